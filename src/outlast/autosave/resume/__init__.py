"""A rewritten program while it runs: its step boundaries, and the way back to one."""
