"""Chat templates of the shapes that are published, with messages as clients of all three APIs send them."""

import json

import pytest
from phalanx.rank import protocol
from phalanx.rank.server.decoding import convert
from phalanx.rank.server.http.messages import MessagesRequest
from phalanx.rank.server.prompts import render_chat
from phalanx.rank.server.responses_request import ResponsesRequest
from phalanx.rank.server.schema import ChatRequest
from phalanx.rank.server.text.load import Text
from phalanx.rank.server.text.message_shape import ABSENT, PATIENCE, ROLES, MessageShape, find_shape

from ..conftest import make_model

pytestmark = pytest.mark.timeout(60)
READY = protocol.Ready(max_model_len=512, vocab_size=400, kv_tokens=4096, block_size=16, max_num_seqs=4, ranks=1)


def template(assistant, other="<{{ m.role[0] }}>{{ m.content }}", calls="call.function.arguments | tojson"):
    """assistant: how the content of the assistant's message is written."""
    return (
        "{% if tools %}<tools>{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
        + assistant
        + "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ "
        + calls
        + " }}]{% endfor %}{% else %}"
        + other
        + "{% endif %}{% endfor %}"
    )


PARTS = "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
FIRST_PART = "<{{ m.role[0] }}>{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
# For each shape the template, what it is handed, and the assistant's turn of a call without and with a text before it.
SHAPES = {
    "writes what it gets": (template("<a>{{ m.content }}"), MessageShape(), "<a>", "<a>On it"),
    "adds a text": (template("{{ '<a>' + m.content }}"), MessageShape(), "<a>", "<a>On it"),
    "splits": (template("<a>{{ m.content.split('</think>')[-1] }}"), MessageShape(), "<a>", "<a>On it"),
    "searches": (
        template("<a>{% if '</think>' not in m['content'] %}{{ m['content'] }}{% endif %}"),
        MessageShape(), "<a>", "<a>On it",
    ),
    "trims": (template("<a>{{ m.content | trim }}"), MessageShape(), "<a>", "<a>On it"),
    "asks whether it is none": (
        template("{% if m.content is not none %}<a>{{ m.content }}</a>{% endif %}"),
        MessageShape(empty=None), "", "<a>On it</a>",
    ),
    "asks whether it is there": (
        template("{% if m.content is defined %}<a>{{ m.content }}</a>{% endif %}"),
        MessageShape(empty=ABSENT), "", "<a>On it</a>",
    ),
    "asks whether it is empty": (
        template("{% if m.content %}<a>{{ m.content }}</a>{% endif %}"), MessageShape(), "", "<a>On it</a>",
    ),
    "adds arguments to a text": (
        template("<a>{{ m.content }}", calls="'' + call.function.arguments"),
        MessageShape(json_arguments=True), "<a>", "<a>On it",
    ),
    "writes arguments as they are": (
        template("<a>{{ m.content }}", calls="call.function.arguments"),
        MessageShape(json_arguments=True), "<a>", "<a>On it",
    ),
    "iterates over parts": (
        template("<a>" + PARTS, "<{{ m.role[0] }}>" + PARTS),
        MessageShape(parts=frozenset(ROLES)), "<a>", "<a>On it",
    ),
    "takes the first part": (
        template("<a>{{ m.content[0].text }}", FIRST_PART),
        MessageShape(parts=frozenset({"assistant"})), "<a>", "<a>On it",
    ),
    "reads thinking": (
        template("{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}<a>{{ m.content }}"),
        MessageShape(thoughts="thinking"), "<a>", "<a>On it",
    ),
    "reads reasoning": (
        template("{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}<a>{{ m.content }}"),
        MessageShape(thoughts="reasoning"), "<a>", "<a>On it",
    ),
    "takes either thoughts or a text": (
        template(
            "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
            "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}<a>{{ m.content }}"
        ),
        MessageShape(thoughts="thinking", thoughts_alone=True), "<a>", "<a>On it",
    ),
    "wants parts of the system": (
        template("<a>{{ m.content }}", "<{{ m.role[0] }}>{% if m.role == 'system' %}" + PARTS
                 + "{% else %}{{ m.content }}{% endif %}"),
        MessageShape(parts=frozenset({"system"})), "<a>", "<a>On it",
    ),
}  # fmt: skip
CONTENTS = {"null": None, "absent": ABSENT, "empty": "", "text": "On it"}
ARGUMENTS = '{"city": "Rome"}'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def chat(content, thoughts=""):
    said = {} if content is ABSENT else {"content": content}
    said |= {"reasoning_content": thoughts} if thoughts else {}
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", **said, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "Sun"},
    ]
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    return convert({"messages": messages, "tools": [tool]}, ChatRequest)


