"""Many polite and some misbehaving clients at once: what the latter can take from the others, and from the server.

    python benchmarks/crowd.py                    starts a server of its own (serving/paced.py)
    python benchmarks/crowd.py --port 2000        asks a running one on this machine

Each of --streams polite clients asks for one streamed answer after the other, for --seconds; with them are
--misbehaving others (serving/misbehaving.py): slow readers, never-readers, leavers, resets, half requests. Then the
same again, with bodies of 10 MB from a sixth of these. The exit code is 1 unless

- every polite stream of both runs is whole: all its tokens, its finish_reason, its usage;
- the median time to first token with the 10 MB bodies is at most twice that without;
- the server process (the one that listens) stays under 300 MB;
- afterwards no sequence is open, no file descriptor is left, and the memory is back near where it was.

The clients run in two processes of the server's machine; on few cores they compete with it in both runs alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
from phalanx.launcher.commands.bench.client import Answer, Client, Failure
from phalanx.launcher.commands.bench.run import many_files

HERE = Path(__file__).resolve().parent
MAX_MEMORY = 300  # MB
MAX_LEFT = 50  # MB that the allocator and warm caches may keep
WARM_FILES = 8  # descriptors of text workers that large prompts start, and that stay warm
SETTLE = 30.0  # seconds for the server to see that everybody has gone
GAUGES = ("phalanx_sequences_open", "phalanx_requests_running", "phalanx_requests_waiting")


class _Choice(msgspec.Struct):
    token_ids: list[int] = []


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


_decode = msgspec.json.Decoder(_Chunk).decode


class Whole(Answer):
    """An answer whose tokens are counted."""

    tokens = 0

    def event(self, now: float, payload: bytes) -> None:
        super().event(now, payload)
        if payload != b"[DONE]" and self.error is None:
            self.tokens += sum(len(choice.token_ids) for choice in _decode(payload).choices)


class Server(psutil.Process):
    """The process that answers."""

    def megabytes(self) -> float:
        return self.memory_info().rss / 1e6


def server_of(port: int) -> Server:
    """The process that listens there; of several that hold the socket, the one that serves."""
    holders = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in process.net_connections("tcp")):
                holders.append(process)
    if not holders:
        raise Failure(f"no process of yours listens on port {port} of this machine")
    serving = [process for process in holders if "phalanx.rank.server" in process.cmdline()]
    return Server((serving or holders)[-1].pid)


@dataclasses.dataclass
class Run:
    """The result of one crowd."""

    streams: int = 0
    errors: list[str] = dataclasses.field(default_factory=list)
    first: list[float] = dataclasses.field(default_factory=list)  # seconds to each stream's first token
    texts: list[str] = dataclasses.field(default_factory=list)
    peak: float = 0.0  # MB
    misbehaving: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.first) if self.first else float("inf")

    def figures(self) -> dict[str, Any]:
        return {
            "whole_streams": self.streams,
            "broken_streams": len(self.errors),
            "errors": self.errors[:5],
            "median_first_token_s": self.median,
            "worst_first_token_s": max(self.first, default=float("inf")),
            "peak_mb": self.peak,
            "misbehaving": self.misbehaving,
        }


async def polite(client: Client, number: int, tokens: int, until: float, run: Run, text: str = "") -> None:
    """Streams one after the other; the last one ends after the time. text: what each has to be, where that is known."""
    messages = [{"role": "user", "content": f"Client {number} asks for a story."}]
    body = {
        "model": "any",
        "messages": messages,
        "stream": True,
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    while time.perf_counter() < until:
        answer, sent = Whole(keep_text=True), time.perf_counter()
        try:
            await client.call("POST", "/v1/chat/completions", json.dumps(body).encode(), answer)
            counted = answer.usage.completion_tokens if answer.usage else 0
            if not answer.tokens == counted == tokens or answer.finish != "length":
                raise Failure(f"{answer.tokens} tokens came, usage says {counted}, asked were {tokens}")
            run.texts.append("".join(answer.text or ()))
            if text and run.texts[-1] != text:
                raise Failure(f"the answer was {run.texts[-1]!r}, alone it was {text!r}")
            run.streams += 1
            run.first.append((answer.times or [answer.ended])[0] - sent)  # a few tokens may have no text
        except Failure as failure:
            run.errors.append(str(failure))


async def watch(server: Server, run: Run) -> None:
    while True:
        run.peak = max(run.peak, server.megabytes())
        await asyncio.sleep(0.02)


async def crowd(asked: argparse.Namespace, server: Server, large: bool, alone: dict[int, str]) -> Run:
    """Everybody at once, until all polite streams have ended. alone: texts of some, by their numbers."""
    run = Run()
    client = Client(f"http://127.0.0.1:{asked.port}", "EMPTY", timeout=asked.seconds + 120)
    command = [
        sys.executable,
        str(HERE / "serving/misbehaving.py"),
        "--port",
        str(asked.port),
        "--clients",
        str(asked.misbehaving),
        "--seconds",
        str(asked.seconds),
        *(["--large"] if large else []),
    ]
    watcher = asyncio.ensure_future(watch(server, run))
    misbehaving = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        until = time.perf_counter() + asked.seconds
        clients = range(asked.streams)
        await asyncio.gather(*(polite(client, i, asked.tokens, until, run, alone.get(i, "")) for i in clients))
        said, _ = await misbehaving.communicate()
        run.misbehaving = json.loads(said)
    finally:
        if misbehaving.returncode is None:
            misbehaving.kill()
            await misbehaving.wait()
        watcher.cancel()
    return run


async def gauges(client: Client) -> dict[str, float]:
    text = (await client.call("GET", "/metrics")).decode()
    found = {name: re.search(rf"^{name} (\S+)$", text, re.MULTILINE) for name in GAUGES}
    return {name.removeprefix("phalanx_"): float(value[1]) for name, value in found.items() if value}


async def settled(client: Client, server: Server, files: int, memory: float) -> dict[str, float]:
    """Resources left once everybody has gone; waits at most SETTLE seconds until there are none."""
    until = time.perf_counter() + SETTLE
    while True:
        left = await gauges(client)
        left |= {"files": max(0, server.num_fds() - files - WARM_FILES), "mb": server.megabytes() - memory}
        over = left["mb"] > MAX_LEFT or any(value > 0 for name, value in left.items() if name != "mb")
        if not over or time.perf_counter() > until:
            return left
        await asyncio.sleep(0.2)


async def texts(client: Client, asked: argparse.Namespace) -> dict[int, str]:
    """Answers to every tenth client while no other client asks."""
    found = {}
    for number in range(0, asked.streams, 10):
        run = Run()
        await polite(client, number, asked.tokens, time.perf_counter() + 1e-3, run)
        if run.errors:
            raise Failure(run.errors[0])
        found[number] = run.texts[0]
    return found


async def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Both runs, and what is left after them."""
    server, client = server_of(asked.port), Client(f"http://127.0.0.1:{asked.port}", "EMPTY", 60)
    warm = Run()
    await polite(client, 0, 2, time.perf_counter() + 0.5, warm)
    if warm.errors:
        raise Failure(warm.errors[0])
    files, memory = server.num_fds(), server.megabytes()
    alone = await texts(client, asked) if asked.texts else {}
    without = await crowd(asked, server, False, alone)
    await settled(client, server, files, memory)
    large = await crowd(asked, server, True, alone)
    left = await settled(client, server, files, memory)
    kept = {
        "every polite stream is whole": not without.errors + large.errors and bool(without.streams and large.streams),
        "first token: median at most twice": large.median <= 2 * without.median,
        f"the server process under {MAX_MEMORY} MB": max(without.peak, large.peak) < MAX_MEMORY,
        "nothing open or leaked": left["mb"] <= MAX_LEFT and not any(v > 0 for k, v in left.items() if k != "mb"),
    }
    return {
        "without_large": without.figures(),
        "with_large": large.figures(),
        "texts_compared": len(alone),
        "before_mb": memory,
        "left": left,
        "kept": kept,
    }


