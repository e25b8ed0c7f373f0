"""Images of messages as data: URLs: files, and what Pillow has in memory."""

from __future__ import annotations

import base64
import io
import mimetypes
import os
from typing import Any

URLS = "data:", "http:", "https:", "file:"


def data_url(path: str | os.PathLike[str]) -> str:
    """A file as a data: URL. Raises OSError."""
    kind, _ = mimetypes.guess_type(os.fspath(path))
    with open(path, "rb") as file:
        return _url(file.read(), kind or "image/png")


def with_image_urls(message: Any) -> Any:
    """A message whose parts `{"type": "image", "image": …}` are OpenAI's. An image is a path, a URL or one of Pillow's.

    Raises OSError for a file that cannot be read, ValueError for what is no image.
    """
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return message
    return message | {"content": [_part(part) if _is_image(part) else part for part in content]}


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "image" and "image" in part


def _part(part: dict[str, Any]) -> dict[str, Any]:
    image = part["image"]
    if isinstance(image, str) and image.lower().startswith(URLS):
        url = image
    elif isinstance(image, str | os.PathLike):
        url = data_url(image)
    elif hasattr(image, "save"):
        file = io.BytesIO()
        image.save(file, "PNG")
        url = _url(file.getvalue(), "image/png")
    else:
        raise ValueError(f"an image is {type(image).__name__}: expected a path, a URL, or an image of Pillow's")
    return {"type": "image_url", "image_url": {"url": url}}


def _url(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
