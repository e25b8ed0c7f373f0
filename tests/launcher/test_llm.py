"""The library on two live ranks: answers, errors, and an end however the program ends."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from phalanx import LLM, AsyncLLM, SamplingParams
from phalanx.launcher.llm import JobError
from phalanx.launcher.llm_types import collect
from phalanx.rank.server.session import Update
from phalanx.rank.server.text.events import Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart

from .. import retries
from ..checkpoints import make_checkpoint
from ..processes import gone, kill
from ..ranks import clean

pytestmark = [pytest.mark.timeout(120), retries.KILLS]
SMALL = {"device": "cpu", "mem": 64, "dtype": "f32", "max_num_seqs": 16}


@pytest.fixture(autouse=True)
def no_foreign_variables(monkeypatch):
    for name in os.environ.keys() - clean().keys():
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("llm") / "ckpt"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, np=2, **SMALL) as model:
        yield model


def pids(model: LLM) -> list[int]:
    return [model._host._process.pid, *model._host._link.ready.pids]


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_texts_and_token_ids(llm):
    text, ids = llm.generate(["The quick brown", [5, 6, 7]], GREEDY)
    assert len(text.token_ids) == len(ids.token_ids) == 6
    assert ids.prompt_token_ids == [5, 6, 7]
    assert (text.finish_reason, text.logprobs) == ("length", None)
    assert text.usage["completion_tokens"] == 6
    assert llm.generate("The quick brown", GREEDY)[0].token_ids == text.token_ids
    assert llm.generate(text.prompt_token_ids, GREEDY)[0].text == text.text


def test_events_become_a_completion():
    choice = SimpleNamespace(index=0, started=False, finish="tool_calls", stop_reason=None)

    class Session:
        choices, prompts, usage = [choice], [SimpleNamespace(tokens=[1])], dict

        async def __aiter__(self):
            for events in ([Reasoning("h"), Text("a"), ToolCallStart(0, "id", "f")], [ToolCallArguments(0, "{")],
                           [ToolCallArguments(0, "}"), ToolCallEnd(0), Text("b")]):  # fmt: skip
                update = Update(choice)
                update.events, update.tokens = events, [5]
                yield [update]

    (one,) = asyncio.run(collect(Session(), False)).outputs
    assert (one.text, one.reasoning, one.token_ids, one.finish_reason) == ("ab", "h", [5, 5, 5], "tool_calls")
    assert one.tool_calls == [{"id": "id", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def test_one_sampling_for_each_prompt(llm):
    outs = llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3, ignore_eos=True)])
    assert len(outs[1].token_ids) == 3 and len(outs[0].token_ids) <= 1
    with pytest.raises(ValueError, match="2 sampling.*1 prompt"):
        llm.generate(["a"], [GREEDY, GREEDY])


def test_a_child_of_the_program_cannot_ask(llm, monkeypatch):
    """A fork has the sockets, too, and would take the parent's answers."""
    monkeypatch.setattr(llm._host, "_pid", -1)
    with pytest.raises(RuntimeError, match="parent process"):
        llm.generate("x")


def test_several_answers_and_logprobs(llm):
    params = SamplingParams(n=3, seed=1, max_tokens=4, logprobs=2, ignore_eos=True)
    (out,) = llm.generate("The quick", params)
    assert [one.index for one in out.outputs] == [0, 1, 2]
    assert all(len(one.logprobs) == 4 and len(one.logprobs[0].top) == 2 for one in out.outputs)
    assert [one.token for one in out.logprobs] == out.token_ids
    (again,) = llm.generate("The quick", params)
    assert [one.token_ids for one in again.outputs] == [one.token_ids for one in out.outputs]


def test_chat(llm):
    message = [{"role": "user", "content": "Hello"}]
    (out,) = llm.chat(message, GREEDY)
    assert len(out.token_ids) == 6
    two = llm.chat([message, message], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0))
    assert [one.token_ids for one in two] == [out.token_ids] * 2
    assert len(two[0].logprobs) == 6


def test_more_prompts_than_run_at_once(llm):
    outs = llm.generate([[5, 6, index] for index in range(100)], SamplingParams(max_tokens=2, ignore_eos=True))
    assert [out.prompt_token_ids[2] for out in outs] == list(range(100))


