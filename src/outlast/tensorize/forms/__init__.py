"""The forms: modules that take the place of `nn.Linear` and `nn.Embedding`."""

from outlast.tensorize.forms.block import BTTLinear, MonarchLinear
from outlast.tensorize.forms.low_rank import BottleneckLinear, LowRankLinear
from outlast.tensorize.forms.tensor_train import TTLinear, TTMLinear

__all__ = [
    "BTTLinear",
    "BottleneckLinear",
    "LowRankLinear",
    "MonarchLinear",
    "TTLinear",
    "TTMLinear",
]
