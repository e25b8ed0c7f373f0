"""Each field that a request may have changes something, is refused, or is documented as ignored."""

import json
import re
import types
import typing

import msgspec
import pytest
import tokenizers
from phalanx.rank import protocol
from phalanx.rank.server import sampling_params
from phalanx.rank.server.embedding_request import EmbeddingRequest
from phalanx.rank.server.fields import properties
from phalanx.rank.server.http.batches import BatchRequest
from phalanx.rank.server.http.conversations import ConversationRequest, ItemsRequest, MetadataRequest
from phalanx.rank.server.http.message_batches import MessageBatchRequest
from phalanx.rank.server.http.messages import CountRequest, MessagesRequest
from phalanx.rank.server.http.models import SelectRequest
from phalanx.rank.server.http.rerank import RerankRequest, ScoreRequest
from phalanx.rank.server.http.routes import routes
from phalanx.rank.server.http.tokens import DetokenizeRequest, TokenizeRequest
from phalanx.rank.server.responses_request import ResponsesRequest
from phalanx.rank.server.schema import ChatRequest, CompletionRequest

from ..conftest import TEMPLATE, LiveServer, make_model
from .batching import client_of, leave, line, put

pytestmark = pytest.mark.timeout(60)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
ALLOWED = {"type": "allowed_tools", "tools": [FLAT_TOOL]}
JSON_FORMAT = {"type": "json_schema", "schema": SCHEMA}
CLIENT_TOOL = {"name": "f", "input_schema": SCHEMA}
USER = [{"role": "user", "content": "hello you"}]
TURNS = [*USER, {"role": "assistant", "content": "I am"}]


class Case(typing.NamedTuple):
    """A value of a field, and the fields beside which it matters."""

    value: typing.Any
    beside: dict = {}


def case(value, **beside):
    return Case(value, beside)


