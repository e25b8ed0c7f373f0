"""Takes out of mpirun's output what it says about the end of a rank: the launcher says that in one line itself.

Open MPI puts every message of its own between two lines of dashes, but for the line in which version 4 says that it
passes a signal on. MPICH's hydra writes one message, between lines of equals signs and with a tail. Everything else,
and messages that are not about a rank's end, passes as it comes.
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
_LONGEST = 4000  # bytes of a message that is held back


class OutputFilter:
    """One stream's filter. `casualty` is the rank that a signal ended, in words, once mpirun has named one."""

    def __init__(self) -> None:
        self.casualty = ""
        self._message: list[bytes] = []  # the lines of a message so far, held back
        self._tail = b""  # the beginning of a line that may belong to one
        self._at_line_start = True
        self._after: tuple[bytes, ...] = ()  # how the lines begin that may follow hydra's message

    def feed(self, data: bytes) -> bytes:
        """What to show of what was held back and `data`."""
        shown = []
        text, self._tail = self._tail + data, b""
        for line in text.splitlines(keepends=True):
            whole = line.endswith(b"\n")
            if not (self._message or (self._at_line_start and self._may_be_one(line))):
                shown.append(line)
            elif not whole and len(line) < _LONGEST:
                self._tail = line  # it is the last one
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
        """What is still held back, at the end of the stream."""
        held = b"".join(self._message) + self._tail
        self._message, self._tail = [], b""
        return held

    def _may_be_one(self, line: bytes) -> bool:
        """Whether it is, or may become, the first line of a message or one that stands alone."""
        starts = (*_FORWARDING, *self._after)
        return _rule(line) or any(line.startswith(start) or start.startswith(line) for start in starts)

    def _hold(self, line: bytes) -> bytes:
        """Add a line to the message; what is to be shown now."""
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
