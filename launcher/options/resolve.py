"""Turns what the user chose into what will run: the model's directory, the number of ranks and how they divide."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec

from ...errors import MODEL, USAGE, FatalError
from ...rank.gguf import checkpoint
from ...rank.gguf.checkpoint import is_gguf
from ...rank.options import SERVER_ONLY, Options, degrees, specs
from ...rank.server.mcp import config as mcp_config
from .. import hf_hub
from ..builtin_model import DIRECTORY as DEMO
from ..job import mpi_env
from ..job.mpi_env import RankPlacement


def joined(options: Options, place: RankPlacement | None) -> RankPlacement | None:
    """The job that this process belongs to. In the shell of `srun --pty bash` it is alone in one.

    Who asks there for several ranks, or for restarts, wants them to be started here.
    """
    alone = place is not None and place.size == 1
    return None if alone and (max(options.ranks, options.tp, options.pp, options.dp) > 1 or options.restarts) else place


def resolve(options: Options, place: RankPlacement | None) -> Options:
    """Options with model, ranks, tp, pp and dp as they will be used. Raises FatalError where they contradict."""
    numbers = in_force(options, place)
    _check_devices(options, numbers["ranks"], place)
    if options.mem and options.kv_fraction:
        raise FatalError("--mem and --kv-fraction both size the KV cache: give one of them", USAGE)
    _check_host_memory(options)
    _check_names(options)
    options = _check_tool_servers(options)
    _check_template(options)
    api_key, model = _api_key(options), model_path(options, place)
    options = check_mmproj(options, model)
    name = options.served_model_name
    if is_gguf(model) and not name:
        name = checkpoint.name(Path(model))
    elif options.model and not name and not Path(options.model).expanduser().is_dir():
        name = options.model  # an id: the directory in the cache is named by a commit, which tells clients nothing
    return msgspec.structs.replace(
        options, model=model, weight_file="", served_model_name=name, api_key=api_key, api_key_file="", **numbers
    )


def check_mmproj(options: Options, model: str) -> Options:
    """Options with an absolute path of --mmproj."""
    return msgspec.structs.replace(options, mmproj=mmproj_file(options.mmproj, model))


def mmproj_file(given: str, model: str) -> str:
    """The absolute path of --mmproj; empty: none is given. Raises FatalError where it is none for the model."""
    if not given:
        return ""
    if not is_gguf(model):
        raise FatalError(f"--mmproj {given}: {model} is no GGUF file, and has its tower itself", USAGE)
    file = Path(given).expanduser().absolute()
    if not is_gguf(file) or not file.is_file():
        raise FatalError(f"--mmproj {given}: there is no GGUF file {file} on {mpi_env.hostname()}", USAGE)
    return str(file)


def rank_options(options: Options) -> Options:
    """The options as ranks get them: without those of the server, such as API keys, which they then cannot leak."""
    table = specs()
    return msgspec.structs.replace(options, **{name: table[name].default for name in SERVER_ONLY})


def _check_host_memory(options: Options) -> None:
    if options.num_experts_offload_per_rank and options.expert_memory:
        raise FatalError("--num-experts-offload-per-rank and --expert-memory say the same: give one of them", USAGE)
    if options.expert_placement != "auto" and not (options.num_experts_offload_per_rank or options.expert_memory):
        raise FatalError(
            f"--expert-placement {options.expert_placement} is for experts in host memory: give "
            "--num-experts-offload-per-rank or --expert-memory as well",
            USAGE,
        )
    if options.expert_deferral and options.expert_placement not in ("auto", "cpu"):
        raise FatalError(
            f"--expert-deferral is of experts that the CPU computes: --expert-placement {options.expert_placement} "
            "leaves it none",
            USAGE,
        )
    if options.kvcache_mem_cpu and not options.prefix_cache:
        raise FatalError("--kvcache-mem-cpu keeps blocks of the prefix cache: leave --disable-prefix-cache out", USAGE)


def in_force(options: Options, place: RankPlacement | None) -> dict[str, int]:
    """The numbers that replace what was chosen, for --show-config. Raises FatalError where they contradict."""
    if place is not None:
        _check_under_mpi(options, place)
    ranks = place.size if place is not None else ranks_of(options)
    try:
        tp, pp, dp = degrees(ranks, options.tp, options.pp, options.dp, options.ep)
    except ValueError as error:
        raise FatalError(str(error), USAGE) from None
    return {"ranks": ranks, "tp": tp, "pp": pp, "dp": dp}


def _check_under_mpi(options: Options, place: RankPlacement) -> None:
    if options.ranks and options.ranks != place.size:
        raise FatalError(
            f"--np {options.ranks}, but {place.launcher} started {place.size} ranks: leave --np out", USAGE
        )
    if options.restarts:
        raise FatalError(
            f"--restarts works where phalanx starts the ranks itself; under {place.launcher} let the job's script "
            "start it again (docs/exit-codes.md says after which codes that helps)",
            USAGE,
        )
    if options.multithread and place.size > 1:
        raise FatalError(
            f"--multithread puts all ranks into one process, but {place.launcher} started {place.size}", USAGE
        )


def ranks_of(options: Options) -> int:
    """How many ranks are wanted, where they are not started yet."""
    given = [degree for degree in (options.tp, options.pp, options.dp) if degree]
    return options.ranks or (math.prod(given) if given else max(1, len(options.devices)))


def _check_devices(options: Options, ranks: int, place: RankPlacement | None) -> None:
    mpi_env.check_device(options.device)
    if options.device == "cuda" and options.multithread:
        raise FatalError("--multithread is for CPUs: with --device cuda every rank is a process", USAGE)
    here = ranks if place is None else place.local_size
    if place is not None and options.devices == (0,) and mpi_env.gpus() == 1:
        return  # each rank may see one GPU, which is its own: rank_bootstrap.device_index
    if options.devices and options.device != "cpu" and len(options.devices) < here:
        listed = ",".join(str(one) for one in options.devices)
        raise FatalError(f"--d {listed} lists {len(options.devices)} devices for {here} ranks on this node", USAGE)


def _check_tool_servers(options: Options) -> Options:
    if not options.mcp_config:
        return options
    path = str(Path(options.mcp_config).expanduser().absolute())
    try:
        mcp_config.read(path)
    except ValueError as error:
        raise FatalError(f"--mcp-config {error}", USAGE) from None
    return msgspec.structs.replace(options, mcp_config=path)


def _check_template(options: Options) -> None:
    try:
        if options.chat_template:
            Path(options.chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise FatalError(f"--chat-template {options.chat_template}: {error.strerror}", USAGE) from None
    except UnicodeDecodeError:
        raise FatalError(f"--chat-template {options.chat_template}: it is no text in UTF-8", USAGE) from None


def _check_names(options: Options) -> None:
    for one in options.allowed_origins:
        if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+/?", one, re.IGNORECASE):
            raise FatalError(
                f"--allowed-origins {one!r}: an origin is written http://HOST:PORT; * lets every page in", USAGE
            )
    for one in options.allowed_hosts:
        if not re.fullmatch(r"\*|(\*\.)?[\w.-]+", one):
            raise FatalError(f"--allowed-hosts {one!r}: a name without port is needed, or *.DOMAIN; * is any", USAGE)


def _api_key(options: Options) -> str:
    """The keys, a line each, with or without a name before. Empty lines of the file and those after # are none."""
    if not options.api_key_file:
        if len(options.api_key.split()) > 1:
            raise FatalError("--api-key: a key has no spaces; --api-key-file FILE takes several, a line each", USAGE)
        return options.api_key
    if options.api_key:
        raise FatalError("--api-key and --api-key-file are both given: give one of them", USAGE)
    try:
        text = Path(options.api_key_file).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FatalError(f"--api-key-file {options.api_key_file}: {error.strerror}", USAGE) from None
    except UnicodeDecodeError:
        raise FatalError(f"--api-key-file {options.api_key_file}: it is no text", USAGE) from None
    lines = [line.strip() for line in text.split("\n")]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise FatalError(f"--api-key-file {options.api_key_file}: no line of it is a key", USAGE)
    if any(len(line.split()) > 2 for line in keys):
        raise FatalError(f"--api-key-file {options.api_key_file}: a line is KEY or NAME KEY, without spaces", USAGE)
    return "\n".join(keys)


