"""The base classes of all architectures: pipeline stages, residual stream, head, and the tensors that fill them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Container, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from ...comm.mesh import Mesh
from ...errors import MODEL, FatalError
from ...kernels.rope.rope import CosSin
from ..protocol import Picture
from ..vision import ImageRules, find
from .batch import Batch
from .cache_spec import CacheSpec
from .config import MOST, Config, spelled
from .experts.fused import FusedExperts, StackedLinear
from .experts.offload import Offload
from .formats import ChooseFormat, dense
from .formats._stacks import APART
from .layer_offload import LayerOffload
from .layers.embedding import ParallelLMHead, VocabParallelEmbedding
from .layers.linear import Linear
from .layers.norm import norm
from .layers.residual import Normed, ResidualStream
from .layers.rope import Parameters, RotaryEmbeddings
from .shard import Shard, stage_layers
from .weights.slicing import ShardedModule, Slice, Source, slices

STACKED = (
    ".experts.gate_up_proj",
    ".experts.up_proj",
    ".experts.down_proj",
)  # of all experts in one tensor, whose name ends here
# The types that a field of Args accepts, by its annotation.
TYPES: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float), "bool": bool, "str": str, "dict": dict}
TYPES["Any"] = object  # the architecture checks the value
# How names of towers and of their projectors begin in checkpoints, and what the modules are called here.
PROJECTED = {
    f"{under}{theirs}.": f"vision.{ours}."
    for under in ("", "model.")
    for theirs, ours in (
        ("vision_tower.vision_model", "tower"),
        ("vision_tower", "tower"),
        ("multi_modal_projector", "projector"),
    )
}
TOWER = "vision."  # how names begin of the tensors of what makes features of images
REGION = "model.region."  # ... and of heads beside the vocabulary's, with the embeddings of their tokens
BESIDE = TOWER, REGION  # no captured step computes these, and --isq leaves them as they are
Count = int  # of tokens, layers, heads or groups, of which there are some wherever config.json has the key
Divisor = float  # above 0


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
    layer_norms: ClassVar[bool] = False  # norms are layer norms, with layer_norm_eps, and not RMS norms
    norm_bias: ClassVar[bool] = True  # layer norms have one

    def __post_init__(self) -> None:
        """Raises FatalError where keys do not fit together, or have values that are not supported."""

    @property
    def embed_scale(self) -> float:
        return 1.0

    @property
    def logit_scale(self) -> float:
        return 1.0

    @property
    def logit_softcap(self) -> float:
        return 0.0

    @property
    def head_bias(self) -> bool:
        return False

    @property
    def draft_layer(self) -> int:
        """The index of a layer that is of the kind of those that predict further tokens: they have full attention, of
        which there may be none next to them."""
        full = (index for index in reversed(range(self.num_hidden_layers)) if not self.linear(index))
        return next(full, self.num_hidden_layers - 1)

    def linear(self, index: int) -> bool:
        """Whether a layer has a recurrent state in the place of attention."""
        return False

    def rope(self, index: int) -> Parameters:
        """The rope parameters of a layer."""
        return self.rope_parameters

    def stage_layers(self, stage: int, stages: int) -> range:
        """The layers of a pipeline stage."""
        return stage_layers(self.num_hidden_layers, stage, stages)

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Raises FatalError where a key is missing or has a wrong type or value. A null is one where the field may be
        None, such as no window; elsewhere it counts as absent."""
        given = config.raw | {"num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim}
        if given.get("use_sliding_window") is False:  # transformers writes a window of 0 then, of Qwen2-MoE
            given.pop("sliding_window", None)
        values = {}
        for field in dataclasses.fields(cls):
            value = given.get(field.name)
            annotated = str(field.type).removesuffix(" | None")
            kind = {"Count": "int", "Divisor": "float"}.get(annotated, annotated)
            if value is not None:
                values[field.name] = value
                least, divides = int(annotated == "Count"), annotated == "Divisor"
                off = kind == "int" and _is_of(value, kind) and not least <= value <= MOST
                if not _is_of(value, kind) or off or (divides and not 0 < value < math.inf):
                    name = spelled(field.name, config.model_type)
                    expected = f"int, at least {least}" if kind == "int" else kind + ", above 0 and finite" * divides
                    expected += f" and at most {MOST}" if off else ""
                    raise FatalError(f"{config.file}: {name} is {value!r}, expected {expected}", MODEL)
            elif field.name in given and annotated != str(field.type):
                values[field.name] = None
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                name = spelled(field.name, config.model_type)
                raise FatalError(f"{config.file} has no {name}", MODEL)
        return cls(**values)


def expect(key: str, value: object, *supported: object) -> None:
    """Raises FatalError where a key of config.json has a value that is not supported."""
    if value not in supported:
        names = " and ".join(map(repr, supported))
        raise FatalError(
            f"config.json: {key} {value!r} is not supported for this model type; supported: {names}", MODEL
        )


def _is_of(value: Any, kind: str) -> bool:
    """kind: an annotation such as int, int | str, list[str] or dict[str, Any]."""
    if " | " in kind:
        return any(_is_of(value, one) for one in kind.split(" | "))
    if kind.startswith("list["):
        return isinstance(value, list) and all(_is_of(one, kind[5:-1]) for one in value)
    if isinstance(value, bool):  # which Python takes for an int
        return kind == "bool"
    return isinstance(value, TYPES[kind.partition("[")[0]])


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, args: Any, mesh: Mesh, index: int, local: int):
        """index: of the layer in the model. local: of the layer in this pipeline stage."""
        super().__init__()

    def cache_spec(self) -> CacheSpec:
        """The cache that the layer keeps of its sequences: what its one sublayer with a cache does."""
        (attention,) = [sublayer for sublayer in self.children() if hasattr(sublayer, "cache_spec")]
        return cast(Any, attention).cache_spec()

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
        indices = args.stage_layers(mesh.pipe.rank, mesh.pipe.size)
        embedding = VocabParallelEmbedding(args.vocab_size, args.hidden_size, mesh, args.embed_scale)
        self.embed_tokens = embedding if mesh.first else None
        self.layers = nn.ModuleDict({str(i): layer(args, mesh, i, local) for local, i in enumerate(indices)})
        self.norm = self.final_norm(args) if mesh.last else None

    @staticmethod
    def final_norm(args: Any) -> nn.Module:
        return norm(args)

    def embed(self, batch: Batch) -> Tensor:
        """The residual stream [T, hidden] before the first layer, on the first stage."""
        assert self.embed_tokens is not None
        embedded = self.embed_tokens(batch.ids)
        if batch.embeddings is not None:
            embedded[batch.embeddings.at] = batch.embeddings.values
        return embedded


