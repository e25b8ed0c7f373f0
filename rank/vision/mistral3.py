"""Mistral Small 3.1 and Ministral 3 (Mistral AI 2025), after Pixtral (arXiv 2410.07073): images keep their shape, and a
token behind each row of patches frames them."""

from __future__ import annotations

import math
from typing import Any

from . import CLIP_MEAN, CLIP_STD, MAX_EDGE, ImageRules, colours, number


class Rules(ImageRules, frozen=True, kw_only=True):
    merge: int  # patches of a token along an edge
    longest: int  # edge
    row_end: int  # the token behind a row
    end: int  # the one behind the last row

    @property
    def unit(self) -> int:
        """Pixels of a token along an edge."""
        return self.patch * self.merge

    def size(self, height: int, width: int, most: int = 0) -> tuple[int, int]:
        longest = min(self.longest, math.isqrt(most)) if most else self.longest
        if (ratio := max(height, width) / longest) > 1:
            height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
        return -(-height // self.unit) * self.unit, -(-width // self.unit) * self.unit

    def largest(self, tokens: int) -> tuple[int, int]:
        edge = min(-(-self.longest // self.unit), max(1, math.isqrt(tokens))) * self.unit
        return edge, edge

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return height // self.unit, width // self.unit

    def tokens(self, rows: int, columns: int) -> list[int]:
        return [*([*[self.token] * columns, self.row_end] * rows)[:-1], self.end]


def read(config: dict[str, Any], processor: dict[str, Any]) -> Rules:
    token = number(config, "image_token_index", number(config, "image_token_id", 10, 1 << 24), 1 << 24)
    return Rules(
        placeholder=token,
        token=token,
        # All of Mistral's tokenizers have them there.
        row_end=number(config, "image_break_token_id", 12, 1 << 24),
        end=number(config, "image_end_token_id", 13, 1 << 24),
        mean=colours(processor, "image_mean", CLIP_MEAN),
        std=colours(processor, "image_std", CLIP_STD),
        patch=number(config["vision_config"], "patch_size", 16),
        merge=number(config, "spatial_merge_size", 1),
        longest=number(processor.get("size") or {}, "longest_edge", 1024, MAX_EDGE),
    )
