"""A JSON schema taken apart, for formats that do not write arguments as JSON.

References, allOf, anyOf and oneOf become a list of plain schemas, of which a value has to fit one.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .schema_values import TYPES, kinds_of

Schema = dict[str, Any]
GRAMMAR = "x-phalanx-grammar"  # of a text, in Lark: what custom tools bring, and no client's schema
MAX_ALTERNATIVES = 64  # alternatives of a value
DEEPEST = 32  # references and alternatives within each other
STEPS = 20_000  # keywords and items that are looked at for one value: about a tenth of a second
# They do not constrain values.
ANNOTATIONS = frozenset(
    "title description default examples example deprecated readOnly writeOnly nullable contentEncoding "
    "contentMediaType $schema $id $anchor $comment $defs definitions x-guidance".split()
)
LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")  # the larger of two holds
SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


class Unwritable(ValueError):
    """A schema's demand that a format cannot be held to, as a message."""


def resolve(root: Mapping[str, Any], ref: str) -> Any:
    """The schema that a reference stands for."""
    if not ref.startswith("#"):
        raise Unwritable(f"$ref {ref!r} leads out of the schema")
    found: Any = root
    for step in filter(None, ref[1:].split("/")):
        key = step.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, TypeError, ValueError):
            raise Unwritable(f"$ref {ref!r} leads nowhere") from None
    return found


class _Steps:
    """Ends what would take too long."""

    def __init__(self) -> None:
        self._left = STEPS

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise Unwritable("the schema has too many references and alternatives within each other")


def alternatives(schema: Any, root: Mapping[str, Any]) -> list[Schema]:
    """Plain schemas, one of which a value fits. Raises Unwritable."""
    return _alternatives(schema, root, 0, _Steps())


