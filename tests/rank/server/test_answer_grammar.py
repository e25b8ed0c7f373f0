"""The grammars of whole answers: thoughts, calls in every format, schemas; what they take and what they do not."""

import json
import random
from types import SimpleNamespace

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from phalanx.launcher.builtin_model import DIRECTORY
from phalanx.rank.scheduler.grammar import Grammars
from phalanx.rank.server.answer_grammar import Calls, Thoughts, answer_grammar
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.constraint import choice, json_schema, regex
from phalanx.rank.server.custom_tools import enforced
from phalanx.rank.server.text import raw_strings, reasoning
from phalanx.rank.server.text.load import Text
from phalanx.rank.server.text.tool_formats import find, names

from ..scheduler.schemas import random_schema
from ..scheduler.uniform import Uniform
from .text.parsing import parse

THINK, BRACKETS, GRANITE = map(reasoning.find, ("think", "mistral", "granite"))
VOCAB = 4040
CITY = {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
WEATHER = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": CITY, "required": ["city"], "additionalProperties": False},
}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
FORM = {
    "name": "form",
    "parameters": {
        "type": "object",
        "$defs": {
            "color": {"enum": ["red", "5", "true", 5, None]},
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v"],
                "additionalProperties": False,
            },
        },
        "properties": {
            "short": {"type": "string", "minLength": 1, "maxLength": 4},
            "code": {"type": "string", "pattern": "^[a-c]{2,3}$"},
            "maybe": {"type": ["string", "null"], "maxLength": 6},
            "limit": {"anyOf": [{"type": "integer", "minimum": 10, "maximum": 20}, {"type": "string", "maxLength": 5}]},
            "ratio": {"type": "number"},
            "color": {"$ref": "#/$defs/color"},
            "list": {"type": "array", "items": {"type": "string", "maxLength": 4}, "minItems": 1, "maxItems": 3},
            "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
            "node": {"$ref": "#/$defs/node"},
        },
        "required": ["short", "maybe", "limit", "color", "list"],
        "additionalProperties": False,
    },
}
ALL = [{"type": "function", "function": one} for one in (WEATHER, CLOCK, FORM)]
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]
STRICT = [{"type": "function", "function": {**one, "strict": True}} for one in (WEATHER, CLOCK)]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WRONG = CALL.replace("city", "town")
SCHEMAS = {one["name"]: one["parameters"] for one in (WEATHER, CLOCK, FORM)}


@pytest.fixture(scope="module")
def text():
    return Text(str(DIRECTORY))


@pytest.fixture(scope="module")
def tokenizer(text):
    vocabulary = text.vocabulary(VOCAB)
    return LLTokenizer(vocabulary.tokenizer, n_vocab=VOCAB, eos_token=list(vocabulary.ends))


@pytest.fixture(scope="module")
def grammars(text):
    made = Grammars()
    made.know(text.vocabulary(VOCAB))
    yield made
    made.close()


