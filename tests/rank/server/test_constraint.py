"""JSON schemas, expressions and choices: what of them is enforced, what is passed over, and what is refused."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.constraint import StructuredOutputs, checked, json_schema, response_format, structured_outputs
from phalanx.rank.server.text.enforceable_schema import enforceable

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a"],
    "additionalProperties": False,
}
ANNOTATED = [
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"type": "string", "format": "password"},
    {"type": "integer", "not": {"const": 3}},
    {"type": "integer", "if": {"minimum": 3}, "then": {"multipleOf": 2}},
    {"type": "integer", "x-unit": "m", "readOnly": True},
    {"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}},
]
EXACT = 1 << 53


def takes(constraint, words):
    """Whether the constraint's grammar takes a text: "all", "beginning" or "no"."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, json.dumps({"grammars": [checked(constraint)]}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(words.encode())
    if matcher.try_consume_tokens(tokens) < len(tokens):
        return "no"
    return "all" if matcher.is_accepting() else "beginning"


def refused(constraint):
    with pytest.raises(ApiError) as error:
        checked(constraint)
    assert error.value.status == 400
    return error.value


@pytest.mark.parametrize(
    "words", ['{"a":1}', '{ "a" : 1 }', '{\n  "a": 1,\n  "b": [\n    1,\n    2\n  ]\n}', '{\n\t"a": 1}']
)
def test_white_space_as_json_is_written(words):
    assert takes(json_schema("x", OBJECT), words) == "all"


@pytest.mark.parametrize(
    "words", ['{  "a"', '{\n\n"a"', "{\n" + " " * 21, '{ \n"a"', '{\r"a"', '{"a":\t1', " {", "\n{"]
)
def test_white_space_without_end(words):
    assert takes(json_schema("x", OBJECT), words) == "no"


def test_white_space_that_the_client_asks_for():
    def constraint(**fields):
        (found,) = structured_outputs(StructuredOutputs(**fields))
        return found

    wide, narrow = (
        constraint(json=OBJECT, whitespace_pattern=r"[ ]{0,5}"),
        constraint(json=OBJECT, whitespace_pattern=""),
    )
    dense = constraint(json_object=True, disable_any_whitespace=True)
    assert takes(wide, '{     "a": 1}') == "all" and takes(wide, '{\n"a": 1}') == "no"
    assert takes(narrow, '{"a":1}') == takes(dense, '{"a":1}') == "all"
    assert takes(narrow, '{"a": 1}') == takes(dense, '{"a": 1}') == "no"
    assert refused(constraint(json=OBJECT, whitespace_pattern="(")).param == "structured_outputs.json"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("time", "12:00:00.{}Z"),
        ("time", "12:00:00.{}+01:00"),
        ("date-time", "2026-01-31T12:00:00.{}Z"),
        ("date-time", "2026-01-31T12:00:00.{}-11:30"),
        ("duration", "P{}D"),
        ("email", "{}@example.com"),
        ("email", "a@b.{}"),
        ("hostname", "{}.example.com"),
        ("uri", "http://a/{}"),
    ],
)
@pytest.mark.parametrize("within", [False, True])
def test_texts_of_formats_have_an_end(form, text, within):
    schema = {"type": "string", "format": form}
    if within:  # of what a reference leads to
        schema = {
            "$defs": {"format": schema},
            "properties": {"format": {"$ref": "#/$defs/format"}},
            "required": ["format"],
        }
    for digits, wanted in ((1, "all"), (9, "all"), (4000, "no")):
        value = text.format("1" * digits)
        words = json.dumps({"format": value} if within else value)
        assert takes(json_schema("x", schema), words) == wanted, words[:80]


def test_lengths_of_texts_of_formats():
    def length(**limits):
        return checked(json_schema("x", {"type": "string", "format": "uri", **limits}))["json_schema"].get("maxLength")

    assert (length(), length(maxLength=10), length(maxLength=9999)) == (2048, 10, 2048)
    longer = enforceable({"type": "string", "format": "email", "minLength": 300}, True)
    assert "maxLength" not in longer


@pytest.mark.parametrize("schema, words, wanted", [
    ({"type": "integer"}, "9223372036854774784", "all"),
    ({"type": "integer"}, "-9" + 17 * "0", "all"),
    ({"type": "integer"}, 25 * "1", "no"),
    ({"type": "integer", "minimum": 0}, 25 * "1", "no"),
    ({"type": ["integer", "null"], "exclusiveMaximum": 7}, "-" + 25 * "1", "no"),
    ({"type": "integer", "multipleOf": 5}, 25 * "5", "no"),
    ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, 25 * "1", "no"),
    ({"type": "number", "minimum": 0}, 18 * "9", "all"),
    ({"type": "number", "minimum": 0}, 25 * "1", "no"),
    ({"type": "number", "minimum": 0}, "0." + 10 * "3", "all"),
    ({"type": "number", "minimum": 0}, "0." + 11 * "3", "no"),
    ({"type": "number", "exclusiveMinimum": -1, "maximum": 1}, "-0.5", "all"),
    ({"type": "number", "exclusiveMinimum": -1, "maximum": 1}, "0." + 11 * "3", "no"),
    ({"type": "number", "minimum": 0, "maximum": 1e-12}, "0." + 12 * "0" + "1", "all"),  # more places than are given
    ({"type": "number", "minimum": 0, "multipleOf": 0.5}, "7.5", "all"),
    ({"type": "number", "minimum": 0, "allOf": [{"multipleOf": 0.5}]}, "7.5", "all"),
    ({"type": "number", "minimum": 0, "enum": [0.25]}, "0.25", "all"),
    ({"type": "number"}, "6.62607015e-34", "all"),
    ({"type": ["integer", "number"]}, "1e30", "all"),
])  # fmt: skip
@pytest.mark.parametrize("strict", [False, True])
def test_numbers_have_an_end(schema, words, wanted, strict):
    assert takes(json_schema("x", schema, strict), words) == wanted
    inside = {"type": "object", "properties": {"type": schema}, "required": ["type"]}  # a name that is a keyword
    assert takes(json_schema("x", inside, strict), '{"type": %s}' % words) == wanted  # noqa: UP031


