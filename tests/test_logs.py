"""Logs: cut, escaped, limited, and never waited for."""

import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
from phalanx import logs

from .fields import each
from .processes import wait


def run(code: str, **streams) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", f"from phalanx import logs\n{code}"], timeout=60, **streams)


@pytest.fixture
def pipe():
    """A pipe's two ends, the reading one not blocking."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    yield reading, writing
    os.close(reading)


def read(fd: int, until: bytes, seconds: float = 20) -> bytes:
    """The output, up to a text that ends it."""
    found = bytearray()

    def missing() -> bool:
        with contextlib.suppress(BlockingIOError):
            found.extend(os.read(fd, 1 << 16))
        return until not in found

    assert not wait(missing, seconds), bytes(found[-300:])
    return bytes(found)


def test_control_characters_and_bidirectional_marks_are_escaped():
    text = "a\x1b[31m\x00\x7f\x9b\r\u202e\u2066\u200f\u2028b\tc é 漢"
    assert logs.escape(text) == r"a\x1b[31m\x00\x7f\x9b\r\u202e\u2066\u200f\u2028b" + "\tc é 漢"


def test_a_long_line_is_cut_and_tells_its_length():
    for one in ("x", "\x1b"):
        shown = logs.clean(one * 240_000)
        assert len(shown) < logs.LINE + 50 and "240000 characters" in shown


def test_many_lines_lose_their_middle():
    shown = logs.clean("\n".join(map(str, range(10_000)))).split("\n")
    assert len(shown) == logs.LINES + 1
    assert shown[0] == "0" and shown[-1].strip() == "9999" and str(10_000 - logs.LINES) in shown[logs.LINES // 2]


def test_a_newline_begins_no_line_that_looks_like_the_logs():
    assert logs.clean("no tensor a\nphalanx: all is well\n    more\n") == (
        "no tensor a\n  phalanx: all is well\n    more"
    )


def test_a_writer_drops_the_oldest_counts_it_and_blocks_nobody(pipe):
    reading, writing = pipe
    writer = logs.Writer(writing, backlog=50_000)
    lines = [b"%099d\n" % number for number in range(5000)]  # half a megabyte, where a pipe takes 64 KiB
    for line in lines:
        writer.write(line)
    assert not writer.idle
    found = read(reading, lines[-1])
    dropped = re.findall(rb"phalanx: (\d+) bytes of the log were dropped", found)
    assert sum(map(int, dropped)) == 100 * (len(lines) - len(re.findall(rb"^\d{99}$", found, re.MULTILINE)))
    assert writer.dropped == sum(map(int, dropped)) > 100_000


def test_what_was_lost_is_counted():
    code = (
        "import logging\nlogs.start('INFO', '%(message)s')\nfor i in range(logs.BURST + 30): logging.info('x')\n"
        "assert logs.lost() == (0, 30), logs.lost()\nlogs.writer(2).write(b'y' * (logs.BACKLOG + 1))\n"
        "assert logs.lost()[0] > logs.BACKLOG, logs.lost()"
    )
    assert run(code, stderr=subprocess.DEVNULL).returncode == 0


def test_a_signal_handler_may_log_while_the_thread_that_it_interrupts_does(pipe):
    _, writing = pipe
    writer = logs.Writer(writing, backlog=1000)
    calls = []

    def log_too(*_: object) -> None:
        calls.append(1)
        writer.write(b"from the handler\n" * 10)

    old = signal.signal(signal.SIGALRM, log_too)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        until = time.monotonic() + 30
        while len(calls) < 50 and time.monotonic() < until:
            writer.write(b"a line\n" * 20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert len(calls) >= 50


def test_a_full_disk_ends_nothing():
    code = (
        "import logging, sys\nlogs.start('INFO', '%(message)s')\nlogs.say('something')\n"
        "logging.info('more')\nprint('yet more', file=sys.stderr)\nprint('went on')"
    )
    with open("/dev/full", "w") as full:
        done = run(code, stdout=subprocess.PIPE, stderr=full)
    assert done.returncode == 0 and done.stdout == b"went on\n"
    done = run(code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=lambda: os.close(2))
    assert done.returncode == 0 and done.stdout == b"went on\n"


def test_what_is_said_without_streams_of_logs_ends_nothing_either():
    with open("/dev/full", "w") as full:
        done = run("logs.say('something'); print('went on')", stdout=subprocess.PIPE, stderr=full)
    assert done.stdout == b"went on\n"


NOISE = """
import sys, threading, warnings
logs.start("INFO", "%(message)s")
import logging
for _ in range(3000):
    print("x" * 1000, file=sys.stderr, flush=True)
    sys.stdout.write("y" * 1000)
