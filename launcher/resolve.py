"""Turns what the user chose into what will run: the model's directory, the number of ranks and how they divide."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from ..rank.exits import MODEL, USAGE, Stop
from ..rank.options import Options, degrees
from . import hosts, hub
from .demo import DIRECTORY as DEMO
from .hosts import World


def joined(options: Options, place: World | None) -> World | None:
    """The job that this process belongs to. In the shell of `srun --pty bash` it is alone in one.

    Who asks there for several ranks, or for restarts, wants them to be started here.
    """
    alone = place is not None and place.size == 1
    return None if alone and (max(options.ranks, options.tp, options.pp, options.dp) > 1 or options.restarts) else place


def resolve(options: Options, place: World | None) -> Options:
    """Options with model, ranks, tp, pp and dp as they will be used. Raises Stop where they contradict each other."""
    numbers = in_force(options, place)
    _check_devices(options, numbers["ranks"], place)
    if options.mem and options.kv_fraction:
        raise Stop("--mem and --kv-fraction both size the KV cache: give one of them", USAGE)
    api_key, model = _api_key(options), model_directory(options, place)
    name = options.served_model_name
    if options.model and not name and not Path(options.model).expanduser().is_dir():
        name = options.model  # an id: the directory in the cache is named by a commit, which tells clients nothing
    return msgspec.structs.replace(
        options, model=model, served_model_name=name, api_key=api_key, api_key_file="", **numbers
    )


def in_force(options: Options, place: World | None) -> dict[str, int]:
    """The numbers that replace what was chosen, for --show-config. Raises Stop where they contradict each other."""
    if place is not None:
        _check_under_mpi(options, place)
    ranks = place.size if place is not None else ranks_of(options)
    try:
        tp, pp, dp = degrees(ranks, options.tp, options.pp, options.dp)
    except ValueError as error:
        raise Stop(str(error), USAGE) from None
    return {"ranks": ranks, "tp": tp, "pp": pp, "dp": dp}


def _check_under_mpi(options: Options, place: World) -> None:
    if options.ranks and options.ranks != place.size:
        raise Stop(f"--np {options.ranks}, but {place.launcher} started {place.size} ranks: leave --np out", USAGE)
    if options.restarts:
        raise Stop(
            f"--restarts works where phalanx starts the ranks itself; under {place.launcher} let the job's script "
            "start it again (docs/exit-codes.md says after which codes that helps)",
            USAGE,
        )
    if options.multithread and place.size > 1:
        raise Stop(f"--multithread puts all ranks into one process, but {place.launcher} started {place.size}", USAGE)


def ranks_of(options: Options) -> int:
    """How many ranks are wanted, where nobody has started them yet."""
    given = [degree for degree in (options.tp, options.pp, options.dp) if degree]
    return options.ranks or (math.prod(given) if given else max(1, len(options.devices)))


def _check_devices(options: Options, ranks: int, place: World | None) -> None:
    if options.device == "cuda" and not hosts.gpus():
        raise Stop(f"--device cuda: no GPU was found on {hosts.hostname()}; --device cpu computes without", USAGE)
    if options.device == "cuda" and options.multithread:
        raise Stop("--multithread is for CPUs: with --device cuda every rank is a process", USAGE)
    here = ranks if place is None else place.local_size
    if options.devices and options.device != "cpu" and len(options.devices) < here:
        listed = ",".join(str(one) for one in options.devices)
        raise Stop(f"--d {listed} lists {len(options.devices)} devices for {here} ranks on this node", USAGE)


def _api_key(options: Options) -> str:
    if not options.api_key_file:
        return options.api_key
    if options.api_key:
        raise Stop("--api-key and --api-key-file are both given: give one of them", USAGE)
    try:
        key = Path(options.api_key_file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise Stop(f"--api-key-file {options.api_key_file}: {error.strerror}", USAGE) from None
    if not key or "\n" in key:
        raise Stop(f"--api-key-file {options.api_key_file}: one line with the key is needed", USAGE)
    return key


def model_directory(options: Options, place: World | None = None) -> str:
    """The absolute path of the model's directory, made sure of as far as a launcher can. A model's id is fetched."""
    if not options.model:
        return str(DEMO)
    path = Path(options.model).expanduser()
    if path.is_file():
        what = "GGUF files are not supported yet" if path.suffix == ".gguf" else "it is a file"
        raise Stop(f"model {options.model!r}: {what}; a directory with config.json and safetensors is needed", USAGE)
    if not path.is_dir():
        if hub.is_id(options.model):
            return hub.model(options.model, waiting=place is not None and place.size > 1)
        raise Stop(f"model {options.model!r}: there is no such directory on {hosts.hostname()}", USAGE)
    if not (path / "config.json").is_file():
        raise Stop(f"model {options.model!r}: the directory has no config.json", MODEL)
    return str(path.resolve())
