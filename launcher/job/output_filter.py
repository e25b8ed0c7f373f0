"""Removes mpirun's messages about a rank's end from the output: the supervisor prints one line instead.

Open MPI writes its messages between two lines of dashes, except version 4's line about a forwarded signal. MPICH's
hydra writes one message between lines of equals signs, with a tail. All other output passes unchanged.
"""

from __future__ import annotations

import re

_RULE = re.compile(rb"(-{60,}|={60,})\s*")
_END_OF_A_RANK = re.compile(
    rb"exited on\s+signal|non-zero\s+(exit|status)|has exited due to process rank|MPI_ABORT was invoked|BAD TERMINATION"
)
_CASUALTY = re.compile(rb"process rank (\d+) with PID \d+ on node (\S+) exited\s+on\s+signal\s+(\d+)")
_HYDRAS_CASUALTY = re.compile(rb"RUNNING AT (\S+)\s+=\s+EXIT CODE: ([1-9]|[12]\d)\s")
_HYDRAS_TAIL = (
    b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: ",
    b"This typically refers to a problem with your application.",
    b"Please see the FAQ page for debugging suggestions",
)
_FORWARDED = re.compile(rb"(mpirun|mpiexec|orterun): Forwarding signal \d+ to job\s*")
_FORWARDING = (b"mpirun: Forwarding signal ", b"mpiexec: Forwarding signal ", b"orterun: Forwarding signal ")
_LONGEST = 4000  # most bytes of a message; longer text is no message of mpirun's


class OutputFilter:
    """Filters one stream. `casualty`: a text about the rank that a signal ended, once mpirun has named it."""

    def __init__(self) -> None:
        self.casualty = ""
        self._message: list[bytes] = []  # the lines of an unfinished message, held back
        self._tail = b""  # an unfinished line that may belong to a message
        self._at_line_start = True
        self._after: tuple[bytes, ...] = ()  # beginnings of the lines that may follow hydra's message

    def feed(self, data: bytes) -> bytes:
        """Add `data`. Returns what to show now."""
        shown = []
        text, self._tail = self._tail + data, b""
        for line in text.splitlines(keepends=True):
            whole = line.endswith(b"\n")
            if not (self._message or (self._at_line_start and self._may_be_one(line))):
                shown.append(line)
            elif not whole and len(line) < _LONGEST:
                self._tail = line  # it is the last line of `data`
                break
            elif _FORWARDED.fullmatch(line) or line.startswith(self._after):
                pass
            elif self._message or _RULE.fullmatch(line):
                shown.append(self._hold(line))
            else:
                shown.append(line)
            self._at_line_start = whole
        return b"".join(shown)

    def flush(self) -> bytes:
        """At the end of the stream: what is still held back."""
        held = b"".join(self._message) + self._tail
        self._message, self._tail = [], b""
        return held

    def _may_be_one(self, line: bytes) -> bool:
        """Whether the line begins, or may begin, a message or a line to remove."""
        starts = (*_FORWARDING, *self._after)
        return _rule(line) or any(line.startswith(start) or start.startswith(line) for start in starts)

    def _hold(self, line: bytes) -> bytes:
        """Add a line to the message. Returns what to show now."""
        self._message.append(line)
        if len(self._message) > 1 and _RULE.fullmatch(line):
            return self._judge()
        return self.flush() if sum(map(len, self._message)) > _LONGEST else b""

    def _judge(self) -> bytes:
        held = self.flush()
        if not _END_OF_A_RANK.search(held):
            return held
        if found := _CASUALTY.search(held):
            rank, host, number = (one.decode() for one in found.groups())
            self.casualty = f"rank {rank} on {host} was ended by signal {number}"
        if b"BAD TERMINATION" in held:
            self._after = _HYDRAS_TAIL
        if found := _HYDRAS_CASUALTY.search(held):
            host, number = (one.decode() for one in found.groups())
            self.casualty = f"a rank on {host} was ended by signal {number}"
        return b""


def _rule(line: bytes) -> bool:
    return line[:1] in (b"-", b"=") and not line.strip(line[:1] + b"\r\n")
