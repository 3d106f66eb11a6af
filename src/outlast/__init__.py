"""Outlast makes a PyTorch training run finish.

Every part is a package of its own and is imported by its name, for example
``from outlast.checkpoint import CheckpointStore``. Importing ``outlast`` itself loads nothing
heavy: neither torch nor transformers.
"""

__version__ = "0.1.0"
