"""One file per architecture, named after `general.architecture`: its keys of config.json and its tensors' names, as
`Architecture` lists them."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from ...safetensors_header import Order
from ..metadata import Metadata

Config = dict[str, Any]  # keys of config.json


class Architecture(NamedTuple):
    """The contents of an architecture's file."""

    # GGUF's name of a tensor → the one that the model's code has for it (rank/model/architectures): {} is a layer's
    # number, names without an ending stand for weight and bias, and what becomes empty is not read as a weight.
    TENSORS: dict[str, str]
    config: Callable[[Metadata], Config]  # the keys that the metadata mean
    PAIRED: tuple[str, ...] = ()  # linears whose outputs a file holds in the order of interleaved rope
    orders: Callable[[Config], dict[str, Order]] = lambda keys: {}  # other orders, by what `config` has returned
    ADDED: float = 0.0  # what files add to the weights of norms,
    UNCHANGED: tuple[str, ...] = ()  # and norms to which they do not
    LOGARITHMS: tuple[str, ...] = ()  # tensors of which files have the negative exponential
    ONES: dict[str, tuple[int, ...]] = {}  # tensors whose axes of one files may leave out → where they are in the model
    FLAT: tuple[str, ...] = ()  # vectors that files have in several axes
    STACKED: dict[str, str] = {}  # matrices whose rows are vectors there → what stands before their numbers
    PER_LAYER: dict[str, str] = {}  # keys of the metadata that are tensors of the model, a number for each layer
    ENDINGS: dict[str, str] = {}  # what tensors end with there in place of weight or bias

    # `phalanx convert` reads the rest:
    WRITES: tuple[str, ...] = ()  # the model types that become files of it
    # config.json, with each layer's type in `layer_types` → the metadata that not all have
    keys: Callable[[Config], Config] = lambda raw: {}
    FIXED: dict[str, Any] = {}  # metadata that are the same for each layer of all models
    NAME: str = ""  # the architecture's, where it has other signs than the file's
    SPELLED_ANEW: tuple[str, ...] = ()  # arguments of the model that files spell otherwise


@functools.cache  # who reads a file asks for the name of each tensor
def supported() -> tuple[str, ...]:
    """The names of all architectures."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


def spelled(architecture: str) -> str:
    """The file's name: of gpt-oss gpt_oss."""
    return architecture.replace("-", "_")


def of_model(model_type: str) -> str | None:
    """The architecture of files that models of this type are written as; None: they are not."""
    return next((one for one in supported() if model_type in find(one).WRITES), None)


def written() -> list[str]:
    """The model types that can be written."""
    return sorted(kind for one in supported() for kind in find(one).WRITES)


def find(architecture: str) -> Architecture:
    """A supported architecture."""
    found = vars(importlib.import_module(f".{spelled(architecture)}", __name__))
    return Architecture(**{name: found[name] for name in Architecture._fields if name in found})
