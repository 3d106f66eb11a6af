"""The store behind ``torch.distributed.checkpoint``: a storage writer and reader."""

from outlast.checkpoint.dcp.storage import OutlastReader, OutlastWriter

__all__ = ["OutlastReader", "OutlastWriter"]