class Tower(nn.Module):
    """Makes features [tokens, (1 + levels) * the text model's hidden size] of an image [height, width, 3] u8: what
    enters the first layer, and what is added behind each of the first `levels` layers."""

    rules: ImageRules
    levels = 0
    hidden: int  # size of a patch's hidden state
    depth: int  # its layers

    def pieces(self, pixels: Tensor) -> Generator[None, None, Tensor]:
        """Computes a layer at a time, so that other work can go on between them. Returns the features."""
        raise NotImplementedError

    def reading(self, pixels: Tensor, text: Tensor) -> Generator[None, None, Tensor]:
        """`pieces`, of a text's tokens [T] int64 that are read with the image: a feature for each."""
        raise NotImplementedError

    def forward(self, pixels: Tensor, text: Tensor | None = None) -> Tensor:
        """The features, all at once."""
        work = self.pieces(pixels) if text is None else self.reading(pixels, text)
        while True:
            try:
                next(work)
            except StopIteration as done:
                return done.value

    @property
    def num_weights(self) -> int:
        """Weights of its linears."""
        return sum(one.num_weights for one in self.modules() if isinstance(one, Linear))

    def multiplications(self) -> tuple[float, float]:
        """About how many an image takes for each of its pixels, and for each two of them."""
        patch = self.rules.patch**2
        return self.num_weights / patch, 2 * self.depth * self.hidden / patch**2


