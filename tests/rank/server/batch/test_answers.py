"""Single requests of a batch job: answers, refusals, failures, and requests that are asked again."""

import asyncio
import json
from types import SimpleNamespace

from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.batch import answers

from ....fields import each


def test_bad_lines_and_refused_requests(stage, capsys):
    wrong = {"custom_id": "long", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 10000}}
    odd = {"custom_id": "odd", "url": "/v1/completions", "body": {"prompt": "x", "top_p": 7}}
    stage.input(3, "nonsense", json.dumps(wrong), json.dumps(odd))
    assert stage.start() == 0
    assert sorted(stage.ids()) == ["r0", "r1", "r2"]
    errors = {one["line"]: one for one in stage.read("errors.jsonl")}
    assert errors[4]["error"]["code"] == "invalid_json" and errors[4]["response"] is None
    assert errors[5]["custom_id"] == "long" and errors[5]["response"]["status_code"] == 400
    assert "model's context" in errors[5]["error"]["message"]
    assert "top_p is 7" in errors[6]["error"]["message"]
    assert "6 done, 3 failed" in capsys.readouterr().err
    assert stage.summary["total"]["failed"] == 3
    assert stage.summary["errors"].endswith("errors.jsonl")


def test_failures_can_fail_the_job(stage, capsys):
    stage.input(1, "nonsense")
    assert stage.start(fail_on_error=True) == 1
    assert "1 requests failed (--fail-on-error)" in capsys.readouterr().err
    assert stage.left() == ["errors.jsonl", "out.jsonl"]


def test_the_engine_fails_on_a_request(stage):
    stage.input(2)
    stage.scheduler_has = {"error": (500, "on fire")}
    assert stage.start() == 0
    assert [one["error"]["message"] for one in stage.read("errors.jsonl")] == ["on fire"] * 2
    assert stage.read() == []


def test_an_error_of_ours_is_one_requests_error(stage, monkeypatch):
    stage.input(3)
    from phalanx.rank.server.text_engine import TextEngine

    real = TextEngine.generate

    async def broken(self, request, *more):
        if request.seed == 1:
            raise KeyError("oops")
        return await real(self, request, *more)

    monkeypatch.setattr(TextEngine, "generate", broken)
    assert stage.start() == 0
    assert sorted(stage.ids()) == ["r0", "r2"]
    assert stage.read("errors.jsonl")[0]["error"]["message"] == "internal error: KeyError: 'oops'"


def test_ranks_that_come_back_are_asked_again(stage, capsys):
    stage.input(30)
    stage.scheduler_has = {"hold": True}

    async def restart(stage):
        for _ in range(2):
            await stage.until(lambda: len(stage.scheduler.requests) == 8)
            stage.scheduler.close()
            await stage.until(lambda: stage.link.state == "restarting")
            await asyncio.sleep(0.05)  # while nobody is connected nothing may be sent, or fail
            await stage.connect()
        stage.scheduler.hold = False

    assert stage.start(restart, restarts=True) == 0
    assert "asked again when" in capsys.readouterr().err
    assert sorted(stage.ids()) == sorted(f"r{i}" for i in range(30))


def test_embeddings_among_other_requests(stage):
    body = {"input": ["hello", "hello world"], "normalize": False}
    stage.input(3, json.dumps({"custom_id": "vectors", "url": "/v1/embeddings", "body": body}))
    assert stage.start() == 0
    assert sorted(stage.ids()) == ["r0", "r1", "r2", "vectors"]
    (answer,) = (one["response"]["body"] for one in stage.read() if one["custom_id"] == "vectors")
    lengths = [len(stage.encode(text)) for text in body["input"]]
    assert each(answer["data"], "embedding") == [[n, 3, 0, 4] for n in lengths]
    assert answer["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}


def test_scores_among_other_requests(stage):
    stage.input(1, json.dumps({"custom_id": "s", "url": "/v1/score", "body": {"text_1": "a", "text_2": ["a", "b c"]}}))
    assert stage.start() == 0
    (answer,) = (one["response"]["body"] for one in stage.read() if one["custom_id"] == "s")
    assert each(answer["data"], "index") == [0, 1]
    assert round(answer["data"][0]["score"], 5) == 1


def test_a_request_pauses_while_the_model_is_being_put_to_sleep(monkeypatch):
    """Open requests still end: the link's `ready` is there, and nothing new is taken."""
    real, pauses = asyncio.sleep, []

    async def sleep(seconds):
        pauses.append(seconds)
        await real(0)

    async def wait_ready():
        link.asleep = len(pauses) < 3

    link = SimpleNamespace(asleep=True, draining=False, wait_ready=wait_ready)

    async def ask(item, request):
        if link.asleep:
            raise ApiError(503, "it sleeps", code="sleeping")
        return "entry", b"answer"

    made = answers.Answers(SimpleNamespace(link=link), None, None, None)
    written = []
    monkeypatch.setattr(made, "_ask", ask)
    monkeypatch.setattr(made, "_record", lambda *given: written.append(given))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(made._answer(SimpleNamespace(custom_id="a"), None))
    assert pauses and set(pauses) == {answers.BUSY} and written == [("entry", b"answer")]