def model_path(options: Options, place: RankPlacement | None = None) -> str:
    """The absolute path of the model's directory or GGUF file, made sure of as far as a launcher can. What the hub has
    is fetched."""
    if options.weight_file:
        return _weight_file(options, place)
    if not options.model:
        return str(DEMO)
    path = Path(options.model).expanduser()
    if path.is_file() and is_gguf(path):
        return _gguf(path)
    if path.is_file():
        raise FatalError(
            f"model {options.model!r}: it is a file; a GGUF file or a directory with config.json and safetensors is "
            "needed",
            USAGE,
        )
    if path.suffix == ".gguf" and not path.is_dir():
        raise FatalError(f"model {options.model!r}: there is no such file on {mpi_env.hostname()}", MODEL)
    if not path.is_dir():
        if hf_hub.is_id(options.model):
            return hf_hub.model(options.model, waiting=_waiting(place))
        raise FatalError(
            f"model {options.model!r}: there is no such directory on {mpi_env.hostname()}, and a hub id is OWNER/NAME",
            MODEL,
        )
    if not (path / "config.json").is_file():
        found = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; choose one of its GGUF files with --f, such as --f {found[0]}" if found else ""
        raise FatalError(f"model {options.model!r}: the directory has no config.json{hint}", MODEL)
    return str(path.resolve())


def _weight_file(options: Options, place: RankPlacement | None) -> str:
    """The path of --f: in the model's directory, at the hub, or by itself."""
    file = options.weight_file
    if not is_gguf(file):
        raise FatalError(
            f"--f {file}: a file that ends with .gguf is needed; of safetensors name the directory (--w)", USAGE
        )
    path = Path(options.model).expanduser() / Path(file).expanduser()
    if path.is_file():
        return _gguf(path)
    if options.model and not Path(options.model).expanduser().is_dir() and hf_hub.is_id(options.model):
        return hf_hub.gguf(options.model, file, waiting=_waiting(place))
    raise FatalError(f"--f {file}: there is no file {path} on {mpi_env.hostname()}", MODEL)


def _gguf(path: Path) -> str:
    """Not resolved: the hub's cache has links to files without names."""
    missing = [file for file in checkpoint.shards(path) if not file.is_file()]
    if missing:
        raise FatalError(f"there is no file {missing[0]}, which is one of the shards of {path.name}", MODEL)
    return str(path.absolute())


def _waiting(place: RankPlacement | None) -> bool:
    """Whether other ranks wait for this one."""
    return place is not None and place.size > 1