@pytest.fixture(scope="module")
def takes(text, tokenizer):
    """Whether a grammar takes a text: "all", "beginning" or "no"."""

    def look(grammar, words):
        matcher = LLMatcher(tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        tokens = text.tokenizer.encode(words, False)
        if matcher.try_consume_tokens(tokens) < len(tokens):
            return "no"
        return "all" if matcher.is_accepting() else "beginning"

    return look


def of_format(text, name):
    return SimpleNamespace(tool_format=find(name), tokenizer=text.tokenizer, reasoning=None)


def test_nothing_is_asked(text):
    assert answer_grammar(text, None, None, Thoughts(THINK, True)) == ""
    assert answer_grammar(text, None, Calls(TOOLS, False, True), None) == ""  # tools are neither strict nor required


@pytest.mark.parametrize(
    "thoughts",
    [None, Thoughts(THINK, True), Thoughts(THINK, False), Thoughts(BRACKETS, False), Thoughts(GRANITE, False)],
)
def test_the_constraint_begins_after_the_thoughts(text, takes, thoughts):
    grammar = answer_grammar(text, choice("x", ["yes", "no"]), None, thoughts)
    begun = thoughts is not None and thoughts.begun
    assert takes(grammar, "yes") == ("beginning" if begun else "all")
    if thoughts is None:
        assert takes(grammar, "<think>") == "no"
        return
    opens, closes = thoughts.format.opens[-1], thoughts.format.closes[-1]
    head = "" if begun else opens
    assert takes(grammar, f"{head}\nWell, yes. <b> {{\n") == "beginning"
    assert takes(grammar, f"{head}\nWell, yes.\n{closes}\n\nno") == "all"
    assert takes(grammar, f"{head}\nWell.{closes}yes") == "all"
    assert takes(grammar, f"{head}Well.{closes}maybe") == "no"
    for one in thoughts.format.closes:
        assert takes(grammar, f"{head}a{one}b{closes}yes") == "no"


def test_required_and_named_calls(text, takes):
    several = answer_grammar(text, None, Calls(TOOLS, True, True), None)
    one = answer_grammar(text, None, Calls(TOOLS, True, False), Thoughts(THINK, True))
    assert takes(several, CALL) == takes(several, f"{CALL}\n{CALL}") == "all"
    assert takes(several, WRONG) == takes(several, "Hello") == "no"
    assert takes(one, f"I see</think>\n{CALL}") == "all" and takes(one, f"I see</think>\n{CALL}\n{CALL}") == "no"
    named = answer_grammar(text, None, Calls(TOOLS[1:], True, False), None)
    assert takes(named, CALL) == "no"
    assert takes(named, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>') == "all"


def test_strict_tools_that_may_be_called(text, takes):
    grammar = answer_grammar(text, None, Calls(STRICT, False, True), Thoughts(THINK, False))
    for words in ("", "Hello { <b> you", f"Let me look.\n{CALL}", CALL, f"<think>hm</think>\n\nWell: {CALL}\n{CALL}"):
        assert takes(grammar, words) == "all", words
    for words in (WRONG, f"Let me look.\n{WRONG}", f"{CALL} and so on"):
        assert takes(grammar, words) == "no", words


def test_strict_tools_are_held_to_their_schemas_without_markers_too(text, takes):
    """The parser takes a whole answer that is such a call for one."""
    bare = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    for name in ("hermes", "granite", "jamba", "phi4"):
        grammar = answer_grammar(of_format(text, name), None, Calls(STRICT, False, True), Thoughts(THINK, False))
        for words in (bare, f"```json\n{bare}\n```", f"<think>Hm.</think>\n\n{bare}", bare.replace("name", "title")):
            assert takes(grammar, words) == "all", words
        for words in (bare.replace("city", "town"), f"```\n{bare.replace('Rome', 'Reykjavik')}", f"{bare} or so"):
            assert takes(grammar, words) == "no", words
        assert takes(grammar, '{"name": "Ada", "arguments": 5} is JSON') == "all"
        must = answer_grammar(of_format(text, name), None, Calls(STRICT, True, True), None)
        assert takes(must, bare) == "no"


def test_no_call_in_thoughts(text, takes):
    """One that nothing follows would be made as it is."""
    form, call = of_format(text, "mistral"), '[TOOL_CALLS][{"name": "clock", "arguments": {}}]'
    thoughts = f"<think>I might say {call.replace('{}', '5')}</think>"
    assert takes(answer_grammar(form, None, Calls(STRICT, False, True), Thoughts(THINK, False)), thoughts) == "no"
    must = answer_grammar(form, None, Calls(STRICT, True, True), Thoughts(THINK, False))
    assert takes(must, thoughts) == "beginning" and takes(must, f"{thoughts}\n{call}") == "all"


def test_a_schema_beside_tools(text, takes):
    grammar = answer_grammar(text, json_schema("x", {"type": "integer"}), Calls(TOOLS, False, True), None)
    assert takes(grammar, "12") == takes(grammar, CALL) == "all"
    assert takes(grammar, "Hello") == takes(grammar, WRONG) == "no"


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("required", [True, False])
def test_each_format_reads_the_calls_that_it_is_held_to(text, grammars, name, required):
    """No format is without a grammar, and what a model without sense writes by it are calls that fit the schemas."""
    form = of_format(text, name)
    grammar = answer_grammar(form, None, Calls(ALL if required else STRICT, required, True), None)
    closing = [i for i in range(text.tokenizer.size) if text.tokenizer.piece(i)[-1:] in (b'"', b"}", b"]", b">", b"\n")]
    one = Uniform(VOCAB, seed=len(name), eager=[*closing, *text.end_tokens], grammars=grammars)
    for i in range(12):
        one.add(str(i), [1], grammar, 150, stop_token_ids=text.end_tokens)
    one.run()
    calls = 0
    for i in range(12):
        if one.ends[str(i)].finish != "stop":
            continue
        words = b"".join(map(text.tokenizer.piece, one.tokens.get(str(i), []))).decode(errors="replace")
        for kind, *rest in parse([words], tool_format=form.tool_format, tools=SCHEMAS)[0]:
            if kind != "call":
                assert kind == "text" and not required, words
                continue
            calls += 1
            jsonschema.validate(json.loads(rest[1]), SCHEMAS[rest[0]])
    assert calls or not required


def test_a_tool_that_is_not_strict_may_have_keywords_that_cannot_be_enforced(text, takes):
    loose = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}
    grammar = answer_grammar(text, None, Calls([{"function": loose}], True, False), None)
    assert takes(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": [1, 1]}}\n</tool_call>') == "all"
    with pytest.raises(ApiError, match="parameters of f .*uniqueItems"):
        answer_grammar(text, None, Calls([{"function": {**loose, "strict": True}}], False, False), None)


def test_a_model_whose_calls_are_not_read(text):
    form = SimpleNamespace(tool_format=None, tokenizer=text.tokenizer, reasoning=None)
    with pytest.raises(ApiError, match='tool_choice "auto"') as error:
        answer_grammar(form, None, Calls(TOOLS, True, True), None)
    assert error.value.param == "tool_choice"
    with pytest.raises(ApiError, match="output's format"):
        answer_grammar(form, regex("x", "a"), Calls(TOOLS, False, True), None)
    assert answer_grammar(form, None, Calls(STRICT, False, True), None) == ""


QWEN = "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
SEED = "<seed:tool_call>\n<function=get_weather>\n<parameter=city>{}</parameter>\n</function>\n</seed:tool_call>"
GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">{}</parameter>\n</invoke>\n'
    "</minimax:tool_call>"
)
MINIMAX_M3 = "".join(
    f"]<]minimax[>[<{tag}"
    for tag in ("tool_call>\n", 'invoke name="get_weather">', "city>{}", "/city>", "/invoke>\n", "/tool_call>")
)
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">{}'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
DSML_V4 = DSML.replace("function_calls", "tool_calls")
GEMMA = "<start_function_call>call:get_weather{{city:<escape>{}<escape>}}<end_function_call>"
HARMONY = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{{"city": "{}"}}'
WRITTEN = [  # a call; whether another one may follow
    ("qwen3_coder", QWEN, "\n"),
    ("seed", SEED, None),
    ("glm45", GLM, "\n"),
    ("glm45", GLM.replace("\n", ""), ""),
    ("minimax_m2", MINIMAX, None),
    ("deepseek_v32", DSML, None),
    ("deepseek_v4", DSML_V4, None),
    ("minimax_m3", MINIMAX_M3, None),
    ("gemma", GEMMA, ""),
    ("harmony", HARMONY, None),
    ("lfm2", '<|tool_call_start|>[get_weather(city="{}"), clock()]<|tool_call_end|>', None),
    ("pythonic", '[get_weather(city="{}"), clock()]', None),
    ("pythonic", '<function_calls>\nget_weather(city="{}")\nclock()\n</function_calls>', None),
    ("json", '{{"name": "get_weather", "arguments": {{"city": "{}"}}}}', None),
    ("json", '```json\n[{{"name": "get_weather", "arguments": {{"city": "{}"}}}}]\n```', None),
]


@pytest.mark.parametrize(("name", "call", "between"), WRITTEN, ids=range(len(WRITTEN)))
def test_calls_as_models_write_them(text, takes, name, call, between):
    form = of_format(text, name)
    thoughts = Thoughts(reasoning.find("harmony") if name == "harmony" else THINK, False)
    free = answer_grammar(form, None, Calls(STRICT, False, True), thoughts)
    must = answer_grammar(form, None, Calls(TOOLS, True, True), thoughts)
    begun = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" if name == "harmony" else "<think>Hm.</think>\n"
    )
    one, long = call.format("Rome"), call.format("Reykjavik")
    wanted = ("call", "get_weather", '{"city": "Rome"}')
    bare = not one.startswith(form.tool_format.opens)
    split = (
        name == "minimax_m3"
    )  # this tokenizer has a token in the middle of its marker, which no text is searched for
    for grammar in (must,) if split else (free, must):
        marked = grammar is free or bare or not form.tool_format.bare
        assert takes(grammar, one) == takes(grammar, begun + one) == ("all" if marked else "no"), one
        assert takes(grammar, long) == "no"
        if between is not None:
            assert takes(grammar, one + between + one) == "all"
            assert takes(grammar, one + between + long) == "no"
    if not bare and not split and name != "harmony":
        assert takes(free, f"Let me see.\n{one}") == "all" and takes(free, f"Let me see.\n{long}") == "no"
    parsed = parse(list(begun + one), tool_format=form.tool_format, tools=SCHEMAS, reasoning=thoughts.format)[0]
    assert wanted in parsed


