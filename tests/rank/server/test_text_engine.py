"""Sessions as the library uses them: a loop in a thread, no HTTP."""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from phalanx.rank import protocol
from phalanx.rank.server import blocking, text_engine
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.config import SamplingDefaults, ServerConfig
from phalanx.rank.server.decoding import convert
from phalanx.rank.server.engine_client import EngineClient
from phalanx.rank.server.generation import completion_generation
from phalanx.rank.server.openai_format import TextRenderer
from phalanx.rank.server.prompts import Prompt
from phalanx.rank.server.sampling_params import resolve_defaults
from phalanx.rank.server.schema import CompletionRequest
from phalanx.rank.server.session import Choice, Update
from phalanx.rank.server.text import reasoning, tool_formats
from phalanx.rank.server.text.events import Reasoning, Text
from phalanx.rank.server.text.output_parser import OutputParser
from phalanx.rank.server.text_engine import TextEngine

from .conftest import make_model

pytestmark = pytest.mark.timeout(20)


def test_without_http(fresh_server):
    """The work of LLM.generate: requests made of fields, all awaited together."""

    async def generate():
        engine = fresh_server.engine
        requests = [convert({"prompt": prompt, "seed": 1}, CompletionRequest) for prompt in ("hello", [1, 2, 3])]
        replies = [
            TextRenderer(await engine.generate(one, completion_generation), one, engine.text.tokenizer)
            for one in requests
        ]
        return await asyncio.gather(*(reply.collect() for reply in replies))

    assert [answer["choices"][0]["text"] for answer in fresh_server.call(generate())] == ["hello world"] * 2


def test_tokens_after_a_stop_string_in_one_delta_are_not_counted(fresh_server):
    fresh_server.scheduler.per_delta = 100  # all in one
    fresh_server.scheduler.answer = "hello world, how are you?"

    async def generate():
        session = await fresh_server.engine.generate(
            convert({"prompt": "x", "stop": "wor", "logprobs": 0}, CompletionRequest), completion_generation
        )
        updates = [update async for batch in session for update in batch]
        return session, updates

    session, (update,) = fresh_server.call(generate())
    assert [event.text for event in update.events] == ["hello "] and update.finish == "stop"
    assert len(update.tokens) == len(update.logprobs) == session.completion_tokens
    assert session.completion_tokens < len(fresh_server.scheduler.encode(fresh_server.scheduler.answer))
    assert fresh_server.scheduler.aborted == []  # it had ended by itself


def test_deltas_that_come_together_tell_the_prompt_once():
    scored = [protocol.TokenLogprob(token, -1.0, []) for token in (1, 2, 3)]
    for length in (1, 3):
        prompt = Prompt([1, 2, 3][:length], echo="abc"[:length], offsets=[0, 1, 2][:length])
        detok = SimpleNamespace(feed=lambda token: "d", finish=lambda: "")
        choice = Choice(0, prompt, OutputParser(), detok, (), lambda token: "")
        update = Update(choice)
        choice.apply(protocol.Delta("0", [4], scored[:1], prompt_logprobs=scored[1:length]), update)
        choice.apply(protocol.Delta("0", [4], scored[:1]), update)
        assert [offset for _, offset in update.logprobs] == [*range(length + 2)]


@pytest.mark.parametrize("per_delta", [1, 100])
@pytest.mark.parametrize("stop", ["l", "ell", "o w"])
def test_stop_texts_wait_for_min_tokens(fresh_server, per_delta, stop):
    """One that begins in the first tokens is text, and those behind them end the answer."""
    scheduler = fresh_server.scheduler
    scheduler.per_delta, scheduler.answer = per_delta, "hello world, hello world, hello world"
    tokens = scheduler.encode(scheduler.answer)
    decode = fresh_server.engine.text.tokenizer.decode

    def answer(**fields):
        found = fresh_server.post("completions", prompt="x", stop=[stop], **fields).body
        return found["choices"][0]["text"], found["choices"][0]["finish_reason"]

    assert answer() == ("hello world".partition(stop)[0], "stop")
    for count in (2, 5, len(tokens)):
        first = decode(tokens[:count])
        rest, found, _ = scheduler.answer[len(first) :].partition(stop)
        assert answer(min_tokens=count) == (first + rest, "stop")
    kept, _ = answer(min_tokens=2, include_stop_str_in_output=True)
    assert kept.endswith(stop) and len(kept) > len(decode(tokens[:2]))


def test_a_stop_text_that_is_a_marker_waits_for_min_tokens():
    parser = OutputParser(["</think>"], reasoning=reasoning.find("think"), thinking=True)
    events = []
    parser.hold_stops(True)
    parser.feed("hm</think>so", events)
    assert not parser.stopped and events == [Reasoning("hm"), Text("so")]


