"""Which embedding tables and layers lie in host memory (`--cpu-offload-gb`), and how many buffers on the device layers
share.

Without torch: `phalanx fit` asks, too.
"""

from __future__ import annotations

from collections.abc import Sequence


def choose_tables(sizes: Sequence[float], most: float) -> list[int]:
    """Chooses as many embedding tables of these bytes as `most` bytes hold, the largest first."""
    chosen = []
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        if sizes[place] <= most:
            chosen.append(place)
            most -= sizes[place]
    return chosen


def choose(sizes: Sequence[float], most: float) -> list[int]:
    """Chooses as many layers of these bytes as `most` bytes hold, each the last of an equal share of all."""
    for count in range(len(sizes), 0, -1):
        chosen = [(number + 1) * len(sizes) // count - 1 for number in range(count)]
        if sum(sizes[place] for place in chosen) <= most:
            return chosen
    return []


def slots(chosen: Sequence[int]) -> int:
    """Places on the device: a layer's is free once the next layer is computed, which may be in host memory, too."""
    return 3 if any(place + 1 in chosen for place in chosen) else 2
