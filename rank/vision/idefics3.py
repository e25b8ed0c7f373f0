"""Idefics 3 (Laurençon et al. 2024, arXiv 2408.12637) and SmolVLM: a large image is cut into squares, which are
followed by the whole image as one more."""

from __future__ import annotations

import math
from typing import Any

from . import HALF, LANCZOS, ImageRules, colours, number

MOST = 4096  # pixels of an edge
PLACEHOLDER, FRAME, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"


class Rules(ImageRules, frozen=True, kw_only=True):
    """Pixels are the whole image's square, and below it the image in squares, if it is cut."""

    edge: int  # pixels of a square
    longest: int  # pixels that an image's longer edge is resized to before it is cut
    side: int  # tokens along a square's edge
    cuts: bool

    def size(self, height: int, width: int, most: int = 0) -> tuple[int, int]:
        rows, columns = self._cut(*self._scaled(height, width, most))
        return (rows, columns) if rows == columns == self.edge else (self.edge + rows, columns)

    def _scaled(self, height: int, width: int, most: int = 0) -> tuple[int, int]:
        """Height and width of an image whose longer edge is resized to `longest`, and the shorter to an even number."""
        longest = min(self.longest, max(self.edge, math.isqrt(most) // self.edge * self.edge)) if most else self.longest
        if width >= height:
            width, height = longest, int(longest / (width / height))
            height = max(1, height + height % 2)
        else:
            height, width = longest, int(longest * (width / height))
            width = max(1, width + width % 2)
        return _bounded(height, width)

    def _cut(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of an image that is cut: whole squares."""
        edge, ratio = self.edge, width / height
        if not self.cuts:
            return edge, edge
        if width >= height:
            width = math.ceil(width / edge) * edge
            height = math.ceil(int(width / ratio) / edge) * edge
        else:
            height = math.ceil(height / edge) * edge
            width = math.ceil(int(height * ratio) / edge) * edge
        return max(height, edge), max(width, edge)

    def squares(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of squares of an image that is cut; none of another."""
        return (0, 0) if height == self.edge else (height // self.edge - 1, width // self.edge)

    def shown(self, image: Any, height: int, width: int) -> Any:
        cut = (self.edge, self.edge) if height == self.edge else (width, height - self.edge)
        most = max(cut) ** 2 if self.cuts and max(cut) < self.longest else 0  # as `size` had it
        scaled = self._scaled(image.height, image.width, most)
        image = image.resize(scaled[::-1], self.resample).resize(cut, self.resample)
        if height == self.edge:
            return image
        made = image.resize((width, height))
        made.paste((0, 0, 0), (0, 0, width, height))
        made.paste(image.resize((self.edge, self.edge), self.resample), (0, 0))
        made.paste(image, (0, self.edge))
        return made

    def largest(self, tokens: int) -> tuple[int, int]:
        return self.size(self.longest, self.longest)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return self.runs(height, width) * self.side, self.side

    def text(self, height: int, width: int) -> str:
        rows, columns = self.squares(height, width)
        cut = "".join(
            "".join(f"{FRAME}<row_{row}_col_{column}>{PLACEHOLDER}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return f"{cut}{cut and chr(10)}{FRAME}{GLOBAL}{PLACEHOLDER}{FRAME}"

    def runs(self, height: int, width: int) -> int:
        return 1 + math.prod(self.squares(height, width))

    def tokens(self, rows: int, columns: int) -> list[int]:
        return [self.token] * self.side**2


def _bounded(height: int, width: int) -> tuple[int, int]:
    """At most MOST pixels an edge."""
    ratio = width / height
    if width >= height and width > MOST:
        width, height = MOST, max(1, int(MOST / ratio))
    elif height > width and height > MOST:
        height, width = MOST, max(1, int(MOST * ratio))
    return height, width


def read(config: dict[str, Any], processor: dict[str, Any]) -> Rules:
    vision, token = config["vision_config"], number(config, "image_token_id", 128257, 1 << 24)
    edge, patch = number(vision, "image_size", 364), number(vision, "patch_size", 14)
    scale = number(config, "scale_factor", 2)
    square = number(processor.get("max_image_size") or {}, "longest_edge", edge)
    longest = number(processor.get("size") or {}, "longest_edge", 4 * edge)
    if square != edge or edge // patch % scale or edge < patch:
        raise ValueError(
            f"max_image_size is {square} and image_size {edge}, expected equal multiples of the patch_size {patch} "
            f"and of scale_factor {scale}"
        )
    return Rules(
        placeholder=token,
        token=token,
        mark=PLACEHOLDER,
        mean=colours(processor, "image_mean", HALF),
        std=colours(processor, "image_std", HALF),
        resample=number(processor, "resample", LANCZOS, 5),
        patch=patch,
        edge=edge,
        longest=longest,
        side=edge // patch // scale,
        cuts=processor.get("do_image_splitting") is not False,
    )