def test_from_several_threads(llm):
    found = []
    threads = [threading.Thread(target=lambda: found.append(llm.generate("x", GREEDY)[0].text)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1


@pytest.fixture(scope="module")
def streaming(llm):
    """An AsyncLLM on the same job."""
    model = AsyncLLM.__new__(AsyncLLM)
    model._host = llm._host
    return model


def test_pieces_make_the_answer(llm, streaming):
    message = [{"role": "user", "content": "Hello"}]

    async def both():
        params = SamplingParams(n=2, temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)
        texts = [piece async for piece in streaming.stream("The quick brown", params)]
        chat = [piece async for piece in streaming.stream_chat(message, GREEDY)]
        return texts, chat, await streaming.generate("The quick brown", GREEDY), await streaming.chat(message, GREEDY)

    texts, chat, text, answer = asyncio.run(both())
    for index in range(2):
        own = [piece for piece in texts if piece.index == index]
        assert "".join(piece.text for piece in own) == text.text
        assert [token for piece in own for token in piece.token_ids] == text.token_ids
        assert sum(len(piece.logprobs) for piece in own) == 6
        assert [piece.finish_reason for piece in own if piece.finish_reason] == ["length"]
    assert "".join(piece.text for piece in chat) == answer.text == llm.chat(message, GREEDY)[0].text


def test_a_stream_that_nobody_reads_on_stops_computing(llm, streaming):
    long = SamplingParams(max_tokens=400, ignore_eos=True)

    async def leave():
        async for _ in streaming.stream("x", long):
            break
        reader = asyncio.ensure_future(anext(streaming.stream("x " * 100, long)))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    asyncio.run(leave())
    until = time.monotonic() + 20
    while llm._host._link.open_sequences and time.monotonic() < until:
        time.sleep(0.01)
    assert not llm._host._link.open_sequences
    assert llm._host._room.free == llm._host._room.places


def test_wrong_uses_of_an_async_llm(streaming, checkpoint):
    with pytest.raises(ValueError, match="temperature is -1"):
        asyncio.run(anext(streaming.stream("x", SamplingParams(temperature=-1))))
    with pytest.raises(ValueError, match="argument 'port'"):
        AsyncLLM(checkpoint, port=1)
    idle = AsyncLLM(checkpoint)
    with pytest.raises(RuntimeError, match="has not started"):
        asyncio.run(idle.generate("x"))
    asyncio.run(idle.close())
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        asyncio.run(idle.generate("x"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate("x", SamplingParams(temperature=-1)), "temperature is -1: it must be between 0"),
        (lambda llm: llm.generate("x " * 5000), "the prompt has .* tokens, but this model's context is"),
        (lambda llm: llm.generate([[10**9]]), "prompt holds token id 1000000000"),
        (lambda llm: llm.chat([{"role": "nobody", "content": ""}]), "expected one of system"),
    ],
)
def test_wrong_requests(llm, call, message):
    with pytest.raises(ValueError, match=message):
        call(llm)
    assert llm.generate("x", GREEDY)[0].finish_reason == "length"


def test_wrong_options(checkpoint, monkeypatch):
    with pytest.raises(ValueError, match="model.*'/nowhere'"):
        LLM("/nowhere")
    with pytest.raises(ValueError, match=r"'nps'; did you mean np\?"):
        LLM(checkpoint, nps=2)
    with pytest.raises(ValueError, match="'port'.*phalanx serve"):
        LLM(checkpoint, port=1)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="without mpirun"):
        LLM(checkpoint)


def test_a_model_that_cannot_be_loaded(tmp_path, checkpoint):
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in os.listdir(checkpoint):
        if not name.endswith(".safetensors"):
            shutil.copy(f"{checkpoint}/{name}", broken / name)
    with pytest.raises(JobError, match="exit code 3") as error:
        LLM(str(broken), **SMALL)
    assert error.value.code == 3


def test_close(checkpoint):
    model = LLM(checkpoint, **SMALL)
    running, directory = pids(model), model._host._directory
    started = time.monotonic()
    model.close()
    assert time.monotonic() - started < 5
    assert gone(running, 1) and not os.path.exists(directory)
    model.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        model.generate("x")


@pytest.mark.long
def test_a_killed_rank_raises(checkpoint):
    with LLM(checkpoint, np=2, **SMALL) as model:
        running = pids(model)
        threading.Timer(0.5, os.kill, (running[2], signal.SIGKILL)).start()
        with pytest.raises(JobError, match="exit code 137") as error:
            while True:
                model.generate([[5, 6, 7]] * 64, SamplingParams(max_tokens=50, ignore_eos=True))
        assert error.value.code == 137
        assert gone(running)


PROGRAM = """
import sys, time
from phalanx import LLM, AsyncLLM, SamplingParams
model = LLM(sys.argv[1], device="cpu", mem=64, dtype="f32", np={ranks})
print(model._host._directory, model._host._process.pid, *model._host._link.ready.pids, flush=True)
{then}
"""
GENERATES = "while True: model.generate([5, 6], SamplingParams(max_tokens=100, ignore_eos=True))"


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "then", "number", "code"),
    [
        (1, "pass", None, 0),
        (2, "raise SystemExit(3)", None, 3),
        (2, "time.sleep(60)", signal.SIGKILL, -9),
        (2, "time.sleep(60)", signal.SIGTERM, -15),
        (2, "time.sleep(60)", signal.SIGINT, -2),
        (1, GENERATES, signal.SIGINT, -2),
    ],
    ids=["falls-off", "exits", "killed", "terminated", "ctrl-c", "in-generate"],
)
def test_the_job_ends_with_the_program(checkpoint, ranks, then, number, code):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(ranks=ranks, then=then), checkpoint],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    running: list[int] = []
    try:
        directory, *words = program.stdout.readline().split()
        running = [int(pid) for pid in words]
        assert len(running) == 1 + ranks
        if number:
            time.sleep(0.3)  # it generates by then; a signal that comes before ends it alike
            program.send_signal(number)
        program.communicate(timeout=20)
        assert program.returncode == code
        assert gone(running)
        assert not os.path.exists(directory)
    finally:
        kill([program.pid, *running])
        program.wait()
