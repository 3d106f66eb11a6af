"""The same parts inside other trainers: one module for each, the only one that imports it."""
