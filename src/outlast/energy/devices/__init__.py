"""Real, replayed and analytic devices behind one protocol."""
