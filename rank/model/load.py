"""A model directory becomes this rank's Model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ...comm.mesh import Mesh
from . import architectures
from .base import Model
from .config import Config, check_degrees, read_config
from .weights.dummy import Dummy
from .weights.safetensors import Checkpoint
from .weights.slicing import Sliced

log = logging.getLogger(__name__)

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# Tensors that checkpoints carry and that are computed here, or that a tied head does not read.
HARMLESS = ("rotary_emb.inv_freq", "masked_bias", "attn.bias")


def load(
    path: str | Path,
    mesh: Mesh,
    device: torch.device | str = "cpu",
    dtype: str = "auto",
    max_model_len: int = 0,
    load_format: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """This rank's part of the model at `path`.

    dtype: auto, f32, bf16 or f16. max_model_len: 0 for as long as the model can. load_format: auto, or dummy for
    random weights, which needs config.json alone. progress gets the bytes done and all bytes of this rank.
    Raises Stop in words for the user.
    """
    config = read_config(path)
    check_degrees(config, mesh.tensor.size, mesh.pipe.size)
    device = torch.device(device)
    speaks = mesh.last and mesh.tensor.rank == 0  # one rank tells for all
    chosen = choose_dtype(dtype, config, device)
    if speaks:
        log.info("computing in %s; the checkpoint is in %s", chosen, config.dtype)
    module = architectures.find(config.model_type)
    args = module.Args.from_config(config)
    model: Model = module.Model(args, mesh, model_length(max_model_len, config, speaks))
    materialise(model, device, DTYPES[chosen])
    _fill(model, config, load_format, progress, speaks)
    finish(model)
    return model.eval()


def choose_dtype(dtype: str, config: Config, device: torch.device) -> str:
    """auto is f32 on CPUs, which emulate the narrow kinds; on GPUs the checkpoint's own, bf16 for an f32 one."""
    if dtype != "auto":
        return dtype
    if device.type == "cpu":
        return "f32"
    return "bf16" if config.dtype == "f32" else config.dtype


def model_length(wanted: int, config: Config, speaks: bool = False) -> int:
    """The longest sequence that is served: what is wanted, but no more than the model can."""
    if wanted > config.max_positions and speaks:
        log.warning("the model takes at most %d tokens; %d were asked for", config.max_positions, wanted)
    return min(wanted or config.max_positions, config.max_positions)


def materialise(model: Model, device: torch.device, dtype: torch.dtype) -> None:
    """Give every parameter memory: zeros, as what a slice does not fill is padding. Shared parameters stay shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            key = id(parameter)
            if key not in made:
                data = torch.zeros(parameter.shape, device=device, dtype=dtype)
                made[key] = nn.Parameter(data, requires_grad=False)
            setattr(module, name, made[key])
    model.rope.to(device)
    model.dtype = dtype


def finish(model: Model) -> None:
    layers = [module for module in model.modules() if isinstance(module, Sliced)]
    for layer in layers:
        layer.finish()
    held = {id(t): t.nbytes for layer in layers for t in (*layer.parameters(), *layer.buffers())}
    model.weight_bytes = sum(held.values())


def _fill(
    model: Model, config: Config, load_format: str, progress: Callable[[int, int], None] | None, speaks: bool
) -> None:
    parts = list(model.slices())
    source: Checkpoint | Dummy
    if load_format == "dummy":
        source = Dummy()
    else:
        source = Checkpoint(config.path, model.rename)
        for part in parts:  # all before the first byte is read: a wrong file is told at once
            source.check(part)
        if speaks:
            _tell_unread(model, source)
    total = sum(part.target.nbytes for part in parts)
    done = 0
    for part in parts:
        source.fill(part)
        done += part.target.nbytes
        if progress is not None:
            progress(done, total)


def _tell_unread(model: Model, source: Checkpoint) -> None:
    """Log tensors that no rank reads; layers of other stages are told by their names."""
    read = {part.tensor for part in model.slices()}
    patterns = {_pattern(name) for name in read} | {"model.embed_tokens.weight"}
    harmless = (*HARMLESS, "lm_head.weight") if model.tied else HARMLESS
    unread = [name for name in source.names if _pattern(name) not in patterns and not name.endswith(harmless)]
    if unread:
        log.warning("%d tensors of the checkpoint are not used, the first is %s", len(unread), unread[0])


def _pattern(name: str) -> str:
    """A tensor's name with layer numbers left out."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
