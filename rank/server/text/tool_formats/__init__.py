"""How models write tool calls: one file per format, found by its name. Each has a FORMAT."""

from __future__ import annotations

import importlib
import pkgutil
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..argument_schema import Schema, Unwritable, standing_alone
from ..events import Event
from ..lark import Lark

Tools = Mapping[str, Mapping[str, Any]]  # the functions that the model was offered, with their parameters' JSON schemas


class ToolCallParser(Protocol):
    """Reads what follows an opening marker, as it comes.

    Its events are those of calls, and Text for what turned out to be no call; their order is the text's.
    """

    def feed(self, text: str) -> tuple[list[Event], str | None]:
        """Events, and what follows the calls once they have ended: an end of all text so far."""

    def finish(self) -> list[Event]:
        """No more text comes."""


class CallableTool:
    """A tool, for the grammar of its calls."""

    def __init__(self, lark: Lark, name: str, part: dict[str, Any], strict: bool):
        """part: the grammar of its arguments as JSON. strict: what cannot be enforced is refused."""
        whole = part["json_schema"]
        self.name = name
        self.schema: dict[str, Any] = {key: value for key, value in whole.items() if key != "x-guidance"}
        self.strict = strict
        self._lark = lark
        self._options = whole["x-guidance"]

    @property
    def arguments(self) -> str:
        """The expression of its arguments as JSON."""
        return self.json(self.schema)

    def json(self, schema: Any, **options: Any) -> str:
        """The expression of a value that fits a part of its schema, as JSON."""
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        alone = schema if schema is self.schema else standing_alone(schema, self.schema)
        part = {**alone, "x-guidance": {**self._options, **options}}
        return self._lark.part({"json_schema": part})

    def properties(self, shape: Schema) -> tuple[dict[str, Any], Collection[str]]:
        """The schemas of an object's properties, and the names of those that are required."""
        known, required = shape.get("properties") or {}, shape.get("required") or ()
        rest = shape.get("additionalProperties", {})
        self.check(shape, ("type", "properties", "required", "additionalProperties"))
        return {**known, **{name: rest for name in required if name not in known}}, required

    def members(
        self, properties: Mapping[str, Any], required: Collection[str], write: Callable[[str, Any], str]
    ) -> list[tuple[str, bool]]:
        """`write` of each property's name and schema, and whether it is required. One that cannot be written
        is left out where it may be; else raises Unwritable."""
        found = []
        for name, schema in properties.items():
            try:
                found.append((write(name, schema), name in required))
            except Unwritable:
                if name in required or (self.strict and schema is not False):
                    raise
        return found

    def check(self, plain: Schema, known: Collection[str]) -> None:
        """Raises Unwritable for keywords that a strict tool's format cannot be held to."""
        if self.strict and (unknown := [key for key in plain if key not in known]):
            raise Unwritable(f"{', '.join(unknown)} cannot be enforced in this model's calls")


class ToolCallFormat(NamedTuple):
    """One way to write tool calls."""

    matches: Callable[[str], bool]  # whether a chat template teaches this format; no two formats match one template
    opens: tuple[str, ...]  # markers, each of which begins one call or several
    # Made of the marker that was met, the index of the next call and the tools.
    parser: Callable[[str, int, Tools], ToolCallParser]
    # One call or, where the bool is true, also several, as an expression: what follows a marker of `opens`, which is
    # the last argument; it is "" where calls are bare. Raises Unwritable for what calls cannot be held to.
    grammar: Callable[[Lark, Sequence[CallableTool], bool, str], str]
    markers: tuple[str, ...] = ()  # what else the parser looks for: it is shown to it even as a special token
    bare: str = ""  # a call may also be the answer's first text, beginning with one of these: its marker is ""
    models: tuple[str, ...] = ()  # model types that write so, whatever their template says
    unmarked: bool = False  # models also write one call in JSON as the whole answer, without the markers around it
    raw: bool = False  # texts are written as they are, so that a grammar of their own can hold them


def call_id() -> str:
    """An id for a tool call, as OpenAI's look."""
    return "call_" + uuid.uuid4().hex[:24]


def names() -> list[str]:
    """The formats that there is a file for."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> ToolCallFormat:
    return importlib.import_module(f".{name}", __name__).FORMAT


def choose(template: str, model_type: str = "") -> ToolCallFormat | None:
    """The format that a chat template teaches its model, else the one that such models write. None where neither is
    known, or the template takes no tools."""
    formats = [find(name) for name in names()]
    found = next((one for one in formats if one.matches(template)), None)
    if found is None and "tools" in template:
        found = next((one for one in formats if model_type in one.models), None)
    return found
