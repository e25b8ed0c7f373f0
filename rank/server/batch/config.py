"""The batch process's configuration: JSON in a pipe, whose file descriptor the launcher names in PHALANX_BATCH."""

from __future__ import annotations

import msgspec

from ..config import ServerConfig

VARIABLE = "PHALANX_BATCH"


class BatchConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Fixed for the life of the process. All paths are absolute."""

    server: ServerConfig
    input: str  # a file, a directory of .jsonl files, or "-"
    output: str
    errors: str
    summary: str = ""
    ordered: bool = False  # the output has the input's order
    overwrite: bool = False  # begin anew: an earlier journal and output are given up
    fail_on_error: bool = False
    end_time: float = 0.0  # Unix time at which all must be over; 0: there is none
    reserve: float = 30.0  # seconds kept free before it
    supervised: bool = False  # the launcher decides the job's exit code; otherwise the ranks end with it
    columns: int = 0  # width of the terminal that shows the progress; 0: there is none, lines are written
    interval: float = 30.0  # seconds between those lines
    gpus: list[str] = []  # those of this host that compute, as numbers or UUIDs

    @property
    def journal(self) -> str:
        return self.output + ".journal"