def table(found: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [("", "without 10 MB", "with 10 MB")]
    runs = found["without_large"], found["with_large"]
    for title, name, form in (
        ("whole streams", "whole_streams", "d"),
        ("broken streams", "broken_streams", "d"),
        ("median first token (s)", "median_first_token_s", ".2f"),
        ("worst first token (s)", "worst_first_token_s", ".2f"),
        ("server process, peak (MB)", "peak_mb", ".0f"),
    ):
        rows.append((title, *(format(run[name], form) for run in runs)))
    for name in sorted({*runs[0]["misbehaving"], *runs[1]["misbehaving"]}):
        rows.append((f"misbehaving: {name}", *(str(run["misbehaving"].get(name, 0)) for run in runs)))
    lines = [f"{title:34} {one:>14} {other:>14}" for title, one, other in rows]
    lines.append(
        f"left afterwards: {', '.join(f'{name} {value:g}' for name, value in found['left'].items())} "
        f"(began with {found['before_mb']:.0f} MB)"
    )
    lines += [f"{'kept' if yes else 'NOT KEPT'}: {what}" for what, yes in found["kept"].items()]
    return "\n".join(lines)


@contextlib.contextmanager
def paced(asked: argparse.Namespace) -> Iterator[None]:
    """A server of its own, whose model only takes time."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        asked.port = probe.getsockname()[1]
    options = {"p": asked.port, "step-ms": asked.step_ms, "prefill": asked.prefill, "max-num-seqs": 512}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    process = subprocess.Popen([sys.executable, str(HERE / "serving/paced.py"), *flags], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        assert process.stderr is not None
        if not any("is ready" in line for line in process.stderr):
            raise Failure("the server did not start")
        yield
    finally:
        process.send_signal(2)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--port", type=int, help="of a running server on this machine; without it one is started")
    made.add_argument("--streams", type=int, default=300, help="polite clients (300)")
    made.add_argument("--misbehaving", type=int, default=30, help="misbehaving clients (30)")
    made.add_argument("--seconds", type=float, default=60.0, help="of each of the two runs (60)")
    made.add_argument("--tokens", type=int, default=64, help="of each polite answer (64)")
    made.add_argument("--step-ms", type=float, default=100.0, help="of the server that is started (100)")
    made.set_defaults(prefill=45000.0)  # prompt tokens/s of that server
    made.add_argument("--texts", action="store_true",
                      help="every tenth client's text has to be what it was alone (not of paced.py)")  # fmt: skip
    made.add_argument("--json", metavar="FILE", help="the figures, also printed as the last line")
    return made


def main(argv: list[str] | None = None) -> int:
    asked = parser().parse_args(argv)
    try:
        with many_files(), contextlib.nullcontext() if asked.port else paced(asked):
            found = asyncio.run(measure(asked))
    except Failure as failure:
        print(f"crowd.py: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(table(found))
    print(json.dumps(found))
    if asked.json:
        Path(asked.json).write_text(json.dumps(found) + "\n")
    return 0 if all(found["kept"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
