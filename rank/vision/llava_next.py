"""LLaVA-NeXT (Liu et al. 2024, LLaVA 1.6): the whole image as a square, and below it the image in a grid of such
squares, without what only fills the grid up."""

from __future__ import annotations

import math
from typing import Any

from . import ImageRules
from .llava import square

# Heights and widths of grids.
GRIDS = (336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)


class Rules(ImageRules, frozen=True, kw_only=True):
    """Pixels are the square, the grid below it, and a row of pixels, or column, for each of the grid's rows of patches
    that are left out: so an image's size is enough to know it."""

    edge: int  # pixels of a square
    shortest: int
    grids: tuple[tuple[int, int], ...]  # heights and widths in pixels

    def size(self, height: int, width: int, most: int = 0) -> tuple[int, int]:
        fit = [one for one in self.grids if math.prod(one) + self.edge**2 <= most] if most else self.grids
        grid = best(height, width, fit or [min(self.grids, key=math.prod)])
        rows, columns = (length // self.patch for length in grid)
        if width / height > columns / rows:
            used = int(round(height * (columns / width), 7))
            left_out = (rows - used) // 2 * 2, 0
        else:
            used = int(round(width * (rows / height), 7))
            left_out = 0, (columns - used) // 2 * 2
        return self.edge + grid[0] + left_out[0], grid[1] + left_out[1]

    def parts(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The grid's height and width in pixels, and how many of its rows and columns of patches are left out."""
        lengths = height - self.edge, width
        rows, columns = (length // self.edge * self.edge for length in lengths)
        return (rows, columns), (lengths[0] - rows, lengths[1] - columns)

    def shown(self, image: Any, height: int, width: int) -> Any:
        (rows, columns), _ = self.parts(height, width)
        made = image.crop((0, 0, width, height))
        made.paste((0, 0, 0), (0, 0, width, height))
        made.paste(image.resize((self.edge, self.edge), self.resample), (0, 0))
        by_width, by_height = columns / image.width, rows / image.height
        if by_width < by_height:
            inner = columns, min(math.ceil(image.height * by_width), rows)
        else:
            inner = min(math.ceil(image.width * by_height), columns), rows
        at = (columns - inner[0]) // 2, self.edge + (rows - inner[1]) // 2
        made.paste(image.resize(inner, self.resample), at)
        return made

    def largest(self, tokens: int) -> tuple[int, int]:
        height, width = max(self.grids, key=math.prod)
        return self.size(height, width)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        grid, left_out = self.parts(height, width)
        rows, columns = (length // self.patch - less for length, less in zip(grid, left_out, strict=True))
        return 1, (self.edge // self.patch) ** 2 + rows * (columns + 1)


def best(height: int, width: int, grids: Any) -> tuple[int, int]:
    """The grid in which the most of an image's pixels are shown, of these the one with the least to fill up."""

    def worth(grid: tuple[int, int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, shown - math.prod(grid)

    return max(grids, key=worth)


def read(config: dict[str, Any], processor: dict[str, Any]) -> Rules:
    given = square(config, processor)
    listed = config.get("image_grid_pinpoints") or processor.get("image_grid_pinpoints") or GRIDS
    grids, edge = tuple((int(height), int(width)) for height, width in listed), given["edge"]
    if not grids or any(length % edge or not 0 < length <= 16 * edge for grid in grids for length in grid):
        raise ValueError(f"image_grid_pinpoints is {listed!r}, expected multiples of the image_size {edge}")
    return Rules(**given, grids=grids)