class Model(nn.Module):
    """One pipeline stage of a causal language model, sharded for one rank of its tensor group.

    A stage passes the residual stream on as one tensor, with every sublayer's output added. `logits` computes the final
    norm, so that only sampled rows need it.
    """

    LAYER: ClassVar[type[Layer]]
    DECODER: ClassVar[type[Decoder]] = Decoder
    STREAM: ClassVar[type[ResidualStream]] = ResidualStream
    # Whether the layers that predict further tokens, which checkpoints ship, are as `Args.draft_layer` (drafts/mtp.py).
    DRAFTS: ClassVar[bool] = True
    # merged linear → the names under which checkpoints hold its parts, in the order of its outputs
    MERGED: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    # parts of names of a checkpoint's tensors → what the attributes' paths have in their place, one after the other
    RENAMED: ClassVar[dict[str, str]] = {}
    # How names begin of a checkpoint's tensors that are left out, as another model's: of vision, audio.
    LEFT_OUT: ClassVar[tuple[str, ...]] = ()

    # Set by load():
    offload: Offload | None = None  # this stage's experts in host memory
    layer_offload: LayerOffload | None = None  # this stage's tables and layers in host memory
    dtype: torch.dtype
    weight_bytes: int  # on this rank's device
    # The layers before which the residual stream is kept for a draft model (rank/model/drafts/eagle3.py), in order; the
    # number of all layers stands for the end. `forward` has what it and earlier stages keep side by side behind the
    # residual stream itself.
    aux_layers: tuple[int, ...] = ()
    # The token that images' features stand for, and how images move positions; in models that take images alone.
    image_token = -1
    image_span = 0  # how many tokens of an image attend to each other at most, and not only to those before; 0: none do
    image_positions: Callable[[int, Sequence[Picture]], np.ndarray] | None = None
    num_weights: int  # that a token is multiplied with on this rank: of linears, and of the experts that it visits

    def __init__(
        self,
        args: Args,
        mesh: Mesh,
        max_model_len: int,
        names: Collection[str] = (),
        format_of: ChooseFormat = dense,
        table_of: ChooseFormat = dense,
    ):
        """names: of the checkpoint's tensors. format_of: chooses each linear's weight format; table_of: the
        embedding's."""
        super().__init__()
        self.hidden_size, self.vocab_size, self.max_model_len = args.hidden_size, args.vocab_size, max_model_len
        self.tied = self._is_tied(args, names)
        self.tensor = mesh.tensor
        self.model = self.DECODER(args, mesh, self.layer_class(args))
        ropes = [args.rope(index) for index in range(args.num_hidden_layers)]
        self.rope = RotaryEmbeddings(ropes, args.head_dim, args.max_position_embeddings, max_model_len)
        self.lm_head = self._head(args, mesh) if mesh.last else None
        self.vision = self._tower(args, mesh, names)
        self._build(names, format_of, table_of)

    @classmethod
    def layer_class(cls, args: Any) -> type[Layer]:
        return cls.LAYER

    @property
    def stream_size(self) -> int:
        """Elements of a token's residual stream."""
        return self.hidden_size

    @property
    def received_size(self) -> int:
        """Elements of a token that the stage before passes on: its residual stream, and what stages have kept of it."""
        first = min(map(int, self.model.layers))
        return self.stream_size + self.hidden_size * sum(layer < first for layer in self.aux_layers)

    @staticmethod
    def _is_tied(args: Args, names: Container[str]) -> bool:
        return args.tie_word_embeddings

    def _tower(self, args: Args, mesh: Mesh, names: Collection[str]) -> Tower | None:
        """The tower that makes features of images, on the first stage of a model that takes some."""
        return None

    @staticmethod
    def _head(args: Args, mesh: Mesh) -> ParallelLMHead:
        scale, softcap = args.logit_scale, args.logit_softcap
        return ParallelLMHead(args.vocab_size, args.hidden_size, mesh, scale, softcap, args.head_bias)

    def cache_specs(self) -> list[CacheSpec]:
        """The cache specs of this stage's layers, in order."""
        return [cast(Layer, layer).cache_spec() for layer in self.model.layers.values()]

    def forward(self, batches: Sequence[Batch], hidden: Tensor | None = None) -> Tensor:
        """The residual stream after this stage's layers, [T, hidden], equal on all ranks of the tensor group.

        The rows of all batches follow each other; of a batch with `sampled` they are those at sample_at. Several
        batches are microbatches of one step: while one computes a sublayer, the other's all-reduce runs. A sequence may
        begin in one batch and continue in the next, which finds its keys and values in the cache.

        hidden: the output of the previous stage, None on the first stage. It may be overwritten.
        """
        kept: list[list[Tensor]] = [[] for _ in batches]
        if self.model.embed_tokens is not None:
            embedded = [self.model.embed(batch) for batch in batches]
        else:
            assert hidden is not None
            embedded = list(hidden.split([len(batch.ids) for batch in batches]))
            if self.aux_layers:
                kept = [[x[:, self.stream_size :]] for x in embedded]
                embedded = [x[:, : self.stream_size].contiguous() for x in embedded]
        streams = [self.STREAM(x) for x in embedded]
        if self.layer_offload is not None:
            self.layer_offload.begin(len(batches))
        if self.offload is not None:
            self.offload.begin(batches)
        runs = [self._run(*of) for of in zip(streams, batches, kept, strict=True)]
        if len(runs) == 1:
            for _ in runs[0]:
                pass
        else:
            self._interleave(streams, runs)
        values = [stream.read() for stream in streams]
        if self.aux_layers:
            values = [torch.cat((value, *aux), 1) for value, aux in zip(values, kept, strict=True)]
        return torch.cat(values) if len(values) > 1 else values[0]

    def _run(self, stream: ResidualStream, batch: Batch, kept: list[Tensor]) -> Iterator[Normed]:
        """Run one microbatch through this stage's layers, and yield at each norm. kept: gets the residual streams
        before `aux_layers`."""
        ropes = self.rope(batch.positions)
        for index, layer in self.model.layers.items():
            self._keep_aux(int(index), stream, kept)
            run = layer(stream, ropes[int(index)], batch)
            for normed in run if self.layer_offload is None else self.layer_offload.around(int(index), run):
                if len(stream) == 0:  # the last layer samples no row
                    return
                yield normed
            self._add_deeper(int(index), stream, batch)
        if self.model.norm is not None:  # the last stage: elsewhere it is the next one's first layer
            self._keep_aux(int(index) + 1, stream, kept)

    @staticmethod
    def _add_deeper(layer: int, stream: ResidualStream, batch: Batch) -> None:
        """Add what images have for the tokens behind a layer."""
        override = batch.embeddings
        if override is not None and override.deeper is not None and layer < override.deeper.shape[1]:
            stream.read().index_add_(0, override.at, override.deeper[:, layer])

    def _keep_aux(self, layer: int, stream: ResidualStream, kept: list[Tensor]) -> None:
        if layer in self.aux_layers:
            kept.append(stream.read().clone(memory_format=torch.contiguous_format))

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

    def choose(self, hidden: Tensor, ids: Tensor, heads: Tensor) -> Tensor:
        """The tokens [S] that the model's heads choose for rows [S, hidden] of the last stage's forward.

        heads: [S] int64, a number for each row, 0 for the vocabulary. ids: [S] int64, what was sampled of that.
        """
        raise NotImplementedError

    def normed(self, hidden: Tensor) -> Tensor:
        """Rows of the last stage's forward after the final norm, as the head reads them."""
        assert self.model.norm is not None
        return self.model.norm(hidden[:, : self.hidden_size].contiguous() if self.aux_layers else hidden)

    @classmethod
    def rename(cls, name: str) -> str:
        """Map a checkpoint's tensor name to the path of the module's attribute."""
        for theirs, ours in cls.RENAMED.items():
            if theirs not in ours or ours not in name:  # names of GGUF files are the modules' already
                name = name.replace(theirs, ours)
        return f"{name}.weight" if name.endswith(STACKED) else name

    @classmethod
    def spelled(cls, name: str) -> str:
        """The reverse of renaming: a tensor's name as the checkpoint would have it, for messages."""
        if name.removesuffix(".weight").endswith(STACKED):
            name = name.removesuffix(".weight")
        for theirs, ours in reversed(cls.RENAMED.items()):
            name = name.replace(ours, theirs)
        return name

    def stored_path(self, path: str) -> str:
        """The path under which a checkpoint has a module, by its path here."""
        return path

    def _build(self, names: Collection[str], format_of: ChooseFormat, table_of: ChooseFormat) -> None:
        """Decide, from the names of a checkpoint's tensors, which tensors fill each module, and in which format."""
        stored = frozenset(name.rpartition(".")[0] for name in names)  # the modules that it has tensors of
        for path, layer in [(self.stored_path(path), layer) for path, layer in self.named_modules()]:
            if isinstance(layer, Linear):
                layer.build(self._sources(path, layer, stored), format_of)
            elif isinstance(layer, FusedExperts):
                if not stored.isdisjoint((f"{path}.gate_proj", f"{path}.0.gate_proj")):
                    layer.hold_apart()
                up = self._expert_sources(f"{path}.gate_up_proj", layer.gate_up_proj, stored)
                down = self._expert_sources(f"{path}.down_proj", layer.down_proj, stored)
                layer.build(up, down, format_of)
            elif isinstance(layer, VocabParallelEmbedding):
                layer.build(path, table_of)
            elif isinstance(layer, ShardedModule) and not layer.sources:
                layer.sources = tuple(self._sources(path, layer, stored))
        if self.tied and self.lm_head and self.model.embed_tokens:
            self.lm_head.tie(self.model.embed_tokens)

    def _sources(self, path: str, linear: Linear | ShardedModule, stored: Container[str]) -> list[Source]:
        if linear is self.lm_head and self.tied:
            return [Source("model.embed_tokens")]
        parent, _, name = path.rpartition(".")
        merged = self.MERGED.get(name, (name,))
        several = len(linear.outputs) > 1
        if several and (name not in self.MERGED or path in stored):
            return self._merged_sources(path, linear.outputs)
        return [Source(f"{parent}.{part}" if parent else part) for part in merged]

    def _expert_sources(self, path: str, layer: StackedLinear, stored: Container[str]) -> tuple[Source, ...]:
        """Checkpoints hold each expert's linears apart, or all experts' as one tensor, gate and up merged or not."""
        if path in stored or (layer.layout.axes, layer.layout.interleaved) != (APART.axes, APART.interleaved):
            return tuple(self._merged_sources(path, layer.outputs))
        parent, _, name = path.rpartition(".")
        parts = self.MERGED.get(name, (name,))
        stacked = f"{parent}.{parts[0]}" in stored
        return tuple(Source(f"{parent}.{part}" if stacked else f"{parent}.{{}}.{part}") for part in parts)

    @staticmethod
    def _merged_sources(path: str, outputs: Sequence[Shard]) -> list[Source]:
        """Sources of outputs that one tensor holds one after the other."""
        ends = list(itertools.accumulate(shard.size for shard in outputs))
        return [Source(path, end - shard.size, ends[-1]) for end, shard in zip(ends, outputs, strict=True)]

    def sharded_modules(self) -> list[ShardedModule]:
        """All modules with weights, in the order of computation."""
        return [module for module in self.modules() if isinstance(module, ShardedModule)]

    def slices(self) -> Iterator[Slice]:
        """All slices that must be read to fill this stage."""
        for layer in self.sharded_modules():
            yield from slices(layer)


