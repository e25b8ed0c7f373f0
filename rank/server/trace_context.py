"""W3C Trace Context: the trace that a request belongs to, by its `traceparent` header."""

from __future__ import annotations

import re
import secrets

import msgspec

# Version 00 has these four fields; a later version may have more behind them.
TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class TraceContext(msgspec.Struct, frozen=True):
    """A request's place in a trace."""

    trace_id: str  # 32 hexadecimal digits
    span_id: str  # 16 hexadecimal digits, which name the handling of this request
    recorded: bool = False  # a span of these ids is sent to a collector

    def header(self) -> str:
        """Value of `traceparent` for whoever is asked next, and of the `traceresponse` that answers it."""
        return f"00-{self.trace_id}-{self.span_id}-{self.recorded:02d}"


def read(traceparent: str) -> TraceContext | None:
    """The trace that the header names. None: the header is absent or invalid, and is ignored, as the standard asks."""
    found = TRACEPARENT.fullmatch(traceparent.strip(" \t"))
    if found is None or (found[1] == "00" and found[3] is not None):
        return None
    return TraceContext(found[2], f"{secrets.randbits(63) + 1:016x}")
