"""Formats with a tag for each argument: the tools' schemas say what a value is."""

import copy
import json

import pytest
from phalanx.rank.server.text.argument_schema import Parameters, Unwritable, alternatives
from phalanx.rank.server.text.events import ToolCallArguments
from phalanx.rank.server.text.output_parser import OutputParser
from phalanx.rank.server.text.schema_values import TYPES
from phalanx.rank.server.text.tool_formats import find

from .parsing import check, parse
from .written import MINIMAX

pytestmark = pytest.mark.timeout(60)
SCHEMA = {
    "$defs": {"color": {"type": "string"}},
    "properties": {
        "color": {"$ref": "#/$defs/color"},
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "one_of": {"enum": ["1", "2"]},
    },
}
TOOLS = {"f": SCHEMA}
VALUES = [
    ("text", "5", '"5"'),
    ("text", '{"a": "b"}', '"{\\"a\\": \\"b\\"}"'),
    ("count", "5", "5"),
    ("count", "five", '"five"'),
    ("count", "5.5", '"5.5"'),
    ("ratio", "1e3", "1e3"),
    ("ratio", "NaN", '"NaN"'),
    ("flag", "true", "true"),
    ("flag", "True", "true"),
    ("flag", "1", '"1"'),
    ("items", '["a", 1]', '["a", 1]'),
    ("items", "['a', None]", '["a", null]'),
    ("items", "[" * 10_000, json.dumps("[" * 10_000)),
    ("maybe", "null", "null"),
    ("maybe", "nothing", '"nothing"'),
    ("either", "7", "7"),
    ("either", "seven", '"seven"'),
    ("one_of", "1", '"1"'),
    ("items", '["a</parameter></arg_value>b"]', '["a</parameter></arg_value>b"]'),
    ("items", '["a", "b', '"[\\"a\\", \\"b"'),
    ("color", "5", '"5"'),
    ("either", "(5)", '"(5)"'),
    ("maybe", "# no\nNone", '"# no\\nNone"'),
    ("unknown", "7", "7"),
    ("unknown", "seven\nor é", '"seven\\nor é"'),
]


def text(words):
    return ("text", words)


def call(name, arguments):
    return ("call", name, arguments)


def qwen(name, *arguments):
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


def chained(keyword, last):
    """Each schema has two references to the next one, so that there are 2**15 ways to the last."""
    links = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(15)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, "a15": last}}


def crossed(number):
    """Two objects of many properties, by turns."""
    objects = {name: {"properties": {f"p{i}": {"maxLength": ord(name)} for i in range(number)}} for name in "ab"}
    return {"$defs": objects, "allOf": [{"$ref": f"#/$defs/{'ab'[i % 2]}"} for i in range(number)]}


@pytest.mark.parametrize(
    "schema",
    [
        chained("allOf", {"type": "string"}),
        chained("anyOf", False),
        crossed(500),
        {"allOf": [{"enum": [*range(700)]}, {"enum": [*range(1, 700)]}]},
    ],
    ids=["allOf", "anyOf", "properties", "values"],
)
def test_schemas_that_would_hold_up_the_server(schema):
    with pytest.raises(Unwritable, match="alternatives"):
        alternatives(schema, schema)
    assert Parameters(schema).types("p1") == frozenset(TYPES)  # they allow everything


def test_large_schemas_that_are_simple():
    large = {"properties": {f"p{i}": {"enum": [*range(700)]} for i in range(700)}, "allOf": [{"required": ["p1"]}]}
    assert alternatives(large, large)[0]["required"] == ["p1"] and len(Parameters(large).names) == 700


@pytest.mark.parametrize(("key", "value", "expected"), VALUES, ids=range(len(VALUES)))
def test_types(key, value, expected):
    json.loads(expected)
    glm = f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    for name, written in (("qwen3_coder", qwen("f", (key, value))), ("glm45", glm)):
        for pieces in ([written], list(written)):
            found, _ = parse(pieces, tool_format=find(name), tools=TOOLS)
            assert found == [call("f", f'{{"{key}": {expected}}}')]


def test_schemas_that_allow_nothing_are_read_as_if_they_did_not_say():
    for schema in ({"anyOf": []}, {"allOf": [{"type": "string"}, {"type": "object"}]}):
        whole = {"type": "object", **schema}
        assert (
            Parameters(whole).types("a") == Parameters({"properties": {"a": whole}}).member("a").types("b") == {*TYPES}
        )


