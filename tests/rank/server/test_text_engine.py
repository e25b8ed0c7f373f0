"""Sessions as the library uses them: a loop in a thread, no HTTP."""

import asyncio

import pytest
from phalanx.rank import protocol
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.config import SamplingDefaults, ServerConfig
from phalanx.rank.server.decoding import convert
from phalanx.rank.server.engine_client import EngineClient
from phalanx.rank.server.generation import completion_generation
from phalanx.rank.server.openai_format import TextRenderer
from phalanx.rank.server.sampling_params import resolve_defaults
from phalanx.rank.server.schema import CompletionRequest
from phalanx.rank.server.text import reasoning, tool_formats
from phalanx.rank.server.text.events import Text
from phalanx.rank.server.text_engine import TextEngine

from .conftest import make_model

pytestmark = pytest.mark.timeout(20)


def test_without_http(fresh_server):
    """What LLM.generate does: requests made of fields, all awaited together."""

    async def generate():
        sessions = fresh_server.sessions
        requests = [convert({"prompt": prompt, "seed": 1}, CompletionRequest) for prompt in ("hello", [1, 2, 3])]
        replies = [
            TextRenderer(await sessions.generate(one, completion_generation), one, sessions.text.tokenizer)
            for one in requests
        ]
        return await asyncio.gather(*(reply.collect() for reply in replies))

    assert [answer["choices"][0]["text"] for answer in fresh_server.call(generate())] == ["hello world"] * 2


def test_tokens_after_a_stop_string_in_one_delta_are_not_counted(fresh_server):
    fresh_server.scheduler.per_delta = 100  # all in one
    fresh_server.scheduler.answer = "hello world, how are you?"

    async def generate():
        session = await fresh_server.sessions.generate(
            convert({"prompt": "x", "stop": "wor", "logprobs": 0}, CompletionRequest), completion_generation
        )
        updates = [update async for batch in session for update in batch]
        return session, updates

    session, (update,) = fresh_server.call(generate())
    assert update.events == [Text("hello ")] and update.finish == "stop"
    assert len(update.tokens) == len(update.logprobs) == session.completion_tokens
    assert session.completion_tokens < len(fresh_server.scheduler.encode(fresh_server.scheduler.answer))
    assert fresh_server.scheduler.aborted == []  # it had ended by itself


def test_the_engine_s_error_ends_all_choices(fresh_server):
    fresh_server.scheduler.error = (500, "out of blocks")

    async def generate():
        session = await fresh_server.sessions.generate(
            convert({"prompt": "x", "n": 2}, CompletionRequest), completion_generation
        )
        async for _ in session:
            pass

    with pytest.raises(ApiError, match="out of blocks"):
        fresh_server.call(generate())
    assert fresh_server.link.open_sequences == 0


def test_not_ready(tmp_path, model_dir):
    async def main():
        link = EngineClient(str(tmp_path / "link"))
        sessions = TextEngine(link, ServerConfig(model_dir=str(model_dir), link=link.path, listen_fd=-1))
        with pytest.raises(ApiError, match="still loading"):
            await sessions.generate(convert({"prompt": "x"}, CompletionRequest), completion_generation)
        link.state, link.ready = "ready", protocol.Ready(64, 400, 64, 16, 4, 1)
        with pytest.raises(ApiError, match="the tokenizer is still loading"):
            await sessions.generate(convert({"prompt": "x"}, CompletionRequest), completion_generation)
        sessions.close()

    asyncio.run(main())


def test_a_special_token_as_stop_string_is_matched_by_its_id(fresh_server):
    fresh_server.post("completions", prompt="x", stop=["<|turn|>", "<think>"], ignore_eos=True, max_tokens=2)
    assert fresh_server.scheduler.requests[0].sampling.stop_token_ids == (
        fresh_server.sessions.text.tokenizer.token_id("<|turn|>"),
    )


def test_a_format_of_tool_calls_that_is_not_known(model_dir, tmp_path, caplog):
    (tmp_path / "template").write_text("{{ tools }}{{ messages }}")

    def loaded(**options):
        config = ServerConfig(
            model_dir=str(model_dir), link="", listen_fd=-1, chat_template=str(tmp_path / "template"), **options
        )
        sessions = TextEngine(EngineClient(str(tmp_path / "link")), config)
        asyncio.run(sessions.load())
        sessions.close()
        return sessions.text

    assert loaded().tool_format is tool_formats.find("json")
    (message,) = caplog.messages
    assert "--tool-call-parser" in message and "JSON" in message
    caplog.clear()
    text = loaded(tool_call_parser="glm45", reasoning_parser="seed")
    assert (text.tool_format, text.reasoning) == (tool_formats.find("glm45"), reasoning.find("seed"))
    text = loaded(tool_call_parser="none", reasoning_parser="none")
    assert text.tool_format is None and text.reasoning is None and not caplog.messages


def test_the_template_of_a_family(tmp_path, caplog):
    model = make_model(tmp_path / "base", template=None)
    (model / "config.json").write_text('{"model_type": "olmo2"}')
    sessions = TextEngine(
        EngineClient(str(tmp_path / "link")), ServerConfig(model_dir=str(model), link="", listen_fd=-1)
    )
    asyncio.run(sessions.load())
    sessions.close()
    (message,) = caplog.messages
    assert "no chat template" in message and "OLMo" in message and "--chat-template" in message


def test_an_error_without_words(fresh_server):
    fresh_server.scheduler.error = (0, "")
    for path, body in (("completions", {"prompt": "x"}), ("embeddings", {"input": "x"})):
        answer = fresh_server.post(path, **body)
        assert (answer.status, answer.body["error"]["message"]) == (500, "the engine failed on this request")


def test_order_of_defaults():
    defaults = resolve_defaults(SamplingDefaults(temperature=0.1), {"temperature": 0.2, "top_k": 5, "top_p": None})
    assert defaults["temperature"] == 0.1 and defaults["top_k"] == 5 and defaults["top_p"] == 1.0
    assert defaults["max_tokens"] is None
