"""One rank's part of a model: the weights of each layer with the names they have, and one token's KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

# Classes of tensors, in the order of reports
KINDS = ("tower", "embedding", "attention", "MLP", "experts", "norms", "head", "drafts")
CLASSES = (  # a word in a tensor's name → its class; the first that fits
    ("vision.", "tower"),  # of images
    (".region.", "tower"),  # of points and boxes in them
    ("embed_", "embedding"),  # of tokens, of positions
    ("lm_head", "head"),
    (".experts.", "experts"),
    (".gate.", "experts"),  # their router
    ("norm", "norms"),
    ("attn", "attention"),
    ("attention", "attention"),
)
WIDTHS = {"f32": 4, "bf16": 2, "f16": 2}  # bytes of an element


def kind_of(name: str) -> str:
    """The class of a tensor or a layer."""
    return next((kind for word, kind in CLASSES if word in f"{name}."), "MLP")


def split(size: int, ways: int) -> int:
    """The largest part of `size` entries."""
    return -(-size // ways)


class Weights(msgspec.Struct, frozen=True):
    """The bytes of a linear, a norm or an embedding on one rank."""

    name: str
    elements: int  # of one copy
    bytes: float  # of these
    matrix: bool  # tokens are multiplied with it
    moves: bool  # --cpu-offload-gb may leave it in host memory, from where steps copy it
    row: float = 0.0  # of a table that --cpu-offload-gb may leave there, the bytes that a token reads; 0: of no such
    fp8: bool = False  # Hopper's tensor cores multiply it in 8 bits, of many rows
    shared: bool = False  # the bytes are another's: a tied head's are the embedding's
    expert: bool = False
    copies: int = 1  # experts of the layer
    host: float = 0.0  # bytes of one expert's elements in the host's memory
    slot: float = 0.0  # and on the device, where it lies in host memory as well

    @property
    def kind(self) -> str:
        return kind_of(self.name)


class Layer(msgspec.Struct, frozen=True):
    """On one rank."""

    weights: tuple[Weights, ...]
    kv: int  # bytes of one token's keys and values
    inner: int  # elements of a token between two linears, where there are most
    scores: int  # multiply-adds of a token with one token of its context when a prompt is computed
    window: int = 0  # tokens of a sequence that are kept; 0: all
    state: int = 0  # bytes of what is kept of a sequence as a whole


class Draft(msgspec.Struct, frozen=True):
    """A model that drafts, on a rank of the last stage."""

    layers: tuple[Layer, ...]
    ends: tuple[Weights, ...]  # outside the layers
    table: tuple[Weights, ...]  # the target's embedding, where the last stage lacks it
    rope: int  # bytes of one position
    hidden: int
    read: int  # elements of a token of the target that are kept while it computes

    def weights(self, stages: int) -> Iterator[Weights]:
        for layer in self.layers:
            yield from layer.weights
        yield from self.ends
        yield from self.table if stages > 1 else ()


class RankShape(msgspec.Struct, frozen=True):
    """A rank of a tensor group; all ranks of the group hold as much."""

    kinds: tuple[Layer, ...]
    layers: tuple[int, ...]  # each layer's index in `kinds`
    # Weights outside the layers, by the stage's place: whole (the only one), first, middle, last.
    ends: dict[str, tuple[Weights, ...]]
    rope: int  # bytes of one position in the table of cosines and sines
    draft: Draft | None = None


class StageShape(msgspec.Struct, frozen=True):
    """A rank of one pipeline stage."""

    layers: tuple[Layer, ...]
    ends: tuple[Weights, ...]  # beside the layers

    @property
    def weights(self) -> Iterator[Weights]:
        for layer in self.layers:
            yield from layer.weights
        yield from self.ends


class Image(msgspec.Struct, frozen=True):
    """An image as a tower takes it."""

    height: int  # pixels
    width: int
    tokens: int  # of a prompt, without the texts that templates write around them
    linears: float  # multiply-adds of the tower's linears ...
    scores: float  # ... and of its attention
    stream: int  # elements between two linears, where there are most


class Images(msgspec.Struct, frozen=True):
    usual: Image  # of 1024 x 1024 pixels, or as much of it as the model takes
    largest: Image  # of a prompt


@dataclass(frozen=True)
class ModelShape:
    """All that memory and speed follow from."""

    name: str
    model_type: str
    hidden: int
    vocab: int
    max_positions: int
    usual_dtype: str  # that `serve --dtype auto` computes in
    parameters: int  # of the whole model
    checkpoint_bytes: float  # that the weight files should hold
    degrees: tuple[int, ...]  # tensor degrees that its heads allow
    stages: tuple[tuple[int, ...], ...]  # by the number of stages less 1: the layers of each stage
    ranks: dict[int, RankShape]  # by tensor degree, those that were asked for
    chosen: int = 0  # experts that a token visits
    images: Images | None = None  # None: the model takes text alone
    verified: int = 1  # tokens of a sequence in a step: 1 and the drafts

    @property
    def layers(self) -> int:
        return sum(self.stages[0])

    @property
    def experts(self) -> int:
        return max((one.copies for layer in self.ranks[1].kinds for one in layer.weights), default=1)

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with: chosen experts only, no embedding and no tower."""
        (whole,) = self.stage_shapes(1, 1, 1)
        used = (one for one in whole.weights if one.kind not in ("embedding", "tower"))
        return sum(one.elements * min(one.copies, self.chosen or 1) for one in used)

    def kinds(self, tp: int, ep: int) -> tuple[Layer, ...]:
        """Its kinds of layers on a rank. ep > 1: experts are shared out over ep ranks, each whole, or cut over the
        tp / ep ranks that are left."""
        return self._shared_out(tp, ep, lambda rank: rank.kinds)

    def draft(self, tp: int, ep: int) -> Draft | None:
        """The model that drafts, on a rank of the last stage."""
        made = self.ranks[tp].draft
        if made is None:
            return None
        layers = self._shared_out(tp, ep, lambda rank: () if rank.draft is None else rank.draft.layers)
        return msgspec.structs.replace(made, layers=layers)

    def _shared_out(self, tp: int, ep: int, layers: Callable[[RankShape], tuple[Layer, ...]]) -> tuple[Layer, ...]:
        cuts = layers(self.ranks[tp])
        if ep == 1:
            return cuts
        parts = max(1, tp // ep)
        # A degree that heads do not allow is not measured: experts of another are divided, without padding.
        of, parts = (self.ranks[parts], 1) if parts in self.ranks else (self.ranks[1], parts)
        return tuple(_with_shared_out(cut, one, ep, parts) for cut, one in zip(cuts, layers(of), strict=True))

    def stage_shapes(self, tp: int, pp: int, ep: int) -> list[StageShape]:
        """The stages, the first one with the embedding first."""
        rank, kinds = self.ranks[tp], self.kinds(tp, ep)
        made, start = [], 0
        for number, count in enumerate(self.stages[pp - 1]):
            place = "whole" if pp == 1 else "first" if number == 0 else "last" if number == pp - 1 else "middle"
            layers = tuple(kinds[index] for index in rank.layers[start : start + count])
            made.append(StageShape(layers, rank.ends[place]))
            start += count
        return made


def _with_shared_out(cut: Layer, other: Layer, ep: int, parts: int) -> Layer:
    """`cut` with 1 / ep of the experts of `other`, and 1 / parts of each."""
    if not any(one.expert for one in other.weights):
        return cut
    weights = tuple(
        _share_of(theirs, ep, parts) if theirs.expert else own
        for own, theirs in zip(cut.weights, other.weights, strict=True)
    )
    return msgspec.structs.replace(cut, weights=weights, inner=max(cut.inner, split(other.inner, parts)))


def _share_of(experts: Weights, ep: int, parts: int) -> Weights:
    elements, copies = split(experts.elements, parts), split(experts.copies, ep)
    size, host, slot = experts.bytes / parts, experts.host / parts, experts.slot / parts
    return msgspec.structs.replace(experts, elements=elements, bytes=size, host=host, slot=slot, copies=copies)
