"""Loads this rank's Model from a model directory."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from ...comm.base import HostComm
from ...comm.broadcast import broadcast_bytes
from ...comm.mesh import Mesh
from ...errors import USAGE, FatalError, HostMemoryError, first_line, lacks_memory
from ...kernels.cpp import ops
from ...kernels.quantized import affine
from ...kernels.quantized.stack import Stack
from .. import filesystems
from ..checkpoint_files import directory, read_index
from ..gguf import checkpoint, mixes
from ..safetensors_header import Index
from . import architectures, choices, load_memory, stored_formats
from .base import BESIDE, Args, Model, SeeingArgs
from .choices import DTYPES, choose_dtype, model_length
from .config import Config, check_degrees, read_config
from .experts.fused import FusedExperts, StackedLinear
from .experts.offload import ON_DEVICE, OffloadOptions, overflowing
from .formats import dense
from .formats._in_situ import InSituPart
from .formats._packed import PackedPart
from .formats._part import Part
from .formats._stacks import StackOfParts
from .layers.embedding import VocabParallelEmbedding
from .layers.linear import Linear
from .layers.mla import PlainColumnParallel
from .stored_formats.gptq import OrderedStack
from .weights import ggml
from .weights.dummy import Dummy
from .weights.filler import Filler
from .weights.safetensors import Checkpoint
from .weights.slicing import ShardedModule, Slice
from .weights.striped import Striped

log = logging.getLogger(__name__)

# Tensors of checkpoints that are computed here instead: without a warning that they are unread.
HARMLESS = (
    "rotary_emb.inv_freq", "rotary_pos_emb.inv_freq", "masked_bias", "attn.bias", "act_fn.beta", "act_fn.eps",
)  # fmt: skip
# How names begin of tensors that predict further tokens: Qwen's, MiniMax's, MiMo's.
FURTHER = "mtp.", "model.mtp.", "model.mtp_layers."

Progress = Callable[[int, int], None]  # called with bytes done and all bytes


class Classes(NamedTuple):
    """The classes by which a checkpoint is read."""

    args: type[Args]
    model: type[Model]


# From a config and the names of the tensors, where these are known: the classes of a draft model.
ChooseClasses = Callable[[Config, frozenset[str]], Classes]


def load(
    path: str | Path,
    mesh: Mesh,
    device: torch.device | str = "cpu",
    dtype: str = "auto",
    max_model_len: int = 0,
    load_format: str = "auto",
    way: str = "auto",
    progress: Progress = lambda done, total: None,
    room: int | None = None,
    host_room: int | None = None,
    isq: str = "none",
    quantization: str = "auto",
    experts: OffloadOptions = ON_DEVICE,
    layers: int = 0,
    draft: ChooseClasses | None = None,
    images: bool = True,
) -> Model:
    """This rank's shard of the model at `path`. Collective over the mesh's world.

    dtype: auto, f32, bf16 or f16. max_model_len: 0 for the model's own. load_format: auto, or dummy for random weights.
    way: direct (each rank reads its own slices), striped (one reads each byte and sends it to others) or auto. progress
    gets this rank's bytes or, striped, the job's. room: bytes of the device for weights; None: unlimited. host_room: of
    a GPU's host. isq: what linears become. experts, layers: what is in host memory, and bytes. draft: of a draft model
    (rank/model/drafts), whose experts stay on the device, and whose max_model_len is its target's. images: whether it
    takes some, where it can. Raises FatalError.
    """
    config = read_config(path)
    check_degrees(config, mesh.tensor.size, mesh.pipe.size)
    device = torch.device(device)
    speaks = mesh.world.rank == 0  # one rank logs for all
    chosen = choose_dtype(dtype, config, device)
    if speaks and draft is None:
        _tell_checkpoint(config, chosen)
    index = None
    if load_format != "dummy":
        way = choose_way(way, config.path, mesh.world)
        index = _share_index(config.path, mesh.world) if way == "striped" else read_index(config.path)
    length = model_length(max_model_len, config, speaks) if draft is None else max_model_len  # the target's
    model = _build(config, length, index, Wanted(isq, quantization, dtype, images), device, mesh, draft)
    if draft is None:
        _check_experts(model, mesh, experts)
    if speaks and isq != "none":
        _tell_other_formats(model, isq)
    parts = list(model.slices())
    tells = speaks and draft is None
    source = Dummy() if index is None else _open(model, parts, config, index, way, mesh.world, tells)
    stored = DTYPES[config.dtype]
    memory = partial(load_memory.weight_memory, model.sharded_modules(), source, DTYPES[chosen], stored, device)
    of = model, memory, None if layers else room, DTYPES[chosen], device, mesh.world
    if draft is None:
        experts = experts or overflowing(*of)._replace(defers=experts.defers)
    need = load_memory.place_together(
        model, mesh, (experts, layers), (DTYPES[chosen], stored), device, (room, host_room), source
    )
    try:
        filler = _filler(model, device, DTYPES[chosen], stored)
        _fill_together(model, mesh.world, source, partial(_fill, source, parts, filler, progress))
        model.rope.to(device)
        _attach(model, mesh.world)
    except Exception as error:
        if isinstance(error, HostMemoryError) or not lacks_memory(error):
            raise
        raise load_memory.too_large(need, f"memory ran out ({first_line(error).rstrip('.')})") from error
    _finish(model, DTYPES[chosen], device, speaks)
    return model.eval()


class Wanted(NamedTuple):
    """Options of `load` by which formats are chosen, and whether there is a tower."""

    isq: str
    quantization: str
    dtype: str
    images: bool = True


def _build(
    config: Config, length: int, index: Index | None, wanted: Wanted, device: torch.device, mesh: Mesh,
    draft: ChooseClasses | None = None,
) -> Model:  # fmt: skip
    """This rank's model, without memory, for sequences of up to `length`."""
    module = architectures.find(config.model_type)
    own = Classes(module.Args, module.Model)
    classes = own if draft is None else draft(config, choices.names_of(config, module.Model, index))
    names = choices.names_of(config, classes.model, index)
    compiled = device.type == "cpu" and ops.available()
    stored = choices.stored_dtypes(classes.model, index)
    plain = choices.choose_plain(wanted.dtype, config, device, compiled, stored)
    left = choices.without_codes(names, stored)
    format_of = choices.choose_format(config, wanted.isq, wanted.quantization, left, plain)
    table_of = format_of if compiled else dense
    args = classes.args.from_config(config)
    if isinstance(args, SeeingArgs) and not wanted.images:
        args = dataclasses.replace(args, rules=None)
    model = classes.model(args, mesh, length, names, format_of, table_of)
    if device.type == "mps":  # which has no kernels for quantised weights
        for one in model.modules():
            if isinstance(one, PackedPart):
                one.expanded = True
    return model


