"""Choices made from config.json and the options before a weight is read: formats, dtype, length."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch

from ...errors import USAGE, FatalError
from ..checkpoint_files import is_gguf, read_index
from ..gguf import mixes
from ..safetensors_header import Index
from . import stored_formats
from .base import BESIDE, Model
from .config import Config
from .formats import DENSE, ChooseFormat, Format, dense, in_situ
from .formats._plain import HalfFloats

log = logging.getLogger(__name__)

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
CODES = "F8_E4M3", "I8"  # of safetensors: elements that mean nothing without a scale
HALVES = {"bf16": "BF16", "f16": "F16"}  # dtypes of 16 bits, as safetensors name them
EXPERTS = "num_experts", "num_local_experts", "n_routed_experts"  # config.json's keys for how many a layer has


def choose_format(
    config: Config, isq: str, quantization: str = "auto", names: Collection[str] = (), plain: ChooseFormat = dense
) -> ChooseFormat:
    """The format of each linear: what the checkpoint stores, or what weights are quantised to while they are loaded.

    quantization: the method that the checkpoint must have, or auto. names: of the checkpoint's tensors; none where
    config.json alone is known. plain: of linears that are not quantised.
    """
    method = stored_formats.method_of(config.quantization, config.path) if config.quantization else "none"
    if quantization not in ("auto", *stored_formats.goes_by(method)):
        raise FatalError(
            f"--quantization {quantization}: by its config.json {config.path} is quantised by {method}: leave the "
            "option out" + ("; --isq quantises while loading" if method == "none" else ""),
            USAGE,
        )
    if method == "none":
        if isq == "none":
            return plain
        quantised = in_situ(isq, sizes_of(config))
        return lambda path: plain(path) if path.startswith(BESIDE) else quantised(path)
    if isq != "none":
        raise FatalError(f"--isq {isq}: {config.path} is quantised already ({method}): leave --isq out", USAGE)
    return stored_formats.choose(config.quantization, plain, names)


def sizes_of(config: Config) -> mixes.Sizes:
    """Facts that the mixes of formats need."""
    experts = next((config.raw[key] for key in EXPERTS if config.raw.get(key)), 0)
    return mixes.Sizes(config.num_layers, experts, config.num_heads // config.num_kv_heads)


def names_of(config: Config, model: type[Model], index: Index | None = None) -> frozenset[str]:
    """The names of the checkpoint's tensors, as far as they are known: a GGUF file's stand in its config."""
    if index is None and is_gguf(config.path):
        index = read_index(config.path)
    return frozenset(map(model.rename, index.files)) if index else frozenset()


def without_codes(names: frozenset[str], stored: Mapping[str, str]) -> frozenset[str]:
    """Names without those of codes, which are no plain weights: so that a linear whose scale is missing is not taken
    for one that is not quantised. stored: as stored_dtypes has them."""
    return names - {name for name, dtype in stored.items() if dtype in CODES}


def choose_dtype(dtype: str, config: Config, device: torch.device) -> str:
    """Resolve auto: f32 on CPUs, which emulate 16 bits; on GPUs the checkpoint's dtype, or bf16 for f32."""
    if dtype != "auto":
        return dtype
    if device.type == "cpu":
        return "f32"
    return "bf16" if config.dtype == "f32" else config.dtype


def choose_plain(
    dtype: str, config: Config, device: torch.device, compiled: bool, stored: Mapping[str, str]
) -> ChooseFormat:
    """The format of linears that are not quantised. Where auto has a CPU compute in f32, weights of 16 bits stay so.

    dtype: the option. compiled: whether there are kernels that read them. stored: as stored_dtypes has them.
    """
    if dtype != "auto" or device.type != "cpu" or config.dtype not in HALVES or not compiled:
        return dense
    kept, usual = HalfFloats(DTYPES[config.dtype]), HALVES[config.dtype]

    def choose(path: str) -> Format:
        """Stacked experts are stored by their path alone."""
        return kept if stored.get(f"{path}.weight", stored.get(path, usual)) == usual else DENSE

    return choose


def stored_dtypes(model: type[Model], index: Index | None) -> dict[str, str]:
    """Dtypes of the checkpoint's tensors, as safetensors name them; empty where there are no files."""
    if index is None:
        return {}
    entries = {model.rename(name): index.headers[file].get(name) for name, file in index.files.items()}
    return {name: entry.dtype for name, entry in entries.items() if entry}


def model_length(wanted: int, config: Config, speaks: bool = False) -> int:
    """The longest sequence to serve: `wanted`, limited to the model's context length."""
    if wanted > config.max_positions and speaks:
        log.warning("the model takes at most %d tokens; %d were asked for", config.max_positions, wanted)
    return min(wanted or config.max_positions, config.max_positions)