logging.error("an error")
warnings.warn("a warning")
threading.Thread(target=lambda: 1 / 0).start()
logs.say("the last words")
open(sys.argv[1], "w").close()
"""


def test_a_pipe_that_nobody_reads_delays_the_end_by_a_moment(tmp_path):
    reading, writing = os.pipe()
    done = tmp_path / "done"
    process = subprocess.Popen(
        [sys.executable, "-c", f"from phalanx import logs\n{NOISE}", done], stdout=writing, stderr=writing
    )
    try:
        assert process.wait(60) == 0 and done.exists()
    finally:
        process.kill()
        process.wait()
        os.close(reading)
        os.close(writing)


def test_the_last_words_reach_a_slow_reader(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", f"from phalanx import logs\n{NOISE}", tmp_path / "done"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    assert not wait(lambda: not (tmp_path / "done").exists(), 30)
    found = process.stdout.read()
    assert process.wait(30) == 0
    for words in ("bytes of the log were dropped", "an error", "a warning", "ZeroDivisionError", "the last words"):
        assert words.encode() in found, words


def test_a_reader_that_shares_the_open_file_may_set_it_to_not_block(pipe):
    reading, writing = pipe
    os.set_blocking(writing, False)
    writer = logs.Writer(writing)
    lines = [b"%099d\n" % number for number in range(5000)]
    writer.write(b"".join(lines))
    assert read(reading, lines[-1]) == b"".join(lines)


def test_stdout_and_stderr_that_are_one_file_keep_their_order(tmp_path):
    code = "import sys\nlogs.unblock()\nfor i in range(500): print(i, file=(sys.stdout, sys.stderr)[i % 2], flush=True)"
    with (tmp_path / "log").open("w") as log:
        assert run(code, stdout=log, stderr=log).returncode == 0
    assert (tmp_path / "log").read_text().split() == [str(i) for i in range(500)]


def test_a_progress_bar_keeps_its_carriage_return():
    code = "import sys\nlogs.unblock()\nsys.stderr.write('\\r50%'); sys.stderr.write('a\\rb\\x1b')"
    assert run(code, capture_output=True).stderr == b"\r50%a\\rb\\x1b"


class Kept(logs.Writer):
    """A Writer that keeps what it is given."""

    def __init__(self):
        super().__init__(-1)
        self.lines: list[str] = []

    def write(self, data: bytes) -> None:
        self.lines.append(data.decode())


@pytest.fixture
def log():
    """A logger with a LogHandler, and the handler's lines."""
    kept = Kept()
    logger = logging.Logger("test")
    logger.addHandler(logs.LogHandler([kept], "%(message)s"))
    return logger, kept.lines


def test_a_line_of_code_that_logs_too_often_is_limited_and_counted(log):
    logger, lines = log
    for number in range(1000):
        logger.warning("malformed %d: %s", number, "\x1b" * 60_000)
    logger.warning("another line of code")
    assert any("another line" in line for line in lines)
    assert not wait(lambda: "left out" not in lines[-1], 20)
    counted = sum(int(found) for line in lines for found in re.findall(r"(\d+) more lines", line))
    assert counted + sum("malformed" in line for line in lines) == 1000
    assert counted > 500 and sum(map(len, lines)) < 1000 * logs.LINE


def test_a_record_may_have_a_rate_of_its_own(log):
    logger, lines = log
    for number in range(400):
        logger.warning("GET %d", number, extra={"rate": 100_000})
    assert len(lines) == 400


def test_tracebacks_are_cut(log):
    logger, lines = log
    try:
        raise ValueError("\n".join(["phalanx: forged"] * 5000) + "\x9b" * 9000)
    except ValueError:
        logger.exception("failed")
    (text,) = lines
    assert len(text) < 2 * logs.LINES * logs.LINE and "\x9b" not in text
    assert "\nphalanx" not in text
    assert text.startswith("failed\n  Traceback")


