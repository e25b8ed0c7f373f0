"""Qwen2.5-VL (Qwen team 2025, arXiv 2502.13923): images keep their shape; a token stands for 2 x 2 patches."""

from __future__ import annotations

import math
from typing import Any

from . import CLIP_MEAN, CLIP_STD, MAX_PIXELS, ImageRules, colours, number, squarish

MAX_RATIO = 200  # of the longer edge to the shorter


class Rules(ImageRules, frozen=True, kw_only=True):
    merge: int  # patches of a token along an edge
    least: int  # pixels
    most: int

    def size(self, height: int, width: int, most: int = 0) -> tuple[int, int]:
        if max(height, width) > MAX_RATIO * min(height, width):
            raise ValueError(f"its longer edge is more than {MAX_RATIO} times the shorter")
        most = max(min(most or self.most, self.most), self.least)
        unit = self.patch * self.merge
        rounded = round(height / unit) * unit, round(width / unit) * unit
        if rounded[0] * rounded[1] > most:
            shrunk = math.sqrt(height * width / most)
            return _down(height / shrunk, unit), _down(width / shrunk, unit)
        if rounded[0] * rounded[1] < self.least:
            grown = math.sqrt(self.least / (height * width))
            return math.ceil(height * grown / unit) * unit, math.ceil(width * grown / unit) * unit
        return rounded

    def largest(self, tokens: int) -> tuple[int, int]:
        unit = self.patch * self.merge
        least = self.least / unit**2
        most = max(1.0, min(tokens, self.most / unit**2), least)
        # A narrow image's edge is never less than a token, and both edges of an image that is grown are rounded up.
        strip = 1, int(math.sqrt(MAX_RATIO * min(most, MAX_RATIO)))
        narrow = math.sqrt(least / MAX_RATIO)
        fewer = range(int(narrow), math.isqrt(math.ceil(least)) + 1)  # than the rows
        grown = [(rows + 1, math.ceil(least / max(rows, narrow))) for rows in fewer]
        rows, columns = max([squarish(int(most)), strip, *grown], key=math.prod)
        return rows * unit, columns * unit

    def grid(self, height: int, width: int) -> tuple[int, int]:
        unit = self.patch * self.merge
        return height // unit, width // unit


def _down(length: float, unit: int) -> int:
    return max(unit, math.floor(length / unit) * unit)


def read(config: dict[str, Any], processor: dict[str, Any]) -> Rules:
    vision, token = config["vision_config"], number(config, "image_token_id", 151655, 1 << 24)
    size = processor.get("size") or {}
    least = number(processor, "min_pixels", number(size, "shortest_edge", 56 * 56, MAX_PIXELS), MAX_PIXELS)
    most = number(processor, "max_pixels", number(size, "longest_edge", 28 * 28 * 1280, MAX_PIXELS), MAX_PIXELS)
    if least > most:
        raise ValueError(f"min_pixels {least} are more than max_pixels {most}")
    return Rules(
        placeholder=token,
        token=token,
        mean=colours(processor, "image_mean", CLIP_MEAN),
        std=colours(processor, "image_std", CLIP_STD),
        patch=number(vision, "patch_size", 14),
        merge=number(vision, "spatial_merge_size", 2),
        least=least,
        most=most,
    )
