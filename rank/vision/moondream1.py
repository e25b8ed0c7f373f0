"""Moondream 2 (vikhyatk/moondream2, revisions of 2025): an image is read as a whole, and in overlapping crops that
keep its details, which become the features of one grid.

Its checkpoints are of model_type `moondream1`. The pixels have the whole image, at the crops' size, above the crops'.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from . import HALF, LANCZOS, ImageRules, number

FILE = "tokenizer.json"  # has the token that begins a text, which revisions have at different places
BEGIN = "<|endoftext|>"  # begins a text, and ends an answer
# The heads that choose objects. The first coordinate of an object comes only where the vocabulary's does not end.
FIRST, COORDINATE, SIZE = 1, 2, 3
TASKS = {"detect": (FIRST, COORDINATE, SIZE), "point": (FIRST, COORDINATE)}
DIGITS = 6  # of numbers in answers: bins are a thousandth wide, but those of small sizes much less


class Objects:
    """Spells objects as JSON: a list of points or of boxes, as parts of the image's width and height."""

    def __init__(self, rules: Rules, length: int):
        """length: tokens of an object."""
        self._rules, self._length = rules, length
        self._tokens: list[int] = []  # of the object that has begun
        self._open = "["

    def feed(self, token: int) -> str:
        self._tokens.append(token - self._rules.vocabulary)
        if len(self._tokens) < self._length:
            return ""
        (x, y), size = (one / self._rules.coordinates for one in self._tokens[:2]), self._tokens[2:]
        found = {"x": x, "y": y}
        if size:
            bins = divmod(size[0] - self._rules.coordinates, self._rules.sizes)
            width, height = (extent(one, self._rules.sizes) for one in bins)
            found = {"x_min": x - width / 2, "y_min": y - height / 2, "x_max": x + width / 2, "y_max": y + height / 2}
        opened, self._open, self._tokens = self._open, ", ", []
        return opened + json.dumps({name: round(value, DIGITS) for name, value in found.items()})

    def finish(self) -> str:
        return "[]" if self._open == "[" else "]"


def extent(size: Any, sizes: int) -> Any:
    """The width or height, from 1/1024 to 1, of a bin: of a number, or of a tensor of them."""
    return 2.0 ** (10.0 * (size / (sizes - 1) - 1))


class Rules(ImageRules, frozen=True, kw_only=True):
    crop: int  # edge of a crop in pixels
    margin: int  # patches that neighbouring crops share at each edge
    crops: int  # most, but for the whole image
    # The bins of a coordinate, and of a width or a height. Tokens from `vocabulary` on are the coordinates', and behind
    # these one for each width with each height.
    coordinates: int
    sizes: int

    @property
    def vocabulary(self) -> int:
        """How many tokens texts have."""
        return self.token + 1

    def spelling(self, heads: tuple[int, ...]) -> Objects:
        return Objects(self, len(heads))

    @property
    def edge(self) -> int:
        """Patches of a crop's edge, and features of an image's."""
        return self.crop // self.patch

    @property
    def window(self) -> int:
        """Pixels from one crop to the next."""
        return self.crop - 2 * self.margin * self.patch

    def size(self, height: int, width: int, most: int = 0) -> tuple[int, int]:
        border = self.crop - self.window
        crops = max(1, min(self.crops, most // self.crop**2)) if most else self.crops
        rows, columns = tiling(height - border, width - border, self.window, crops)
        return self.crop + rows * self.window + border, columns * self.window + border

    def shown(self, image: Any, height: int, width: int) -> Any:
        made = image.crop((0, 0, width, height))
        made.paste((0, 0, 0), (0, 0, width, height))
        made.paste(image.resize((self.crop, self.crop), self.resample), (0, 0))
        made.paste(image.resize((width, height - self.crop), self.resample), (0, self.crop))
        return made

    def largest(self, tokens: int) -> tuple[int, int]:
        # A row of crops: it is as wide as the black that fills up next to the whole image.
        return 2 * self.crop, self.crop + (self.crops - 1) * self.window

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return self.edge, self.edge

    def tokens(self, rows: int, columns: int) -> list[int]:
        return [self.placeholder, *[self.token] * (rows * columns)]

    @property
    def span(self) -> int:
        return 1 + self.edge**2

    def spans(self, tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
        return ((0, len(tokens)),)  # the token before the image's attends to these, too


def tiling(height: int, width: int, window: int, most: int) -> tuple[int, int]:
    """Rows and columns of at most so many crops for an image of that size without its border."""
    if min(height, width) <= window:
        return 1, 1
    rows, columns = -(-height // window), -(-width // window)
    if rows * columns > most:
        share = math.sqrt(most / (rows * columns))
        # A narrow image's edge comes to less than one crop. The published code has more than `most` along the longer.
        rows, columns = max(1, math.floor(rows * share)), max(1, math.floor(columns * share))
        return min(rows, most), min(columns, most)
    rows = max(rows, math.floor(math.sqrt(most * height / width)))
    columns = max(columns, math.floor(math.sqrt(most * width / height)))
    if rows * columns > most and columns > rows:
        columns = most // rows
    elif rows * columns > most:
        rows = most // columns
    return max(1, rows), max(1, columns)


def read(config: dict[str, Any], tokenizer: dict[str, Any]) -> Rules:
    inner = config.get("config") or {}
    vision, text, region = (inner.get(name) or {} for name in ("vision", "text", "region"))
    begin = [int(token["id"]) for token in tokenizer.get("added_tokens") or () if token["content"] == BEGIN]
    rules = Rules(
        placeholder=begin[0] if begin else 0,  # the template writes it first, image or not
        single=True,
        token=number(text, "vocab_size", 51200, 1 << 24) - 1,  # any that no text has
        mean=HALF,
        std=HALF,
        resample=LANCZOS,
        patch=number(vision, "enc_patch_size", 14),
        crop=number(vision, "crop_size", 378, 1 << 12),
        margin=number(vision, "overlap_margin", 4),
        crops=number(vision, "max_crops", 12, 1 << 8),
        coordinates=number(region, "coord_out_dim", 1024),
        sizes=number(region, "size_out_dim", 2048, 1 << 14) // 2,
        tasks=TASKS,
    )
    if rules.sizes < 2:
        raise ValueError(f"size_out_dim is {rules.sizes}, expected at least two bins of widths and of heights")
    if rules.crop % rules.patch or rules.window < rules.patch:
        raise ValueError(
            f"crop_size {rules.crop} is no multiple of enc_patch_size {rules.patch} that leaves more than margins of "
            f"{rules.margin} patches"
        )
    return rules
