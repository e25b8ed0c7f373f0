"""The input: good lines, bad ones, every kind of source, and how a change is noticed."""

import asyncio
import io
import json
import re
from types import SimpleNamespace

import pytest
from phalanx.errors import FatalError
from phalanx.rank.server.batch import batch_input
from phalanx.rank.server.http.routes import batchable
from phalanx.rank.server.schema import ChatRequest, CompletionRequest

PATHS = f"one of {', '.join(batchable())} is needed"


def line(custom_id, url="/v1/completions", **body):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body or {"prompt": "x"}})


def items(path, *texts, finished=None):
    path.write_text("\n".join(texts) + "\n")
    return list(batch_input.Reader(str(path), finished or {}))


def test_good_lines(tmp_path):
    texts = (line("a"), "", line("b", "/v1/chat/completions", messages="hi"), line("c", "/completions"))
    a, b, c = items(tmp_path / "in", *texts)
    assert [(one.custom_id, one.line, one.wrong) for one in (a, b, c)] == [("a", 1, ""), ("b", 3, ""), ("c", 4, "")]
    assert [one.route.schema for one in (a, b, c)] == [CompletionRequest, ChatRequest, CompletionRequest]
    assert json.loads(bytes(b.body)) == {"messages": "hi"}


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("hello", "invalid_json", "the line is not JSON: JSON is malformed: invalid character (byte 0)"),
        ('{"custom_id": "a"', "invalid_json", "the line is not JSON: Input data was truncated"),
        ("[1]", "invalid", "the line is [1]: a JSON object with custom_id, method, url and body is needed"),
        ("{}", "custom_id", "custom_id is missing"),
        ('{"custom_id": 7}', "custom_id", "custom_id is 7: a text is needed"),
        ('{"custom_id": ""}', "custom_id", 'custom_id is "": a text is needed'),
        ('{"custom_id": "a", "method": "GET"}', "method", 'method is "GET": only POST is possible'),
        ('{"custom_id": "a"}', "url", f"url is missing: {PATHS}"),
        ('{"custom_id": "a", "url": "/v1/x"}', "url",
         f'url is "/v1/x": {PATHS}'),
        ('{"custom_id": "a", "url": 3}', "url", f"url is 3: {PATHS}"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "body", "body is missing"),
        ('{"custom_id": ' + "[" * 100000, "invalid_json", "nested too deeply"),
    ],
)  # fmt: skip
def test_bad_lines(tmp_path, text, code, message):
    one, after = items(tmp_path / "in", text, line("z"))
    assert one.code == code and message in one.wrong and one.line == 1
    assert after.custom_id == "z" and not after.wrong


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "in").write_bytes(b"\xff\xfe{\n" + line("a").encode() + b"\n")
    one, two = batch_input.Reader(str(tmp_path / "in"), {})
    assert one.code == "invalid_json" and two.custom_id == "a"
    (tmp_path / "in").write_bytes(b'{"custom_id": "\xff"}\n')
    (one,) = batch_input.Reader(str(tmp_path / "in"), {})
    assert "UTF-8" in one.wrong and "0xff (byte 15)" in one.wrong


def test_a_byte_order_mark_and_windows_line_ends(tmp_path):
    (tmp_path / "in").write_bytes(b"\xef\xbb\xbf" + line("a").encode() + b"\r\n" + line("b").encode())
    assert [one.custom_id for one in batch_input.Reader(str(tmp_path / "in"), {})] == ["a", "b"]
    assert batch_input.count(str(tmp_path / "in")) == 2


def test_a_line_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_input, "MAX_LINE", 1 << 20)
    one, two = items(tmp_path / "in", line("a", prompt="x" * (3 << 20)), line("b"))
    assert "1 MiB" in one.wrong and one.custom_id is None and one.line == 1
    assert two.custom_id == "b" and two.line == 2


def test_a_custom_id_counts_once(tmp_path):
    one, two, three = items(tmp_path / "in", line("a"), line("a", prompt="y"), line("a"))
    assert not one.wrong
    assert '"a"' in two.wrong
    assert two.code == "duplicate"
    assert two.custom_id is None and len({one.key, two.key, three.key}) == 3


