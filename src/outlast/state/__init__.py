"""A training state as named tensors and values: what is saved, kept in memory, moved or traced."""
