"""How images become what models take: their sizes, and the tokens that stand for them. A file for each kind of model,
named after the `model_type` of config.json; rank/model/vision has the towers. No torch."""

from __future__ import annotations

import importlib
import itertools
import math
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ...errors import MODEL, FatalError
from .. import untrusted_files
from ..json_decoding import decode_object

MAX_EDGE = 1 << 16  # pixels of an edge of what a model takes
MAX_PIXELS, MAX_TOKENS = 1 << 26, 1 << 17  # of an image: no model comes near
CPU_PIXELS = 1 << 20  # of an image on CPUs: sequences that decode wait for each of a tower's layers
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # of Pillow's filters
HALF = 0.5, 0.5, 0.5
CLIP_MEAN = 0.48145466, 0.4578275, 0.40821073
CLIP_STD = 0.26862954, 0.26130258, 0.27577711
# Ends a prompt as chat templates write it where further heads of the model choose the answer's tokens: a task's name.
TASK = re.compile("\u2063phalanx-task (\\w+)\u2063\\Z")
SEEING = ("moondream1",)  # types all of whose models take images, whether config.json has a vision_config or not


def task(name: str) -> str:
    """The text that TASK finds."""
    return f"\u2063phalanx-task {name}\u2063"


class Spelling(Protocol):
    """The text of one sequence, token by token: what `feed` and `finish` return, joined, is the text of all tokens."""

    def feed(self, token: int) -> str: ...

    def finish(self) -> str: ...


class ImageRules(msgspec.Struct, frozen=True, kw_only=True):
    """The way from an image to a model's tokens."""

    placeholder: int  # the token that a chat template writes in an image's place
    token: int  # the tokens that features stand for
    # The text that a chat template writes in an image's place, where another text takes that place; "": the placeholder
    # is one token, and `tokens` take its place.
    mark: str = ""
    mean: tuple[float, float, float]  # of the colours, from 0 to 1 ...
    std: tuple[float, float, float]  # ... and by what they are divided then
    patch: int  # pixels of a patch along an edge
    resample: int = BICUBIC
    # The tokens around a text where the tower reads that, behind an image, instead of the model, and how many tokens it
    # may have with these; (): the tower reads none.
    frame: tuple[int, ...] = ()
    longest: int = 0
    single: bool = False  # a prompt has one image at most, the last that its messages show
    needed: bool = False  # a prompt has one image at least
    tasks: dict[str, tuple[int, ...]] = {}  # by name: the heads that choose an answer's tokens, in turn

    def spelling(self, heads: tuple[int, ...]) -> Spelling:
        """A new one for an answer whose tokens these heads choose."""
        raise NotImplementedError

    def size(self, height: int, width: int, most: int = 0) -> tuple[int, int]:
        """The height and width that an image is resized to. most: pixels; 0: as many as the model takes.

        Raises ValueError for shapes that the model does not take.
        """
        raise NotImplementedError

    def shown(self, image: Any, height: int, width: int) -> Any:
        """An image of Pillow's, in colours, as pixels of that size."""
        return image.resize((width, height), self.resample)

    def largest(self, tokens: int) -> tuple[int, int]:
        """Height and width of the largest image of so many tokens: no result of `size` has more pixels to encode, as
        memory is kept for this one."""
        raise NotImplementedError

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of features of an image of that size."""
        raise NotImplementedError

    def text(self, height: int, width: int) -> str:
        """The text that takes the place of `mark`, with a placeholder for each run of features. height, width: as
        `size` has them."""
        return self.mark

    def runs(self, height: int, width: int) -> int:
        """How many placeholders an image of that size has."""
        return 1

    def tokens(self, rows: int, columns: int) -> list[int]:
        """The tokens that take a placeholder's place."""
        return [self.token] * (rows * columns)

    @property
    def span(self) -> int:
        """How many tokens of an image attend to each other at most; 0: each attends to those before alone."""
        return 0

    def spans(self, tokens: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """(first, end) of those of an image's tokens that attend to each other: of features that stand side by
        side."""
        if not self.span:
            return ()
        shown = [-1, *(i for i, token in enumerate(tokens) if token != self.token), len(tokens)]
        return tuple((a + 1, b) for a, b in itertools.pairwise(shown) if b > a + 1)


def kinds() -> list[str]:
    """The model types that take images."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(directory: Path, config: dict[str, Any]) -> ImageRules | None:
    """The rules of a model directory; None: the model takes text alone. config: its config.json.

    Raises FatalError, code MODEL, for values that cannot be.
    """
    kind = config.get("model_type")
    if kind not in kinds() or not (isinstance(config.get("vision_config"), dict) or kind in SEEING):
        return None
    module = importlib.import_module(f".{kind}", __name__)
    given = config.get("image_processor")  # of a mmproj file
    if given is None:
        given = _read(directory, getattr(module, "FILE", "preprocessor_config.json"))
    nested = _read(directory, "processor_config.json").get("image_processor") if not given else None
    try:
        processor = given or (nested if isinstance(nested, dict) else {})
        rules: ImageRules = module.read(config, processor)
        _check_steps(processor, rules, getattr(module, "READ", ()))
        _check_sizes(rules)
        return rules
    # Numbers that are no floats, and lists where keys are expected, among others.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise FatalError(f"{directory}: its files do not say how it takes images: {error!r}", MODEL) from None


def _check_steps(processor: dict[str, Any], rules: ImageRules, read: Sequence[str]) -> None:
    """Raises ValueError for steps of preprocessing that would be left out, or taken, in silence. read: keys that the
    model's module reads."""
    steps = {
        "do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "resample": rules.resample,
    }  # fmt: skip
    for key, expected in steps.items():
        value = processor.get(key)
        if value is not None and key not in read and not math.isclose(value, expected, rel_tol=1e-5):
            raise ValueError(f"{key} is {value!r}, expected {expected!r}")


def _check_sizes(rules: ImageRules) -> None:
    """Raises ValueError for images that are too large, or of no token, which would be left out in silence."""
    height, width = rules.largest(MAX_PIXELS)
    if height * width > MAX_PIXELS:
        raise ValueError(f"the largest image has {height} x {width} pixels, expected at most {MAX_PIXELS}")
    rows, columns = rules.grid(height, width)
    if not 1 <= rows * columns <= MAX_TOKENS:
        raise ValueError(
            f"an image of {height} x {width} pixels is {rows * columns} tokens, expected 1 to {MAX_TOKENS}"
        )


def squarish(tokens: int) -> tuple[int, int]:
    """Rows and columns of nearly a square that has so many tokens, or as few more as there may be."""
    square = math.isqrt(tokens)
    rows = min(range(square, square // 2, -1), key=lambda rows: -(-tokens // rows) * rows)
    return rows, -(-tokens // rows)


def number(values: dict[str, Any], key: str, default: int, most: int = MAX_EDGE) -> int:
    """A positive whole number. Raises ValueError."""
    value = values.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{key} is {value!r}, expected a whole number from 1 to {most}")
    return value


def colours(values: dict[str, Any], key: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    """A number for each of red, green and blue. Raises ValueError."""
    value = values.get(key) or default
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ValueError(f"{key} is {value!r}, expected three numbers")
    red, green, blue = (float(one) for one in value)
    if key == "image_std" and min(red, green, blue) < 1e-6:
        raise ValueError(f"{key} is {value!r}, by which colours cannot be divided")
    return red, green, blue


def _read(directory: Path, name: str) -> dict[str, Any]:
    try:
        return decode_object(untrusted_files.read_bytes(directory, name))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise FatalError(f"{directory / name} cannot be read: {error}", MODEL) from None