def test_members_of_what_may_also_be_null():
    inner = {"type": "object", "properties": {"zip": {"type": "string"}}}
    schema = {"properties": {"a": {"anyOf": [inner, {"type": "null"}]}, "b": {"anyOf": [
        {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}}}  # fmt: skip
    assert Parameters(schema).member("a").types("zip") == Parameters(schema).member("b").item.own_types == {"string"}


def test_a_schema_that_refers_to_itself_does_not_grow():
    """An expression with operators, each with two expressions: as deep as a model writes it."""
    parts = {"left": {"$ref": "#/$defs/e"}, "right": {"$ref": "#/$defs/e"}}
    ways = [{"type": "object", "properties": {"op": {"const": op}, **copy.deepcopy(parts)}} for op in "+-*/%"]
    merged = [{"allOf": [{"properties": parts}, one]} for one in ways]
    for each in (ways, merged):
        schema = {"properties": {"e": {"$ref": "#/$defs/e"}}, "$defs": {"e": {"anyOf": [{"type": "number"}, *each]}}}
        found = Parameters(schema).member("e")
        for _ in range(40):
            found = found.member("left")
        assert {"number", "object"} <= found.own_types


def test_schemas_that_do_not_say():
    for schema in (None, {}, True, {"type": 5}, {"type": [1]}, {"anyOf": "x"}, {"$ref": "#/no"}, {"$ref": "#"}):
        assert Parameters({"properties": {"a": schema}}).types("a") == frozenset(TYPES)
    check(
        qwen("g", ("k", "5")), [call("g", '{"k": 5}')], tool_format=find("qwen3_coder"), tools={"g": {"properties": 1}}
    )


CASES = [
    ("no arguments", qwen("f"), [call("f", "{}")]),
    ("text around", f"So:\n{qwen('f')}\n{qwen('f')}\nDone", [text("So:"), *[call("f", "{}")] * 2, text("\nDone")]),
    ("newlines are the value's", qwen("f", ("text", "\n a\n\n")), [call("f", '{"text": "\\n a\\n\\n"}')]),
    ("an empty value", "<tool_call><function=f><parameter=text>\n</parameter></function></tool_call>",
     [call("f", '{"text": ""}')]),
    ("two values", qwen("f", ("text", "a"), ("count", 5)), [call("f", '{"text": "a", "count": 5}')]),
    ("without its marker", "<function=f><parameter=text>a</parameter></function></tool_call>.",
     [call("f", '{"text": "a"}'), text(".")]),
    ("cut off in a value", qwen("f", ("text", "ab")).partition("\n</p")[0], [call("f", '{"text": "ab')]),
    ("cut off behind a value", qwen("f", ("text", "ab"))[:-25], [call("f", '{"text": "ab"}')]),
    ("cut off in the head", "a <tool_call>\n<function=", [text("a <tool_call>\n<function=")]),
    ("no call", "<tool_call> is a <function=>", [text("<tool_call> is a <function=>")]),
    ("the end of the function is missing", qwen("f", ("count", 1)).replace("</function>\n", ""),
     [call("f", '{"count": 1}')]),
    ("text in a call", "<tool_call>\n<function=f>\nor so</function>", [call("f", "{}"), text("or so</function>")]),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_qwen3_coder(case):
    check(*case[1:], tool_format=find("qwen3_coder"), tools=TOOLS)


def test_glm_forgets_the_end():
    call_ = "<tool_call>f\n<arg_key>count</arg_key><arg_value>1</arg_value>\n"
    check(call_ + call_, [call("f", '{"count": 1}')] * 2, tool_format=find("glm45"), tools=TOOLS)
    check("<tool_call>What?", [text("<tool_call>What?")], tool_format=find("glm45"))


# A format's arguments and the ends of its call and of all calls, each with what a model writes before it.
WRITTEN = {
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n", "</tool_call>"
    ),
    "seed": (
        "<seed:tool_call>\n<function=f>\n", "<parameter={}>{}</parameter>\n", "</function>\n", "</seed:tool_call>"
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n',
        '<｜DSML｜parameter name="{}" string="false">{}</｜DSML｜parameter>\n',
        "</｜DSML｜invoke>\n",
        "</｜DSML｜function_calls>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n',
        '<parameter name="{}">{}</parameter>\n',
        "</invoke>\n",
        "</minimax:tool_call>",
    ),
    "glm45": ("<tool_call>f\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "", "</tool_call>"),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([("text", "ls -l")], '{"text": "ls -l"}'),
        ([("text", "a\n\nb <c> ")], '{"text": "a\\n\\nb <c> "}'),
        ([("count", "5")], '{"count": 5}'),
        ([("items", '["<x>", 1]')], '{"items": ["<x>", 1]}'),
        ([("text", "a"), ("color", "red")], '{"text": "a", "color": "red"}'),
        ([("count", "5"), ("text", "a"), ("items", "[1]")], '{"count": 5, "text": "a", "items": [1]}'),
    ],
    ids=str,
)
def test_closing_tags_that_a_model_forgets(name, arguments, expected):
    begin, argument, end, close = WRITTEN[name]
    closing = argument.rpartition("}")[2].lstrip("\n")
    closing = closing if name == "qwen3_coder" else closing.rstrip("\n")  # there it has a line of its own
    whole = [argument.format(*one) for one in arguments]
    for forgotten in range(len(whole) + 1):
        cut = [one.replace(closing, "") if forgotten in (i, len(whole)) else one for i, one in enumerate(whole)]
        for behind in (end + close, close, end):
            if behind and (behind != end or name != "glm45"):
                words = f"{begin}{''.join(cut)}{behind}"
                check(words, [call("f", expected)], tool_format=find(name), tools=TOOLS)


@pytest.mark.parametrize(
    "value", ["a</function>b", "a\n<parameter=text>\nb", "<parameter=no>", "</function> and", "<tool_call>"]
)
def test_a_text_that_speaks_of_how_calls_are_written(value):
    expected = [call("f", json.dumps({"text": value}))]
    check(qwen("f", ("text", value)), expected, tool_format=find("qwen3_coder"), tools=TOOLS)


def test_any_name_begins_an_argument_where_the_schema_has_none():
    words = "<tool_call><function=g><parameter=a>\n1\n<parameter=b>\nx\n</function></tool_call>."
    expected = [call("g", '{"a": 1, "b": "x"}'), text(".")]
    check(words, expected, tool_format=find("qwen3_coder"), tools={"g": {}})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("{a:<escape>x<end_function_call>", '{"a": "x"}'),
        ("{a:[<escape>x<escape>,{b:5<end_function_call>", '{"a": ["x", {"b": 5}]}'),
        ("{a:5<end_function_call>", '{"a": 5}'),
    ],
)
def test_gemma_forgets_the_end_of_a_text_or_of_a_bracket(words, expected):
    check(f"<start_function_call>call:f{words}.", [call("f", expected), text(".")], tool_format=find("gemma"))


