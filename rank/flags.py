"""An option's description at its field: its flags, what it may be, and its line in the help."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

# Scopes: what an option concerns, which decides who takes it.
ENGINE = "engine"  # one model, and how the ranks hold and run it: may differ from model to model of a models.yaml
LAUNCHER = "launcher"  # the job: its ranks, their devices, its logs
SERVER = "server"  # its clients, and the life of a server: of no meaning to a program that uses the library
BATCH = "batch"  # a file of requests


class Flag(msgspec.Struct, frozen=True):
    """How an option is written and what it may be. The first flag is the one that help and messages use."""

    flags: tuple[str, ...]
    group: str
    help: str  # of the flag that --help shows; for a boolean that is on, the one that switches it off
    metavar: str = ""
    choices: tuple[str, ...] = ()
    spellings: dict[str, str] = {}  # other spellings of a choice
    short: dict[str, str] = {}  # flags without a value, each for one of the choices
    low: float | None = None
    high: float | None = None
    off: tuple[str, ...] = ()  # flags that switch a boolean off
    scope: tuple[str, ...] = ()
    secret: bool = False  # never printed
    runs_code: bool = False  # what it names is run, so a directory that somebody else wrote must not set it
    slurm_decides: bool = False  # a job under srun is not given it
    positional: bool = False
    variable: str = ""  # candle-vLLM's environment variable for it


def flag(*flags: str, group: str, help: str = "", **more) -> Flag:
    return Flag(flags=flags, group=group, help=help, **more)


class Spec(msgspec.Struct, frozen=True):
    """One option as the sources see it."""

    name: str
    type: type  # str, int, float, bool, or tuple for a list
    optional: bool  # None is its default
    default: object
    flag: Flag
    item: Any = None  # of a list: int or str

    @property
    def env(self) -> str:
        return "PHALANX_" + self.name.upper()


@cache
def read(options: type[msgspec.Struct]) -> dict[str, Spec]:
    """The options of a struct whose fields are annotated with flags: in its order, by field name."""
    hints = get_type_hints(options, include_extras=True)
    found = {}
    for field in msgspec.structs.fields(options):
        kind, note = get_args(hints[field.name])[:2]
        item = None
        optional = type(None) in get_args(kind)
        if optional:
            (kind,) = (one for one in get_args(kind) if one is not type(None))
            if get_origin(kind) is Annotated:  # a request's field
                kind, limits = get_args(kind)
                note = msgspec.structs.replace(note, low=limits.ge, high=limits.le, help=limits.description)
        elif get_args(kind):
            item, kind = get_args(kind)[0], tuple
        found[field.name] = Spec(field.name, kind, optional, field.default, note, item)
    return found
