"""Finds a model's config: in a directory, a GGUF file, with the built-in model, or at the Hugging Face hub."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from .... import errors
from ....rank.gguf import checkpoint
from ....rank.gguf.checkpoint import is_gguf
from ... import hf_hub
from ...builtin_model import DIRECTORY as DEMO

IMAGES = "preprocessor_config.json", "processor_config.json"  # how a model takes images


class Found(NamedTuple):
    path: Path
    name: str  # for people
    served_as: str  # how `serve` is told


def find(model: str, file: str = "") -> Found:
    """The config of a directory, a GGUF file, an id such as Qwen/Qwen3-0.6B, or "" for the built-in model.

    file: a GGUF file in the directory or in the hub's cache. Of a model that is not there config.json is fetched, and
    how it takes images.
    """
    if file:
        return _weight_file(model, file)
    path = Path(model or DEMO).expanduser()
    if path.is_file() and is_gguf(path):
        return Found(path.absolute(), checkpoint.name(path), str(path))
    if path.is_dir():
        return Found(path, path.resolve().name, str(path))
    if path.suffix == ".gguf":
        raise errors.FatalError(f"model {model!r}: there is no such file", errors.MODEL)
    if not hf_hub.is_id(model):
        raise errors.FatalError(f"model {model!r}: there is no such directory", errors.MODEL)
    return Found(_from_hub(model), model.rpartition("/")[2], model)


def _weight_file(model: str, file: str) -> Found:
    """In the model's directory, in the hub's cache, or by itself: to read its header it is not fetched."""
    if not is_gguf(file):
        raise errors.FatalError(f"--f {file}: a file that ends with .gguf is needed", errors.USAGE)
    path = Path(model).expanduser() / Path(file).expanduser()
    if not path.is_file() and model and not Path(model).expanduser().is_dir() and hf_hub.is_id(model):
        path = Path(hf_hub.cached_gguf(model, file))
        if not path.name:
            raise errors.FatalError(
                f"--f {file}: it is not in the cache: fetch it with phalanx pull {model} --f {file}", errors.MODEL
            )
    return find(str(path))


def _from_hub(id: str) -> Path:
    import huggingface_hub as hub  # here: it takes half a second, and most models are directories
    from huggingface_hub.errors import EntryNotFoundError

    try:
        config = hub.try_to_load_from_cache(id, "config.json")
        if not isinstance(config, str):
            hub.HfApi().model_info(id, timeout=20)  # without a network it fails at once, where the next line tries long
            config = hub.hf_hub_download(id, "config.json")
        there = [hub.try_to_load_from_cache(id, name) for name in IMAGES]  # a path, None, or a sign that there is none
        if b'"vision_config"' in Path(config).read_bytes() and not any(isinstance(one, str) for one in there):
            for name in (name for name, one in zip(IMAGES, there, strict=True) if one is None):
                with contextlib.suppress(EntryNotFoundError):
                    hub.hf_hub_download(id, name)
    except Exception as error:  # of whichever HTTP library this version of huggingface_hub has
        raise hf_hub.explained(id, "main", error) from None
    return Path(config).parent
