"""A Hugging Face model with layers of factors, in plain torch and transformers.

`outlast.tensorize.export.export_factored` puts this file beside the weights, as
``modeling_outlast.py``, so that

    AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)

loads them where Outlast is not installed. It computes the same numbers up to rounding, and plans
nothing: Outlast's own layers (`load_factored`) are faster where there are more than two factors.
The layers are described by ``outlast_tensorize`` in config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel as Dense

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "tanh": torch.tanh,
}


class TwoFactors(nn.Module):
    """y = up(act(down(x))), or with (up down + a few entries) as the weight.

    Args:
        layer: The layer's entry in config.json.
    """

    indices: Tensor

    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        settings = layer["settings"]
        rank, into, out = settings["rank"], settings["in_features"], settings["out_features"]
        self.down = nn.Linear(into, rank, bias=False)
        self.up = nn.Linear(rank, out, bias=settings["bias"])
        self.activation: str | None = settings.get("activation")
        self.scale = 1.0
        self.sparse = "density" in settings
        if self.sparse:
            entries = max(1, round(settings["density"] * into * out))
            kind = torch.int32 if into * out < 2**31 else torch.int64
            self.values = nn.Parameter(torch.empty(entries))
            self.register_buffer("indices", torch.empty(entries, dtype=kind))
            self.scale = settings["alpha"] / rank if settings["alpha"] is not None else 1.0

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        if self.sparse:
            product = self.up.weight @ self.down.weight * self.scale
            flat = product.flatten().index_add(0, self.indices, self.values)
            return functional.linear(x, flat.view_as(product), self.up.bias)
        h = self.down(x)
        y: Tensor = self.up(_ACTIVATIONS[self.activation](h) if self.activation else h)
        return y


class Chain(nn.Module):
    """Multiplies with the cores one after the other; an embedding takes rows of their product.

    Args:
        layer: The layer's entry in config.json, whose network reads ``inputs->outputs; cores;
            letter=size ...; in->out``.
    """

    def __init__(self, layer: dict[str, Any]) -> None:
        super().__init__()
        ends, cores, sizes, features = layer["network"].split("; ")
        self.inputs, self.outputs = ends.split("->")
        self.terms = cores.split(",")
        self.sizes = {letter: int(size) for letter, size in (s.split("=") for s in sizes.split())}
        self.in_features, self.out_features = map(int, features.split("->"))
        self.padding_idx = layer["settings"].get("padding_idx")
        shapes = [[self.sizes[letter] for letter in term] for term in self.terms]
        if layer["embedding"] and layer["form"] == "low_rank":
            self.table = nn.Embedding(shapes[0][0], shapes[0][1])
            self.up = nn.Linear(shapes[1][1], shapes[1][0], bias=False)
        else:
            self.cores = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
        self.embedding = layer["embedding"]
        biased = layer["settings"].get("bias")
        self.bias = nn.Parameter(torch.empty(self.out_features)) if biased else None

    def _cores(self) -> list[Tensor]:
        return [self.table.weight, self.up.weight] if hasattr(self, "table") else list(self.cores)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features), or indices of rows (...) -> (..., out_features)."""
        if self.embedding:
            return self._rows(x)
        modes = [self.sizes[letter] for letter in self.inputs]
        whole = 1
        for mode in modes:
            whole *= mode
        act = functional.pad(x, (0, whole - self.in_features)).reshape(*x.shape[:-1], *modes)
        letters = self.inputs
        for place, (term, core) in enumerate(zip(self.terms, self._cores(), strict=True)):
            later = self.outputs + "".join(self.terms[place + 1 :])
            kept = "".join(dict.fromkeys(c for c in letters + term if c in later))
            act = torch.einsum(f"...{letters},{term}->...{kept}", act, core.to(act.dtype))
            letters = kept
        y = torch.einsum(f"...{letters}->...{self.outputs}", act)
        y = y.flatten(x.dim() - 1)[..., : self.out_features]
        return y if self.bias is None else y + self.bias

    def _rows(self, index: Tensor) -> Tensor:
        flat, digits = index.flatten(), {}
        for letter in reversed(self.inputs):
            digits[letter] = flat % self.sizes[letter]
            flat = flat // self.sizes[letter]
        terms, parts = [], []
        for term, core in zip(self.terms, self._cores(), strict=True):
            part, letters = core, term
            for letter in term:
                if letter in digits:
                    # Every index of a row is on one core alone, and comes first from here on.
                    part = part.movedim(term.index(letter), 0).index_select(0, digits[letter])
                    letters = "Z" + term.replace(letter, "")
            terms.append(letters)
            parts.append(part)
        rows = torch.einsum(",".join(terms) + f"->Z{self.outputs}", *parts).flatten(1)
        rows = rows[:, : self.out_features]
        if self.padding_idx is not None:
            rows = rows.masked_fill((index.flatten() == self.padding_idx)[:, None], 0.0)
        return rows.view(*index.shape, -1)


class Tensorized(Dense):  # type: ignore[misc]
    """The model of config.json with layers of factors in the places that it names."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        for name, layer in config.outlast_tensorize["layers"].items():
            plain = "rank" in layer["settings"] and not layer["embedding"]
            two = plain and layer["form"] in ("low_rank", "cola", "lax", "sltrain")
            self.set_submodule(name, TwoFactors(layer) if two else Chain(layer))

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        """Load from the file of factors, ``model.factored.safetensors``."""
        options.setdefault("variant", "factored")
        return super().from_pretrained(*arguments, **options)
