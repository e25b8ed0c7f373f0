"""Logs that never wait for their reader, for all processes of a job.

A pipe that nobody reads, a stopped terminal and a hung file system block whoever writes to them. So a thread alone
writes (`Writer`). Output that is not read is dropped and counted, the oldest first. `O_NONBLOCK` would not do instead:
the user's shell shares the open file, and a file system that hangs ignores the flag.

Texts of clients and model files reach a log only through `clean`, which cuts and escapes them. A line of code that logs
too often is limited (`LogHandler`), so that no client can fill a disk.

After `use_json` each line is a JSON object, also of what libraries print.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import io
import json
import logging
import os
import re
import select
import sys
import threading
import time
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

LINE = 2000  # characters of a line
LINES = 200  # of a record with its traceback
BURST, RATE = 50, 5.0  # records that one line of code may log at once, and a second from then on
REPORT_AFTER = 1.0  # seconds until the log counts the records that were left out
BACKLOG = 1 << 20  # bytes that wait for a reader
SLICE = 4096  # bytes of a write: a pipe takes so many at once, so that a slow reader's progress shows
STALLED, LONGEST_FLUSH = 0.3, 3.0  # seconds that `flush` waits: for a reader that takes nothing, and in all

# Control characters but tab and newline, and the marks that reorder or break lines on a terminal.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escape(text: str) -> str:
    """Write control characters and bidirectional marks as `\\x1b` and `\\u202e`."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def clean(text: str) -> str:
    """Escape a text of several lines, cut long lines and leave out the middle of more than LINES lines.

    Every line but the first is indented: a newline in a client's text cannot begin a line that looks like the log's.
    """
    lines = text.rstrip("\n").split("\n")
    if len(lines) > LINES:
        half = LINES // 2
        lines[half:-half] = [f"… {len(lines) - 2 * half} lines …"]
    first, *rest = map(_cut, lines)
    return "\n".join((first, *(line if line.startswith("  ") else f"  {line}" for line in rest)))


def _cut(line: str) -> str:
    shown = escape(line[: LINE + 1])
    return shown if len(shown) <= LINE else f"{shown[:LINE]}… ({len(line)} characters)"


_process = ""  # this process's name in JSON lines; "": lines are text
# Fields of the request that is being handled, for JSON lines: request_id and the like.
request: ContextVar[dict[str, str] | None] = ContextVar("request", default=None)


def use_json(process: str) -> None:
    """Make each line of this process's log a JSON object. process: its name there, such as "rank 3"."""
    global _process
    _process = process


def is_json() -> bool:
    """Whether lines are JSON objects."""
    return bool(_process)


def _object(level: str, logger: str, message: str, seconds: float | None = None, **fields: Any) -> str:
    """A line of the log as JSON. seconds: its Unix time, if that is not now."""
    at = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    shown = {
        "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": level,
        "logger": logger,
        "process": _process,
        "pid": os.getpid(),
        "message": clean(message),
        **{name: clean(value) if isinstance(value, str) else value for name, value in fields.items()},
    }
    return json.dumps(shown, ensure_ascii=False)


def _own(text: str, level: str) -> str:
    """A line of Phalanx's own that no logger wrote."""
    return _object(level, "phalanx", text) if _process else f"phalanx: {clean(text)}"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {**(request.get() or {}), **getattr(record, "fields", {})}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _object(record.levelname.lower(), record.name, record.getMessage(), record.created, **fields)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return clean(super().format(record))


def formatter(form: str) -> logging.Formatter:
    """Make lines of the format that this process's log has. form: that of text lines."""
    return _JsonFormatter() if _process else _TextFormatter(form, "%H:%M:%S")


def say(text: str, level: str = "info") -> None:
    """Print one line to the user, on stderr, if that can be written. level: for JSON lines."""
    _print(_own(text, level))


def say_traceback(error: BaseException) -> None:
    """Print an exception's traceback on stderr, if that can be written."""
    text = "".join(traceback.format_exception(error))
    _print(_object("error", "phalanx", str(error), exception=text) if _process else clean(text))


def _print(line: str) -> None:
    with contextlib.suppress(OSError):
        if isinstance(sys.stderr, _Stream):
            sys.stderr.put(f"{line}\n")
        else:
            print(line, file=sys.stderr, flush=True)


