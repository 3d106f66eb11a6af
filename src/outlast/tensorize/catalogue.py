"""The forms by name: which module each is, and what its rank means."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outlast.errors import TensorizeError
from outlast.tensorize.shapes import (
    balanced_modes,
    block_modes,
    largest_block_rank,
    largest_train_ranks,
)

if TYPE_CHECKING:
    from torch import nn

Ranks = int | tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """A form.

    Attributes:
        name: What `tensorize` and `cost.layer_cost` know it by.
        home: Module of `outlast.tensorize.forms` and class that stand in for `nn.Linear`.
        embedding: Likewise for `nn.Embedding`; empty: none.
        two_factor: Whether a rank is the number of features between two factors, so that a fraction
            is one of the narrower side.
        aligned: Whether the rank is a side of the matrix products, so that matrix units want
            multiples of it.
        modes: Modes on each side unless the user says so; 0: they are none to choose.
        modes_name: What the class calls their number.
        blocks: Whether the "rank" is a number of blocks: more of them are fewer parameters.
    """

    name: str
    home: str
    embedding: str = ""
    two_factor: bool = False
    aligned: bool = False
    modes: int = 0
    modes_name: str = "cores"
    blocks: bool = False

    def build(
        self, in_features: int, out_features: int, rank: Ranks, settings: dict[str, Any]
    ) -> nn.Module:
        """A new linear layer; `settings` are keywords of its class that it may not know."""
        return _made(self.home, (in_features, out_features, rank), self._known(settings))

    def build_embedding(
        self, rows: int, features: int, rank: Ranks, settings: dict[str, Any]
    ) -> nn.Module:
        """A new embedding.

        Raises:
            TensorizeError: There is none of this form.
        """
        if not self.embedding:
            some = ", ".join(form.name for form in FORMS.values() if form.embedding)
            raise TensorizeError(f"form = {self.name!r} has no embedding: use one of {some}")
        known = self._known(settings)
        known.pop("bias", None)
        if settings.get("padding_idx") is not None:
            known["padding_idx"] = settings["padding_idx"]
        return _made(self.embedding, (rows, features, rank), known)

    def _known(self, settings: dict[str, Any]) -> dict[str, Any]:
        known: dict[str, Any] = {}
        for name in ("bias", "device", "dtype"):
            if name in settings:
                known[name] = settings[name]
        if self.modes:
            known[self.modes_name] = settings.get("cores") or self.modes
        if self.name in ("cola", "lax") and settings.get("activation") is not None:
            known["activation"] = settings["activation"]
        if self.name == "sltrain" and settings.get("density") is not None:
            known["density"] = settings["density"]
        return known

    def largest_rank(self, in_features: int, out_features: int, cores: int) -> int:
        """The rank above which the form holds nothing more; of blocks, their largest number."""
        narrow = min(in_features, out_features)
        if self.two_factor or self.blocks:
            return narrow
        if self.name == "btt":
            return largest_block_rank(*block_modes(in_features, out_features))
        into, out = balanced_modes(in_features, cores), balanced_modes(out_features, cores)
        if self.name == "tt":
            return max(largest_train_ranks((*into, *out)))
        if self.name == "ttm":
            pairs = [a * b for a, b in zip(into, out, strict=True)]
            return max(largest_train_ranks(pairs), default=1)
        if self.name == "tucker":
            return max(*into, *out)
        return in_features * out_features // max(*into, *out)


def _made(home: str, arguments: tuple[Any, ...], settings: dict[str, Any]) -> nn.Module:
    module, _, name = home.partition(":")
    kind = getattr(importlib.import_module(f"outlast.tensorize.forms.{module}"), name)
    layer: nn.Module = kind(*arguments, **settings)
    return layer


FORMS = {
    form.name: form
    for form in (
        Form(
            "low_rank", "low_rank:LowRankLinear", "embedding:LowRankEmbedding", True, aligned=True
        ),
        Form("cola", "low_rank:BottleneckLinear", two_factor=True, aligned=True),
        Form("lax", "latent:LatentLinear", two_factor=True, aligned=True),
        Form("sltrain", "sparse:SparseLowRankLinear", two_factor=True, aligned=True),
        Form("tt", "tensor_train:TTLinear", "embedding:TTEmbedding", aligned=True, modes=3),
        Form("ttm", "tensor_train:TTMLinear", "embedding:TTMEmbedding", modes=3),
        Form("btt", "block:BTTLinear"),
        Form("monarch", "block:MonarchLinear", blocks=True),
        Form("tucker", "tucker:TuckerLinear", modes=2, modes_name="modes"),
        Form("cp", "cp:CPLinear", aligned=True, modes=2, modes_name="modes"),
    )
}
"""All forms."""


def form_named(name: str) -> Form:
    """A form by its name.

    Raises:
        TensorizeError: There is none of that name.
    """
    if name in FORMS:
        return FORMS[name]
    close = difflib.get_close_matches(str(name), FORMS, n=1)
    hint = f": did you mean {close[0]!r}?" if close else ""
    raise TensorizeError(f"form = {name!r} is not one of {', '.join(FORMS)}{hint}")
