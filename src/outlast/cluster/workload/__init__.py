"""Jobs of a log or of a generator."""