def test_many_threads_lose_nothing_that_is_read(pipe):
    reading, writing = pipe
    writer = logs.Writer(writing)

    def many(name: bytes) -> None:
        for number in range(200):
            writer.write(b"%s %d\n" % (name, number))

    threads = [threading.Thread(target=many, args=(b"%d" % one,)) for one in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.write(b"end\n")
    lines = read(reading, b"end\n").splitlines()
    assert len(lines) == 1601
    for one in range(8):
        assert [line for line in lines if line.startswith(b"%d " % one)] == [b"%d %d" % (one, i) for i in range(200)]


def test_a_record_that_cannot_be_written_ends_nobody():
    code = (
        "import logging\nlogs.start('INFO', '%(message)s')\nlogging.warning('%d of all', 'x')\nlogging.warning('then')"
    )
    done = run(code, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "then" in done.stderr and "Logging error" in done.stderr


JSON = """
import logging, sys, threading, warnings
logs.use_json("rank 3")
logs.start("INFO", "%(asctime)s %(message)s")
log = logging.getLogger("phalanx.test")
logs.request.set({"request_id": "r1"})
log.info("a %s", "b\\nphalanx: \\x1b[31m \\u202e\\udc80 é", extra={"fields": {"path": "/v1\\x1b", "status": 200}})
logs.request.set(None)
try:
    1 / 0
except ZeroDivisionError as error:
    log.exception("failed")
    logs.say_traceback(error)
print("one\\ntwo", end="")
print("half", end="", file=sys.stderr)
print(" a line", file=sys.stderr)
thread = threading.Thread(target=lambda: [][0])
thread.start()
thread.join()
for i in range(logs.BURST + 5): log.warning("often")
logs.say("x" * (logs.LINE + 100), "error")
print("last", end="", file=sys.stderr)
"""


def test_every_line_is_json_where_that_is_asked_for():
    done = run(JSON, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.returncode == 0
    out, err = ([json.loads(line) for line in data.decode().splitlines()] for data in (done.stdout, done.stderr))
    assert [(one["logger"], one["level"], one["message"]) for one in out] == [
        ("stdout", "info", "one"), ("stdout", "info", "two"),
    ]  # fmt: skip
    for one in (*out, *err):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one["time"])
        assert one["process"] == "rank 3" and one["pid"]
    first, failed, traceback, half, *_ = err
    assert (first["level"], first["logger"], first["request_id"]) == ("info", "phalanx.test", "r1")
    assert first["message"] == "a b\n  phalanx: \\x1b[31m \\u202e\udc80 é"
    assert (first["path"], first["status"]) == (r"/v1\x1b", 200)
    assert failed["message"] == "failed" and "request_id" not in failed
    assert "ZeroDivisionError" in failed["exception"] and "ZeroDivisionError" in traceback["exception"]
    assert (half["logger"], half["level"], half["message"]) == ("stderr", "warning", "half a line")
    assert any("IndexError" in one["message"] for one in err)
    assert each(err, "message").count("often") == logs.BURST
    assert any(one["message"].startswith("5 more") for one in err)
    (cut,) = (one for one in err if one["message"].startswith("xxx"))
    assert cut["level"] == "error" and len(cut["message"]) < logs.LINE + 50
    assert err[-1]["message"] == "last"


def test_bytes_that_were_dropped_are_counted_in_json_too(pipe):
    reading, writing = pipe
    code = (
        "logs.use_json('server')\nwriter = logs.writer(2)\n"
        "for i in range(30000): writer.write(b'{\"n\": %90d}\\n' % i)\n"
        "print('written')\nimport sys; sys.stdin.read()\nlogs.flush()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"from phalanx import logs\n{code}"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=writing,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"written\n"
        process.stdin.close()
        lines = [json.loads(line) for line in read(reading, b"29999}\n").splitlines()]
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    notes = [one for one in lines if "message" in one]  # one for each time that the pipe had room again
    assert notes
    for note in notes:
        assert note["level"] == "warning" and "dropped" in note["message"] and note["process"] == "server"


def test_streams_that_are_closed():
    """Standard streams as some service managers give them: no file that is opened later gets the log."""
    code = (
        "import os, socket, sys\nlogs.open_closed()\none = socket.socket()\n"
        "assert one.fileno() > 2 and not sys.stderr.isatty()\n"
        "logs.unblock()\nprint('lost', file=sys.stderr, flush=True)\nlogs.flush()\nos._exit(7)"
    )
    line = f'exec "$0" -c "$1" {" ".join(f"{fd}>&-" for fd in range(3))}'
    program = [sys.executable, f"from phalanx import logs\n{code}"]
    assert subprocess.run(["bash", "-c", line, *program], timeout=60).returncode == 7


ROTATED = """
import logging, os, sys
logs.start("INFO", "%(message)s", "own.log")
logging.info("before")
logs.flush()
if sys.argv[1] == "renamed":
    os.rename("own.log", "own.log.1")
else:
    open("own.log.1", "w").write(open("own.log").read())
    os.truncate("own.log", 0)
logging.info("after")
logs.flush()
logging.info("later")
logs.flush()
"""


@pytest.mark.parametrize("how", ["renamed", pytest.param("copied and truncated", marks=pytest.mark.long)])
def test_a_log_file_may_be_rotated(tmp_path, how):
    code = f"from phalanx import logs\n{ROTATED}"
    done = subprocess.run([sys.executable, "-c", code, how], cwd=tmp_path, timeout=60, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "own.log.1").read_text() == "before\n"
    assert (tmp_path / "own.log").read_text() == "after\nlater\n"  # without a gap of null bytes