def _filler(model: Model, device: torch.device, dtype: torch.dtype, stored: torch.dtype) -> Filler:
    def finished(module: ShardedModule) -> None:
        if model.layer_offload is not None:
            model.layer_offload.park(module)
        if model.offload is not None:
            model.offload.keep(module)

    return Filler(model.sharded_modules(), device, dtype, stored, finished)


def _finish(model: Model, dtype: torch.dtype, device: torch.device, speaks: bool) -> None:
    """Once its weights are loaded. dtype: the model's."""
    model.dtype = dtype
    for one in model.modules():
        if isinstance(one, PlainColumnParallel):
            one.expand(model.dtype)
    held = {id(t): t for layer in model.sharded_modules() for t in (*layer.parameters(), *layer.buffers())}
    model.weight_bytes = sum(t.nbytes for t in held.values() if t.device.type == device.type)
    counted = ((name, one) for name, one in model.named_modules() if isinstance(one, Linear | FusedExperts))
    model.num_weights = sum(one.num_weights for name, one in counted if not name.startswith(BESIDE))
    if speaks:
        _tell_without_kernel(model)


def _fill_together(
    model: Model, world: HostComm, source: Dummy | Checkpoint | Striped, fill: Callable[[], None]
) -> None:
    """Fills the model; collective over world where experts are in host memory, so that no rank goes on alone. One that
    fails in striped loading does not speak, as it leaves the others in messages of that."""

    def work() -> int:
        fill()
        return 0

    if model.offload is None or isinstance(source, Striped):
        fill()
    else:
        load_memory.together(world, work)


def _attach(model: Model, world: HostComm) -> None:
    """Prepare what is in host memory, once it is there. Collective over world."""
    lines = []
    if model.offload is not None:  # on all ranks or none
        world.barrier()  # striped loading ends on one rank before the others have filled their parts of what they share
        load_memory.together(world, model.offload.pin)  # they measure at the same time, and no rank pins meanwhile
        lines.append(model.offload.attach())
    if model.layer_offload is not None:
        lines += model.layer_offload.attach(aside=model.offload is None)
    for text in filter(None, lines if world.rank == 0 else ()):
        log.info(text)