OPTIONAL = {  # as Pydantic writes them
    "type": "object",
    "properties": {
        "place": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}, "maxItems": 2}, {"type": "null"}]},
    },
    "required": ["place", "tags"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "gemma", "lfm2", "pythonic", "minimax_m3"])
def test_calls_of_tools_with_random_schemas(text, grammars, name, count):
    """Formats that do not write arguments as JSON."""
    form, draws = of_format(text, name), random.Random(count)
    schemas = {str(i): random_schema(draws, 2) for i in range(count)} | {"optional": OPTIONAL}
    closing = [i for i in range(text.tokenizer.size) if text.tokenizer.piece(i)[-1:] in (b'"', b"}", b"]", b">", b"\n")]
    one = Uniform(VOCAB, seed=count, eager=closing, grammars=grammars)
    for i, schema in schemas.items():
        tool = {"function": {"name": i, "parameters": schema, "strict": True}}
        try:
            grammar = answer_grammar(form, None, Calls([tool], True, False), None)
        except ApiError:
            assert name == "minimax_m3" and i != "optional"  # texts beside numbers with limits
            continue
        one.add(i, [1], grammar, 200)
    one.run()
    whole = [i for i in one.ends if one.ends[i].finish == "stop"]
    for i in whole:
        words = b"".join(map(text.tokenizer.piece, one.tokens[i])).decode(errors="replace")
        ((_, called, arguments),) = parse([words], tool_format=form.tool_format, tools=schemas)[0]
        assert called == i
        jsonschema.validate(json.loads(arguments), schemas[i])
    assert 2 * len(whole) > count


