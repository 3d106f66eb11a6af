"""The engine of a run: everything beside its loop."""
