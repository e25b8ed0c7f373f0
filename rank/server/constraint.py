"""The constraint on an answer: a JSON schema, a regular expression, a choice or a grammar.

Each becomes a grammar of llguidance (https://github.com/guidance-ai/llguidance), which rank 0 compiles and enforces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from .api_error import ApiError, bad
from .decoding import show
from .text.argument_schema import Unwritable
from .text.enforceable_schema import enforceable, without_patterns

LARGEST_SCHEMA = 1 << 18  # bytes of its JSON
LARGEST_REGEX = 1 << 14  # characters
LARGEST_GRAMMAR = 1 << 17
MAX_TEXTS = 4096  # of a choice, LARGEST_GRAMMAR characters together
DEEPEST = 64  # brackets within brackets of a grammar or a regular expression
# At each gap, if any. Small models that may write more wander in it until max_tokens ends them.
WHITE_SPACE = r" |\n[ \t]{0,20}"

# llguidance's words about look-around, word boundaries and references back in a regular expression.
UNSUPPORTED = re.compile(r"look-around|lookarounds|backreferences")

Part = dict[str, Any]  # {"json_schema": …} or {"lark_grammar": …}: one of llguidance's grammars
UNREAD = "unread"  # instead, until `checked`: a grammar in a notation that is not known yet


class Constraint(NamedTuple):
    """A constraint on an answer."""

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
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


def _bad(field: str, why: str) -> ApiError:
    """Error location: a field, or "field: the part that is wrong"."""
    return bad(field.partition(": ")[0], why)


def json_schema(field: str, schema: Any, strict: bool = False, white_space: str = WHITE_SPACE) -> Constraint:
    """A schema as an object or as its text.

    strict: keywords that cannot be enforced are errors instead of being passed over. white_space: a regular expression
    of what may stand at a gap; "": nothing.
    """
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
    options = {"whitespace_pattern": white_space, "lenient": not strict} | (given if isinstance(given, dict) else {})
    return Constraint(field, {"json_schema": {**schema, "x-guidance": options}})


def regex(field: str, pattern: str) -> Constraint:
    _check_size(field, pattern, LARGEST_REGEX, "a regular expression")
    from llguidance import LLMatcher

    return Constraint(field, json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0])


def choice(field: str, texts: Sequence[str]) -> Constraint:
    if not texts or not all(texts) or len(texts) > MAX_TEXTS:
        what = f"has {len(texts)} texts" if len(texts) > MAX_TEXTS else f"is {show(texts)}"
        raise _bad(field, f"{field} {what}: expected 1 to {MAX_TEXTS} texts, none of them empty")
    if (size := sum(map(len, texts))) > LARGEST_GRAMMAR:
        raise _bad(field, f"{field} has {size} characters: at most {LARGEST_GRAMMAR} are allowed")
    return Constraint(field, {"lark_grammar": f"start: TEXT\nTEXT: {' | '.join(map(json.dumps, texts))}"})


def grammar(field: str, text: str) -> Constraint:
    """The constraint of a grammar in Lark's notation, as llguidance has it, or in llama.cpp's GBNF."""
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
    if (schema := part.get("json_schema")) is not None:
        options = schema["x-guidance"]
        try:
            bare = {key: value for key, value in schema.items() if key != "x-guidance"}
            written = enforceable(bare, bool(options["lenient"]))
        except Unwritable as error:
            raise _bad(field, f"{field} cannot be enforced: {error}") from None
        part = {"json_schema": {**written, "x-guidance": options}}
    wrong, why = LLMatcher.validate_grammar_with_warnings(json.dumps({"grammars": [part]}))
    if wrong and schema is not None and options["lenient"] and UNSUPPORTED.search(why[0]):
        part = {"json_schema": {**without_patterns(written, _cannot_be_enforced), "x-guidance": options}}
        wrong, why = LLMatcher.validate_grammar_with_warnings(json.dumps({"grammars": [part]}))
    if wrong:
        raise _bad(field, f"{field} cannot be enforced: {explain(why[0])}")
    return part


def _cannot_be_enforced(pattern: str) -> bool:
    """Whether a regular expression is right, as far as that can be known, and has what llguidance does not compute."""
    from llguidance import LLMatcher

    grammar = {"json_schema": {"type": "string", "pattern": pattern}}
    wrong, why = LLMatcher.validate_grammar_with_warnings(json.dumps({"grammars": [grammar]}))
    return wrong and UNSUPPORTED.search(why[0]) is not None


def explain(why: str) -> str:
    """llguidance's reason, where it is a keyword in our words."""
    lead = "Unimplemented keys: "
    if why.startswith(lead):
        keys = json.loads(why[len(lead) :])
        rest = "is not supported, leave it out" if len(keys) == 1 else "are not supported, leave them out"
        return f"the JSON schema's {', '.join(keys)} {rest}"
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
    given = {name: form[name] for name in ("schema", "json_schema") if form.get(name) is not None}
    if kind == "text":
        if given:
            raise _bad(field, f"{field} has a schema, but its type is text: expected json_schema")
        return None
    if kind not in ("json_object", "json_schema"):
        raise _bad(field, f"{field}.type is {show(kind)}: expected text, json_object or json_schema")
    if "schema" in given:  # as llama.cpp has it, for both types
        return json_schema(f"{field}.schema", given["schema"], strict=form.get("strict") is True)
    if kind == "json_object" and not given:
        return json_schema(field, {"type": "object"})
    inner = form.get("json_schema")
    if not isinstance(inner, dict) or (schema := inner.get("schema")) is None:
        raise bad(f"{field}.json_schema", f"{field}.json_schema is {show(inner)}: expected an object with a schema")
    return json_schema(f"{field}.json_schema.schema", schema, strict=inner.get("strict") is True)


def structured_outputs(given: StructuredOutputs) -> list[Constraint]:
    """vLLM's field."""
    at = "structured_outputs"
    if given.structural_tag is not None:
        raise bad(f"{at}.structural_tag", f"{at}.structural_tag is not supported: use grammar")
    if given.disable_additional_properties:
        name = f"{at}.disable_additional_properties"
        raise bad(name, f"{name} is not supported: write additionalProperties false into the schema")
    kinds = given.json, given.regex, given.choice, given.grammar
    dense = bool(given.disable_any_whitespace)
    return guided(f"{at}.", *kinds, given.whitespace_pattern, bool(given.json_object), dense)


def guided(
    prefix: str,
    schema: Any,
    pattern: str | None,
    texts: list[str] | None,
    text: str | None,
    white_space: str | None,
    any_object: bool = False,
    dense: bool = False,
) -> list[Constraint]:
    """vLLM's kinds, as far as they are given. dense: JSON without white space."""
    field = f"{prefix}whitespace_pattern"
    if (white_space is not None or dense) and schema is None and not any_object:
        name = field if white_space is not None else f"{prefix}disable_any_whitespace"
        raise bad(name, f"{name} is for JSON: give a schema beside it ({prefix}json), or leave it out")
    if white_space:
        _check_size(field, white_space, LARGEST_REGEX, "a regular expression")
    space = "" if dense else WHITE_SPACE if white_space is None else white_space
    found = []
    if schema is not None:
        found.append(json_schema(f"{prefix}json", schema, white_space=space))
    if any_object:
        found.append(json_schema(f"{prefix}json_object", {"type": "object"}, white_space=space))
    if pattern is not None:
        found.append(regex(f"{prefix}regex", pattern))
    if texts is not None:
        found.append(choice(f"{prefix}choice", texts))
    if text is not None:
        found.append(grammar(f"{prefix}grammar", text))
    return found
