"""The forms: modules that take the place of `nn.Linear` and `nn.Embedding`."""

from outlast.tensorize.forms.block import BTTLinear, MonarchLinear
from outlast.tensorize.forms.cp import CPLinear
from outlast.tensorize.forms.embedding import (
    LowRankEmbedding,
    StructuredEmbedding,
    TTEmbedding,
    TTMEmbedding,
)
from outlast.tensorize.forms.latent import (
    LatentLinear,
    latent_contexts,
    link_by_name,
    link_latents,
)
from outlast.tensorize.forms.low_rank import BottleneckLinear, LowRankLinear
from outlast.tensorize.forms.sparse import SparseLowRankLinear
from outlast.tensorize.forms.tensor_train import TTLinear, TTMLinear
from outlast.tensorize.forms.tied import TiedHead
from outlast.tensorize.forms.tucker import TuckerLinear

__all__ = [
    "BTTLinear",
    "BottleneckLinear",
    "CPLinear",
    "LatentLinear",
    "LowRankEmbedding",
    "LowRankLinear",
    "MonarchLinear",
    "SparseLowRankLinear",
    "StructuredEmbedding",
    "TTEmbedding",
    "TTLinear",
    "TTMEmbedding",
    "TTMLinear",
    "TiedHead",
    "TuckerLinear",
    "latent_contexts",
    "link_by_name",
    "link_latents",
]
