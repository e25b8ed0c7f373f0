"""Sources of images' bytes: data: URLs, and where the operator allows it http, https and file: URLs.

A URL makes this host ask another one, or read a file: what a client can reach by itself, and no more, is what a server
may fetch for it. So hosts have to be named (`--allowed-media-hosts`), and a redirect is a URL like the first.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

from .api_error import ApiError, bad
from .blocking import on_disk
from .decoding import show

if TYPE_CHECKING:
    from .image_fetcher import ImageFetcher

LARGEST = 32 << 20  # bytes of an encoded image
REDIRECTS = 3
LOCAL_NAMES = "", "localhost"


class ImageSources:
    """Gets the bytes of images that are elsewhere."""

    def __init__(self, hosts: Collection[str], directory: str):
        """hosts: that URLs may name; "*": any public one. directory: where file: URLs may lead; "": nowhere."""
        self._hosts, self._directory = {host.lower() for host in hosts}, directory
        self._fetcher: ImageFetcher | None = None

    async def get(self, url: str, at: str) -> bytes:
        """The bytes that a URL stands for. at: its field, for errors. Raises ApiError 400."""
        kind = url[:6].partition(":")[0].lower()
        if kind in ("http", "https"):
            return await self._fetch(url, at)
        if kind == "file":
            return await on_disk(self._read, url, at)
        raise bad(at, f"{at} is {show(url)}: expected a data: URL, such as data:image/png;base64,…")

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()

    async def _fetch(self, url: str, at: str) -> bytes:
        if self._fetcher is None:
            from .image_fetcher import ImageFetcher  # the library loads no Tornado before it needs it

            self._fetcher = ImageFetcher({host for host in self._hosts if _is_address(host)}, LARGEST)
        for _ in range(REDIRECTS + 1):
            self._check(url, at)
            found = await self._fetcher.get(url, at)
            if isinstance(found, bytes):
                return found
            try:
                url = urljoin(url, found.url)
            except ValueError:
                raise bad(at, f"{at}: the URL leads to {show(found.url)}, which is none") from None
        raise bad(at, f"{at}: the URL leads to more than {REDIRECTS} others")

    def _check(self, url: str, at: str) -> None:
        """Raises ApiError for a URL whose host is not allowed."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").rstrip("."), parts.port
        except ValueError:
            raise bad(at, f"{at} is {show(url)}: it is no URL") from None
        if parts.scheme not in ("http", "https") or parts.username or parts.password or port == 0 or "\\" in url:
            raise bad(at, f"{at} is {show(url)}: expected http or https, and no user")
        if not self._hosts:
            raise bad(at, f"{at}: this server fetches no URLs (--allowed-media-hosts): send the image as a data: URL")
        if host not in self._hosts and not ("*" in self._hosts and host not in LOCAL_NAMES):
            allowed = ", ".join(sorted(self._hosts))
            raise bad(at, f"{at}: the host {show(host)} is not among those that may be asked: {allowed}")

    def _read(self, url: str, at: str) -> bytes:
        """A file within the directory, links followed."""
        if not self._directory:
            raise bad(at, f"{at}: this server reads no files (--allowed-media-dir): send the image as a data: URL")
        root = Path(os.path.realpath(self._directory))
        wrong = bad(at, f"{at} is {show(url)}: there is no such file within --allowed-media-dir")
        try:
            parts = urlsplit(url)
        except ValueError:
            raise wrong from None
        if parts.netloc not in LOCAL_NAMES or "\0" in unquote(parts.path):
            raise wrong
        try:
            resolved = Path(os.path.realpath(root / unquote(parts.path)))
            if not resolved.is_relative_to(root):
                raise wrong
            # Not blocking: it may be a FIFO; without links: what was resolved may have become one meanwhile.
            fd = os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(fd, "rb") as file:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise wrong
                data = file.read(LARGEST + 1)
        except OSError:
            raise wrong from None
        if len(data) > LARGEST:
            raise too_large(at)
        return data


def is_data(url: str) -> bool:
    return url[:5].lower() == "data:"


def data_of(url: str, at: str) -> bytes:
    """The bytes in a data: URL. Raises ApiError 400."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise bad(at, f"{at} is {show(url)}: expected data:image/png;base64,… or another image in base64")
    return decoded(body, at)


def decoded(text: str, at: str) -> bytes:
    """Bytes of base64. Raises ApiError 400."""
    if len(text) > LARGEST * 4 // 3 + 4:
        raise too_large(at)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(at, f"{at} is no base64: {error}") from None


def too_large(at: str) -> ApiError:
    return ApiError(400, f"{at}: an image has at most {LARGEST >> 20} MiB", at, "too_large")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