def responses(content, thoughts=""):
    thought = [{"type": "reasoning_text", "text": thoughts}]
    items = [
        {"role": "user", "content": "Rain?"},
        *([{"type": "reasoning", "summary": [], "content": thought}] if thoughts else []),
        *([{"role": "assistant", "content": content}] if content is not ABSENT else []),
        {"type": "function_call", "call_id": "call00001", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "call00001", "output": "Sun"},
    ]
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA}
    request = convert({"instructions": "Be brief", "input": items, "tools": [tool]}, ResponsesRequest)
    return request.chat(request.items())


def messages(content, thoughts=""):
    said = [{"type": "thinking", "thinking": thoughts, "signature": ""}] if thoughts else []
    said += [{"type": "text", "text": content or ""}] if content is not ABSENT else []
    turns = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": [
            *said, {"type": "tool_use", "id": "call00001", "name": "weather", "input": {"city": "Rome"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call00001", "content": "Sun"}]},
    ]  # fmt: skip
    tool = {"name": "weather", "input_schema": SCHEMA}
    asked = {"system": "Be brief", "messages": turns, "tools": [tool], "max_tokens": 9}
    return convert(asked, MessagesRequest).chat()


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    made = {}

    def make(source):
        if source not in made:
            made[source] = Text(str(make_model(tmp_path_factory.mktemp("model") / "m", source)))
        return made[source]

    return make


@pytest.mark.sample(5)
@pytest.mark.parametrize("api", [chat, responses, messages])
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", SHAPES)
def test_calls_with_every_content_in_every_api(texts, name, content, api):
    source, _, without, with_text = SHAPES[name]
    rendered, _ = render_chat(texts(source), api(CONTENTS[content]), READY, None)
    assistant = with_text if content == "text" else without
    assert rendered == f"<tools><s>Be brief<u>Rain?{assistant}[weather {ARGUMENTS}]<t>Sun"


@pytest.mark.parametrize("api", [chat, responses, messages])
def test_thoughts_that_led_to_a_call_stay_in_the_prompt(texts, api):
    for name, source in {
        "reasoning_content": SHAPES["reads thinking"][0].replace("thinking", "reasoning_content"),
        **{name: SHAPES[f"reads {name}"][0] for name in ("thinking", "reasoning")},
    }.items():
        text = texts(source)
        assert text.shape([1]).thoughts == name
        rendered, _ = render_chat(text, api("On it", "Look it up"), READY, None)
        assert "<think>Look it up</think><a>On it[weather" in rendered
    text = texts(SHAPES["takes either thoughts or a text"][0])
    for said, written in (("On it", "Look it up\n\nOn it"), (ABSENT, "Look it up")):
        rendered, _ = render_chat(text, api(said, "Look it up"), READY, None)
        assert f"<think>{written}</think><a>[weather" in rendered


@pytest.mark.parametrize("name", SHAPES)
def test_the_shape_of_a_template(texts, name):
    source, shape, *_ = SHAPES[name]
    assert texts(source).shape([1]) == shape


def test_each_of_several_templates_has_its_shape(tmp_path):
    directory = make_model(tmp_path / "m", "{% for m in messages %}{{ m.content }}{% endfor %}")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    listed = template("<a>{{ m.content }}", "<{{ m.role[0] }}>" + PARTS)
    config["chat_template"] = [
        {"name": "default", "template": config["chat_template"]}, {"name": "tool_use", "template": listed},
    ]  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    text = Text(str(directory))
    assert text.shape(None) == MessageShape()
    assert text.shape([1]) == MessageShape(parts=frozenset(ROLES) - {"assistant"})


def test_a_message_that_goes_on_in_a_template_of_parts(texts):
    text = texts(SHAPES["iterates over parts"][0])
    asked = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}]}
    request = convert({**asked, "continue_final_message": True}, ChatRequest)
    assert render_chat(text, request, READY, None)[0] == "<u>Hi<a>He"


def test_a_template_that_fails_or_never_ends_has_the_usual_shape(monkeypatch, texts):
    assert texts("{{ raise_exception('never') }}").shape(None) == MessageShape()
    clock, tried = [0.0], []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def slow(messages):
        tried.append(messages)
        clock[0] += PATIENCE
        return ""

    assert find_shape(slow) == MessageShape() and len(tried) == 1
