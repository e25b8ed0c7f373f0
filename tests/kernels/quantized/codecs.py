"""Codecs by their names."""

from types import ModuleType
from typing import Any

from phalanx.kernels.quantized import affine, e4m3
from phalanx.kernels.quantized.ggml import CODECS

MODULES: dict[str, ModuleType] = {"affine": affine, "e4m3": e4m3, "fp8": e4m3}


def find(name: str) -> Any:
    return MODULES.get(name) or CODECS[name.upper()]


def name_of(codec: Any) -> str:
    return codec.__name__.rpartition(".")[2] if isinstance(codec, ModuleType) else codec.name
