"""A scheduler's counters since the start, for protocol.Stats."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    swapped_in: int = 0
    images: int = 0
    image_hits: int = 0
    chunks: int = 0
    aborted: int = 0
