"""A web page to talk to the model with: files of `ui/`, served as they are.

Nothing comes from elsewhere, and no script or style stands in the page itself, so the policy that browsers are given
allows this server's own files alone, and as data: URLs the images that users attach. Paths are relative: the page works
behind a proxy's prefix, too.
"""

from __future__ import annotations

import functools
from pathlib import Path

from ..api_error import ApiError
from .routes import Call, Reply, Route

FILES = Path(__file__).parent / "ui"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@functools.cache
def files() -> dict[str, tuple[bytes, str]]:
    """Each file's bytes and Content-Type, by its path below `ui/`."""
    paths = [*FILES.iterdir(), *(FILES / "vendor").iterdir()]
    return {
        str(path.relative_to(FILES)): (path.read_bytes(), KINDS[path.suffix]) for path in paths if path.suffix in KINDS
    }


def _file(call: Call, name: str) -> Reply:
    assert call.server is not None
    if not call.server.config.ui_server:
        raise ApiError(404, "this server has no web page: start it with --ui-server", code="page_off")
    if name not in files():
        raise ApiError(404, f"the page has no file {name[:100]!r}", code="not_found")
    content, kind = files()[name]
    return Reply(content, headers={**HEADERS, "Content-Type": kind})


def page(call: Call) -> Reply:
    """A page to chat with the model, with `--ui-server`."""
    return _file(call, "index.html")


def asset(call: Call) -> Reply:
    """The page's scripts and styles."""
    return _file(call, call.args["file"])


def library(call: Call) -> Reply:
    """The libraries that the page uses."""
    return _file(call, f"vendor/{call.args['file']}")


ROUTES = [
    Route("/", page, method="GET", needs_key=False, media=("text/html",)),
    Route("/ui/{file}", asset, method="GET", needs_key=False, media=("text/javascript", "text/css", "image/svg+xml")),
    Route("/ui/vendor/{file}", library, method="GET", needs_key=False, media=("text/javascript",)),
]
