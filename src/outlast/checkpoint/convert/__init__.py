"""Checkpoints of other programs, in and out."""

from outlast.checkpoint.convert.api import Converted, export_checkpoint, import_checkpoint

__all__ = ["Converted", "export_checkpoint", "import_checkpoint"]
