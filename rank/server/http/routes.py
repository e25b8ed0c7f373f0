"""Routes of the server: each file of this folder with a ROUTES is a family of endpoints, and is found by that.

From these tables come the routing, the metrics' labels, the 404's text, OpenAPI, docs/api.md and what a batch file may
name. Nothing here or in a family knows of Tornado.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..api_error import ApiError
from ..decoding import Body
from ..text_engine import TextEngine

if TYPE_CHECKING:
    from ..conversation_store import ConversationStore
    from ..file_store import StoredFile
    from ..response_store import ResponseStore
    from .state import ServerState
    from .upload import Upload

FAMILY = re.compile(r"^ROUTES\b", re.MULTILINE)
JSON, EVENTS = "application/json", "text/event-stream"
ANTHROPIC = "Anthropic-Version"  # the header that all clients of that API send
PART = re.compile(r"\{(\w+)\}")  # of a path: stands for any text


@dataclass
class Call:
    """One request for a route."""

    engine: TextEngine
    request: Any = None  # the body, as the route's schema has it
    args: Mapping[str, str] = field(default_factory=dict)  # what the path's {name} parts stand for
    query: Mapping[str, str] = field(default_factory=dict)
    repeated: Mapping[str, Sequence[str]] = field(
        default_factory=dict
    )  # the query's values, of which a name may have several
    headers: Mapping[str, str] = field(default_factory=dict)
    server: ServerState | None = None  # None in a batch job
    key: int = 0  # which API key it came with
    known: bool = True  # it came with a valid one, or needs none
    release: Callable[[], None] = lambda: None  # tells that the body's bytes are not needed any more
    behind: asyncio.Future[Any] | None = None  # what goes on behind the answer; until then the request is open
    # Stores, and the ids of what the request puts there: a whole answer waits until that is saved.
    stored: list[tuple[ResponseStore | ConversationStore, str]] = field(default_factory=list)
    batch_owner: str = ""  # of a batch's request: the owner of the batch

    @property
    def anthropic(self) -> bool:
        """Whether a client of Anthropic's API asks, where both APIs have the path."""
        return ANTHROPIC in self.headers

    @property
    def owner(self) -> str:
        """Whose request it is: a digest of the API key, which stands for it on the disk and on rank 0."""
        return self.server.owners[self.key] if self.server is not None else self.batch_owner

    def count(self, prompt_tokens: int, completion_tokens: int = 0) -> None:
        """Put what was used down to the API key."""
        if self.server is not None:
            self.server.used[self.key].add(prompt_tokens, completion_tokens)


class Reply(NamedTuple):
    """An answer that is more than an object with status 200. Bytes are sent as they are, the rest as JSON."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = {}


class Events(NamedTuple):
    """Server-sent events that are not a session's."""

    stream: AsyncIterator[bytes]
    error: Callable[[ApiError], bytes]  # the event for an error after the first event


class Lines(NamedTuple):
    """JSON objects, one in each line, that are sent as they come."""

    stream: AsyncIterator[bytes]


class Download(NamedTuple):
    """A file, sent in chunks."""

    path: Path
    file: StoredFile  # what its bytes are known to be


class Route(NamedTuple):
    """One endpoint. The first line of `prepare`'s docstring is its line in the documents."""

    path: str  # {name} stands for a part, such as /v1/models/{model}
    # Makes the answer: an object, a Reply, Events, Lines, a Download, a Renderer or, with `render`, a Session.
    prepare: Callable[[Call], Any | Awaitable[Any]]
    schema: type[Body] | None = None  # of the body; None: there is none
    render: Callable[..., Any] | None = None  # a Renderer's class: made of session, request and tokenizer
    method: str = "POST"
    also: tuple[str, ...] = ()  # other paths
    batchable: bool = False  # a batch file may name it
    needs_key: bool = True
    media: tuple[str, ...] = (JSON,)  # what the answer may be, for OpenAPI; a session may be EVENTS, too
    error: Callable[[ApiError], dict[str, Any]] = ApiError.body  # the shape of errors
    both: bool = False  # OpenAI's and Anthropic's APIs have it: the client's header tells which shape is expected
    # Takes a body that is no JSON, of this Content-Type, while it comes; what it makes of it is `Call.request`.
    receive: Callable[[Call, str], Upload] | None = None

    @property
    def about(self) -> str:
        """The endpoint's description, a sentence."""
        return " ".join((inspect.getdoc(self.prepare) or "").split("\n\n")[0].split())

    def pattern(self, path: str) -> str:
        """A regular expression for a path of it."""

        def group(part: re.Match[str]) -> str:
            return f"(?P<{part[1]}>{'.+' if part[1] == 'model' else '[^/]+'})"  # names of models may have slashes

        return PART.sub(group, re.sub(r"[.+*]", r"\\\g<0>", path))


@functools.cache
def routes() -> tuple[Route, ...]:
    """All endpoints, by their families' names."""
    found: list[Route] = []
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if FAMILY.search(path.read_text(encoding="utf-8")):
            found += importlib.import_module(f".{path.stem}", __package__).ROUTES
    return tuple(found)


@functools.cache
def paths() -> dict[str, dict[str, Route]]:
    """The routes of each path by their methods; the narrower paths come first."""
    found: dict[str, dict[str, Route]] = {}
    for route in routes():
        for path in (route.path, *route.also):
            found.setdefault(path, {})[route.method] = route
    return dict(sorted(found.items(), key=lambda one: ("{" in one[0], -one[0].count("/"))))


@functools.cache
def batchable() -> dict[str, Route]:
    """Routes that a batch file may name."""
    return {route.path: route for route in routes() if route.batchable}
