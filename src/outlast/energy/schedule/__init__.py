"""Training steps as graphs of operations."""
