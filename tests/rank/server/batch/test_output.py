"""The output: from the journal, each line once, in either order, and never half."""

import asyncio
import json
import resource

import pytest
from phalanx.errors import FatalError
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.batch import output
from phalanx.rank.server.batch.batch_input import Reader, parse
from phalanx.rank.server.batch.journal import ANSWERED, FAILED, Journal

from ....fields import each
from .test_batch_input import line


@pytest.fixture
def place(tmp_path):
    (tmp_path / "in").write_text("\n".join([line("a"), "nonsense", line("b"), line("c"), line("a")]) + "\n")
    return tmp_path


@pytest.fixture
def journal(place):
    journal = Journal(str(place / "journal"), str(place / "in"), {})
    yield journal
    journal.close()


def items(place):
    reader = Reader(str(place / "in"), {})
    return list(reader), reader.seen


def fill(journal, found):
    async def main():
        for item in found:
            if item.wrong:
                await journal.add(output.entry(item, FAILED), output.mistake(item))
            elif item.custom_id == "c":
                error = ApiError(400, "too long", "prompt", "context_length_exceeded")
                await journal.add(output.entry(item, FAILED), output.failure(item, error))
            else:
                await journal.add(
                    output.entry(item, ANSWERED, 3, 4), output.answer(item, "cmpl-1", {"of": item.custom_id})
                )

    asyncio.run(main())


def read(path):
    return [json.loads(text) for text in path.read_text().splitlines()]


def write(journal, place, seen, ordered=False):
    return output.write(journal, seen, str(place / "out"), str(place / "errors"), ordered)


def test_the_shapes(place, journal):
    found, seen = items(place)
    fill(journal, found)
    assert write(journal, place, seen) == 0
    answers, errors = read(place / "out"), read(place / "errors")
    assert answers[0] == {
        "id": answers[0]["id"],
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "cmpl-1", "body": {"of": "a"}},
        "error": None,
    }
    assert each(answers, "custom_id") == ["a", "b"]
    assert [(one["line"], one["custom_id"], one["error"]["code"]) for one in errors] == [
        (2, None, "invalid_json"), (4, "c", "context_length_exceeded"), (5, None, "duplicate"),
    ]  # fmt: skip
    assert errors[0]["response"] is None
    body = {
        "message": "too long",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "context_length_exceeded",
    }
    assert errors[1]["response"] == {"status_code": 400, "request_id": "", "body": {"error": body}}
    assert len(set(each(answers + errors, "id"))) == 5


def test_the_name_of_the_file_is_told_where_there_are_several(place):
    one = json.loads(output.mistake(parse("a.jsonl", 7, b"nonsense")))
    assert (one["file"], one["line"]) == ("a.jsonl", 7)


@pytest.mark.parametrize("ordered", [False, True])
def test_order(place, journal, ordered):
    found, seen = items(place)
    fill(journal, found[::-1])
    write(journal, place, seen, ordered)
    assert each(read(place / "out"), "custom_id") == (["a", "b"] if ordered else ["b", "a"])
    assert each(read(place / "errors"), "line") == ([2, 4, 5] if ordered else [5, 4, 2])


def test_the_order_of_a_directory(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for name in "ba":
        (source / f"{name}.jsonl").write_text(line(f"{name}1") + "\n" + line(f"{name}2"))
    journal = Journal(str(tmp_path / "journal"), str(source), {})
    reader = Reader(str(source), {})
    fill(journal, list(reader)[::-1])
    write(journal, tmp_path, reader.seen, ordered=True)
    assert each(read(tmp_path / "out"), "custom_id") == ["a1", "a2", "b1", "b2"]
    journal.close()


def test_twice_in_the_journal_is_once_in_the_output(place, journal):
    found, seen = items(place)
    fill(journal, found + found)
    assert write(journal, place, seen) == 5
    assert len(read(place / "out")) == 2
    assert len(read(place / "errors")) == 3


def test_what_the_input_has_no_more_is_left_out(place, journal):
    found, _ = items(place)
    fill(journal, found)
    (place / "in").write_text(line("b") + "\n")
    _, seen = items(place)
    assert write(journal, place, seen) == 4
    assert each(read(place / "out"), "custom_id") == ["b"]
    assert not (place / "errors").exists()


def test_a_request_that_is_missing_is_noticed(place, journal):
    found, seen = items(place)
    fill(journal, found[1:])
    with pytest.raises(FatalError, match="lost 1.*requests") as error:
        write(journal, place, seen)
    assert error.value.code == 1
    assert not (place / "out").exists()
    assert not (place / "errors").exists()


def test_a_full_disk(place, journal):
    found, seen = items(place)
    fill(journal, found)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, old[1]))
    try:
        with pytest.raises(FatalError, match="/out: File too large.*/journal"):
            write(journal, place, seen)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert sorted(path.name for path in place.iterdir()) == ["in", "journal"]
    write(journal, place, items(place)[1])
    assert len(read(place / "out")) == 2


def test_whether_all_is_done(place, journal):
    found, seen = items(place)
    fill(journal, found)
    paths = (str(place / "in"), str(place / "out"), str(place / "errors"))
    assert not output.is_complete(*paths)
    write(journal, place, seen)
    assert output.is_complete(*paths)
    assert not output.is_complete("-", *paths[1:])
    whole = (place / "out").read_text()
    (place / "out").write_text(whole + whole)
    assert not output.is_complete(*paths)
    (place / "out").write_text("a book\n")
    assert not output.is_complete(*paths)
    (place / "out").write_text(whole.splitlines()[0] + "\n")
    assert not output.is_complete(*paths)
