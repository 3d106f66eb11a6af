"""A decoder-only transformer as numbers: what its steps compute, hold and send depends on these."""

from __future__ import annotations

from dataclasses import dataclass, field

from outlast.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """Dense, grouped-query or mixture-of-experts; gated (SwiGLU) or plain feed-forward layers.

    Attributes:
        name: For people.
        layers: Blocks.
        hidden: Width between the blocks.
        heads: Query heads.
        kv_heads: Key and value heads; equal to `heads` without grouped queries.
        head_width: Features of one head; `hidden / heads` in most models.
        intermediate: Width inside the feed-forward part of a dense block; 0 where none is dense.
        gated: Three matrices (gate, up, down) in place of two.
        vocabulary: Tokens.
        tied: The head shares the embedding's weights.
        experts: Routed experts of a mixture block; 0 for a dense model.
        experts_per_token: Routed experts that a token goes through.
        expert_intermediate: Width inside a routed expert.
        shared_intermediate: Width inside the experts that every token goes through, together.
        dense_layers: Of a mixture model, the blocks without experts.
        dense_blocks: Which these are, from 0 on and rising; empty where they are the first ones. No
            figure depends on it. Not compared.
        projection_parameters: Of one block's attention, where they are not four plain matrices
            (the low-rank factors of multi-head latent attention); 0 where they are.
        further_parameters: Of the whole model, held but in no matrix product: biases, learned
            positions, and norms beyond two weights per block.
        notes: What of the model is in none of these numbers, a sentence each (attention windows, a
            part for pictures): figures of such a model should say so. Not compared.
    """

    name: str = "transformer"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    gated: bool
    vocabulary: int
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    dense_blocks: tuple[int, ...] = field(default=(), compare=False)
    projection_parameters: int = 0
    further_parameters: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for size in ("layers", "hidden", "heads", "kv_heads", "head_width", "vocabulary"):
            if getattr(self, size) < 1:
                raise PlanError(f"{size} = {getattr(self, size)} of {self.name}: give at least 1")
        if self.heads % self.kv_heads:
            raise PlanError(
                f"kv_heads = {self.kv_heads} of {self.name} does not divide heads = {self.heads}"
            )
        if bool(self.experts) != bool(self.experts_per_token and self.expert_intermediate):
            raise PlanError(
                f"experts = {self.experts} of {self.name} goes with experts_per_token and "
                "expert_intermediate: give all three or none"
            )
        if self.experts_per_token > self.experts:
            raise PlanError(
                f"experts_per_token = {self.experts_per_token} of {self.name} exceeds its "
                f"experts = {self.experts}"
            )
        if not 0 <= self.dense_layers <= self.layers:
            raise PlanError(
                f"dense_layers = {self.dense_layers} of {self.name} is not in 0 to {self.layers}"
            )
        blocks = self.dense_blocks
        if blocks and [*blocks] != sorted(set(blocks) & {*range(self.layers)}):
            raise PlanError(
                f"dense_blocks = {[*blocks]} of {self.name}: give rising numbers from 0 to below "
                f"{self.layers}"
            )
        if blocks and len(blocks) != self.dense_layers:
            raise PlanError(
                f"dense_blocks = {[*blocks]} of {self.name} are {len(blocks)}, and dense_layers = "
                f"{self.dense_layers}: give one for each, or none for the first ones"
            )
        if self.intermediate < 1 and self.plain_layers:
            raise PlanError(
                f"intermediate = {self.intermediate} of {self.name}: its {self.plain_layers} dense "
                "blocks need a width of at least 1"
            )

    @property
    def mixture_layers(self) -> int:
        """Blocks with routed experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def plain_layers(self) -> int:
        """Blocks with one feed-forward part for all tokens."""
        return self.layers - self.mixture_layers

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Of every block, whether it has routed experts."""
        dense = self.dense_blocks or range(self.plain_layers)
        return tuple(self.experts > 0 and block not in dense for block in range(self.layers))

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward part."""
        return 3 if self.gated else 2

    @property
    def query_width(self) -> int:
        """Features of all query heads."""
        return self.heads * self.head_width

    @property
    def kv_width(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.kv_heads * self.head_width

    @property
    def attention_parameters(self) -> int:
        """Of one block: query, key, value and output projections."""
        plain = self.hidden * (2 * self.query_width + 2 * self.kv_width)
        return self.projection_parameters or plain

    @property
    def plain_parameters(self) -> int:
        """Of one feed-forward part without experts."""
        return self.matrices * self.hidden * self.intermediate

    @property
    def expert_parameters(self) -> int:
        """Of one routed expert."""
        return self.matrices * self.hidden * self.expert_intermediate

    @property
    def shared_parameters(self) -> int:
        """Of one mixture block outside its routed experts: shared experts and router."""
        if not self.experts:
            return 0
        return self.hidden * (self.matrices * self.shared_intermediate + self.experts)

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding alone."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """All; of norms, two weights per block and a final one beside `further_parameters`."""
        blocks = (
            self.layers * (self.attention_parameters + 2 * self.hidden)
            + self.plain_layers * self.plain_parameters
            + self.mixture_layers * (self.experts * self.expert_parameters + self.shared_parameters)
        )
        tables = (1 if self.tied else 2) * self.embedding_parameters
        return blocks + tables + self.hidden + self.further_parameters

    @property
    def active_parameters(self) -> int:
        """In matrices that a token goes through: no embedding, experts per token only, the head."""
        return (
            self.layers * self.attention_parameters
            + self.plain_layers * self.plain_parameters
            + self.mixture_layers
            * (self.experts_per_token * self.expert_parameters + self.shared_parameters)
            + self.embedding_parameters
        )

    def flops_per_token(self, sequence: int) -> float:
        """Model FLOPs of a training step per token, `6 N + 12 L d s`, attention in full.

        The convention of PaLM (2204.02311, appendix B): no recomputation, no causal halving.

        Args:
            sequence: Tokens of one sample.
        """
        return 6.0 * self.active_parameters + 12.0 * self.layers * self.query_width * sequence
