"""Random JSON schemas of the kinds that JSONSchemaBench collects, of which llguidance knows every keyword."""

import random

NAMES = ["id", "name", "kind", "size", "on", "tags", "when", "at", "note", "größe"]
PATTERNS = ["^[a-z]{2,6}$", "^[A-Z][0-9]{3}$", "^(ab|cd)+$", "[0-9]", "^.{1,4}$"]
FORMATS = ["date", "ipv4", "uuid", "email", "time"]
VALUES = [None, True, False, 0, 7, -3, 1.5, "", "a b", 'say "x"', "ü", [1, 2], {"a": []}]


def random_schema(r: random.Random, depth: int = 3) -> dict:
    """The schema of an object, as most requests ask for."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "T"} | _object(r, depth)
    if r.random() < 0.3:
        schema["$defs"] = {"one": _object(r, 1)}
        schema["properties"]["ref"] = {"$ref": "#/$defs/one"}
    return schema


def _any(r: random.Random, depth: int) -> dict:
    kinds = [_string, _number, _number, _enum, _const, _simple]
    if depth > 0:
        kinds += [_object, _object, _array, _array, _any_of]
    return r.choice(kinds)(r, depth)


def _object(r: random.Random, depth: int) -> dict:
    names = r.sample(NAMES, r.randint(0, 4))
    schema = {"type": "object", "properties": {name: _any(r, depth - 1) for name in names}}
    if names and r.random() < 0.9:
        schema["required"] = r.sample(names, r.randint(1, len(names)))
    if r.random() < 0.7:
        schema["additionalProperties"] = False
    elif r.random() < 0.5:
        schema["additionalProperties"] = _simple(r, 0)
    if r.random() < 0.2:
        schema["description"] = "what it is"
    return schema


def _array(r: random.Random, depth: int) -> dict:
    schema = {"type": "array", "items": _any(r, depth - 1)}
    if r.random() < 0.3:
        schema["prefixItems"] = [_any(r, depth - 1) for _ in range(r.randint(1, 2))]
    low = r.randint(0, 2)
    if r.random() < 0.5:
        schema["minItems"] = low
    if r.random() < 0.7:
        schema["maxItems"] = low + r.randint(0, 2)
    return schema


def _string(r: random.Random, depth: int) -> dict:
    kind = r.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": r.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": r.choice(FORMATS)}
    low = r.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + r.randint(0, 6)}


def _number(r: random.Random, depth: int) -> dict:
    schema = {"type": r.choice(["integer", "number"])}
    low = r.randint(-50, 50)
    if r.random() < 0.5:
        schema[r.choice(["minimum", "exclusiveMinimum"])] = low
    if r.random() < 0.5:
        schema[r.choice(["maximum", "exclusiveMaximum"])] = low + r.randint(2, 1000)
    if schema["type"] == "integer" and len(schema) == 1 and r.random() < 0.3:
        schema["multipleOf"] = r.choice([2, 5])
    return schema


def _enum(r: random.Random, depth: int) -> dict:
    return {"enum": r.sample(VALUES, r.randint(1, 4))}


def _const(r: random.Random, depth: int) -> dict:
    return {"const": r.choice(VALUES)}


def _simple(r: random.Random, depth: int) -> dict:
    return r.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {"type": "integer"}])


def _any_of(r: random.Random, depth: int) -> dict:
    return {"anyOf": [_any(r, depth - 1) for _ in range(r.randint(2, 3))]}
