"""The forms: modules that take the place of `nn.Linear` and `nn.Embedding`."""

from outlast.tensorize.forms.embedding import (
    LowRankEmbedding,
    StructuredEmbedding,
    TiedHead,
    TTEmbedding,
    TTMEmbedding,
)
from outlast.tensorize.forms.linear import (
    BTTLinear,
    CPLinear,
    MonarchLinear,
    TTLinear,
    TTMLinear,
    TuckerLinear,
)
from outlast.tensorize.forms.low_rank import (
    BottleneckLinear,
    LatentLinear,
    LowRankLinear,
    SparseLowRankLinear,
    latent_contexts,
    link_by_name,
    link_latents,
)

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
