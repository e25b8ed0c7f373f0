"""Which layers lie in host memory (`--cpu-offload-gb`), and how many buffers on the device they share.

Without torch: `phalanx fit` asks, too.
"""

from __future__ import annotations

from collections.abc import Sequence


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