def test_minimax_has_several_calls_between_its_markers():
    one = '<invoke name="f">\n<parameter name="count">1</parameter>\n</invoke>\n'
    block = f"<minimax:tool_call>\n{one}{one}</minimax:tool_call>"
    check(block + "\nb", [*[call("f", '{"count": 1}')] * 2, text("b")], tool_format=find("minimax_m2"), tools=TOOLS)


NESTED = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "points": {"type": "array", "items": {"$ref": "#/$defs/point"}},
            "options": {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
        },
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}, "label": {"type": "string"}}}},
    }
}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("<tags><item>5</item><item></item></tags>", '{"tags": ["5", ""]}'),
        ("<tags></tags><options></options>", '{"tags": [], "options": {}}'),
        ("<points><item><x>1.5</x><label>7</label></item></points>", '{"points": [{"x": 1.5, "label": "7"}]}'),
        ('<points>[{"x": 1}]</points>', '{"points": [{"x": 1}]}'),
        ("<options><a>5</a><b>null</b></options>", '{"options": {"a": 5, "b": null}}'),
        ("<other><item>5</item><item>x</item></other>", '{"other": [5, "x"]}'),
        ("<other><k>true</k></other>", '{"other": {"k": true}}'),
        ("<text>a<b>c</b></text>", '{"text": "aTOKEN<b>cTOKEN</b>"}'),
        ("<points><item><x>2</points>", '{"points": [{"x": 2}]}'),
        ("<text>a", '{"text": "a"}'),
        ("", "{}"),
    ],
)
def test_minimax_m3_writes_elements_within_each_other(words, expected):
    """The end of a call closes elements that are open. A tag within a text belongs to the text."""
    token = MINIMAX
    call_ = f'<tool_call>\n<invoke name="f">{words}</invoke>\n</tool_call>'.replace("<", f"{token}<")
    expected = expected.replace("TOKEN", token)
    check(f"{call_}.", [call("f", expected), text(".")], tool_format=find("minimax_m3"), tools=NESTED)


@pytest.mark.parametrize("text, expected", [("true", '"5"'), ("false", "5")])
def test_deepseek_says_which_values_are_texts(text, expected):
    """The schema leaves it open."""
    written = f'<｜DSML｜parameter name="a" string="{text}">5</｜DSML｜parameter>\n'
    words = (
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="g">\n{written}</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    )
    check(words, [call("g", f'{{"a": {expected}}}')], tool_format=find("deepseek_v32"), tools={"g": {}})


def test_texts_are_passed_on_as_they_come():
    parser, events = OutputParser(tool_format=find("qwen3_coder"), tools=TOOLS), []
    parser.feed('<tool_call>\n<function=f>\n<parameter=text>\nOnce "upon', events)
    assert events[-1] == ToolCallArguments(0, '{"text": "Once \\"upon')
    parser.feed("\n</par", events)
    assert events[-1].text.endswith("upon")  # what may be the value's end is held back
