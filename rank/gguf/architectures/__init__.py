"""One file per architecture, named after `general.architecture`: its keys of config.json, and its tensors' names.

Each has `config(m)`, which gives the keys of config.json that the metadata `m` mean, and `TENSORS`, from GGUF's name of
a tensor to the one that the model's code has for it (rank/model/architectures): {} is a layer's number, names without
an ending stand for weight and bias, and what becomes empty is not read as a weight. It may have
- `PAIRED`, names of linears whose outputs a file holds in the order of interleaved rope,
- `orders(config)`, from the names of tensors to other orders, by what `config` has returned,
- `ADDED`, what files add to the weights of norms, and `UNCHANGED`, norms to which they do not,
- `LOGARITHMS`, tensors of which files have the negative exponential,
- `ONES`, tensors whose axis of one files leave out, and where it is in the model,
- `STACKED`, matrices whose rows are vectors there, by what stands before their numbers,
- `PER_LAYER`, keys of the metadata that are tensors of the model, a number for each layer, and
- `ENDINGS`, what tensors end with there in place of weight or bias.

Those that `phalanx convert` writes have `WRITES`, the model types that become files of it, and may have `keys(raw)`: of
config.json, with each layer's type in `layer_types`, the metadata that not all have; `FIXED`, metadata that
are the same for each layer of all models; `NAME`, the architecture's, where it has other signs than the file's; and
`SPELLED_ANEW`, arguments of the model that files spell otherwise.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType


@functools.cache  # who reads a file asks for the name of each tensor
def supported() -> tuple[str, ...]:
    """The names of all architectures."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")))


def spelled(architecture: str) -> str:
    """The file's name: of gpt-oss gpt_oss."""
    return architecture.replace("-", "_")


def of_model(model_type: str) -> str | None:
    """The architecture of files that models of this type are written as; None: they are not."""
    return next((one for one in supported() if model_type in getattr(find(one), "WRITES", ())), None)


def written() -> list[str]:
    """The model types that can be written."""
    return sorted(kind for one in supported() for kind in getattr(find(one), "WRITES", ()))


def find(architecture: str) -> ModuleType:
    """The module of a supported architecture."""
    return importlib.import_module(f".{spelled(architecture)}", __name__)
