"""Images of requests: they are fetched, decoded in processes with limits, and stand in the request as tokens."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import weakref
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from .. import protocol
from ..vision import ImageRules
from .api_error import ApiError, bad
from .blocking import Lanes
from .config import ServerConfig
from .conversation import IMAGE_PARTS, TEXT_ONLY, ImageUrl, Message, NamedImage, Part, ShownImage
from .decoding import show
from .image_sources import ImageSources, data_of, is_data
from .schema import ChatRequest
from .text_process import Limits, TextProcess

log = logging.getLogger(__name__)
THREADS = 2  # that have images decoded
LIMITS = Limits(seconds=20.0, seconds_per_byte=0.0, memory=1 << 30, memory_per_byte=4, counted=64 << 20)
MAX_OPEN = 4 << 30  # bytes of pixels of all requests that are being answered: small files may have many pixels
MAX_BYTES = 192 << 20  # pixels of a request: it goes to rank 0 as one message
DETAILS = {"auto": 0, "high": 0, "original": 0, "low": 512 * 512}  # most pixels; 0: the model's own limit


class ShownPixels(list[protocol.Pixels]):
    """Pixels of a request. While it lives, also once it is empty, their bytes count among those of open requests."""

    def __init__(self, open: OpenBytes):
        super().__init__()
        self._open, self._mine = open, OpenBytes()
        weakref.finalize(self, open.give, self._mine)

    def take(self, size: int) -> None:
        """Count so many bytes more. Raises ApiError 429 where open requests hold as many as they may."""
        if self._open.size and self._open.size + size > MAX_OPEN:
            raise ApiError(
                429,
                "the images of requests that are being answered hold all the memory that they may: try again later",
                code="busy",
                retry_after=1,
            )
        self._open.size += size
        self._mine.size += size


class OpenBytes:
    """A number of bytes."""

    size = 0

    def give(self, other: OpenBytes) -> None:
        self.size -= other.size


class Place(NamedTuple):
    """An image's place in a request's messages."""

    message: int
    part: int
    image: Part

    @property
    def field(self) -> str:
        """Its name in errors."""
        return self.image.at if isinstance(self.image, NamedImage) else f"messages[{self.message}].content[{self.part}]"


class ImageProcess(TextProcess):
    """Decodes images as TextProcess encodes texts."""

    MODULE = "image_worker"
    WORKS = "the decoder of images"

    def refused(self, what: str) -> ApiError:
        log.warning("a request was refused: decoding an image %s", what)
        return ApiError(400, f"decoding an image {what}: send a smaller one", "messages", "text_limits")


def images_of(request: object) -> list[Place]:
    """The images of a chat; none of other requests."""
    if not isinstance(request, ChatRequest) or isinstance(request.messages, str):
        return []
    return [
        Place(i, j, part)
        for i, message in enumerate(request.messages)
        for j, part in enumerate(message.content if isinstance(message.content, list) else ())
        if isinstance(part, Part) and part.type in IMAGE_PARTS
    ]


class ImageReader:
    """Reads the images of one model's requests."""

    def __init__(self, config: ServerConfig, rules: ImageRules):
        """Raises ValueError where the decoder cannot be started."""
        self._rules, self._most = rules, config.images_per_prompt
        self._sources = ImageSources(config.allowed_media_hosts, config.allowed_media_dir)
        self._lanes = Lanes(THREADS, THREADS, "images")
        self._open = OpenBytes()
        self._process = ImageProcess(None, LIMITS) if importlib.util.find_spec("PIL") is not None else None
        if self._process is None:
            log.warning("images are refused, as Pillow is not installed: pip install 'phalanx[images]'")

    def close(self) -> None:
        self._sources.close()
        self._lanes.pool.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.close()

    async def read(self, request: ChatRequest, places: list[Place], owner: str) -> tuple[ChatRequest, ShownPixels]:
        """The request with images that were read, and their pixels, each once. Raises ApiError."""
        first = places[0].field
        if self._process is None:
            raise ApiError(400, f"{first}: this server takes no images, as it has no Pillow", first)
        if len(places) > self._most:
            raise bad(
                places[self._most].field,
                f"the messages have {len(places)} images: at most {self._most} are taken (--images-per-prompt)",
            )
        found_pixels = ShownPixels(self._open)
        tasks = [asyncio.ensure_future(self._read(place, owner, found_pixels)) for place in places]
        try:
            found = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        pixels = {image.digest: image for _, image in found}
        if (size := sum(len(image.data) for image in pixels.values())) > MAX_BYTES:
            most = MAX_BYTES // 3
            raise bad(first, f"the images have {size // 3} pixels together: at most {most} are taken, send fewer")
        assert not isinstance(request.messages, str)
        messages = list(request.messages)
        for place, (shown, _) in zip(places, found, strict=True):
            messages[place.message] = _with_part(messages[place.message], place.part, shown)
        found_pixels += pixels.values()
        return msgspec.structs.replace(request, messages=messages), found_pixels

    async def _read(self, place: Place, owner: str, pixels: ShownPixels) -> tuple[ShownImage, protocol.Pixels]:
        image, at, process, rules = place.image, place.field, self._process, self._rules
        assert process is not None
        name = image.named if isinstance(image, NamedImage) else f"{at}.image_url"
        if isinstance(image.image_url, ImageUrl):
            name, url, detail = f"{name}.url", image.image_url.url, image.image_url.detail
        else:
            url, detail = image.image_url, image.detail
        if not url:
            raise bad(name, f"{name} is missing: it has the image, as data:image/png;base64,…")
        if (detail or "auto") not in DETAILS:
            raise bad(f"{at}.detail", f"{at}.detail is {show(detail)}: expected one of {', '.join(DETAILS)}")
        most = DETAILS[detail or "auto"]
        data = b"" if is_data(url) else await self._sources.get(url, name)

        def decoded() -> protocol.Pixels:
            from .image_decoding import decode  # it needs Pillow, which may be missing

            height, width, pixels = process.run(decode, data or data_of(url, name), rules, most, name)
            digest = blake2b(pixels, digest_size=16, salt=b"%d" % width).digest()
            return protocol.Pixels(digest, height, width, pixels)

        read = await self._lanes.run(owner, decoded)
        pixels.take(len(read.data))
        rows, columns = rules.grid(read.height, read.width)
        shown = ShownImage(
            type="image_url", digest=read.digest, rows=rows, columns=columns, placeholder=rules.placeholder,
            tokens=rules.tokens(rows, columns),
        )  # fmt: skip
        return shown, read


def _with_part(message: Message, index: int, part: Part) -> Message:
    assert isinstance(message.content, list)
    content = [*message.content[:index], part, *message.content[index + 1 :]]
    return msgspec.structs.replace(message, content=content)


def text_only(place: Place) -> ApiError:
    """The error of an image for a model that takes none."""
    kind = place.image.kind if isinstance(place.image, NamedImage) else place.image.type
    return bad(place.field, f"{place.field}.type is {show(kind)}: {TEXT_ONLY}")