SEQUENCES = [  # what all calls begin with, one call, what all calls end with
    ("hermes", "", CALL, ""),
    ("qwen3_coder", "", QWEN.format("Rome"), ""),
    ("glm45", "", GLM.format("Rome"), ""),
    ("gemma", "", GEMMA.format("Rome"), ""),
    ("llama_functions", "", '<function=get_weather>{"city": "Rome"}</function>', ""),
    (
        "seed",
        "<seed:tool_call>\n",
        "<function=get_weather>\n<parameter=city>Rome</parameter>\n</function>",
        "</seed:tool_call>",
    ),
    (
        "minimax_m2",
        "<minimax:tool_call>\n",
        '<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n</invoke>',
        "</minimax:tool_call>",
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Rome"}\n```<｜tool▁call▁end｜>',
        "<｜tool▁calls▁end｜>",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|>",
        '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|>',
        "<|tool_calls_section_end|>",
    ),
]


@pytest.mark.parametrize(("name", "begin", "call", "end"), SEQUENCES, ids=[one[0] for one in SEQUENCES])
def test_white_space_behind_a_call_asks_for_no_other_call(text, takes, name, begin, call, end):
    grammar = answer_grammar(of_format(text, name), None, Calls(TOOLS, True, True), None)
    for space in ("", "\n", "\n\n"):
        words = f"{begin}{call}{space}"
        assert takes(grammar, words + end) == "all", repr(space)
        assert takes(grammar, f"{words}{call}{space}{end}") == "all", repr(space)
        assert takes(grammar, f"{words}x") == "no"
    parsed = parse([f"{begin}{call}\n{call}\n{end}"], tool_format=find(name), tools=SCHEMAS)[0]
    assert [kind for kind, *_ in parsed] == ["call", "call"], parsed


def test_texts_of_formats_have_an_end_in_tagged_calls_too(text, takes):
    for form, words in (("email", "a@b.{}"), ("time", "12:00:00.{}Z")):
        schema = {"type": "object", "properties": {"city": {"type": "string", "format": form}}, "required": ["city"]}
        tool = {"function": {"name": "get_weather", "parameters": schema, "strict": True}}
        grammar = answer_grammar(of_format(text, "qwen3_coder"), None, Calls([tool], True, False), None)
        assert takes(grammar, QWEN.format(words.format("1" * 5))) == "all"
        assert takes(grammar, QWEN.format(words.format("1.1" * 400 if form == "email" else "1" * 40))) == "no"


