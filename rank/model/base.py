"""What all architectures share: pipeline stages, the residual stream, the head, and which tensors fill them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from ...comm.mesh import Mesh
from ...errors import MODEL, FatalError
from ...kernels.rope.rope import CosSin
from .batch import Batch
from .config import Config
from .formats import ChooseFormat, dense
from .layers.embedding import ParallelLMHead, VocabParallelEmbedding
from .layers.linear import Linear
from .layers.norm import RMSNorm
from .layers.residual import Normed, ResidualStream
from .layers.rope import RotaryEmbedding
from .layers.shard import stage_layers
from .weights.slicing import ShardedModule, Slice, Source, slices

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

    norm_offset: ClassVar[float] = 0.0  # what checkpoints have left out of norms' weights

    @property
    def embed_scale(self) -> float:
        return 1.0

    @property
    def logit_scale(self) -> float:
        return 1.0

    @property
    def logit_softcap(self) -> float:
        return 0.0

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
                    raise FatalError(
                        f"{config.path}/config.json: {field.name} is {value!r}, expected {field.type}", MODEL
                    )
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise FatalError(f"{config.path}/config.json has no {field.name}", MODEL)
        return cls(**values)


class KVSpec(NamedTuple):
    """What this rank's KV cache has to hold."""

    layers: int  # of this stage
    kv_heads: int  # of this rank
    head_dim: int


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, args: Any, mesh: Mesh, index: int, local: int):
        """index counts the model's layers, local this stage's."""
        super().__init__()

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        """Add what the layer's sublayers make of the stream [T, hidden] to it.

        Each norm that begins a sublayer is yielded before it is read: there another microbatch may compute, while the
        all-reduce before the norm is under way.
        """
        raise NotImplementedError


class Decoder(nn.Module):
    """What checkpoints keep under `model.`: this stage's layers under their global index, and the stream's two ends."""

    def __init__(self, args: Args, mesh: Mesh, layer: type[Layer]):
        super().__init__()
        indices = stage_layers(args.num_hidden_layers, mesh.pipe.rank, mesh.pipe.size)
        embedding = VocabParallelEmbedding(args.vocab_size, args.hidden_size, mesh, args.embed_scale)
        self.embed_tokens = embedding if mesh.first else None
        self.layers = nn.ModuleDict({str(i): layer(args, mesh, i, local) for local, i in enumerate(indices)})
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps, args.norm_offset) if mesh.last else None


class Model(nn.Module):
    """One pipeline stage of a causal language model, cut for one rank of its tensor group.

    Between stages travels the residual stream as one tensor, everything added up. The final norm belongs to `logits`,
    where only the rows that are sampled pass through it.
    """

    LAYER: ClassVar[type[Layer]]
    # module name → the names under which checkpoints hold its parts, in the order of its outputs
    MERGED: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    # Set by load():
    dtype: torch.dtype
    weight_bytes: int  # on this rank

    def __init__(
        self,
        args: Args,
        mesh: Mesh,
        max_model_len: int,
        names: Container[str] = (),
        format_of: ChooseFormat = dense,
    ):
        """names: of the checkpoint's tensors. format_of: what each linear is held in."""
        super().__init__()
        self.hidden_size, self.vocab_size, self.max_model_len = args.hidden_size, args.vocab_size, max_model_len
        self.tied = args.tie_word_embeddings
        self.tensor = mesh.tensor
        self.model = Decoder(args, mesh, self.LAYER)
        self.rope = RotaryEmbedding(args.rope_parameters, args.head_dim, args.max_position_embeddings, max_model_len)
        self.lm_head = (
            ParallelLMHead(args.vocab_size, args.hidden_size, mesh, args.logit_scale, args.logit_softcap)
            if mesh.last
            else None
        )
        kv_heads = max(args.num_key_value_heads // mesh.tensor.size, 1)
        self.kv_spec = KVSpec(len(self.model.layers), kv_heads, args.head_dim)
        self._build(names, format_of)

    def forward(self, batches: Sequence[Batch], hidden: Tensor | None = None) -> Tensor:
        """The residual stream after this stage's layers, [T, hidden], equal on all ranks of the tensor group, of all
        batches one after the other; of those with `sampled` only the rows at sample_at.

        Several batches are microbatches of one step: while one computes a sublayer, the other's all-reduce is
        under way. A sequence may begin in one and go on in the next, which finds its keys and values written.

        hidden is what the stage before returned, None on the first stage; it may be overwritten.
        """
        if self.model.embed_tokens is not None:
            embedded = [self.model.embed_tokens(batch.ids) for batch in batches]
        else:
            assert hidden is not None
            embedded = list(hidden.split([len(batch.ids) for batch in batches]))
        streams = [ResidualStream(x) for x in embedded]
        runs = [self._run(stream, batch) for stream, batch in zip(streams, batches, strict=True)]
        if len(runs) == 1:
            for _ in runs[0]:
                pass
        else:
            self._interleave(streams, runs)
        values = [stream.read() for stream in streams]
        return torch.cat(values) if len(values) > 1 else values[0]

    def _run(self, stream: ResidualStream, batch: Batch) -> Iterator[Normed]:
        """One microbatch through this stage's layers, from norm to norm."""
        cos_sin = self.rope(batch.positions)
        for layer in self.model.layers.values():
            for normed in layer(stream, cos_sin, batch):
                if len(stream) == 0:  # nothing of a last layer's rows is sampled
                    return
                yield normed

    @staticmethod
    def _interleave(streams: list[ResidualStream], runs: list[Iterator[Normed]]) -> None:
        """Microbatches by turns, a sublayer at a time; each leaves its all-reduce and norm under way."""
        active = list(zip(streams, runs, strict=True))
        while active:
            for one in list(active):
                stream, run = one
                normed = next(run, None)
                if normed is not None:
                    normed.begin()
                else:
                    stream.begin()
                    active.remove(one)

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

    def _build(self, names: Container[str], format_of: ChooseFormat) -> None:
        """Find out where a checkpoint with tensors of these names holds each layer, and in which format."""
        for path, layer in self.named_modules():
            if isinstance(layer, Linear):
                layer.build(self._sources(path, layer, names), format_of)
            elif isinstance(layer, ShardedModule) and not layer.sources:
                layer.sources = (Source(path),)
        if self.tied and self.lm_head and self.model.embed_tokens:
            self.lm_head.tie(self.model.embed_tokens)

    def _sources(self, path: str, linear: Linear, names: Container[str]) -> list[Source]:
        if linear is self.lm_head and self.tied:
            return [Source("model.embed_tokens")]
        parent, _, name = path.rpartition(".")
        merged = self.MERGED.get(name, (name,))
        if len(merged) > 1 and f"{path}.weight" in names:  # held as one already, one output after the other
            ends = list(itertools.accumulate(shard.size for shard in linear.outputs))
            return [Source(path, end - shard.size, ends[-1]) for end, shard in zip(ends, linear.outputs, strict=True)]
        return [Source(f"{parent}.{part}" if parent else part) for part in merged]

    def sharded_modules(self) -> list[ShardedModule]:
        """All that has weights, in the order of computation."""
        return [module for module in self.modules() if isinstance(module, ShardedModule)]

    def slices(self) -> Iterator[Slice]:
        """Everything that has to be read to fill this stage."""
        for layer in self.sharded_modules():
            yield from slices(layer)
