"""models.yaml: several models in one server (--models-config). candle-vLLM's keys are understood.

default_model: small
idle_unload_secs: 600
models:
  - name: small
    hf_id: Qwen/Qwen3-0.6B        # or local_path: DIR
    params: {max_num_seqs: 64}    # candle-vLLM's names, or options of `phalanx serve`
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import msgspec

from ...errors import USAGE, FatalError
from ...rank.flags import ENGINE
from ...rank.options import Options, specs
from ...rank.server.config import ModelConfig, model_settings
from . import option_sources
from .resolve import check_mmproj, model_path, rank_options

# candle-vLLM's names that are no option's.
ALSO = {"kvcache_mem_gpu": "mem", "prefill_chunk_size": "max_num_batched_tokens"}
NO_EFFECT = {
    "multithread": "the job's ranks serve all models",
    "device_ids": "the job's ranks serve all models",
}
QUOTED = re.compile(r"""(["'])(.*)\1(\s+#.*)?$""")  # a value of a .env file


class PromptCache(msgspec.Struct):
    enabled: bool = True
    backend: str = "memory"


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """One model as the file has it."""

    name: str
    hf_id: str = ""
    local_path: str = ""
    weight_file: str = ""
    notes: str = ""
    params: dict[str, Any] = {}
    options: dict[str, Any] = {}  # the same under this program's word
    capabilities: dict[str, Any] = {}
    parking_lot: dict[str, Any] | None = None


class File(msgspec.Struct, forbid_unknown_fields=True):
    models: list[Entry]
    default_model: str = ""
    idle_unload_secs: float = 0.0
    parking_lot: dict[str, Any] | None = None


class Models(msgspec.Struct):
    """The models of a file: the one to begin with comes first."""

    entries: list[Entry]
    options: list[Options]  # of each
    idle_unload: float
    notes: list[str]  # what has no effect, and why

    def first(self) -> Options:
        """The options that the job is started with."""
        return msgspec.structs.replace(self.options[0], served_model_name=self.entries[0].name)

    def configs(self, resolved: Options) -> list[ModelConfig]:
        """For the server process. resolved: the options that the job is started with."""
        ranks = {name: getattr(resolved, name) for name in ("ranks", "tp", "pp", "dp")}
        found = []
        for entry, own in zip(self.entries, self.options, strict=True):
            options = rank_options(msgspec.structs.replace(own, **ranks))
            found.append(
                ModelConfig(
                    name=entry.name,
                    **model_settings(options),
                    options=msgspec.json.encode(options).decode(),
                    notes=entry.notes,
                )
            )
        return found


def read(options: Options) -> Models:
    """The models of --models-config, over the options of the command line. Raises FatalError."""
    path = Path(options.models_config).expanduser().absolute()
    file = _content(path)
    for name in ("model", "weight_file", "served_model_name"):
        if getattr(options, name):
            raise FatalError(f"--models-config: {path} names the models: leave --{name.replace('_', '-')} out", USAGE)
    if options.file_store:
        raise FatalError("--models-config: batches over HTTP are for one model: leave --file-store out", USAGE)
    names = [entry.name for entry in file.models]
    if wrong := [name for name in names if not name.strip() or "," in name or names.count(name) > 1]:
        raise _wrong(path, f"the name {wrong[0]!r} is there twice, is empty or has a comma")
    if file.default_model and file.default_model not in names:
        raise _wrong(path, f"default_model {file.default_model!r} is none of {', '.join(names)}")
    if not file.models or file.idle_unload_secs < 0:
        raise _wrong(path, "at least one model is needed, and idle_unload_secs of 0 or more")
    entries = sorted(file.models, key=lambda entry: entry.name != (file.default_model or names[0]))
    notes: list[str] = []
    if file.parking_lot is not None:
        notes.append("parking_lot has no effect: requests wait in the server's queue (--queue-size)")
    return Models(entries, [_options(path, entry, options, notes) for entry in entries], file.idle_unload_secs, notes)


def _content(path: Path) -> File:
    try:
        return msgspec.convert(option_sources.read_yaml(path), File, strict=False)
    except OSError as error:
        raise _wrong(path, str(error.strerror)) from None
    except RecursionError:  # an alias within itself
        raise _wrong(path, "it is nested too deeply") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise _wrong(path, str(error)) from None


def _wrong(path: Path, why: str) -> FatalError:
    return FatalError(f"--models-config {path}: {why}", USAGE)


def _options(path: Path, entry: Entry, base: Options, notes: list[str]) -> Options:
    """A model's options: its entry's, over the command line's."""
    given: dict[str, Any] = {}
    for name, value in {**entry.params, **entry.options}.items():
        if name in NO_EFFECT:
            notes.append(f"{entry.name}: {name} has no effect: {NO_EFFECT[name]}")
        elif name == "prompt_cache":
            given["prefix_cache"] = _prompt_cache(path, entry, value, notes)
        elif value is not None:
            given[ALSO.get(name, name)] = value
    if entry.parking_lot is not None:
        notes.append(f"{entry.name}: parking_lot has no effect: requests wait in the server's queue (--queue-size)")
    if entry.capabilities.get("vision_mode", "disabled") != "disabled":
        notes.append(f"{entry.name}: vision_mode has no effect: a model takes images if it has a tower")
    if bool(entry.hf_id) == bool(entry.local_path):
        raise _wrong(path, f"model {entry.name!r}: either hf_id or local_path is needed")
    where = _beside(path, entry.local_path) if entry.local_path else None
    if isinstance(given.get("mmproj"), str) and given["mmproj"]:
        given["mmproj"] = str(_beside(path, given["mmproj"]))
    given["model"] = str(where / entry.weight_file if entry.weight_file else where) if where else entry.hf_id
    try:
        own = option_sources.overridden(base, given, f"{path}, model {entry.name}")
        directory = model_path(own)
        own = check_mmproj(own, directory)
    except FatalError as stop:
        raise _wrong(path, f"model {entry.name!r}: {stop}") from None
    job = (name for name, spec in specs().items() if ENGINE not in spec.flag.scope)
    if foreign := [name for name in job if getattr(own, name) != getattr(base, name)]:
        raise _wrong(path, f"model {entry.name!r}: {foreign[0]} is the whole job's: give it on the command line")
    return msgspec.structs.replace(own, model=directory, weight_file="")


def _beside(path: Path, name: str) -> Path:
    """A path of the file's, from its place."""
    return path.parent / Path(name).expanduser()


def _prompt_cache(path: Path, entry: Entry, value: Any, notes: list[str]) -> bool:
    try:
        cache = msgspec.convert(value, PromptCache)
    except msgspec.ValidationError as error:
        raise _wrong(path, f"model {entry.name!r}: prompt_cache: {error}") from None
    if cache.enabled and cache.backend != "memory":
        notes.append(f"{entry.name}: prompt_cache's backend has no effect: prefixes are kept in the KV cache")
    return cache.enabled


def dotenv(path: Path) -> dict[str, str]:
    """The variables of a .env file: NAME=VALUE lines, with or without `export` and quotes."""
    found = {}
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError:
        return {}
    except UnicodeDecodeError as error:
        raise FatalError(f"{path} is no text in UTF-8: {error}", USAGE) from None
    for number, line in enumerate(text.splitlines(), 1):
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not equals or name.startswith("#"):
            continue
        if not name.strip() or "\0" in line:
            raise FatalError(f"{path}, line {number}: {line.strip()!r} is no NAME=VALUE", USAGE)
        quoted = QUOTED.match(value.strip())
        found[name.strip()] = quoted[2] if quoted else value.partition(" #")[0].strip()
    return found


def load_dotenv(models_config: str, environ: MutableMapping[str, str]) -> Mapping[str, str]:
    """Set HF_TOKEN and options (PHALANX_…) from the .env next to the file, unless they are set already.

    Other variables (LD_PRELOAD, PYTHONPATH, HF_ENDPOINT) and options that name what is run would run code of whoever
    wrote the directory, or send the token elsewhere.
    """
    harmless = [spec for spec in specs().values() if not spec.flag.runs_code]
    names = {name for spec in harmless for name in (spec.env, spec.flag.variable)} | {"HF_TOKEN"}
    beside = Path(models_config).expanduser().absolute().parent / ".env"
    new = {name: value for name, value in dotenv(beside).items() if name in names and name not in environ}
    environ.update(new)
    return new
