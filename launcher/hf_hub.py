"""Models by their Hugging Face id: in the cache that Hugging Face's own tools use, or fetched into it.

HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to those tools.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ERROR, MODEL, STOPPED, USAGE, FatalError
from ..logs import say
from ..rank.gguf import checkpoint
from ..rank.safetensors_header import weight_files
from .job import mpi_env

# Files that serving needs; some models come with the same weights once more, in other formats.
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
# Folders hold them once more, or for other programs; but 1_Pooling/config.json tells how embeddings are made.
UNWANTED = ["consolidated*", "*/tokenizer*", *("*/*." + kind for kind in ("safetensors", "model", "txt", "jinja"))]
ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def is_id(text: str) -> bool:
    """Whether it may be an id, such as Qwen/Qwen3-0.6B. A directory of that name goes first."""
    return ID.fullmatch(text) is not None


def model(id: str, waiting: bool = False) -> str:
    """The directory of a model, which is fetched only if the cache does not have all of it. Raises FatalError.

    Nothing is fetched while the other ranks of a running MPI job are `waiting`, for --timeout at most.
    """
    path = cached(id)
    if waiting and not path:
        raise _not_here(id, id)
    return path or fetch(id)


def gguf(id: str, file: str, waiting: bool = False, pulling: bool = False) -> str:
    """The path of a GGUF file of a model, with its other shards next to it, fetched as `model` does."""
    path = cached_gguf(id, file)
    if waiting and not path:
        raise _not_here(id, f"{id} --f {file}")
    return path or _fetch_files(id, _shards(file), pulling)


def cached_gguf(id: str, file: str) -> str:
    """The path of a GGUF file of a model in the cache; "" where it is not there with all its shards."""
    return _cached_files(id, _shards(file))


def _shards(file: str) -> list[str]:
    return [str(Path(file).with_name(one.name)) for one in checkpoint.shards(Path(file))]


def _cached_files(id: str, names: list[str]) -> str:
    import huggingface_hub as hub

    try:
        found = [hub.try_to_load_from_cache(id, name) for name in names]
    except ValueError:  # no valid id: fetching says so
        return ""
    return found[0] if isinstance(found[0], str) and all(isinstance(one, str) for one in found) else ""


def _fetch_files(id: str, names: list[str], pulling: bool) -> str:
    import huggingface_hub as hub

    with _fetching(id, pulling=pulling):
        there = {one.rfilename: one.size or 0 for one in _files_of(id, "")}
        if missing := [name for name in names if name not in there]:
            ggufs = [name for name in there if name.endswith(".gguf")]
            has = f"has {', '.join(ggufs[:8])}" if ggufs else "has no GGUF files"
            raise FatalError(f"model {id!r} has no {missing[0]}; it {has}", MODEL)
        total = sum(there[name] for name in names)
        say(f"fetching {id} ({', '.join(names[:2])}{', …' * (len(names) > 2)}, {_size(total)}) into {_cache()}")
        _check_room(id, _cache(), _cache() / f"models--{id.replace('/', '--')}" / "blobs", total)
        return [hub.hf_hub_download(id, name) for name in names][0]


def _files_of(id: str, revision: str) -> list[Any]:
    import huggingface_hub as hub

    return hub.HfApi().model_info(id, revision=revision or None, files_metadata=True, timeout=20).siblings or []


@contextlib.contextmanager
def _fetching(id: str, revision: str = "", pulling: bool = False) -> Iterator[None]:
    """Shows bars on a terminal alone, and raises errors with a message for users."""
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    except FatalError:
        raise
    except KeyboardInterrupt:
        raise FatalError(f"fetching {id} was interrupted; the same command goes on where it was", STOPPED) from None
    except Exception as error:  # of whichever HTTP library this version of huggingface_hub has
        raise explained(id, revision, error, pulling) from None


def _not_here(id: str, pull: str) -> FatalError:
    return FatalError(
        f"model {id!r}: there is no such directory on {mpi_env.hostname()}, and it is not complete in {_cache()}; "
        f"run `phalanx pull {pull}` before the job, where there is a network, with the same HF_HOME",
        MODEL,
    )


def fetch(id: str, revision: str = "", to: str = "", pulling: bool = False) -> str:
    """Bring a model here: into the cache, or the directory `to`. What is there already is not fetched again.

    pulling: nothing but this was asked for. Returns its directory; raises FatalError with what to do.
    """
    import huggingface_hub as hub  # here: it takes half a second, and most models are directories

    with _fetching(id, revision, pulling):
        sizes = {one.rfilename: one.size or 0 for one in _files_of(id, revision)}
        names = _chosen(id, list(sizes))
        place = Path(to) if to else _cache()
        total = sum(sizes[name] for name in names)
        say(f"fetching {id} ({len(names)} files, {_size(total)}) into {place}")
        _check_room(id, place, place if to else place / f"models--{id.replace('/', '--')}" / "blobs", total)
        path = hub.snapshot_download(
            id, revision=revision or None, local_dir=to or None, allow_patterns=WANTED, ignore_patterns=UNWANTED
        )
    assert isinstance(path, str)
    return str(Path(path).resolve())


def cached(id: str) -> str:
    """Its directory in the cache if it is complete there, without a look at the network."""
    import huggingface_hub as hub

    try:
        config = hub.try_to_load_from_cache(id, "config.json")
    except ValueError:  # no valid id: fetching says so
        return ""
    path = Path(config).parent.resolve() if isinstance(config, str) else None
    return str(path) if path is not None and _is_complete(path) else ""


def _is_complete(path: Path) -> bool:
    """A fetch that was interrupted leaves a directory too. Files appear in it when they are whole."""
    try:
        shards = weight_files(path).values()
    except FatalError:
        return False
    tokenizer = any((path / name).is_file() for name in ("tokenizer.json", "tekken.json", "tokenizer.model"))
    return tokenizer and all((path / name).is_file() for name in ("config.json", *shards))


def _chosen(id: str, names: list[str]) -> list[str]:
    """The files to fetch. Raises FatalError if the model is in a format that is not served."""

    def matches(name: str, patterns: list[str]) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    chosen = [name for name in names if matches(name, WANTED) and not matches(name, UNWANTED)]
    for needed, pattern in (("config.json", "config.json"), ("safetensors", "*.safetensors")):
        if not fnmatch.filter(chosen, pattern):
            kinds = sorted({os.path.splitext(name)[1] for name in names if "." in name[1:]})
            raise FatalError(
                f"model {id!r} has no {needed}, which is needed; it has {', '.join(kinds) or 'no files'}", MODEL
            )
    return chosen


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _check_room(id: str, place: Path, files: Path, total: int) -> None:
    """Before hours of fetching: whether `total` bytes fit, less what is in the directory `files` already."""
    there = sum(file.stat().st_size for file in files.glob("*") if file.is_file())
    target = place.absolute()
    while not target.exists():
        target = target.parent
    free = shutil.disk_usage(target).free
    if total - there > free:
        raise FatalError(
            f"model {id!r}: {_size(total - there)} are to be fetched, but {place} has {_size(free)} free; HF_HOME or "
            "`phalanx pull --to DIR` chooses another place",
            ERROR,
        )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def explained(id: str, revision: str, error: Any, pulling: bool = False) -> FatalError:
    """The meaning of the hub's error, and what to do."""
    from huggingface_hub import constants, errors

    what, where = f"model {id!r}", constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return FatalError(f"{what}: accept its conditions at {where}/{id}, and set HF_TOKEN to a token of yours", USAGE)
    if isinstance(error, errors.RevisionNotFoundError):
        return FatalError(f"{what} has no revision {revision!r} at {where}", USAGE)
    if isinstance(error, errors.RepositoryNotFoundError):
        return FatalError(
            f"{what}: there is no such directory on {mpi_env.hostname()}, and no such model at {where}; a private one "
            "needs HF_TOKEN",
            MODEL,
        )
    if isinstance(error, errors.HFValidationError):
        return FatalError(f"{what}: there is no such directory on {mpi_env.hostname()}, and it is no valid id", MODEL)
    why = " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return FatalError(f"{what}: {error.filename}: {error.strerror}", ERROR)
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if status:
        return FatalError(f"{what}: {where} answered {status} ({why})", ERROR)
    if pulling:
        return FatalError(
            f"{what}: {where} does not answer ({why}); pull where there is a network, such as on the login node; "
            "HF_ENDPOINT names another hub, https_proxy a proxy",
            ERROR,
        )
    return FatalError(
        f"{what}: there is no such directory on {mpi_env.hostname()}, it is not complete in {_cache()}, and {where} "
        f"does not answer ({why}). "
        f"Where compute nodes have no network, run `phalanx pull {id}` on the login node first, "
        "with the same HF_HOME",
        MODEL if constants.HF_HUB_OFFLINE else ERROR,  # later the hub may answer
    )