@pytest.mark.parametrize("value", [12345678901234567890, EXACT + 1, -EXACT - 1, 1 << 63])
@pytest.mark.parametrize("strict", [False, True])
def test_integers_that_would_be_changed_are_refused(value, strict):
    for schema in (
        {"const": value},
        {"enum": [1, value]},
        {"enum": [{"a": [value]}]},
        {"type": "integer", "minimum": value},
        {"type": "integer", "exclusiveMaximum": value},
        {"type": "integer", "multipleOf": value},
    ):
        bound = next(iter(schema)) == "type"
        if bound and not strict and value == 1 << 63:  # the end of a type, which generated schemas have everywhere
            continue
        for one in (schema, {"properties": {"a": {"anyOf": [{"type": "null"}, schema]}}}):
            error = refused(json_schema("x", one, strict))
            assert str(value)[:19] in error.message and error.param == "x"


def test_integers_that_are_exact_are_taken():
    for value in (EXACT, -EXACT, EXACT - 1):
        assert takes(json_schema("x", {"const": value}, True), str(value)) == "all"
        assert takes(json_schema("x", {"const": value}, True), str(value - 1)) == "no"
    assert takes(json_schema("x", {"type": "integer", "maximum": EXACT}, True), str(EXACT + 1)) == "no"
    ends = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
    assert takes(json_schema("x", ends), "1234567890123456789") == "all"
    assert refused(json_schema("x", ends, True)).param == "x"
    assert takes(json_schema("x", {"default": 1 << 63, "examples": [1 << 63], "type": "integer"}, True), "1") == "all"
    assert takes(json_schema("x", {"properties": {"minimum": {}, "const": {}}}, True), '{"minimum":99}') == "all"


@pytest.mark.parametrize("schema", ANNOTATED, ids=lambda schema: [*schema][-1])
def test_annotations_where_strict_is_not_asked(schema):
    for strict in ({}, {"strict": False}, {"strict": None}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **strict}}
        assert checked(response_format("response_format", form))["json_schema"]
    (guided,) = structured_outputs(StructuredOutputs(json=schema))
    assert checked(guided)["json_schema"]
    form = {"type": "json_schema", "json_schema": {"schema": schema, "strict": True}}
    if "x-unit" not in schema:
        assert refused(response_format("response_format", form)).param == "response_format.json_schema.schema"


@pytest.mark.parametrize("pattern", ["^(?!a)b{1,3}$", r"\bfoo\b", r"(a)\1", "(?<=a)b"])
def test_patterns_that_cannot_be_enforced_where_strict_is_not_asked(pattern):
    schema = {
        "properties": {
            "a": {"anyOf": [{"type": "string", "pattern": pattern}, {"type": "null"}]},
            "b": {"type": "string", "pattern": "^x$"},
            "pattern": {"const": {"pattern": pattern}},
        },
    }
    lenient = json_schema("x", schema)
    assert takes(lenient, '{"a":"z","b":"x"}') == "all" and takes(lenient, '{"a":"z","b":"y"}') == "no"
    assert takes(lenient, json.dumps({"pattern": {"pattern": pattern}})) == "all"
    assert refused(json_schema("x", schema, True)).param == "x"
    wrong = {"anyOf": [{"type": "string", "pattern": "(("}, {"type": "string", "pattern": pattern}]}
    assert refused(json_schema("x", wrong)).param == "x"
    names = {"patternProperties": {pattern: {"const": 1}, "^b$": {"const": 2}}, "additionalProperties": False}
    lenient = json_schema("x", {"type": "object", **names})
    assert takes(lenient, '{"z":7,"b":2}') == "all" and takes(lenient, '{"b":3}') == "no"
    assert refused(json_schema("x", {"type": "object", **names}, True)).param == "x"
    assert refused(json_schema("x", {"type": "object", "patternProperties": {"((": {}, pattern: {}}})).param == "x"


def test_schemas_where_clients_put_them():
    assert takes(response_format("response_format", {"type": "json_object"}), '{"z": 1}') == "all"
    for form in (
        {"type": "json_object", "schema": OBJECT},  # llama.cpp
        {"type": "json_schema", "schema": OBJECT},
        {"type": "json_object", "json_schema": {"schema": OBJECT}},
        {"type": "json_schema", "json_schema": {"schema": OBJECT}, "schema": None},
    ):
        assert takes(response_format("response_format", form), '{"z": 1}') == "no"
        assert takes(response_format("response_format", form), '{"a": 1}') == "all"
    for form in ({"type": "text", "schema": OBJECT}, {"json_schema": {"schema": OBJECT}}):
        with pytest.raises(ApiError, match="its type is text"):
            response_format("response_format", form)
