"""Rules for training structured layers: rates, decay, bounds on updates, and what to watch."""