class TextOfMultimodal(Model):
    """The text model of a multimodal checkpoint: its tensors under the names that they have where it stands alone."""

    PREFIXES: ClassVar[dict[str, str]] = {"language_model.": "", "model.language_model.": "model."}
    LEFT_OUT = tuple(
        f"{under}{part}." for under in ("", "model.") for part in ("vision_tower", "multi_modal_projector")
    )

    @staticmethod
    def _is_tied(args: Args, names: Container[str]) -> bool:
        """Decided by what the checkpoint has, where that is known: the whole's config.json may imply either by its
        class's default, whatever its text_config has."""
        return "lm_head.weight" not in names if names else args.tie_word_embeddings

    @classmethod
    def rename(cls, name: str) -> str:
        for prefix, own in cls.PREFIXES.items():
            if name.startswith(prefix):
                name = own + name.removeprefix(prefix)
        return super().rename(name)


@dataclass(frozen=True, kw_only=True)
class SeeingArgs(Args):
    """Args of a model that takes images, where the checkpoint says how."""

    vision_config: dict[str, Any] | None = None
    # No keys of config.json: config.json as it is, and the way from images to tokens.
    original: dict[str, Any] = dataclasses.field(default_factory=dict)
    rules: ImageRules | None = None

    @classmethod
    def from_config(cls, config: Config) -> Self:
        raw = {key: value for key, value in config.raw.items() if key not in ("rules", "original")}
        made = super().from_config(dataclasses.replace(config, raw=raw))
        return dataclasses.replace(made, original=config.original, rules=find(config.path, config.original))


