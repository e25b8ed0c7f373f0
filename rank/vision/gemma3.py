"""Gemma 3 (Gemma team 2025, arXiv 2503.19786): images become squares of one size, whose tokens attend to each other.
Pan and scan, which preprocessor_config.json may switch on, adds squares of the parts of an oblong image."""

from __future__ import annotations

import math
from typing import Any

from . import BILINEAR, HALF, ImageRules, colours, number

BEGIN, PLACEHOLDER, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class Rules(ImageRules, frozen=True, kw_only=True):
    edge: int  # pixels of a square
    side: int  # tokens along a square's edge
    most_crops: int  # 0: no pan and scan
    least_crop: int = 256  # pixels of a crop's edge
    least_ratio: float = 1.2  # of the longer edge to the shorter, from which there are crops

    def size(self, height: int, width: int, most: int = 0) -> tuple[int, int]:
        return self.edge * (1 + len(self._crops(height, width))), self.edge

    def shown(self, image: Any, height: int, width: int) -> Any:
        """The square of the whole image, and those of its parts below it."""
        parts = [image, *(image.crop(box) for box in self._crops(image.height, image.width))]
        made = image.resize((width, height))
        for i, part in enumerate(parts):
            made.paste(part.resize((self.edge, self.edge), self.resample), (0, i * self.edge))
        return made

    def _crops(self, height: int, width: int) -> list[tuple[int, int, int, int]]:
        shorter, longer = sorted((height, width))
        if not self.most_crops or longer / shorter < self.least_ratio:
            return []
        count = min(longer // self.least_crop, math.floor(longer / shorter + 0.5))
        count = min(max(count, 2), self.most_crops)
        long = math.ceil(longer / count)
        if min(long, shorter) < self.least_crop:
            return []
        along = [(at, min(at + long, longer)) for at in range(0, longer, long)]
        if width >= height:
            return [(begin, 0, end, height) for begin, end in along]
        return [(0, begin, width, end) for begin, end in along]

    def largest(self, tokens: int) -> tuple[int, int]:
        squares = min(1 + self.most_crops, max(1, tokens // self.side**2))
        return self.edge * squares, self.edge

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return height // self.edge * self.side, self.side

    def text(self, height: int, width: int) -> str:
        square, crops = f"\n\n{BEGIN}{PLACEHOLDER}{END}\n\n", height // self.edge - 1
        if not crops:
            return square
        others = " ".join([square] * crops)
        return f"Here is the original image {square} and here are some crops to help you see better {others}"

    def runs(self, height: int, width: int) -> int:
        return height // self.edge

    def tokens(self, rows: int, columns: int) -> list[int]:
        return [self.token] * self.side**2

    @property
    def span(self) -> int:
        return self.side**2


def read(config: dict[str, Any], processor: dict[str, Any]) -> Rules:
    vision, token = config["vision_config"], number(config, "image_token_index", 262144, 1 << 24)
    size = processor.get("size") or {}
    edge, patch = number(vision, "image_size", 896), number(vision, "patch_size", 14)
    side, patches = math.isqrt(number(config, "mm_tokens_per_image", 256, 1 << 20)), edge // patch
    if side > patches or patches // (patches // side) != side:
        raise ValueError(f"mm_tokens_per_image is {side**2}, which {patches} x {patches} patches do not become")
    if not {number(size, "height", edge), number(size, "width", edge)} == {edge}:
        raise ValueError(f"size is {size!r}, expected the image_size {edge} of vision_config")
    crops = number(processor, "pan_and_scan_max_num_crops", 4, 64) if processor.get("do_pan_and_scan") else 0
    return Rules(
        placeholder=token,
        token=token,
        mark=BEGIN,
        mean=colours(processor, "image_mean", HALF),
        std=colours(processor, "image_std", HALF),
        resample=number(processor, "resample", BILINEAR, 5),
        edge=edge,
        patch=patch,
        side=side,
        most_crops=crops,
        least_crop=number(processor, "pan_and_scan_min_crop_size", 256),
        least_ratio=float(processor.get("pan_and_scan_min_ratio_to_activate") or 1.2),
    )
