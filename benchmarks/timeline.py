"""A GPU's work during a call, as torch's profiler saw it: copies from the host, kernels, both at once, or nothing.

Where copies and kernels run one after the other, `both` is short; where the host launches too slowly, `neither` is
long. Of decode steps, what a GPU does in two layers in the middle of one, kernel by kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

MOST = 12  # kinds of kernels that are told apart
MARKS = "host_send", "group"  # kernels that each layer of experts has once: with experts in host memory, and without
LAYERS = 2  # that are told
ROWS = 50  # kernels of these, at most


class Span(NamedTuple):
    name: str
    begin: float  # us
    end: float
    stream: int = 0


def profiled(run: Callable[[], Any]) -> list[Span]:
    """Events on GPUs while `run` runs."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    events = [one for one in found.events() if one.device_type == DeviceType.CUDA]
    return [Span(one.name, one.time_range.start, one.time_range.end, one.device_resource_id or 0) for one in events]


def summary(spans: Iterable[Span]) -> dict[str, Any]:
    """Milliseconds from the first to the last, and of each share of that; and of kernels, by name, the longest."""
    spans = list(spans)
    copies = union(one for one in spans if "HtoD" in one.name)
    kernels = union(one for one in spans if not one.name.startswith(("Memcpy", "Memset")))
    whole, busy = max(one.end for one in spans) - min(one.begin for one in spans), _length(union(spans))
    taken: Counter[str] = Counter()
    for one in spans:
        taken[one.name[:60]] += one.end - one.begin  # type: ignore[assignment]
    both = _length(copies) + _length(kernels) - _length(union(copies + kernels))
    parts = dict(whole=whole, copies=_length(copies), kernels=_length(kernels), both=both, neither=whole - busy)
    return {name: round(1e-3 * us, 2) for name, us in parts.items()} | {
        "by_name": {name: round(1e-3 * us, 2) for name, us in taken.most_common(MOST)}
    }


class Row(NamedTuple):
    """One kernel or copy of a layer. Microseconds."""

    at: float  # since the layer's mark began
    gap: float  # since all before it had ended; below 0: it began before that
    lasts: float
    adds: float  # by how much later all have ended
    stream: int
    name: str

    def __str__(self) -> str:
        return f"{self.at:8.1f} {self.gap:7.1f} {self.lasts:7.1f} {self.adds:7.1f} {self.stream:6} {self.name}"


HEADING = f"{'at':>8} {'gap':>7} {'lasts':>7} {'adds':>7} {'stream':>6} kernel"


def middle(spans: Iterable[Span], layers: int) -> list[list[Row]]:
    """Events from one mark to the next, of LAYERS layers in the middle of the last step but one. layers: of a step,
    that have a mark. Empty where no two steps are there."""
    spans = sorted(spans, key=lambda one: one.begin)
    starts = next(([i for i, one in enumerate(spans) if one.name == mark] for mark in MARKS if _has(spans, mark)), [])
    if layers < 1 or len(starts) < 2 * layers:
        return []
    first = len(starts) - 2 * layers + max(0, (layers - LAYERS) // 2)
    found, ended = [], max((one.end for one in spans[: starts[first]]), default=spans[0].begin)
    for start, end in zip(starts[first : first + LAYERS], starts[first + 1 :], strict=False):
        rows = []
        for one in spans[start:end]:
            adds, gap = max(0.0, one.end - max(ended, one.begin)), one.begin - ended
            ended = max(ended, one.end)
            at, lasts = one.begin - spans[start].begin, one.end - one.begin
            rows.append(Row(round(at, 1), round(gap, 1), round(lasts, 1), round(adds, 1), one.stream, one.name[:60]))
        found.append(rows[: ROWS // LAYERS])
    return found


def _has(spans: list[Span], name: str) -> bool:
    return any(one.name == name for one in spans)


def union(spans: Iterable[Span]) -> list[Span]:
    """The time that any of them covers, in order and apart."""
    made: list[Span] = []
    for one in sorted(spans, key=lambda one: one.begin):
        if made and one.begin <= made[-1].end:
            made[-1] = made[-1]._replace(end=max(made[-1].end, one.end))
        else:
            made.append(one)
    return made


def _length(spans: list[Span]) -> float:
    return sum(one.end - one.begin for one in spans)
