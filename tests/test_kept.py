"""Output kept from one run to the next, and output that is not."""

import sys

import pytest

from . import kept


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "folder", lambda: tmp_path)
    return tmp_path


def test_a_file_is_made_once_for_the_same_inputs():
    made = []

    def make(path):
        made.append(path)
        path.write_text(str(len(made)))

    texts = [kept.kept(make, *inputs).read_text() for inputs in (("a", "b"), ("a", "b"), ("a", "c"), ("a", "b"))]
    assert texts == ["1", "1", "2", "1"]


def test_nothing_is_kept_where_it_could_not_be_made(folder):
    def make(path):
        path.write_text("half")
        raise ValueError("no compiler")

    with pytest.raises(ValueError, match="no compiler"):
        kept.kept(make, "a")
    assert list(folder.iterdir()) == []


def test_a_compiler_that_fails_has_no_version():
    with pytest.raises(kept.subprocess.CalledProcessError):
        kept.version(sys.executable, "-c", "raise SystemExit(1)")