class SeeingModel(TextOfMultimodal):
    """A model that takes images, where the checkpoint has the tower that makes features of them, under `vision.`."""

    TOWER: ClassVar[type[Tower]]  # made of Args; raises ValueError for values that cannot be

    @classmethod
    def tower_class(cls, args: SeeingArgs) -> type[Tower]:
        return cls.TOWER

    def _tower(self, args: Args, mesh: Mesh, names: Collection[str]) -> Tower | None:
        assert isinstance(args, SeeingArgs)
        if (
            args.rules is None
            or args.vision_config is None
            or (names and not any(name.startswith(TOWER) for name in names))
        ):
            return None
        if self.image_positions is not None and not args.rope_parameters.get("mrope_section"):
            return None  # as of files that were made for the text model
        self.image_token, self.image_span = args.rules.token, args.rules.span
        try:
            tower = self.tower_class(args)(args) if mesh.first else None
            layers = min(len(self.model.layers), args.num_hidden_layers - 1)
            if tower is not None and tower.levels > layers:
                raise ValueError(f"images go to {tower.levels} layers, the first stage has {layers}: lower --pp")
            return tower
        except (AttributeError, TypeError, ValueError) as error:
            raise FatalError(f"config.json: {error}; --images-per-prompt 0 serves text alone", MODEL) from None
