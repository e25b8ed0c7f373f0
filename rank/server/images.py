"""Images of requests: they are fetched, decoded in processes with limits, and stand in the request as tokens."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import weakref
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from ... import linux_calls
from .. import protocol
from ..vision import ImageRules
from .api_error import ApiError, bad
from .blocking import Lanes
from .config import ServerConfig
from .conversation import IMAGE_PARTS, TEXT_ONLY, ImageUrl, Message, NamedImage, Part, ShownImage
from .decoding import show
from .image_sources import ImageSources, is_data
from .schema import ChatRequest
from .shares import Budget
from .text_process import Limits, TextProcess

log = logging.getLogger(__name__)
FEWEST, MOST = 2, 8  # images that are decoded at a time: half as many as there are processors
AT_ONCE = 2  # images of a request that are read at a time: what is read is in memory
LIMITS = Limits(seconds=20.0, seconds_per_byte=0.0, memory=1 << 30, memory_per_byte=4, counted=64 << 20)
MAX_OPEN = 4 << 30  # bytes of pixels of all requests that are being answered: small files may have many pixels
MAX_BYTES = 192 << 20  # pixels of a request, for each of its choices: they go to rank 0 as one message each
DETAILS = {"auto": 0, "high": 0, "original": 0, "low": 512 * 512}  # most pixels; 0: the model's own limit


class ShownPixels(list[protocol.Pixels]):
    """Pixels of a request. While it lives, also once it is empty, their bytes count among those of open requests."""

    def take(self, size: int, open: Budget, owner: str) -> None:
        """Count so many bytes more. Raises ApiError 429 where open requests hold as many as they may, the owner's or
        all."""
        if not open.take(owner, size):
            raise ApiError(
                429,
                f"{size >> 20} MiB more of images would exceed the {open.quota >> 20} MiB that are kept for requests "
                "that are being answered: try again later",
                code="busy",
                retry_after=1,
            )
        weakref.finalize(self, open.give, owner, size)


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
        self.rules, self._most = rules, config.images_per_prompt
        self._sources = ImageSources(config.allowed_media_hosts, config.allowed_media_dir)
        keys = max(1, len(config.api_keys))
        threads = min(max(FEWEST, len(linux_calls.processors()) // 2), MOST)
        self._lanes = Lanes(threads, threads // min(threads, keys), "images")
        self._requests = max(4, threads)  # of a key, whose images are read at a time
        self._turns: dict[str, asyncio.Semaphore] = {}  # by key
        self._open = Budget(MAX_OPEN, keys, MAX_BYTES)
        self._process: ImageProcess | None = None
        self._why = "it has no Pillow: pip install 'phalanx[images]'"
        if importlib.util.find_spec("PIL") is not None:
            try:
                self._process = ImageProcess(None, LIMITS)
            except ValueError as error:  # as of a Pillow whose libraries are missing
                self._why = f"its Pillow does not start: {error}"
        if self._process is None:
            log.warning("this server takes no images: %s", self._why)

    def limits(self, ready: protocol.Ready) -> dict[str, int] | None:
        """The images that a request may have, and the pixels that are left of each; None: this server takes none."""
        if self._process is None or not ready.images:
            return None
        height, width = self.rules.largest(ready.max_model_len)
        pixels = min(height * width, ready.image_pixels or height * width)
        return {"per_prompt": self._most, "pixels": pixels}

    def close(self) -> None:
        self._sources.close()
        self._lanes.pool.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.close()

    def check_needed(self, request: object) -> None:
        """Refuse a chat without images where the model takes none of these."""
        if self.rules.needed and isinstance(request, ChatRequest):
            raise bad("messages", "the messages have no image: this model takes one")

    async def read(
        self, request: ChatRequest, places: list[Place], owner: str, max_pixels: int = 0
    ) -> tuple[ChatRequest, ShownPixels]:
        """The request with images that were read, and their pixels, each once. max_pixels: of an image, which is scaled
        down to so many; 0: the model's own limit. Raises ApiError."""
        first = places[0].field
        if self._process is None:
            raise ApiError(400, f"{first}: this server takes no images: {self._why}", first)
        if self.rules.single:
            request, places = _last_shown(request, places)
        if len(places) > self._most:
            raise bad(
                places[self._most].field,
                f"the messages have {len(places)} images: at most {self._most} are taken (--images-per-prompt)",
            )
        choices, pixels = request.sequences(), ShownPixels()
        async with self._turns.setdefault(owner, asyncio.Semaphore(self._requests)):
            shown, found = await self._read_all(places, choices, owner, max_pixels)
            pixels += found
            pixels.take(choices * sum(len(one.data) for one in found), self._open, owner)
        assert not isinstance(request.messages, str)
        messages = list(request.messages)
        for place, part in zip(places, shown, strict=True):
            messages[place.message] = _with_part(messages[place.message], place.part, part)
        return msgspec.structs.replace(request, messages=messages), pixels

    async def _read_all(
        self, places: list[Place], choices: int, owner: str, max_pixels: int
    ) -> tuple[list[ShownImage], list[protocol.Pixels]]:
        """Images as they stand in the request, and their pixels, each once. Raises ApiError, as soon as they are too
        many for so many choices."""
        at_once = asyncio.Semaphore(AT_ONCE)
        found: dict[bytes, protocol.Pixels] = {}

        async def read(place: Place) -> ShownImage:
            async with at_once:
                shown, pixels = await self._read(place, owner, max_pixels)
            found[pixels.digest] = pixels
            if choices * sum(len(one.data) for one in found.values()) > MAX_BYTES:
                most, of = MAX_BYTES // 3 // choices, f" with {choices} choices" if choices > 1 else ""
                raise bad(place.field, f"the images have more than {most} pixels together{of}: send fewer or smaller")
            return shown

        tasks = [asyncio.ensure_future(read(place)) for place in places]
        try:
            return await asyncio.gather(*tasks), list(found.values())
        finally:
            for task in tasks:
                task.cancel()

    async def _read(self, place: Place, owner: str, max_pixels: int) -> tuple[ShownImage, protocol.Pixels]:
        image, at, process, rules = place.image, place.field, self._process, self.rules
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
        limits = [limit for limit in (DETAILS[detail or "auto"], max_pixels) if limit]
        most = min(limits, default=0)
        # Decoding base64 holds the interpreter's lock for up to a tenth of a second: the process does that, too.
        data = url if is_data(url) else await self._sources.get(url, name)

        def decoded() -> protocol.Pixels:
            from .image_decoding import decode  # it needs Pillow, which may be missing

            height, width, pixels = process.run(decode, data, rules, most, name)
            digest = blake2b(pixels, digest_size=16, salt=b"%dx%d" % (height, width)).digest()
            return protocol.Pixels(digest, height, width, pixels)

        read = await self._lanes.run(owner, decoded)
        rows, columns = rules.grid(read.height, read.width)
        tokens = rules.tokens(rows, columns)
        shown = ShownImage(
            type="image_url", rules=rules, digest=read.digest, rows=rows, columns=columns, tokens=tokens,
            runs=rules.runs(read.height, read.width), text=rules.text(read.height, read.width),
            spans=rules.spans(tokens),
        )  # fmt: skip
        return shown, read


def _last_shown(request: ChatRequest, places: list[Place]) -> tuple[ChatRequest, list[Place]]:
    """A chat without the images of messages before the last that has some, and that message's images."""
    assert not isinstance(request.messages, str)
    last, messages = places[-1].message, list(request.messages)
    for number in {place.message for place in places} - {last}:
        content = messages[number].content
        texts = [part for part in content or () if not (isinstance(part, Part) and part.is_image)]
        messages[number] = msgspec.structs.replace(messages[number], content=texts)
    return msgspec.structs.replace(request, messages=messages), [place for place in places if place.message == last]


def _with_part(message: Message, index: int, part: Part) -> Message:
    assert isinstance(message.content, list)
    content = [*message.content[:index], part, *message.content[index + 1 :]]
    return msgspec.structs.replace(message, content=content)


def text_only(place: Place) -> ApiError:
    """The error of an image for a model that takes none."""
    kind = place.image.kind if isinstance(place.image, NamedImage) else place.image.type
    return bad(place.field, f"{place.field}.type is {show(kind)}: {TEXT_ONLY}")
