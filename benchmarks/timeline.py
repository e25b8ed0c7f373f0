"""What a GPU does during a call, as torch's profiler saw it: copies from the host, kernels, both at once, or nothing.

Where copies and kernels run one after the other, `both` is short; where the host launches too slowly, `neither` is
long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

MOST = 12  # kinds of kernels that are told apart


class Span(NamedTuple):
    name: str
    begin: float  # us
    end: float


def profiled(run: Callable[[], Any]) -> list[Span]:
    """What runs on GPUs while `run` does."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
    ranges = [(one.name, one.time_range) for one in found.events() if one.device_type == DeviceType.CUDA]
    return [Span(name, one.start, one.end) for name, one in ranges]


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