def _alternatives(schema: Any, root: Mapping[str, Any], depth: int, steps: _Steps) -> list[Schema]:
    if schema is False:
        return []
    if not isinstance(schema, Mapping):
        return [{}]
    if depth > DEEPEST:
        raise Unwritable("the schema refers to itself without end")
    steps.take(1 + len(schema))
    own = {k: v for k, v in schema.items() if k not in ANNOTATIONS and k not in ("$ref", "allOf", "anyOf", "oneOf")}
    if "const" in own:
        own["enum"] = [own.pop("const")]
    found = [own]
    groups = [[schema["$ref"] and resolve(root, schema["$ref"])]] if isinstance(schema.get("$ref"), str) else []
    groups += [[one] for one in schema.get("allOf") or ()]
    groups += [list(schema[name]) for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    for group in groups:
        others = [plain for one in group for plain in _alternatives(one, root, depth + 1, steps)]
        if len(found) * len(others) > MAX_ALTERNATIVES:
            raise Unwritable(f"the schema has more than {MAX_ALTERNATIVES} alternatives")
        found = [both for one in found for other in others if (both := _both(one, other, steps)) is not None]
    return found


def _both(one: Schema, other: Schema, steps: _Steps) -> Schema | None:
    """The schema of what fits both; None where nothing does."""
    steps.take(1 + len(one) + len(other))
    if not one or not other:
        return {**one, **other}
    found: dict[str, Any] = dict(one)
    for key, value in other.items():
        mine: Any = found.get(key, value)
        if key in found and isinstance(value, list | dict) and isinstance(mine, list | dict):
            steps.take(len(mine) + len(value) + (len(mine) * len(value) // 16 if key == "enum" else 0))
        if key not in found or mine == value:
            found[key] = value
        elif key == "type":
            kinds = kinds_of(mine) & kinds_of(value)
            if not kinds:
                return None
            found[key] = sorted(kinds)
        elif key == "enum":
            found[key] = [item for item in mine if item in value]
        elif key == "properties":
            shared = {name: {"allOf": [mine[name], schema]} for name, schema in value.items() if name in mine}
            found[key] = {**mine, **value, **shared}
        elif key == "required":
            found[key] = list(dict.fromkeys([*mine, *value]))
        elif key in LARGER:
            found[key] = max(mine, value)
        elif key in SMALLER:
            found[key] = min(mine, value)
        elif key == "additionalProperties" and False in (mine, value):
            found[key] = False
        else:
            raise Unwritable(f"{key} is given twice, by allOf or a reference")
    return found


def plain_types(plain: Schema) -> frozenset[str]:
    """The types that a plain schema allows."""
    kinds = kinds_of(plain["type"]) if "type" in plain else frozenset(TYPES)
    values = plain.get("enum")
    return kinds if values is None else kinds & frozenset().union(*map(_types_of_value, values))


def enumerated(plain: Schema) -> list[Any] | None:
    """The values that it names, less those of other types; None where it names none."""
    kinds = plain_types(plain)
    values = plain.get("enum")
    return None if values is None else [value for value in values if _types_of_value(value) & kinds]


def _types_of_value(value: Any) -> frozenset[str]:
    return frozenset(name for name, kinds in TYPES.items() if type(value) in kinds)


class Parameters:
    """An object's members, as far as its schemas tell how to read them. Strange schemas allow everything."""

    def __init__(self, *schemas: Any, root: Mapping[str, Any] | None = None):
        """schemas: of which the object may fit any; none: nothing is known of it. root: what references refer to; the
        first schema unless given."""
        self._root = root if root is not None else schemas[0] if schemas else {}
        self._shapes: list[Schema] = []
        steps = _Steps()
        for one in {id(one): one for one in schemas}.values():  # a schema that refers to itself comes again and again
            try:
                self._shapes += _alternatives(one, self._root, 0, steps)
            except (Unwritable, TypeError, AttributeError):
                self._shapes.append({"properties": _mapping(one).get("properties")})
        if len(self._shapes) > MAX_ALTERNATIVES:
            self._shapes = [{}]
        self._members: dict[str, Parameters] = {}

    @functools.cached_property
    def own_types(self) -> frozenset[str]:
        """The JSON types of the value itself; all where the schema leaves it open."""
        return frozenset[str]().union(*map(_kinds, self._shapes)) or frozenset(TYPES)

    @property
    def names(self) -> list[str]:
        """In their order."""
        return list(dict.fromkeys(name for shape in self._shapes for name in _mapping(shape.get("properties"))))

    def member(self, name: str) -> Parameters:
        """The members of the argument of that name, if it is an object."""
        if name not in self._members:
            self._members[name] = self._inner(
                _mapping(shape.get("properties")).get(name, shape.get("additionalProperties"))
                for shape in self._shapes
                if "object" in _kinds(shape)
            )
        return self._members[name]

    @functools.cached_property
    def item(self) -> Parameters:
        """The members of an item, if this is a list."""
        return self._inner(shape.get("items") for shape in self._shapes if "array" in _kinds(shape))

    def _inner(self, schemas: Iterable[Any]) -> Parameters:
        return Parameters(*(one or {} for one in schemas), root=self._root)

    def types(self, name: str) -> frozenset[str]:
        """The JSON types of the argument of that name; all where the schema leaves it open."""
        return self.member(name).own_types


def _kinds(shape: Schema) -> frozenset[str]:
    """plain_types; all where `type` is none."""
    try:
        return plain_types(shape)
    except (TypeError, AttributeError):
        return frozenset(TYPES)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def standing_alone(schema: Schema, root: Mapping[str, Any]) -> Schema:
    """The schema standing alone: it contains what it refers to."""
    if "$ref" not in json.dumps(schema):
        return schema
    return {**_moved(schema), "$defs": {"root": _moved({k: v for k, v in root.items() if k != "x-guidance"})}}


def _moved(value: Any) -> Any:
    if isinstance(value, list):
        return [_moved(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: re.sub("^#", "#/$defs/root", one) if key == "$ref" and isinstance(one, str) else _moved(one)
        for key, one in value.items()
    }