SAMPLED = {
    "temperature": case(0.5), "top_k": case(5), "top_p": case(0.5), "stream": case(True), "model": case("another"),
}  # fmt: skip
WIDE = {
    **SAMPLED,
    "allowed_token_ids": case([20]),
    "bad_words": case(["fox"]),
    "thinking_token_budget": case(5),
    "repeat_last_n": case(3),
    "min_p": case(0.1),
    "repetition_penalty": case(1.5),
    "presence_penalty": case(1.0),
    "frequency_penalty": case(1.0),
    "logit_bias": case({"5": 1.0}),
    "seed": case(7),
    "stop": case("wor"),
    "stop_token_ids": case([5]),
    "ignore_eos": case(True),
    "min_tokens": case(3),
    "include_stop_str_in_output": case(True, stop="wor"),
    "skip_special_tokens": case(False),
    "priority": case(3),
    "cache_salt": case("a"),
}
COMMON = {
    **WIDE,
    "n": case(2),
    "best_of": case(2),
    "use_beam_search": case(True),
    "max_tokens": case(3),
    "stream_options": case({"include_usage": True}, stream=True),
    "stream_options.include_usage": case(True, stream=True),
    "stream_options.continuous_usage_stats": case(True, stream=True, stream_options={"include_usage": True}),
    "echo": case(True),
    "return_token_ids": case(True),
    "return_tokens_as_token_ids": case(True, logprobs=True),
    "response_format": case({"type": "json_object"}),
    "prompt_logprobs": case(1),
    "truncate_prompt_tokens": case(2),
    "truncation_side": case("right", truncate_prompt_tokens=2),
    "guided_json": case({}),
    "guided_regex": case("a"),
    "guided_choice": case(["a"]),
    "guided_grammar": case('start: "a"'),
    "guided_whitespace_pattern": case(" ", guided_json={}),
    "structured_outputs": case({"regex": "a"}),
    "structured_outputs.json": case({}),
    "structured_outputs.regex": case("a"),
    "structured_outputs.choice": case(["a"]),
    "structured_outputs.grammar": case('start: "a"'),
    "structured_outputs.json_object": case(True),
    "structured_outputs.structural_tag": case("{}"),
    "structured_outputs.whitespace_pattern": case(" ", structured_outputs={"json": {}}),
    "structured_outputs.disable_any_whitespace": case(True, structured_outputs={"json": {}}),
    "structured_outputs.disable_additional_properties": case(True, structured_outputs={"json": {}}),
}
VALUES = {
    ChatRequest: {
        **COMMON,
        "add_special_tokens": case(True),
        "logprob_token_ids": case([5], logprobs=True),
        "messages": case("something else"),
        "prediction": case({"type": "content", "content": "hello"}),
        "prediction.type": case("other", prediction={"type": "content", "content": "hello"}),
        "prediction.content": case("you", prediction={"type": "content", "content": "hello"}),
        "max_completion_tokens": case(3),
        "logprobs": case(True),
        "top_logprobs": case(2, logprobs=True),
        "tools": case([TOOL]),
        "tool_choice": case("required", tools=[TOOL]),
        "parallel_tool_calls": case(False, tools=[TOOL], tool_choice="required"),
        "thinking": case(True),
        "enable_thinking": case(True),
        "reasoning_effort": case("high"),
        "verbosity": case("low"),
        "reasoning": case({"effort": "high"}),
        "reasoning.effort": case("high"),
        "reasoning.enabled": case(True),
        "reasoning.exclude": case(True),
        "reasoning.max_tokens": case(5),
        "include_reasoning": case(False),
        "chat_template": case("x"),
        "chat_template_kwargs": case({"verbosity": "low"}),
        "add_generation_prompt": case(False),
        "continue_final_message": case(True, messages=TURNS),
        "conversation_id": case("c", record_conversation=True),
        "record_conversation": case(True),
    },
    CompletionRequest: {
        **COMMON,
        "add_special_tokens": case(False),
        "logprob_token_ids": case([5], logprobs=0),
        "return_tokens_as_token_ids": case(True, logprobs=1),
        "prompt": case("something else"),
        "suffix": case("x"),
        "logprobs": case(2),
    },
    EmbeddingRequest: {
        "input": case("something else"),
        "model": case("another"),
        "encoding_format": case("base64"),
        "embedding_type": case("last"),
        "normalize": case(False),
        "dimensions": case(2),
        "priority": case(3),
        "cache_salt": case("a"),
        "add_special_tokens": case(False),
    },
    CountRequest: {
        "messages": case([{"role": "user", "content": "something else"}]),
        "model": case("another"),
        "system": case("Be brief."),
        "tools": case([CLIENT_TOOL]),
        "tool_choice": case({"type": "none"}, tools=[CLIENT_TOOL]),
        "thinking": case({"type": "enabled"}),
        "thinking.type": case("enabled"),
        "output_config": case({"effort": "high"}),
        "output_config.effort": case("high"),
        "output_config.format": case({"type": "json_schema", "schema": 5}),
        "output_format": case({"type": "json_schema", "schema": 5}),
    },
    RerankRequest: {
        "model": case("another"),
        "instruction": case("Judge."),
        "priority": case(3),
        "query": case("something else"),
        "documents": case(["one"]),
        "top_n": case(1),
        "return_documents": case(False),
    },
    ScoreRequest: {
        "model": case("another"),
        "instruction": case("Judge."),
        "priority": case(3),
        "text_1": case("something else"),
        "text_2": case("one"),
        "queries": case("something else", text_1=None),
        "documents": case("one", text_2=None),
    },
    ResponsesRequest: {
        **WIDE,
        "input": case("something else"),
        "instructions": case("Be brief."),
        "previous_response_id": case("resp_0"),
        "conversation": case("conv_0"),
        "conversation.id": case("conv_0"),
        "top_logprobs": case(2),
        "background": case(True),
        "store": case(False),
        "metadata": case({"a": "b"}),
        "max_output_tokens": case(3),
        "tools": case([FLAT_TOOL]),
        "tool_choice": case("required", tools=[FLAT_TOOL]),
        "tool_choice.type": case("function", tools=[FLAT_TOOL], tool_choice={"name": "f"}),
        "tool_choice.mode": case("required", tools=[FLAT_TOOL], tool_choice=ALLOWED),
        "tool_choice.name": case("f", tools=[FLAT_TOOL], tool_choice={"type": "function"}),
        "tool_choice.server_label": case("s", tools=[FLAT_TOOL], tool_choice={"type": "mcp"}),
        "tool_choice.tools": case([FLAT_TOOL], tools=[FLAT_TOOL], tool_choice={**ALLOWED, "mode": "auto", "tools": []}),
        "parallel_tool_calls": case(False, tools=[FLAT_TOOL], tool_choice="required"),
        "max_tool_calls": case(-1),
        "reasoning": case({"effort": "high"}),
        "reasoning.effort": case("high"),
        "reasoning.enabled": case(True),
        "reasoning.exclude": case(True),
        "reasoning.max_tokens": case(5),
        "text.format.type": case("json_object"),
        "text.format.name": case("n", text={"format": JSON_FORMAT}),
        "text.format.description": case("d", text={"format": JSON_FORMAT}),
        "text.format.schema": case({"type": "object", "maxProperties": 0}, text={"format": JSON_FORMAT}),
        "text.format.strict": case(True, text={"format": JSON_FORMAT}),
        "user": case("x"),
        "text": case({"format": {"type": "json_object"}}),
        "text.format": case({"type": "json_object"}),
        "text.verbosity": case("low"),
        "include": case(["x"]),
        "truncation": case("auto"),
        "chat_template_kwargs": case({"verbosity": "low"}),
    },
    TokenizeRequest: {
        "model": case("another"),
        "prompt": case("something else"),
        "content": case("something else", prompt=None),
        "messages": case(USER, prompt=None),
        "tools": case([TOOL], prompt=None, messages=USER),
        "chat_template_kwargs": case({"verbosity": "low"}, prompt=None, messages=USER),
        "add_generation_prompt": case(False, prompt=None, messages=USER),
        "continue_final_message": case(True, prompt=None, messages=TURNS),
        "add_special_tokens": case(False),
        "add_special": case(True, prompt=None, content="hello"),
        "return_token_strs": case(True),
        "with_pieces": case(True),
    },
    DetokenizeRequest: {"tokens": case([21]), "model": case("another")},
    BatchRequest: {
        "input_file_id": case("file-c"),
        "endpoint": case("/v1/embeddings"),
        "completion_window": case("1s"),
        "metadata": case({"a": 5}),
    },
    MessageBatchRequest: {"requests": case([])},
    ConversationRequest: {"items": case([{"role": "king"}]), "metadata": case({"a": "b"})},
    ItemsRequest: {"items": case([{"role": "user", "content": "something else"}])},
    MetadataRequest: {"metadata": case({"a": "b"})},
    SelectRequest: {"model": case(""), "model_id": case("another", model=None)},
}
VALUES[MessagesRequest] = {
    **SAMPLED,
    **VALUES[CountRequest],
    "tool_choice": case({"type": "any"}, tools=[CLIENT_TOOL]),
    "max_tokens": case(3),
    "stop_sequences": case(["wor"]),
    "priority": case(3),
    "output_format": case({"type": "json_schema", "schema": SCHEMA}),
    "output_config.format": case({"type": "json_schema", "schema": SCHEMA}),
}
BASE = {
    ChatRequest: ("/v1/chat/completions", {"messages": USER}),
    CompletionRequest: ("/v1/completions", {"prompt": "hello you"}),
    EmbeddingRequest: ("/v1/embeddings", {"input": "hello you"}),
    MessagesRequest: ("/v1/messages", {"messages": USER, "max_tokens": 20}),
    CountRequest: ("/v1/messages/count_tokens", {"messages": USER}),
    RerankRequest: ("/v1/rerank", {"query": "hello", "documents": ["you", "they"]}),
    ScoreRequest: ("/v1/score", {"text_1": "hello", "text_2": ["you", "they"]}),
    ResponsesRequest: ("/v1/responses", {"input": "hello you"}),
    TokenizeRequest: ("/tokenize", {"prompt": "hello you"}),
    DetokenizeRequest: ("/detokenize", {"tokens": [20]}),
    BatchRequest: (
        "/v1/batches",
        {"input_file_id": "file-a", "endpoint": "/v1/completions", "completion_window": "24h"},
    ),
    MessageBatchRequest: ("/v1/messages/batches", {"requests": [{"custom_id": "a", "params": {}}]}),
    ConversationRequest: ("/v1/conversations", {}),
    ItemsRequest: ("/v1/conversations/mine/items", {"items": USER}),
    MetadataRequest: ("/v1/conversations/mine", {"metadata": {}}),
    SelectRequest: ("/v1/models/select", {"model": "tiny"}),
}
IGNORED = {"user": "x", "metadata": {"a": "b"}, "store": True}  # values of fields that are documented so


