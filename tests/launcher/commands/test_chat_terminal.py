"""Features of `phalanx chat` for a person: commands, files, Markdown, progress, a history."""

import io
import json
import os
import pty
import select
import subprocess
import sys
import time

import pytest
from phalanx.launcher.commands.chat import loading
from phalanx.launcher.commands.chat.display import Live, finished
from rich.console import Console

from ... import retries
from .test_chat import Server, chat, server  # noqa: F401

pytestmark = [pytest.mark.timeout(60), retries.CLOCKS]


def said(server, number=-1):  # noqa: F811
    return [(one["role"], one["content"]) for one in server.seen[number][0]["messages"]]


def test_help_lists_every_command(server, monkeypatch, capsys):  # noqa: F811
    assert chat(server, monkeypatch, "/help\n/exit\nnever\n") == 0
    out = capsys.readouterr().out
    names = "new", "again", "undo", "system", "set", "file", "image", "save", "load", "quit"
    assert all(f"/{name}" in out for name in names)
    assert not server.seen


def test_again_undo_and_system(server, monkeypatch, capsys):  # noqa: F811
    text = "/system be brief\none\n/again\ntwo\n/undo\n/thinking off\nthree\n"
    assert chat(server, monkeypatch, text) == 0
    system, one, answer = ("system", "be brief"), ("user", "one"), ("assistant", "answer 2")
    assert said(server, 0) == said(server, 1) == [system, one]
    assert said(server, 3) == [system, one, answer, ("user", "three")]
    assert server.seen[3][0]["enable_thinking"] is False


def test_sampling_is_set(server, monkeypatch, capsys):  # noqa: F811
    typed = "/set top_p 0.5", "/set", "one", "/set top-p default", "two", ""
    assert chat(server, monkeypatch, "\n".join(typed), "--top_k", "3") == 0
    assert "top_p 0.5" in (out := capsys.readouterr().out)
    assert "top_k 3" in out
    first, second = (body for body, _ in server.seen)
    assert (first["top_p"], first["top_k"]) == (0.5, 3) and "top_p" not in second


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/nonsense", "/nonsense is no command"),
        ("/set colour 3", "colour is none of temperature"),
        ("/set seed x", "a number is needed"),
        ("/thinking perhaps", "on, off or default"),
        ("/undo", "nothing to forget"),
        ("/again", "nothing to answer again"),
        ("/file /nowhere", "No such file"),
        ("/image /nowhere", "No such file"),
        ("/load /nowhere", "No such file"),
    ],
)
def test_what_is_wrong_with_a_command_is_told(server, monkeypatch, capsys, line, words):  # noqa: F811
    assert chat(server, monkeypatch, f"{line}\n") == 2
    assert words in capsys.readouterr().err


def test_files_go_along_and_conversations_are_saved(server, monkeypatch, capsys, tmp_path):  # noqa: F811
    (tmp_path / "notes.txt").write_text("secret words")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    kept = tmp_path / "kept.json"
    assert chat(server, monkeypatch, f"/file {tmp_path}/notes.txt\nread it\n/save {kept}\n") == 0
    assert "notes.txt" in said(server)[0][1] and "secret words" in said(server)[0][1]
    assert chat(server, monkeypatch, f"/load {kept}\ngo on\n") == 0
    assert [role for role, _ in said(server)] == ["user", "assistant", "user"]
    assert chat(server, monkeypatch, f"/save {kept}\n") == 2 and "exists" in capsys.readouterr().err
    assert chat(server, monkeypatch, f"/file {tmp_path}/binary\n") == 2 and "no text" in capsys.readouterr().err
    kept.write_text("[]")
    assert chat(server, monkeypatch, f"/load {kept}\n") == 2
    assert "/save has not written" in capsys.readouterr().err


def test_images_go_along(server, monkeypatch, tmp_path):  # noqa: F811
    (tmp_path / "a.png").write_bytes(b"png")
    assert chat(server, monkeypatch, f"/image {tmp_path}/a.png\nwhat?\nand now?\n") == 0
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}
    assert said(server)[0] == ("user", [image, {"type": "text", "text": "what?"}])
    assert said(server)[2] == ("user", "and now?")


def test_a_text_of_several_lines(server, monkeypatch):  # noqa: F811
    assert chat(server, monkeypatch, '"""one\n\ntwo"""\nthree\n') == 0
    assert said(server, 0) == [("user", "one\n\ntwo")]
    assert said(server)[-1] == ("user", "three")


def test_whole_answers(server, monkeypatch, capsys):  # noqa: F811
    assert chat(server, monkeypatch, "one\n", "--no-stream", "--live") == 0  # no terminal: nothing to draw on
    assert capsys.readouterr().out == "hm \nanswer 1\n"


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("one\n\ntwo", "one\n\n"),
        ("one\n\n", ""),
        ("one\ntwo", ""),
        ("```\na\n\nb", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("- a\n\n- b", ""),
        ("- a\n\n  b", ""),
    ],
)
def test_only_finished_blocks_are_printed(text, done):
    assert finished(text) == (done, text[len(done) :])


def test_markdown_is_drawn_once():
    out = io.StringIO()
    live = Live(10, Console(file=out, force_terminal=True, width=60, color_system=None))
    live.thought("hm")
    for piece in ("# Tit", "le\n\n", "some **bo", "ld** text\n\n```python\nx = 1\n", "```\n\nlast"):
        live.text(piece)
    live.end()
    live.note("3 tokens")
    text = out.getvalue()
    assert "bold" in text and "**" not in text.rsplit("last", 1)[0][-400:] and "x = 1" in text and "3 tokens" in text
    assert text.rstrip().endswith("3 tokens") and "\x1b[?25h" in text  # the cursor is back


def test_loading_is_waited_for(server, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(loading, "LOOK_EVERY", 0.01)
    states = [{"status": "loading", "progress": {"phase": "weights", "done": 1, "total": 2}}, {"status": "ready"}]
    plain = Server.do_GET

    def do_GET(self):  # noqa: N802
        if self.path != "/health":
            return plain(self)
        state = states.pop(0)
        return self.answer(200 if state["status"] == "ready" else 503, json.dumps(state).encode())

    monkeypatch.setattr(Server, "do_GET", do_GET)
    assert chat(server, monkeypatch, "one\n") == 0
    assert "loading; waiting" in capsys.readouterr().err and not states
    states = [{"status": "failed", "message": "no memory"}]
    assert chat(server, monkeypatch, "one\n") == 1
    assert "server has failed:" in capsys.readouterr().err


def test_on_a_terminal(server, tmp_path):  # noqa: F811
    """With a history that the next conversation has, for its user alone."""
    environ = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    for line in ("first words\r", "\x10\r"):  # Ctrl-P: the line before
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "phalanx.launcher.cli", "chat", "--p", str(server.server_port), "--live"]
        process = subprocess.Popen(command, env=environ, stdin=theirs, stdout=theirs, stderr=theirs)
        os.close(theirs)
        text, sent, until = b"", 0, time.monotonic() + 30
        while time.monotonic() < until:
            if not select.select([ours], [], [], 1)[0]:
                continue
            try:
                text += os.read(ours, 4096)
            except OSError:  # the other side is closed
                break
            if text.count(b"> ") > sent:
                os.write(ours, (line if not sent else "\r").encode())
                sent += 1
        assert process.wait(10) == 0, text
        os.close(ours)
        assert b"answer" in text
        assert b"/help" in text
    assert [said(server, number) for number in (0, 1)] == [[("user", "first words")]] * 2
    assert (tmp_path / "phalanx" / "chat_history").stat().st_mode & 0o777 == 0o600
