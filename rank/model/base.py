"""The base classes of all architectures: pipeline stages, residual stream, head, and the tensors that fill them."""

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
from .shard import stage_layers
from .weights.slicing import ShardedModule, Slice, Source, slices

# The types that a field of Args accepts, by its annotation. Other annotations are not checked.
TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool, "str": str}


@dataclass(frozen=True, kw_only=True)
class Args:
    """The keys of config.json that an architecture reads. A field without a default must be present."""

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

    norm_offset: ClassVar[float] = 0.0  # added to the weights of norms: 1 where checkpoints store weight - 1

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
        """Raises FatalError where a key is missing or has the wrong type. A null counts as absent."""
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
    """The shape of this rank's KV cache."""

    layers: int  # of this stage
    kv_heads: int  # of this rank
    head_dim: int


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, args: Any, mesh: Mesh, index: int, local: int):
        """index: of the layer in the model. local: of the layer in this pipeline stage."""
        super().__init__()

    def forward(self, stream: ResidualStream, cos_sin: CosSin, batch: Batch) -> Generator[Normed, None, None]:
        """Add the outputs of the layer's sublayers to the residual stream [T, hidden].

        It yields each norm before a sublayer reads it. At that point another microbatch may compute, while the
        all-reduce before the norm runs.
        """
        raise NotImplementedError


class Decoder(nn.Module):
    """The modules that checkpoints keep under `model.`: this stage's layers by their index in the model, the embedding
    on the first stage and the final norm on the last."""

    def __init__(self, args: Args, mesh: Mesh, layer: type[Layer]):
        super().__init__()
        indices = stage_layers(args.num_hidden_layers, mesh.pipe.rank, mesh.pipe.size)
        embedding = VocabParallelEmbedding(args.vocab_size, args.hidden_size, mesh, args.embed_scale)
        self.embed_tokens = embedding if mesh.first else None
        self.layers = nn.ModuleDict({str(i): layer(args, mesh, i, local) for local, i in enumerate(indices)})
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps, args.norm_offset) if mesh.last else None


class Model(nn.Module):
    """One pipeline stage of a causal language model, sharded for one rank of its tensor group.

    A stage passes the residual stream on as one tensor, with every sublayer's output added. `logits` computes the final
    norm, so that only sampled rows need it.
    """

    LAYER: ClassVar[type[Layer]]
    # merged linear → the names under which checkpoints hold its parts, in the order of its outputs
    MERGED: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    # Set by load():
    dtype: torch.dtype
    weight_bytes: int  # on this rank
    num_weights: int  # of its linears

    def __init__(
        self,
        args: Args,
        mesh: Mesh,
        max_model_len: int,
        names: Container[str] = (),
        format_of: ChooseFormat = dense,
    ):
        """names: of the checkpoint's tensors. format_of: chooses each linear's weight format."""
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
        """The residual stream after this stage's layers, [T, hidden], equal on all ranks of the tensor group.

        The rows of all batches follow each other; of a batch with `sampled` they are those at sample_at. Several
        batches are microbatches of one step: while one computes a sublayer, the other's all-reduce runs. A sequence may
        begin in one batch and continue in the next, which finds its keys and values in the cache.

        hidden: the output of the previous stage, None on the first stage. It may be overwritten.
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
        """Run one microbatch through this stage's layers, and yield at each norm."""
        cos_sin = self.rope(batch.positions)
        for layer in self.model.layers.values():
            for normed in layer(stream, cos_sin, batch):
                if len(stream) == 0:  # the last layer samples no row
                    return
                yield normed

    @staticmethod
    def _interleave(streams: list[ResidualStream], runs: list[Iterator[Normed]]) -> None:
        """Alternate between microbatches, one sublayer at a time. Each leaves its all-reduce and norm running."""
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
        """This rank's shard of the logits, [S, width], of rows [S, hidden] of the last stage's forward.

        The shard begins at token lm_head.vocab.start. All ranks of the tensor group have the same width; padding past
        the vocabulary is -inf. The group's shards in rank order, cut to vocab_size, are all logits.
        """
        assert self.lm_head is not None
        return self.lm_head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """Rows of the last stage's forward after the final norm, as the head reads them."""
        assert self.model.norm is not None
        return self.model.norm(hidden)

    @staticmethod
    def rename(name: str) -> str:
        """Map a checkpoint's tensor name to the path of the module's attribute."""
        return name

    def _build(self, names: Container[str], format_of: ChooseFormat) -> None:
        """Decide, from the names of a checkpoint's tensors, which tensors fill each module, and in which format."""
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
        if len(merged) > 1 and f"{path}.weight" in names:  # the checkpoint holds it merged
            ends = list(itertools.accumulate(shard.size for shard in linear.outputs))
            return [Source(path, end - shard.size, ends[-1]) for end, shard in zip(ends, linear.outputs, strict=True)]
        return [Source(f"{parent}.{part}" if parent else part) for part in merged]

    def sharded_modules(self) -> list[ShardedModule]:
        """All modules with weights, in the order of computation."""
        return [module for module in self.modules() if isinstance(module, ShardedModule)]

    def slices(self) -> Iterator[Slice]:
        """All slices that must be read to fill this stage."""
        for layer in self.sharded_modules():
            yield from slices(layer)