def fields_of(kind):
    """The names of a kind's fields, and of those of objects in them as `outer.inner`; those of lists are no fields."""
    hints = typing.get_type_hints(kind)
    for name in kind.__struct_fields__:
        yield name
        for part in typing.get_args(hints[name]) if isinstance(hints[name], types.UnionType) else (hints[name],):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from (f"{name}.{one}" for one in fields_of(part))


EVERY = [(kind, name) for kind in BASE for name in fields_of(kind)]


def ignored(kind, name):
    """Whether the documents say so."""
    outer, _, inner = name.partition(".")
    words = properties(kind)[outer]["description"]
    return f"`{inner}` is ignored" in words or inner == "summary" if inner else words.startswith("ignored")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A model whose tokenizer adds a token and whose template shows all variables; thoughts, then an answer."""
    folder = tmp_path_factory.mktemp("every")
    shown = "{{ reasoning_effort or '' }}{{ verbosity or '' }}"
    directory = make_model(folder / "model", shown + TEMPLATE)
    file = directory / "tokenizer.json"
    made = tokenizers.Tokenizer.from_file(str(file))
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=["<|turn|>", "$A"], special_tokens=[("<|turn|>", made.token_to_id("<|turn|>"))]
    )
    made.save(str(file))
    scheduler = {"answer": "<think>hm</think>hello<|turn|> world", "top": 3}
    options = {"served_model_name": "tiny", "strict": True, "file_store": str(folder / "files")}
    one = LiveServer(folder, directory, made, True, scheduler, **options)
    one.post("chat/completions", messages=USER, record_conversation=True, conversation_id="mine")
    with client_of(one) as client:
        one.files = {f"file-{name}": put(client, line(name)).id for name in "a"}
    yield one
    leave(one)


@pytest.fixture(autouse=True)
def same_seed(monkeypatch):
    monkeypatch.setattr(sampling_params.random, "getrandbits", lambda bits: 5)


RANDOM = re.compile(r"(?<=[\"_-])[0-9a-f]{24,32}(?=\")|\"(created|created_at|completed_at)\": ?[0-9.]+")


def outcome(server, kind, body):
    """The answer that a request's sender and rank 0 see, without what is drawn or the time; the field of a refusal."""
    path, _ = BASE[kind]
    if "input_file_id" in body:
        body = {**body, "input_file_id": server.files.get(body["input_file_id"], "file-c")}
    server.scheduler.requests.clear()
    answer = server.request("POST", path, body)
    words = answer.body.decode() if isinstance(answer.body, bytes) else json.dumps(answer.body)
    if body.get("background"):
        server.wait(lambda: server.scheduler.requests)
    asked = [msgspec.structs.replace(one, id="") for one in server.scheduler.requests]
    error = answer.body.get("error") if isinstance(answer.body, dict) else None
    refused = (error.get("param") or error["message"]) if answer.status >= 400 else ""
    return (answer.status, RANDOM.sub("", words), [protocol.frame(one) for one in asked]), refused