def _experts_of(model: Model) -> int:
    """Layers of this stage that have experts."""
    return sum(isinstance(one, FusedExperts) for one in model.modules())


def _check_experts(model: Model, mesh: Mesh, experts: OffloadOptions) -> None:
    """Raise FatalError where no stage has any, but options speak of them. Collective over the mesh's world."""
    if (mesh.ep > 1 or experts) and not int(
        mesh.world.all_reduce(torch.tensor([_experts_of(model)], dtype=torch.int64))
    ):
        raise _no_experts(mesh)


def _no_experts(mesh: Mesh) -> FatalError:
    if mesh.ep > 1:
        return FatalError(f"--ep {mesh.ep}: the model has no experts: leave --ep out", USAGE)
    return FatalError(
        "--num-experts-offload-per-rank or --expert-memory: the model has no experts: leave the option out", USAGE
    )


def _tell_checkpoint(config: Config, dtype: str) -> None:
    log.info("computing in %s; the checkpoint is in %s", dtype, config.dtype)
    if config.ignored_file:
        log.warning("%s is ignored: no tensor of the checkpoint is quantised in its way", config.ignored_file)


def _tell_other_formats(model: Model, isq: str) -> None:
    """Log how many linears a mix quantises to which format, or how many get another one than was asked for, as their
    inputs are not whole groups."""
    stacks = [one.stored for one in model.modules() if isinstance(one, StackedLinear)]
    parts = [*model.modules(), *(one.part for one in stacks if isinstance(one, StackOfParts))]
    found = [part.name for part in parts if isinstance(part, InSituPart) and part.name != isq]
    if isq in mixes.MIXES:
        counts = ", ".join(f"{found.count(name)} in {name}" for name in sorted(set(found)))
        log.info("--isq %s: linears, or parts of them: %s", isq, counts)
    elif found:
        log.info("--isq %s: %d linears whose inputs are not whole groups are in %s", isq, len(found), found[0])


def check(
    path: str | Path,
    mesh: Mesh,
    max_model_len: int = 0,
    load_format: str = "auto",
    isq: str = "none",
    quantization: str = "auto",
) -> None:
    """Raise FatalError where `load` would, as far as config.json and the headers of the weight files tell.

    Not collective: one rank may ask. No weight is read.
    """
    config = read_config(path)
    check_degrees(config, mesh.tensor.size, mesh.pipe.size)
    index = read_index(config.path) if load_format != "dummy" else None
    wanted = Wanted(isq, quantization, "f32")  # which changes nothing of what is refused
    model = _build(config, model_length(max_model_len, config), index, wanted, torch.device("cpu"), mesh)
    if mesh.ep > 1 and mesh.pipe.size == 1 and not _experts_of(model):
        raise _no_experts(mesh)
    if index is not None:
        _open(model, list(model.slices()), config, index, "direct", mesh.world, speaks=False)


def choose_way(way: str, path: Path, world: HostComm) -> str:
    """Resolve auto: striped where any rank has the files on a network file system. Collective over world."""
    if way != "auto":
        return way
    remote = filesystems.is_network(filesystems.kind(directory(path)))
    return (
        "striped" if int(world.all_reduce(torch.tensor([remote * (world.size > 1)], dtype=torch.int64))) else "direct"
    )


def _open(
    model: Model, parts: list[Slice], config: Config, index: Index, way: str, world: HostComm, speaks: bool
) -> Checkpoint | Striped:
    """Open and check the checkpoint; the model has no memory yet. Collective over world if striped."""
    spelled = model.spelled if not index.path else str  # GGUF files have names of their own
    source = Checkpoint(config.path, index, model.rename, spelled)
    for part in parts:  # before the first byte is read, so that a wrong file is reported at once
        source.check(part)
    if speaks:
        _tell_unread(model, config, parts, source)
        _tell_dequantised(parts, source)
        if any(isinstance(one, StackedLinear) and isinstance(one.stored, OrderedStack) for one in model.modules()):
            log.info("experts with desc_act are dequantised while they are loaded: they take the memory of --dtype")
    return Striped(source, parts, world) if way == "striped" else source


def _share_index(path: Path, world: HostComm) -> Index:
    """Rank 0 reads the headers and broadcasts them."""
    mine = msgspec.msgpack.encode(read_index(path)) if world.rank == 0 else b""
    return msgspec.msgpack.decode(broadcast_bytes(world, mine), type=Index)