def test_a_function_without_parameters_takes_none(text, takes):
    for function in ({"name": "now"}, {"name": "now", "parameters": None}, {"name": "now", "parameters": {}}):
        for name, call in (
            ("hermes", '<tool_call>\n{{"name": "now", "arguments": {{{}}}}}\n</tool_call>'),
            ("qwen3_coder", "<tool_call>\n<function=now>\n{}</function>\n</tool_call>"),
        ):
            grammar = answer_grammar(of_format(text, name), None, Calls([{"function": function}], True, False), None)
            assert takes(grammar, call.format("")) == "all"
            more = '"a": 1' if name == "hermes" else "<parameter=a>\n1\n</parameter>\n"
            assert takes(grammar, call.format(more)) == "no"


CUSTOM = {"type": "custom", "custom": {"name": "sql"}}
PLUS = {"syntax": "lark", "definition": 'start: NUMBER (" + " NUMBER)*\nNUMBER: /[0-9]+/'}
DIGITS = {"syntax": "regex", "definition": "(ab|c)[0-9]+|x"}


@pytest.mark.parametrize("name", names())
def test_custom_tools_with_a_grammar(text, takes, name):
    form = of_format(text, name)
    by_regex, by_lark = ({**CUSTOM["custom"], "format": {"type": "grammar", "grammar": one}} for one in (DIGITS, PLUS))
    tool = enforced({"type": "custom", "custom": by_regex}, form.tool_format.raw)
    grammar = answer_grammar(form, None, Calls([tool], True, True), None)
    calls = {
        "gemma": "<start_function_call>call:sql{{input:<escape>{}<escape>}}<end_function_call>",
        "hermes": '<tool_call>\n{{"name": "sql", "arguments": {{"input": "{}"}}}}\n</tool_call>',
        "lfm2": '<|tool_call_start|>[sql(input="{}")]<|tool_call_end|>',
        "pythonic": '[sql(input="{}")]',
    }
    tagged = {"qwen3_coder": QWEN, "seed": SEED, "glm45": GLM, "minimax_m2": MINIMAX, "minimax_m3": MINIMAX_M3}
    tagged |= {"deepseek_v32": DSML, "deepseek_v4": DSML_V4}
    calls |= {key: one.replace("get_weather", "sql").replace("city", "input") for key, one in tagged.items()}
    call = calls.get(name)
    if call is not None:
        assert takes(grammar, call.format("ab12")) == takes(grammar, call.format("x")) == "all"
        assert takes(grammar, call.format("ab")) == takes(grammar, call.format("xx")) == "no"
    if not form.tool_format.raw:  # the model is shown the grammar, and not held to it
        function = enforced({"type": "custom", "custom": by_lark}, False)["function"]
        assert not function.get("strict")
        return
    tool = enforced({"type": "custom", "custom": by_lark}, True)
    grammar = answer_grammar(form, None, Calls([tool], name == "minimax_m3", True), None)
    assert takes(grammar, call.format("1 + 22")) == "all" and takes(grammar, call.format("1 +")) == "no"


@pytest.mark.parametrize("name", ["gemma", "lfm2", "minimax_m3", "qwen3_coder"])
def test_a_member_that_nothing_fits_stands_in_two_alternatives(text, takes, name):
    """It is left out of both."""
    ways = [{"properties": {"a": {"anyOf": []}, other: {"type": "string"}}} for other in "bc"]
    tool = {"function": {"name": "f", "parameters": {"type": "object", "anyOf": ways}}}
    assert takes(answer_grammar(of_format(text, name), None, Calls([tool], True, True), None), "x") == "no"


def test_tools_that_are_too_large_together(text):
    one = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"description": "x" * 200_000}}}}
    with pytest.raises(ApiError, match="most 1048576.*offer"):
        answer_grammar(text, None, Calls([{"function": one}] * 6, True, True), None)


