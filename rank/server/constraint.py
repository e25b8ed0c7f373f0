"""What a request wants its answer to be: a JSON schema, a regular expression, a choice or a grammar.

Each becomes a grammar of llguidance (https://github.com/guidance-ai/llguidance), which rank 0 compiles and enforces.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from .api_error import ApiError, bad
from .decoding import show

LARGEST_SCHEMA = 1 << 18  # bytes of its JSON
LARGEST_REGEX = 1 << 14  # characters
LARGEST_GRAMMAR = 1 << 17
MOST_TEXTS = 4096  # of a choice, LARGEST_GRAMMAR characters together
DEEPEST = 64  # brackets within brackets of a grammar or a regular expression
# Models that are led to write white space may never stop.
WHITE_SPACE = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}

Part = dict[str, Any]  # {"json_schema": …} or {"lark_grammar": …}: one of llguidance's grammars
UNREAD = "unread"  # instead, until `checked`: a grammar in a notation that is not known yet


class Constraint(NamedTuple):
    """What an answer must be."""

    field: str  # of the request, for errors
    part: Part


class StructuredOutputs(msgspec.Struct):
    """vLLM's field of that name; at most one of them is given."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None


def _bad(field: str, why: str) -> ApiError:
    """Of a field, or of "field: a part of it"."""
    return bad(field.partition(": ")[0], why)


def json_schema(field: str, schema: Any, lenient: bool = False) -> Constraint:
    """Of a schema as an object or as its text. lenient: keywords that cannot be enforced are passed over."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise _bad(field, f"{field} is no JSON schema: {error}") from None
    if not isinstance(schema, dict):
        raise _bad(field, f"{field} is {show(schema)}: expected a JSON schema, which is an object")
    size = len(msgspec.json.encode(schema))
    if size > LARGEST_SCHEMA:
        raise _bad(field, f"{field} has {size} bytes: at most {LARGEST_SCHEMA} are allowed in a JSON schema")
    given = schema.get("x-guidance")
    options = WHITE_SPACE | ({"lenient": True} if lenient else {}) | (given if isinstance(given, dict) else {})
    return Constraint(field, {"json_schema": {**schema, "x-guidance": options}})


def regex(field: str, pattern: str) -> Constraint:
    _check_size(field, pattern, LARGEST_REGEX, "a regular expression")
    from llguidance import LLMatcher

    return Constraint(field, json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0])


def choice(field: str, texts: Sequence[str]) -> Constraint:
    if not texts or not all(texts) or len(texts) > MOST_TEXTS:
        what = f"has {len(texts)} texts" if len(texts) > MOST_TEXTS else f"is {show(texts)}"
        raise _bad(field, f"{field} {what}: expected 1 to {MOST_TEXTS} texts, none of them empty")
    if (size := sum(map(len, texts))) > LARGEST_GRAMMAR:
        raise _bad(field, f"{field} has {size} characters: at most {LARGEST_GRAMMAR} are allowed")
    return Constraint(field, {"lark_grammar": f"start: TEXT\nTEXT: {' | '.join(map(json.dumps, texts))}"})


def grammar(field: str, text: str) -> Constraint:
    """Of a grammar in Lark's notation, as llguidance has it, or in llama.cpp's GBNF."""
    _check_size(field, text, LARGEST_GRAMMAR, "a grammar")
    return Constraint(field, {UNREAD: text})


def _read(field: str, text: str) -> Part:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return {"lark_grammar": any_to_lark(text)}
    except Exception as error:
        raise _bad(field, f"{field} is no grammar, in Lark's notation or in GBNF: {error}") from None


def _check_size(field: str, text: str, most: int, kind: str) -> None:
    if not text.strip():
        raise _bad(field, f"{field} is empty: give {kind}, or leave it out")
    if len(text) > most:
        raise _bad(field, f"{field} has {len(text)} characters: at most {most} are allowed in {kind}")
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > DEEPEST:
        raise _bad(field, f"{field} has {deepest} brackets within each other: at most {DEEPEST} are allowed in {kind}")


def checked(constraint: Constraint) -> Part:
    """For the grammar of an answer. May take long.

    Raises ApiError 400 where llguidance does not take it, in its words.
    """
    from llguidance import LLMatcher

    field, part = constraint
    if UNREAD in part:
        part = _read(field, part[UNREAD])
    wrong, why = LLMatcher.validate_grammar_with_warnings(json.dumps({"grammars": [part]}))
    if wrong:
        raise _bad(field, f"{field} cannot be enforced: {explain(why[0])}")
    return part


def explain(why: str) -> str:
    """llguidance's reason, where it is a keyword in our words."""
    lead = "Unimplemented keys: "
    if why.startswith(lead):
        return f"the JSON schema's {', '.join(json.loads(why[len(lead) :]))} is not supported, leave it out"
    return why.strip()


def need_llguidance() -> None:
    """Raises ApiError 501 where it is not installed."""
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise ApiError(501, "answers cannot be constrained here: llguidance is not installed beside Phalanx") from None


def response_format(field: str, form: dict[str, Any]) -> Constraint | None:
    """OpenAI's response_format; None for type text."""
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_schema(field, {"type": "object"})
    if kind != "json_schema":
        raise _bad(field, f"{field}.type is {show(kind)}: expected text, json_object or json_schema")
    inner = form.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if schema is None:
        raise bad(f"{field}.json_schema", f"{field}.json_schema is {show(inner)}: expected an object with a schema")
    return json_schema(f"{field}.json_schema.schema", schema)


def structured_outputs(given: StructuredOutputs) -> list[Constraint]:
    at = "structured_outputs"
    if given.structural_tag:
        raise bad(f"{at}.structural_tag", f"{at}.structural_tag is not supported: use grammar")
    found = guided(f"{at}.", given.json, given.regex, given.choice, given.grammar)
    if given.json_object:
        found.append(json_schema(f"{at}.json_object", {"type": "object"}))
    return found


def guided(
    prefix: str, schema: Any, pattern: str | None, texts: list[str] | None, text: str | None
) -> list[Constraint]:
    """vLLM's four kinds, as far as they are given."""
    found = []
    if schema is not None and schema != "":
        found.append(json_schema(f"{prefix}json", schema))
    if pattern:
        found.append(regex(f"{prefix}regex", pattern))
    if texts:
        found.append(choice(f"{prefix}choice", texts))
    if text:
        found.append(grammar(f"{prefix}grammar", text))
    return found
