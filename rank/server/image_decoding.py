"""Images become pixels as a model takes them. It runs in processes with limits (image_worker.py)."""

from __future__ import annotations

import io

from PIL import Image, ImageOps, UnidentifiedImageError

from ..vision import ImageRules
from .api_error import ApiError
from .image_sources import data_of

FORMATS = "PNG", "JPEG", "WEBP", "GIF"
MAX_PIXELS = 50_000_000
WHITE = 255, 255, 255
Image.MAX_IMAGE_PIXELS = None  # which warns first: the size is checked here


def decode(_: object, data: bytes | str, rules: ImageRules, most: int, at: str) -> tuple[int, int, bytes]:
    """Height, width and pixels of an image's first frame as the model takes it, upright. data: the file, or its data:
    URL. most: pixels; 0: the model's own limit. Raises ApiError 400 about the field `at`."""
    if isinstance(data, str):
        data = data_of(data, at)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise _bad(at, f"it has {image.width} x {image.height} pixels: at most {MAX_PIXELS} are taken")
            pixels = _opaque(ImageOps.exif_transpose(image))
    except ApiError:
        raise
    except UnidentifiedImageError:
        raise _bad(at, f"it is no image of a known format: {', '.join(FORMATS)} are taken") from None
    except MemoryError:
        raise
    except Exception as error:  # whatever damaged files make decoders raise
        raise _bad(at, f"it is damaged: {str(error)[:200] or type(error).__name__}") from None
    try:
        height, width = rules.size(pixels.height, pixels.width, most)
    except ValueError as error:
        raise _bad(at, f"it has {pixels.width} x {pixels.height} pixels: {error}") from None
    return height, width, rules.shown(pixels, height, width).tobytes()


def _opaque(image: Image.Image) -> Image.Image:
    """The colours of an image, on white where it is transparent."""
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits, which would be cut off at 255
        return image.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, (*WHITE, 255))
        return Image.alpha_composite(ground, image).convert("RGB")
    return image.convert("RGB")


def _bad(at: str, why: str) -> ApiError:
    return ApiError(400, f"{at} cannot be taken: {why}", at)
