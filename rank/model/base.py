"""What all architectures share: pipeline stages, the residual stream, the head, and which tensors fill them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from ...comm.mesh import Mesh
from ...kernels.rope import Rotation
from ..exits import MODEL, Stop
from .batch import Batch
from .config import Config
from .layers.embedding import Embedding, Head
from .layers.norm import RMSNorm, StreamNorm
from .layers.rope import Rope
from .layers.shard import stage_layers
from .weights.slicing import Slice, Sliced, slices

# What a field of Args accepts, by its annotation; others are not checked.
TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool, "str": str}


@dataclass(frozen=True, kw_only=True)
class Args:
    """The keys of config.json that an architecture reads; a field without a default must be there."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any]

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Raises Stop where a key is missing or of the wrong type. A null counts as absent."""
        resolved = {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
        given = {key: value for key, value in (config.raw | resolved).items() if value is not None}
        values = {}
        for field in dataclasses.fields(cls):
            if field.name in given:
                value = values[field.name] = given[field.name]
                if not isinstance(value, TYPES.get(str(field.type), object)):
                    raise Stop(f"{config.path}/config.json: {field.name} is {value!r}, expected {field.type}", MODEL)
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise Stop(f"{config.path}/config.json has no {field.name}", MODEL)
        return cls(**values)


Half = Callable[[Tensor, Tensor | None, Rotation, Batch], tuple[Tensor, Tensor]]


class KVSpec(NamedTuple):
    """What this rank's KV cache has to hold."""

    layers: int  # of this stage
    kv_heads: int  # of this rank
    head_dim: int


class Layer(nn.Module):
    """One transformer layer. `index` counts the model's layers, `local` this stage's."""

    def __init__(self, args: Any, mesh: Mesh, index: int, local: int):
        super().__init__()

    def halves(self) -> tuple[tuple[StreamNorm, Half], ...]:
        """One after the other, each behind the norm that it begins with.

        Each takes x [T, hidden], this rank's part of what the half before adds to the stream `residual`, and returns
        the same for the next, as one tensor where it has added its part. Without a residual, x is the stream. In the
        last of a stage's layers only the rows of batch.sampled go on from attention, where there is that: none perhaps.
        """
        raise NotImplementedError


@dataclass
class _Part:
    """Rows of a step that go through the layers together."""

    batch: Batch
    turn: Rotation
    x: Tensor
    residual: Tensor | None = None


class Decoder(nn.Module):
    """What checkpoints keep under `model.`: this stage's layers under their global index, and the stream's two ends."""

    def __init__(self, args: Args, mesh: Mesh, layer: type[Layer]):
        super().__init__()
        indices = stage_layers(args.num_hidden_layers, mesh.pipe.rank, mesh.pipe.size)
        self.embed_tokens = Embedding(args.vocab_size, args.hidden_size, mesh) if mesh.first else None
        self.layers = nn.ModuleDict({str(i): layer(args, mesh, i, local) for local, i in enumerate(indices)})
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps) if mesh.last else None


class Model(nn.Module):
    """One pipeline stage of a causal language model, cut for one rank of its tensor group.

    Between stages travels the residual stream as one tensor, everything added up. The final norm belongs to `logits`,
    where only the rows that are sampled pass through it.
    """

    LAYER: ClassVar[type[Layer]]
    # module name → the names under which checkpoints hold its parts, in the order of its outputs
    MERGED: ClassVar[dict[str, tuple[str, ...]]] = {}

    # Set by load():
    dtype: torch.dtype
    weight_bytes: int  # on this rank

    def __init__(self, args: Args, mesh: Mesh, max_model_len: int):
        super().__init__()
        self.hidden_size, self.vocab_size, self.max_model_len = args.hidden_size, args.vocab_size, max_model_len
        self.tied = args.tie_word_embeddings
        self.tensor = mesh.tensor
        self.model = Decoder(args, mesh, self.LAYER)
        self.rope = Rope(args.rope_parameters, args.head_dim, args.max_position_embeddings, max_model_len)
        self.lm_head = Head(args.vocab_size, args.hidden_size, mesh) if mesh.last else None
        if self.tied and self.lm_head and self.model.embed_tokens:
            self.lm_head.weight = self.model.embed_tokens.weight
        kv_heads = max(args.num_key_value_heads // mesh.tensor.size, 1)
        self.kv_spec = KVSpec(len(self.model.layers), kv_heads, args.head_dim)
        halves = [half for layer in cast(Iterable[Layer], self.model.layers.values()) for half in layer.halves()]
        following = [*(norm for norm, _ in halves[1:]), None]
        self._halves = [(half, norm) for (_, half), norm in zip(halves, following, strict=True)]

    def forward(self, batches: Sequence[Batch], hidden: Tensor | None = None) -> Tensor:
        """The residual stream after this stage's layers, [T, hidden], equal on all ranks of the tensor group, of all
        batches one after the other; of those with `sampled` only the rows at sample_at.

        Batches take turns, half a layer at a time: while one computes, another's sum goes over the wire. A sequence
        may begin in one and go on in the next, which finds its keys and values written in every layer.

        hidden is what the stage before returned, None on the first stage; it may be overwritten.
        """
        if self.model.embed_tokens is not None:
            streams = [self.model.embed_tokens(batch.ids) for batch in batches]
        else:
            assert hidden is not None
            streams = list(hidden.split([len(batch.ids) for batch in batches]))
        parts = [_Part(batch, self.rope(batch.positions), x) for batch, x in zip(batches, streams, strict=True)]
        for half, following in self._halves:
            self._turn(half, following, parts)
        streams = [self._stream(part.x, part.residual) for part in parts]
        return torch.cat(streams) if len(streams) > 1 else streams[0]

    def _turn(self, half: Half, following: StreamNorm | None, parts: list[_Part]) -> None:
        """Half a layer of each part. With several, each one's sum and the norm that follows begin beside the next."""
        for part in parts:
            if len(part.x) == 0:
                continue
            part.x, part.residual = half(part.x, part.residual, part.turn, part.batch)
            if len(parts) == 1 or len(part.x) == 0:
                continue
            if following:
                following.begin(part.x, part.residual)
            else:
                self.tensor.begin_all_reduce(part.x)

    def _stream(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None or len(x) == 0 or x is residual:
            return x
        return residual.add_(self.tensor.all_reduce(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows [S, hidden] of the last stage's forward → [S, width]: tokens from lm_head.vocab.start on.

        Each rank of the tensor group has the same width; what lies past the vocabulary is -inf. The group's logits in
        rank order, cut to vocab_size, are the whole.
        """
        assert self.lm_head is not None
        return self.lm_head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Rows of the last stage's forward as the head reads them."""
        assert self.model.norm is not None
        return self.model.norm(hidden)

    @staticmethod
    def rename(name: str) -> str:
        """A checkpoint's tensor name → the one that the attributes spell."""
        return name

    def slices(self) -> Iterator[Slice]:
        """Everything that has to be read to fill this stage."""
        for path, layer in self.named_modules():
            if not isinstance(layer, Sliced):
                continue
            parent, _, name = path.rpartition(".")
            paths = [f"{parent}.{part}" if parent else part for part in self.MERGED.get(name, (name,))]
            if layer is self.lm_head and self.tied:
                if self.model.embed_tokens is not None:
                    continue  # it shares the embedding's parameter
                paths = ["model.embed_tokens"]
            yield from slices(layer, paths)