class Writer:
    """Writes to a file descriptor in a thread of its own, which starts with the first write."""

    def __init__(self, fd: int, backlog: int = BACKLOG):
        self.written = 0  # bytes
        self.dropped = 0  # bytes, in all
        self._fd = fd
        self._backlog = backlog
        self._waiting: collections.deque[bytes] = collections.deque()
        self._size = 0  # bytes that wait
        self._reported = 0  # bytes of these that the log has counted
        self._busy = self._in_line = False  # in_line: the last byte that was written is no newline
        # Reentrant, as a signal handler may write while the thread that it interrupts does.
        self._changed = threading.Condition(threading.RLock())
        self._thread: threading.Thread | None = None

    @property
    def key(self) -> tuple[int, int]:
        """The open file's device and inode number. Raises OSError where it is closed."""
        status = os.fstat(self._fd)
        return status.st_dev, status.st_ino

    def write(self, data: bytes) -> None:
        """Queue `data` without blocking. A full queue drops its oldest."""
        with self._changed:
            self._waiting.append(data)
            self._size += len(data)
            while self._size > self._backlog and self._waiting:
                self.dropped += len(self._take())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"log {self._fd}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def idle(self) -> bool:
        """Whether all that was queued is written or dropped."""
        return not (self._waiting or self._busy)

    def _take(self) -> bytes:
        data = self._waiting.popleft()
        self._size -= len(data)
        return data

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                self._busy = True
                data, dropped = self._take(), self.dropped - self._reported
                self._reported = self.dropped
            if dropped:
                newline = "\n" * self._in_line
                note = _own(f"{dropped} bytes of the log were dropped: nobody read it", "warning")
                self._put(f"{newline}{note}\n".encode())
            self._put(data)

    def _put(self, data: bytes) -> None:
        """Write `data`. Bytes that cannot be written are lost: a full disk or a reader that is gone ends no job."""
        self._in_line = not data.endswith(b"\n")
        with contextlib.suppress(OSError):
            while data:
                try:
                    count = os.write(self._fd, data[:SLICE])
                except BlockingIOError:  # another process that has this open file set O_NONBLOCK
                    select.select([], [self._fd], [])
                    continue
                self.written += count
                data = data[count:]


class _FileWriter(Writer):
    """Writes to a file by its name: once logrotate has moved the file, what comes goes to a new one of that name."""

    def __init__(self, path: str):
        self._path = path
        super().__init__(self._open())

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def _put(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a directory that is gone or full: the old file gets it
            if not self._is_there():
                new = self._open()
                os.dup2(new, self._fd, inheritable=False)
                os.close(new)
        super()._put(data)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False


_writers: dict[tuple[int, int], Writer] = {}  # by the open file's device and inode number


def writer(fd: int) -> Writer:
    """The process's one Writer of the file that is open as `fd`: stdout and stderr may be the same file."""
    made = Writer(fd)
    try:
        key = made.key
    except OSError:  # the user's shell closed it, and the next file that is opened must not get the log
        os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        key = made.key
    return _writers.setdefault(key, made)


def lost() -> tuple[int, int]:
    """Bytes that this process dropped because they were not read, and records that it left out as too many."""
    return sum(one.dropped for one in _writers.values()), _handler.left_out if _handler is not None else 0


def flush() -> None:
    """Wait until all is written, while a reader takes what is; at the end of a process, which must not hang."""
    if _handler is not None:
        _handler.report()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Stream):
            stream.end_line()
            stream.flush()
    end = time.monotonic() + LONGEST_FLUSH
    seen, since = -1, 0.0
    while not all(one.idle for one in _writers.values()) and (now := time.monotonic()) < end:
        written = sum(one.written for one in _writers.values())
        if written != seen:
            seen, since = written, now
        elif now - since > STALLED:
            return
        time.sleep(0.001)


class _RawStream(io.RawIOBase):
    def __init__(self, fd: int):
        super().__init__()
        self._fd = fd
        self._writer = writer(fd)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._writer.write(bytes(data))
        return len(data)

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)