def _fill(source: Dummy | Checkpoint | Striped, parts: list[Slice], filler: Filler, progress: Progress) -> None:
    if isinstance(source, Striped):
        source.fill(filler, progress)
    else:
        done, total = 0, sum(map(filler.nbytes, parts))
        progress(done, total)
        for part in parts:
            lent = source.lend(part) if isinstance(source, Checkpoint) and filler.borrows(part) else None
            if lent is not None:
                filler.lend(part, lent)
            else:
                source.fill(part, filler.target(part))
            filler.arrived(part, part.numel)
            done += filler.nbytes(part)
            progress(done, total)
    filler.close()


def _tell_unread(model: Model, config: Config, parts: list[Slice], source: Checkpoint) -> None:
    """Log tensors that no rank reads. Layers of other stages are recognised by their numbers."""
    read = {_pattern(part.tensor) for part in parts} | {"model.embed_tokens.weight", "model.embed_positions.weight"}
    harmless = (*HARMLESS, "lm_head.weight") if model.tied else HARMLESS
    elsewhere = set(range(config.num_layers)) - set(map(int, model.model.layers))
    if config.quantization:
        harmless = (*harmless, *stored_formats.find(config.quantization).HARMLESS)
    # One of the two forms of a quantised tensor is read.
    names = [name for name in source.names if not name.endswith(checkpoint.BLOCKS)]
    read |= {pattern.removesuffix(checkpoint.BLOCKS) + ".weight" for pattern in read}
    unread = [name for name in names if not name.endswith(harmless) and _layer(name) not in elsewhere]
    unread = [name for name in unread if _pattern(name) not in read or _layer(name) >= config.num_layers]
    if model.image_token >= 0 and model.vision is None:  # the first stage's
        unread = [name for name in unread if not name.startswith(BESIDE)]
    further = [name for name in unread if name.startswith(FURTHER)]
    if config.raw.get("num_nextn_predict_layers"):
        further += [name for name in unread if _layer(name) >= config.num_layers]
    if further:
        log.info(
            "%d tensors of layers for multi-token prediction (MTP) are no part of the model itself; --speculate mtp "
            "drafts with those of the models that docs/speculation.md names",
            len(further),
        )
    unread = [name for name in unread if name not in set(further)]
    others = (*model.LEFT_OUT, *BESIDE)
    if left_out := [name for name in unread if name.startswith(others)]:
        served = "text alone is" if model.image_token < 0 else "texts and images are"
        log.info("%s served: %d tensors of the model's other parts are left out", served, len(left_out))
    unread = [name for name in unread if not name.startswith(others)]
    if unread:
        log.warning("%d tensors of the checkpoint are not used, the first is %s", len(unread), unread[0])


def _tell_dequantised(parts: list[Slice], source: Checkpoint) -> None:
    """Log which types of a GGUF file's linears and experts become plain weights, which take more memory."""
    read = (source.find(part.tensor)[1].dtype for part in parts if not isinstance(part.module, VocabParallelEmbedding))
    if kinds := sorted(set(read) & ggml.CODECS.keys()):
        log.info(
            "dequantised while they are loaded, as groups cut by --tp and types without kernels are: %s",
            ", ".join(kinds),
        )


def _tell_without_kernel(model: Model) -> None:
    """Log how many linears and stacks of experts no kernel for quantised weights takes."""
    held = [one.packed for one in model.modules() if isinstance(one, Part | StackedLinear)]
    kept = [one.packed if isinstance(one, Stack) else one for one in held]
    found = [one for one in kept if isinstance(one, affine.Affine) and one.codes.numel()]
    if found:
        log.warning(
            "%d linears and stacks of experts are dequantised in every step, which is slow, as no kernel takes 8-bit "
            "codes whose zeros lie far from the middle, or scales that f16 does not hold: quantise the model "
            "symmetrically, as phalanx convert --to gptq --bits 8 does",
            len(found),
        )


def _layer(name: str) -> int:
    """The number of the layer whose tensor this is; -1: of none."""
    number = name.removeprefix("model.layers.").partition(".")[0]
    return int(number) if name.startswith("model.layers.") and number.isdigit() else -1


def _pattern(name: str) -> str:
    """A tensor's name with * for its numbers: of a layer, and of a head or expert that may be another rank's."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
