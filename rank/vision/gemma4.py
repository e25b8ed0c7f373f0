"""Gemma 4 (Gemma team 2026): images keep their shape, and are resized to as many tokens as there may be. In large
models the tokens of an image attend to each other."""

from __future__ import annotations

import math
from typing import Any

from . import ImageRules, colours, number, squarish

READ = ("do_normalize",)  # colours are normalised where it says so


class Rules(ImageRules, frozen=True, kw_only=True):
    merge: int  # patches of a token along an edge
    most: int  # tokens
    begin: int  # the token before an image
    end: int  # the one behind it
    mutual: bool  # whether its tokens attend to each other

    def size(self, height: int, width: int, most: int = 0) -> tuple[int, int]:
        unit = self.patch * self.merge
        tokens = max(1, min(self.most, most // unit**2)) if most else self.most
        factor = math.sqrt(tokens * unit**2 / (height * width))
        rows, columns = (math.floor(factor * length / unit) for length in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, tokens)
        elif columns == 0:
            rows, columns = min(height // width, tokens), 1
        return rows * unit, columns * unit

    def largest(self, tokens: int) -> tuple[int, int]:
        rows, columns = squarish(min(self.most, max(1, tokens)))
        return rows * self.patch * self.merge, columns * self.patch * self.merge

    def grid(self, height: int, width: int) -> tuple[int, int]:
        unit = self.patch * self.merge
        return height // unit, width // unit

    def tokens(self, rows: int, columns: int) -> list[int]:
        return [self.begin, *[self.token] * (rows * columns), self.end]

    @property
    def span(self) -> int:
        return self.most if self.mutual else 0


def read(config: dict[str, Any], processor: dict[str, Any]) -> Rules:
    vision, text = config["vision_config"], config.get("text_config") or {}
    token = number(config, "image_token_id", 258880, 1 << 24)
    # The tower takes colours from -1 to 1, of what the preprocessor, if it does, has normalised.
    given = colours(processor, "image_mean", (0.0, 0.0, 0.0)), colours(processor, "image_std", (1.0, 1.0, 1.0))
    (red, green, blue), (r, g, b) = given if processor.get("do_normalize") else ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    return Rules(
        placeholder=token,
        token=token,
        mean=(red + r / 2, green + g / 2, blue + b / 2),
        std=(r / 2, g / 2, b / 2),
        resample=number(processor, "resample", 3, 5),
        patch=number(vision, "patch_size", 16),
        merge=number(vision, "pooling_kernel_size", 3),
        most=number(processor, "max_soft_tokens", 280, 1 << 14),
        begin=number(config, "boi_token_id", 255999, 1 << 24),
        end=number(config, "eoi_token_id", 258882, 1 << 24),
        mutual=text.get("use_bidirectional_attention") == "vision",
    )