def test_the_engine_s_error_ends_all_choices(fresh_server):
    fresh_server.scheduler.error = (500, "out of blocks")

    async def generate():
        session = await fresh_server.engine.generate(
            convert({"prompt": "x", "n": 2}, CompletionRequest), completion_generation
        )
        async for _ in session:
            pass

    with pytest.raises(ApiError, match="out of blocks"):
        fresh_server.call(generate())
    assert fresh_server.link.open_sequences == 0


@pytest.mark.parametrize("kind", ["prompts", "large prompts", "grammars", "vectors"])
def test_a_key_whose_work_takes_long_holds_up_no_other(tmp_path, model_dir, kind):
    """Not even where its clients leave, which ends no thread."""

    async def main():
        config = ServerConfig(model_dir=str(model_dir), link=str(tmp_path / "link"), listen_fd=-1, api_keys=["a", "b"])
        engine = TextEngine(EngineClient(config.link), config)
        engine.link.state, engine.link.ready = "ready", protocol.Ready(64, 400, 64, 16, 4, 1)
        engine.text = SimpleNamespace(within=lambda size: None, close=lambda: None)
        large = kind == "large prompts"
        request = convert({"prompt": "x" * (text_engine.LARGE + 1 if large else 1)}, CompletionRequest)
        release, begun, owners = threading.Event(), [], set()

        def done(work, owner):
            if kind == "vectors":
                return asyncio.ensure_future(engine.in_pool(owner, work))
            if kind == "grammars":
                return asyncio.ensure_future(engine._checked(work, owner))
            return asyncio.ensure_future(engine.prepare(request, lambda model, request: work(), owner))

        def long():
            begun.append(1)
            owners.add(blocking.owner.get())
            release.wait(15)

        for _ in range(3):
            tasks = [done(long, "slow") for _ in range(10)]
            await asyncio.sleep(0.05)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        last = done(lambda: "made", "slow")
        assert await done(lambda: "quick", "other") == "quick"
        assert len(begun) == (text_engine.LARGE_THREADS if large else text_engine.THREADS) // 2 and not last.done()
        release.set()
        assert await last == "made" and owners == {"slow"}
        engine.close()

    asyncio.run(main())


def test_not_ready(tmp_path, model_dir):
    async def main():
        link = EngineClient(str(tmp_path / "link"))
        engine = TextEngine(link, ServerConfig(model_dir=str(model_dir), link=link.path, listen_fd=-1))
        with pytest.raises(ApiError, match="still loading"):
            await engine.generate(convert({"prompt": "x"}, CompletionRequest), completion_generation)
        link.state, link.ready = "ready", protocol.Ready(64, 400, 64, 16, 4, 1)
        with pytest.raises(ApiError, match="still loading"):
            await engine.generate(convert({"prompt": "x"}, CompletionRequest), completion_generation)
        engine.close()

    asyncio.run(main())


def test_a_special_token_as_stop_string_is_matched_by_its_id(fresh_server):
    fresh_server.post("completions", prompt="x", stop=["<|turn|>", "<think>"], ignore_eos=True, max_tokens=2)
    assert fresh_server.scheduler.requests[0].sampling.stop_token_ids == (
        fresh_server.engine.text.tokenizer.token_id("<|turn|>"),
    )


def test_a_format_of_tool_calls_that_is_not_known(model_dir, tmp_path, caplog):
    (tmp_path / "template").write_text("{{ tools }}{{ messages }}")

    def loaded(**options):
        config = ServerConfig(
            model_dir=str(model_dir), link="", listen_fd=-1, chat_template=str(tmp_path / "template"), **options
        )
        engine = TextEngine(EngineClient(str(tmp_path / "link")), config)
        asyncio.run(engine.load())
        engine.close()
        return engine.text

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
    engine = TextEngine(EngineClient(str(tmp_path / "link")), ServerConfig(model_dir=str(model), link="", listen_fd=-1))
    asyncio.run(engine.load())
    engine.close()
    (message,) = caplog.messages
    assert "no chat template" in message and "OLMo" in message and "--chat-template" in message
    assert "base model" in message and "/v1/completions" in message


def test_an_error_without_words(fresh_server):
    fresh_server.scheduler.error = (0, "")
    for path, body in (("completions", {"prompt": "x"}), ("embeddings", {"input": "x"})):
        answer = fresh_server.post(path, **body)
        assert answer.status == 500 and "engine failed" in answer.body["error"]["message"]


def test_order_of_defaults():
    defaults = resolve_defaults(SamplingDefaults(temperature=0.1), {"temperature": 0.2, "top_k": 5, "top_p": None})
    assert defaults["temperature"] == 0.1
    assert defaults["top_k"] == 5
    assert defaults["top_p"] == 1.0
    assert defaults["max_tokens"] is None