def test_what_a_format_cannot_be_held_to(text):
    some = {"name": "f", "parameters": {"type": "object", "patternProperties": {"^a": {}}}}
    name = {"name": "f", "parameters": {"type": "object", "properties": {"a<b": {}}, "required": ["a<b"]}}
    form = of_format(text, "qwen3_coder")
    with pytest.raises(ApiError, match='"a b"'):
        answer_grammar(form, None, Calls([{"function": {"name": "a b"}}], True, True), None)
    with pytest.raises(ApiError, match="patternProperties"):
        answer_grammar(form, None, Calls([{"function": {**some, "strict": True}}], True, True), None)
    with pytest.raises(ApiError, match='"a<b"'):
        answer_grammar(form, None, Calls([{"function": name}], True, True), None)
    assert answer_grammar(form, None, Calls([{"function": some}], True, True), None)


def test_patterns_that_would_hold_up_the_server(text):
    assert raw_strings._outermost("[" * 300_000) == ""  # (?x) lets a comment have them
    long = {"properties": {"a": {"type": "string", "pattern": "^(?x)a#" + "(" * 20_000}}, "required": ["a"]}
    tool, form = {"name": "f", "parameters": {"type": "object", **long}}, of_format(text, "qwen3_coder")
    assert answer_grammar(form, None, Calls([{"function": tool}], True, True), None)
    with pytest.raises(ApiError, match="pattern.*20007 characters.*most 16384"):
        answer_grammar(form, None, Calls([{"function": {**tool, "strict": True}}], True, True), None)


def test_a_mistral_of_either_generation(text, takes):
    form = of_format(text, "mistral")
    old = answer_grammar(form, None, Calls(TOOLS, True, True), None)
    assert takes(old, '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {}}]') == "all"
    form.tokenizer = SimpleNamespace(added={"[ARGS]": 3, "[TOOL_CALLS]": 5})
    new = answer_grammar(form, None, Calls(TOOLS, True, False), None)
    assert takes(new, '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}') == "no", (
        "spelled, which the parser takes for text"
    )
    assert takes(new, "<tool_call>clock<think>{}") == "all", "the tokens 5 and 3"


def test_marks_around_the_answer_itself(text, takes):
    form = SimpleNamespace(tool_format=None, tokenizer=text.tokenizer, reasoning=reasoning.find("harmony"))
    grammar = answer_grammar(form, choice("x", ["yes"]), None, Thoughts(form.reasoning, False))
    thoughts = "<|channel|>analysis<|message|>Hm.<|end|>"
    assert takes(grammar, "<|channel|>final<|message|>yes") == "all" and takes(grammar, "yes") == "no"
    assert takes(grammar, f"{thoughts}<|start|>assistant<|channel|>final<|message|>yes") == "all"
    assert takes(grammar, f"{thoughts}<|start|>assistant<|channel|>final<|message|>no") == "no"
    form.reasoning = reasoning.find("granite33")
    grammar = answer_grammar(form, choice("x", ["yes"]), None, Thoughts(form.reasoning, False))
    assert takes(grammar, "<think>Hm.</think><response>yes</response>") == "all" and takes(grammar, "yes") == "no"


def test_harmony_with_strict_tools_that_may_be_called(text, takes):
    form = SimpleNamespace(tool_format=find("harmony"), tokenizer=text.tokenizer, reasoning=reasoning.find("harmony"))
    grammar = answer_grammar(form, None, Calls(STRICT, False, True), Thoughts(form.reasoning, False))
    said = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
    assert takes(grammar, "<|channel|>final<|message|>Hello") == "all"
    assert takes(grammar, said + HARMONY.format("Rome")) == "all"
    assert takes(grammar, said + HARMONY.format("Reykjavik")) == "no"


def test_markers_of_several_tokens(text, takes):
    added = {"<|channel|>": 5, "<|message|>": 6, "<|constrain|>": 7}
    form = SimpleNamespace(tool_format=find("harmony"), tokenizer=SimpleNamespace(added=added), reasoning=None)
    grammar = answer_grammar(form, None, Calls(TOOLS, True, True), None)
    tokens = HARMONY.replace("<|channel|>", "<tool_call>").replace("<|message|>", "</tool_call>")
    assert takes(grammar, tokens.replace("<|constrain|>", "<tool_response>").format("Rome")) == "all"
    assert takes(grammar, HARMONY.format("Rome")) == "no", "spelled"


def test_a_spelled_marker_is_no_marker(text, tokenizer):
    """The parser takes it for text, so that a call would be none."""
    matcher = LLMatcher(tokenizer, answer_grammar(text, None, Calls(TOOLS, True, True), None))
    assert matcher.try_consume_tokens([text.tokenizer.encode("<", False)[0]]) == 0