def test_the_same_keys_at_every_start(tmp_path):
    texts = (line("a"), "nonsense", line("a"), "nonsense")
    first = items(tmp_path / "in", *texts)
    assert items(tmp_path / "in", *texts, finished={one.key: one.digest for one in first}) == []
    kept = first[:2]
    again = items(tmp_path / "in", *texts, finished={one.key: one.digest for one in kept})
    assert [one.line for one in again] == [3, 4]


def test_a_request_that_changed_is_noticed(tmp_path):
    (one,) = items(tmp_path / "in", line("a"))
    with pytest.raises(FatalError, match='changed.*line 1.*"a"') as e:
        items(tmp_path / "in", line("a", prompt="other"), finished={one.key: one.digest})
    assert e.value.code == 2 and "--overwrite" in str(e.value)


def test_a_directory(tmp_path):
    (tmp_path / "b.jsonl").write_text(line("b1") + "\n" + line("b2"))
    (tmp_path / "a.jsonl").write_text(line("a1") + "\n")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".hidden.jsonl").write_text("x")
    found = list(batch_input.Reader(str(tmp_path), {}))
    assert [(one.where, one.custom_id) for one in found] == [
        ("a.jsonl line 1", "a1"), ("b.jsonl line 1", "b1"), ("b.jsonl line 2", "b2"),
    ]  # fmt: skip
    assert batch_input.count(str(tmp_path)) == 3


def test_standard_input(monkeypatch):
    stdin = io.BytesIO(line("a").encode() + b"\n" + line("b").encode())
    monkeypatch.setattr(batch_input.sys, "stdin", SimpleNamespace(buffer=stdin))
    assert [one.custom_id for one in batch_input.Reader("-", {})] == ["a", "b"]
    assert batch_input.count("-") == 0
    assert batch_input.fingerprint("-") == []
    assert not batch_input.changed("-", [])


def test_no_input(tmp_path):
    with pytest.raises(FatalError, match="/none: No such file"):
        batch_input.check(str(tmp_path / "none"))
    with pytest.raises(FatalError, match="[.]jsonl"):
        batch_input.check(str(tmp_path))
    batch_input.check("-")


def test_how_an_input_differs(tmp_path):
    one, two = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    one.write_text("old old\n")
    two.write_text("x\n")
    known = batch_input.fingerprint(str(tmp_path))
    assert batch_input.changed(str(tmp_path), known) == ""
    two.write_text("x\nmore\n")
    assert batch_input.changed(str(tmp_path), known) == ""  # it has grown
    (tmp_path / "3.jsonl").write_text("z")
    assert batch_input.changed(str(tmp_path), known) == ""
    one.write_text("new new\n")
    assert re.search("1.jsonl.*requests", batch_input.changed(str(tmp_path), known))
    one.write_text("old")
    assert re.search("1.jsonl.*8 bytes.*3", batch_input.changed(str(tmp_path), known))
    one.unlink()
    assert re.search("1.jsonl.*longer", batch_input.changed(str(tmp_path), known))
    assert batch_input.changed(str(tmp_path), batch_input.fingerprint(str(two))) == "it was one file"


def test_the_feed_reads_only_a_little_ahead():
    taken = []

    def endless():
        for i in range(10**9):
            taken.append(i)
            yield batch_input.Item("", i, i, 0)

    async def main():
        feed = batch_input.Feed(endless(), ahead=8)
        first = [(await anext(feed)).line for _ in range(5)]
        await asyncio.sleep(0.1)  # 0.1 s are enough to read thousands of lines ahead
        feed.close()
        return first

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]
    assert len(taken) <= 16


def test_the_feed_passes_errors_on():
    def broken():
        yield batch_input.Item("", 1, 1, 0)
        raise FatalError("the disk is on fire", 1)

    async def main():
        feed = batch_input.Feed(broken())
        await anext(feed)
        await anext(feed)

    with pytest.raises(FatalError, match="on fire"):
        asyncio.run(main())


def test_an_input_that_breaks_off(tmp_path, monkeypatch):
    def broken(path):
        yield "", 1, line("a").encode()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(batch_input, "read", broken)
    with pytest.raises(FatalError, match="input.*Input/output"):
        list(batch_input.Reader("x", {}))
