"""benchmarks/builtin_model/evaluate.py: what counts as right, and runs against a server that knows all or nothing."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from phalanx.benchmarks.builtin_model import evaluate, heldout
from phalanx.benchmarks.builtin_model.item import Item
from phalanx.benchmarks.builtin_model.words import normal

from ...server import Server


def right(item, content="", calls=(), thought="", ended=True, think=True):
    return evaluate.right(item, thought, content, list(calls), ended, think)


@pytest.mark.parametrize("skill", [name for name, _, _ in heldout.SKILLS])
def test_every_exercise_accepts_its_own_answer(skill):
    for item in heldout.items(skill, 30):
        calls = [{"name": call["name"], "arguments": call["arguments"]} for call in item.calls]
        assert right(item, item.answer, calls, item.thought)
        assert not right(item, item.answer, calls, item.thought, ended=False)
        assert not right(item, f"<think>\n{item.thought}\n</think>\n\n{item.answer}", calls)


def test_a_call_has_the_arguments_types():
    call = {"name": "f", "arguments": {"on": True, "n": 1}}
    item = Item("call", [], calls=[call], expect={"call": call})
    assert right(item, calls=[call])
    for wrong in ({"on": 1, "n": 1}, {"on": True, "n": 1.0}, {"on": True}, "{"):
        assert not right(item, calls=[{"name": "f", "arguments": wrong}])
    assert not right(item, calls=[call, call]) and not right(item, calls=[call | {"name": "g"}])
    assert not right(item, '<tool_call>\n{"name": "f", "arguments": {"on": true, "n": 1}}\n</tool_call>')


def test_json_has_the_values_types():
    item = Item("extract", [], expect={"json": {"n": 1, "x": None}})
    assert right(item, '{"x": null, "n": 1}')
    assert right(item, '```json\n{"n": 1, "x": null}\n```')
    assert not right(item, '{"n": true, "x": null}')
    assert not right(item, '{"n": "1", "x": null}')


def test_a_value_is_whole():
    item = Item("recall", [], expect={"all": ["55"]})
    assert right(item, "It is 55.") and not right(item, "It is 1555.") and not right(item, "It is A-55.")


def test_a_flag_is_whole_but_a_word_may_go_on():
    item = Item("facts", [], expect={"all": ["--m", "drain"], "fact": 1})
    assert right(item, "Use --m: it drains.") and not right(item, "Use --mem: it drains.")


def test_a_sum_needs_a_short_thought():
    item = Item("add", [], expect={"number": 5})
    assert right(item, "2 + 3 = 5", thought="2 + 3 = 5.") and right(item, "2 + 3 = 5", think=False)
    assert not right(item, "2 + 3 = 5") and not right(item, "2 + 3 = 5", thought="so " * 100)


class Many(ThreadingHTTPServer):
    request_queue_size = 128  # all requests come at once


class Knowing(BaseHTTPRequestHandler):
    """Answers each exercise as wanted; each token has the log-probability -1."""

    items: dict[str, Item]

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path.endswith("/chat/completions"):
            item = self.items.get(json.dumps(body["messages"][-1]["content"]))
            message = {"content": item.answer if item else "", "reasoning_content": item.thought if item else ""}
            message["tool_calls"] = [
                {"function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
                for call in (item.calls if item else ())
            ]
            choice = {"message": message, "finish_reason": "stop"}
        else:
            (token,) = body["logit_bias"]
            choice = {"token_ids": [int(token)], "logprobs": {"token_logprobs": [-1.0]}}
        answer = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run the evaluation against a server that knows these items; exit code, report and output."""

    def run(items, *words):
        handler = type("Handler", (Knowing,), {"items": {json.dumps(i.messages[-1]["content"]): i for i in items}})
        server = Many(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        base, out = f"http://127.0.0.1:{server.server_port}/v1", tmp_path / "report.json"
        monkeypatch.setattr("sys.argv", ["demo_eval.py", "--base-url", base, "--json", str(out), *words])
        try:
            code = evaluate.main()
        finally:
            server.shutdown()
            server.server_close()
            thread.join(10)
        return code, json.loads(out.read_text()), capsys.readouterr().out

    return run


def test_a_server_that_knows_everything(run):
    items = [item for skill, _, _ in heldout.SKILLS for item in heldout.items(skill, 40)]
    code, report, out = run(items, "--items", "40", "--perplexity", "2")
    assert code == 0 and "missed" not in out
    assert list(report["table"]) == [skill for skill, _, _ in heldout.SKILLS]
    assert all((one["right"], one["of"], one["failed"]) == (40, 40, []) for one in report["table"].values())
    assert report["table"]["no call, answer after a result"]["kinds"] == {
        "no_call": {"right": 20, "of": 20}, "result": {"right": 20, "of": 20}
    }  # fmt: skip
    tokens = sum(sum(learn[1:]) for _, learn in heldout.documents(2))
    assert report["perplexity"] == {"answers": pytest.approx(2.718281828), "tokens": tokens}
    assert f"answers   2.7183, {tokens} tokens" in out
    assert len({normal(one["user"]) for one in report["small_talk"]}) == 20
    assert all(f"> {one['user']}\n{one['answer']}\n" in out for one in report["small_talk"])
    assert len(json.dumps(report)) < 10_000


def test_a_server_that_knows_nothing(run):
    code, report, out = run([], "--items", "3", "--skill", "copy", "--skill", "sort")
    assert code == 1 and [line.split()[-1] for line in out.splitlines()[1:3]] == ["missed", "missed"]
    assert list(report["table"]) == ["copy", "sort"] and "perplexity" not in report
    first = heldout.items("copy", 3)[0]
    failed = report["table"]["copy"]["failed"]
    assert len(failed) == 3
    assert failed[0]["wanted"] == first.answer
    assert failed[0]["content"] == ""


def test_a_server_that_heeds_no_bias(monkeypatch):
    monkeypatch.setattr(evaluate, "post", lambda *_: {"choices": [{"token_ids": [7]}]})
    with pytest.raises(RuntimeError, match=r"chose \[7\].*token 9$"):
        evaluate.surprise(([1, 2], 9), "http://here", "m", "")


@pytest.mark.long
def test_through_a_real_server(monkeypatch, tmp_path):
    out, whole = tmp_path / "report.json", evaluate.as_request
    monkeypatch.setattr(evaluate, "as_request", lambda *asked: whole(*asked) | {"max_tokens": 16})
    with Server("--device", "cpu", "--load-format", "dummy") as server:
        words = ["--base-url", server.url + "/v1", "--items", "1", "--perplexity", "2", "--json", str(out)]
        monkeypatch.setattr("sys.argv", ["demo_eval.py", *words])
        assert evaluate.main() == 1  # random weights know nothing
    report = json.loads(out.read_text())
    assert len(report["table"]) == len(heldout.SKILLS)
    assert report["perplexity"]["answers"] > 100