class _Stream(io.TextIOWrapper):
    """A standard stream whose writes never block. Progress bars begin with a carriage return, which is left.

    Where the log is JSON, a line is written when it is whole, as an object.
    """

    def __init__(self, *args: Any, **more: Any):
        super().__init__(*args, **more)
        self._line = ""  # has not ended yet
        self._line_lock = threading.RLock()  # a signal handler may print, too

    def write(self, text: str) -> int:
        if not _process:
            return self.put(text)
        with self._line_lock:
            *lines, self._line = (self._line + text).split("\n")
            if len(self._line) > BACKLOG:
                lines, self._line = [*lines, self._line], ""
        for line in filter(str.strip, lines):
            stderr = self.fileno() == 2
            self.put(_object("warning" if stderr else "info", "stderr" if stderr else "stdout", line) + "\n")
        return len(text)

    def end_line(self) -> None:
        """Write what has not ended by a newline."""
        if self._line:
            self.write("\n")

    def put(self, text: str) -> int:
        """Write text as it is, but for control characters."""
        begin = text[:1] if text[:1] == "\r" else ""
        super().write(begin + escape(text[len(begin) :]))
        return len(text)


def open_closed() -> None:
    """Open the standard streams that whoever started this process has closed: the next file or socket would take their
    descriptors, and get the log."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: fd
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115


def unblock() -> None:
    """Have `print`, warnings and tracebacks of this process never wait for a reader."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)  # None: the user's shell closed it
        if isinstance(old, _Stream) or (old is not None and not _is_standard(old, fd)):
            continue
        with contextlib.suppress(OSError, AttributeError):
            old.flush()
        raw: Any = _RawStream(fd)
        setattr(sys, name, _Stream(raw, getattr(old, "encoding", "utf-8"), "backslashreplace", line_buffering=True))
    atexit.register(flush)


def _is_standard(stream: Any, fd: int) -> bool:
    """Whether it is the process's own stream, not one that a notebook or a test put there."""
    try:
        return bool(stream.fileno() == fd)
    except (AttributeError, OSError, ValueError):
        return False


class _Site:
    """A line of code that logs: how many records it may log now, and how many were left out."""

    def __init__(self, now: float, rate: float):
        self._left = max(BURST, rate)
        self._since = now
        self.left_out = 0

    def allows(self, now: float, rate: float) -> bool:
        self._left = min(max(BURST, rate), self._left + rate * (now - self._since))
        self._since = now
        if self._left < 1:
            self.left_out += 1
            return False
        self._left -= 1
        return True


class LogHandler(logging.Handler):
    """Writes records by Writers. Limits how often each line of code logs, by its record's `rate` where it has one."""

    def __init__(self, writers: list[Writer], form: str):
        super().__init__()
        self.setFormatter(formatter(form))
        self._writers = writers
        self._sites: dict[tuple[str, int], _Site] = {}
        self.left_out = 0  # records, in all
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._emit(record)
        except Exception:  # its values do not fit its format: that must not end whoever logs
            self.handleError(record)

    def _emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        key = record.pathname, record.lineno
        rate = getattr(record, "rate", RATE)
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = _Site(now, rate)
        if site.allows(now, rate):
            self._write(self.format(record))
            return
        self.left_out += 1
        if self._timer is None:
            self._timer = threading.Timer(REPORT_AFTER, self.report)
            self._timer.daemon = True
            self._timer.start()

    def report(self) -> None:
        """Log how many records were left out since the last report."""
        with self.lock or contextlib.nullcontext():
            self._timer = None
            for (path, line), site in self._sites.items():
                if site.left_out:
                    where = f"{os.path.basename(path)}, line {line}"
                    self._write(_own(f"{site.left_out} more lines like these were left out ({where})", "warning"))
                    site.left_out = 0

    def _write(self, line: str) -> None:
        data = f"{line}\n".encode(errors="backslashreplace")
        for one in self._writers:
            one.write(data)


_handler: LogHandler | None = None


def start(level: int | str, form: str, file: str = "") -> None:
    """Begin this process's log: on stderr, and in `file` if that is named. Raises OSError where it cannot be opened."""
    global _handler
    unblock()
    writers = [writer(2)]
    if file:
        named = _FileWriter(file)
        writers.append(_writers.setdefault(named.key, named))
    _handler = LogHandler(writers, form)
    logging.basicConfig(level=level, handlers=[_handler], force=True)
