"""A model as arithmetic: its weight matrices with the way a tensor group cuts them, and its KV cache's width.

The cuts are those of rank/model/layers; that room loads torch, so the few lines of arithmetic stand here again and
tests/launcher/commands/test_fit_live.py compares them with what ranks really hold.
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("embedding", "attention", "MLP", "experts", "norms", "head")  # classes of tensors, in the order of reports
WIDTHS = {"f32": 4, "bf16": 2, "f16": 2}  # bytes of an element


def split(size: int, ways: int) -> int:
    """The largest part of `size` entries; the other parts are padded to it."""
    return -(-size // ways)


@dataclass(frozen=True)
class Part:
    """Weights that are computed with at once: [outputs * unit, inputs], or a vector where inputs is 0."""

    kind: str
    outputs: int
    inputs: int = 0
    cut: str = "whole"  # over a tensor group: columns (outputs), rows (inputs), keys (outputs, replicated when few)
    unit: int = 1  # what is not cut: a head's dimensions
    bias: bool = False
    copies: int = 1  # experts: so many of them in a layer
    fused: bool = False  # one product together with the part before
    packs: bool = True  # quantised formats store it narrow

    @property
    def expert(self) -> bool:
        return self.copies > 1

    def one(self, tp: int) -> int:
        """Elements that a rank of a tensor group of `tp` holds of one copy."""
        outputs, inputs = self.outputs, self.inputs
        if self.cut == "columns":
            outputs = split(outputs, tp)
        elif self.cut == "keys":
            outputs = max(1, split(outputs, tp))
        elif self.cut == "rows":
            inputs = split(inputs, tp)
        width = outputs * self.unit
        return width * (inputs or 1) + (width if self.bias else 0)

    def held(self, tp: int, ep: int) -> int:
        """Elements that a rank holds: whole experts where there are expert groups, cut ones elsewhere."""
        if self.expert and ep > 1:
            return split(self.copies, ep) * self.one(1)
        return self.copies * self.one(tp)


Layer = tuple[Part, ...]


@dataclass(frozen=True)
class ModelShape:
    """All that memory and speed follow from."""

    name: str
    model_type: str
    unserved: str  # "" when Phalanx serves it; else why not
    hidden: int
    vocab: int
    heads: int
    kv_heads: int  # 0: every rank holds the whole latent of multi-head latent attention
    kv_width: int  # elements of one KV head's keys and values of one token, or of a token's latent
    rope_width: int  # dimensions that are turned
    score_width: int  # multiply-adds of one query head with one token of the context when a prompt is computed
    max_positions: int
    dtype: str  # of the checkpoint
    tied: bool
    layers: tuple[Layer, ...]
    chosen: int = 0  # experts that a token visits
    narrow: float = 0.0  # bytes of an element of a quantised matrix; 0: not quantised
    notes: tuple[str, ...] = ()

    @property
    def embedding(self) -> Part:
        return Part("embedding", self.vocab, self.hidden, "columns", packs=False)

    @property
    def head(self) -> Part:
        return Part("head", self.vocab, self.hidden, "columns", packs=False)

    @property
    def norm(self) -> Part:
        return Part("norms", self.hidden, packs=False)

    @property
    def experts(self) -> int:
        return max((part.copies for layer in self.layers for part in layer), default=1)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        ends = self.embedding.one(1) * (1 if self.tied else 2) + self.norm.one(1)
        return ends + sum(part.held(1, 1) for layer in self.layers for part in layer)

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with: chosen experts only, and no embedding."""
        each = (part.one(1) * min(part.copies, self.chosen or 1) for layer in self.layers for part in layer)
        return sum(each) + self.head.one(1) + self.norm.one(1)

    def kv_elements(self, tp: int) -> int:
        """Of one token in one layer, on one rank."""
        return self.kv_width * (max(1, split(self.kv_heads, tp)) if self.kv_heads else 1)

    def tensor_degrees(self) -> list[int]:
        """Those that fit: whole query heads per rank, and whole or replicated key heads."""
        keys = self.kv_heads or 1
        return [n for n in range(1, self.heads + 1) if self.heads % n == 0 and (keys % n == 0 or n % keys == 0)]


def stage_layers(layers: int, stage: int, stages: int) -> range:
    """The layers of a pipeline stage, as rank/model/layers/shard.py gives them out."""
    each, more = divmod(layers, stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))