def bodies(kind, name):
    """A request without and with a field."""
    value, beside = case(IGNORED.get(name, "auto")) if ignored(kind, name) else VALUES[kind][name]
    before = {key: one for key, one in {**BASE[kind][1], **beside}.items() if one is not None}
    after = json.loads(json.dumps(before))
    *way, last = name.split(".")
    inner = after
    for step in way:
        inner = inner.setdefault(step, {})
    inner[last] = value
    return before, after


def test_all_kinds_of_requests_are_walked():
    own = {route.schema for route in routes() if route.schema is not None and not route.path.startswith("/admin/")}
    assert own == BASE.keys() == VALUES.keys()


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=[f"{kind.__name__}-{name}" for kind, name in EVERY])
def test_a_field_has_an_effect_or_is_refused_or_documented_as_ignored(server, kind, name):
    before, after = bodies(kind, name)
    (plain, _), (other, refused) = outcome(server, kind, before), outcome(server, kind, after)
    if ignored(kind, name):
        assert other[0] == plain[0] and other[2] == plain[2] and name not in VALUES[kind]
        return
    assert other != plain, f"{name} changes nothing"
    if other[0] >= 400 and plain[0] < 400:
        assert name.split(".")[0] in refused or (name.startswith("output_") and "output_config" in refused)
