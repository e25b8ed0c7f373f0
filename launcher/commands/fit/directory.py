"""Where a model's config is: in a directory, a GGUF file, with the built-in model, or at the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .... import errors
from ....rank.gguf import checkpoint
from ....rank.gguf.checkpoint import is_gguf
from ... import hf_hub
from ...builtin_model import DIRECTORY as DEMO


class Found(NamedTuple):
    path: Path
    name: str  # for people
    served_as: str  # how `serve` is told


def find(model: str) -> Found:
    """Of a directory, a GGUF file, an id such as Qwen/Qwen3-0.6B, or "" for the built-in model.

    Of a model that is not in the cache config.json alone is fetched.
    """
    path = Path(model or DEMO).expanduser()
    if path.is_file() and is_gguf(path):
        return Found(path.absolute(), checkpoint.name(path), str(path))
    if path.is_dir():
        return Found(path, path.resolve().name, str(path))
    if path.suffix == ".gguf":
        raise errors.FatalError(f"model {model!r}: there is no such file", errors.USAGE)
    if not hf_hub.is_id(model):
        raise errors.FatalError(f"model {model!r}: there is no such directory", errors.USAGE)
    return Found(_from_hub(model), model.rpartition("/")[2], model)


def _from_hub(id: str) -> Path:
    import huggingface_hub as hub  # here: it takes half a second, and most models are directories

    try:
        config = hub.try_to_load_from_cache(id, "config.json")
        if not isinstance(config, str):
            hub.HfApi().model_info(id, timeout=20)  # without a network it fails at once, where the next line tries long
            config = hub.hf_hub_download(id, "config.json")
    except Exception as error:  # of whichever HTTP library this version of huggingface_hub has
        raise hf_hub.explained(id, "main", error) from None
    return Path(config).parent
