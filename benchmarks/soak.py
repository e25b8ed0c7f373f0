"""A long mixed load on a live server: what its processes hold has to stay flat.

    python benchmarks/soak.py run.json --requests 1000000 --seconds 3600
    python benchmarks/soak.py run.json other.json --table

Starts `phalanx serve` with a tiny model of dummy weights (on two CPU ranks: --ranks, --device) and asks for streams,
tools, grammars, log-probabilities, embeddings, responses, conversations, files, batches and wrong things; many are
given up in the middle. After every --round requests the server is left alone until it is idle, and what it holds is
written to run.json: memory, file descriptors and threads of each kind of process, KV blocks in use, shared memory,
files in its temporary, state and storage directories, bytes of its log.

A run is made in slices: called again with the same file it starts another server and goes on until --requests have been
answered. --models 2 makes a slice of two models that take turns; the server has no batches then. --table prints each
slice, and adds up those of all files.

A slice is flat if nothing that it holds grew by more than TOLERANCE after its first --warm share. Growth is the
Theil-Sen slope (the median slope of all pairs of samples) times the requests. The exit code is 0 if this slice is flat,
no request failed and nothing was left behind, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from phalanx import child_python
from phalanx.launcher import builtin_model
from phalanx.launcher.commands.bench.client import Answer, Client, Failure
from phalanx.launcher.commands.bench.run import many_files
from phalanx.rank.server import durable

SETTLE = 60.0  # seconds for the server to become idle after a round, and to end
KINDS = r"-m phalanx\.(rank\.server$|rank\.[\w.]+|rank$|launcher\.job\.rank_bootstrap$)"
MPIRUN = r"\b(mpirun|prterun|mpiexec)\b"
RENAMED = {"prterun": "mpirun", "mpiexec": "mpirun", "launcher.job.rank_bootstrap": "rank"}
IDLE = ("phalanx_sequences_open", "phalanx_requests_running", "phalanx_requests_waiting", "phalanx_batches_unfinished")
RANKS = ["--load-format", "dummy", "--mem", "8", "--timeout", "120"]
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 512}  # fmt: skip


class Tolerance(NamedTuple):
    share: float  # of the median
    least: float  # in any case


TOLERANCE = {
    "memory": Tolerance(0.03, 4e6),  # bytes of a process of each kind
    "files": Tolerance(0, 2),  # its descriptors: the server has one of each process of its pools
    "threads": Tolerance(0, 2),
    "processes": Tolerance(0, 2),  # pools fill when they are needed
    "blocks": Tolerance(0, 0),  # of the KV cache in use, while nothing runs
    "shared": Tolerance(0, 1e6),  # bytes of shared memory
    "places": Tolerance(0, 1),  # files in each of the server's directories
    "log": Tolerance(0, 65536),  # bytes
}


# -- the load


class Asker:
    """One request after the other, of kinds drawn at random; what went wrong is counted."""

    def __init__(self, url: str, models: list[str], seed: int):
        self.client = Client(url, "EMPTY", timeout=180)
        self.forms = Client(url, "EMPTY", timeout=180, content_type="multipart/form-data; boundary=b")
        self.models = models
        self.random = random.Random(seed)
        self.asked: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.batches = len(models) == 1
        self.kinds: dict[Callable[[], Awaitable[None]], float] = {
            self.chat: 14, self.stream: 22, self.leave: 14, self.tool: 8, self.schema: 8, self.pattern: 4,
            self.choices: 4, self.logprobs: 8, self.embed: 6, self.response: 6, self.streamed_response: 3,
            self.background: 1, self.conversation: 1, self.message: 4, self.tokens: 2, self.wrong: 4, self.look: 1,
        }  # fmt: skip
        if self.batches:
            self.kinds |= {self.file: 0.6, self.batch: 0.4}

    @property
    def count(self) -> int:
        return self.asked.total()

    async def round(self, count: int, clients: int) -> None:
        until = self.count + count
        kinds, weights = list(self.kinds), list(self.kinds.values())

        async def one() -> None:
            while self.count < until:
                unasked = [kind for kind in kinds if not self.asked[kind.__name__]]  # what starts late is no growth
                kind = unasked[0] if unasked else self.random.choices(kinds, weights)[0]
                self.asked[kind.__name__] += 1
                try:
                    await kind()
                except Failure as failure:
                    self.failures[f"{kind.__name__}: {failure}"[:300]] += 1

        await asyncio.gather(*(one() for _ in range(clients)))
        # A model that took its turn has no process for grammars until it needs one, and no sample should lack it.
        try:
            await self.schema()
        except Failure as failure:
            self.failures[f"schema: {failure}"[:300]] += 1

    # -- what is asked

    @property
    def model(self) -> str:
        """The first one mostly, so that switches leave time for answers."""
        return self.models[self.random.random() < 0.002] if len(self.models) > 1 else self.models[0]

    def text(self) -> str:
        """A prompt that shares its beginning with others, or does not."""
        words = ["number", str(self.random.randrange(20))] * self.random.choice((1, 4, 16, 40))
        return " ".join(words + [hex(self.random.getrandbits(32))] * self.random.choice((0, 1)))

    def body(self, **more: Any) -> dict[str, Any]:
        few = self.random.choice((1, 2, 4, 8, 16))
        messages = [{"role": "user", "content": self.text()}]
        return {"model": self.model, "messages": messages, "max_tokens": few} | more

    async def post(self, path: str, body: dict[str, Any], answer: Answer | None = None) -> Any:
        said = await self.client.call("POST", path, json.dumps(body).encode(), answer)
        return json.loads(said) if answer is None else None

    async def chat(self) -> None:
        expect(await self.post("/v1/chat/completions", self.body(temperature=self.random.choice((0, 1)))), "choices")

    async def stream(self) -> None:
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        await self.post("/v1/chat/completions", self.body(**usage), Answer())

    async def leave(self) -> None:
        """A client that goes away: before its answer, or after a few events."""
        body = self.body(max_tokens=200, ignore_eos=True, n=self.random.choice((1, 1, 2)))
        left = Leaver(self.random.choice((0, 1, 3, 10)))
        if self.random.random() < 0.7:
            body["stream"] = True
        asking = asyncio.ensure_future(self.post("/v1/chat/completions", body, left if "stream" in body else None))
        left.leave = asking.cancel
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([asking], timeout=None if "stream" in body else self.random.random() * 0.05)
            asking.cancel()
            await asking

    async def tool(self) -> None:
        schema = {"type": "object", "properties": {"unit": {"enum": ["c", "f"]}, "days": {"type": "boolean"}},
                  "required": ["unit", "days"], "additionalProperties": False}  # fmt: skip
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
        body = self.body(tools=[tool], tool_choice=self.random.choice(("required", "auto")), max_tokens=64)
        said = await self.post("/v1/chat/completions", body)
        choice = expect(said, "choices")[0]
        if body["tool_choice"] == "required" and choice["finish_reason"] != "length":
            expect(choice["message"], "tool_calls")

    async def schema(self) -> None:
        """Grammars, of which there are 41: compiled ones are kept, up to 128 MB of them."""
        names = ["a", "b", f"field_{self.random.randrange(40)}"] if self.random.random() < 0.2 else ["a", "b"]
        schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}, "required": names,
                  "additionalProperties": False}  # fmt: skip
        form = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema, "strict": True}}
        choice = expect(await self.post("/v1/chat/completions", self.body(response_format=form, max_tokens=96)),
                        "choices")[0]  # fmt: skip
        if choice["finish_reason"] == "stop":
            content = choice["message"]["content"]
            try:
                json.loads(content)
            except ValueError as error:
                raise Failure(f"an answer that is no JSON ({error}): {content!r}") from None

    async def pattern(self) -> None:
        body = self.body(structured_outputs={"regex": "(yes|no)"}, max_tokens=8)
        expect(await self.post("/v1/chat/completions", body), "choices")

    async def choices(self) -> None:
        said = await self.post("/v1/chat/completions", self.body(n=3, temperature=1))
        if len(expect(said, "choices")) != 3:
            raise Failure(f"{len(said['choices'])} choices in place of 3")

    async def logprobs(self) -> None:
        body = {"model": self.model, "prompt": self.text(), "max_tokens": 4, "logprobs": 3}
        body["echo"] = self.random.random() < 0.3
        choice = expect(await self.post("/v1/completions", body), "choices")[0]
        if choice["finish_reason"] != "stop":  # its first token may have been an end token
            expect(choice["logprobs"], "tokens")

    async def embed(self) -> None:
        texts = [self.text() for _ in range(self.random.choice((1, 4)))]
        said = await self.post("/v1/embeddings", {"model": self.model, "input": texts})
        if len(expect(said, "data")) != len(texts):
            raise Failure(f"{len(said['data'])} vectors in place of {len(texts)}")

    async def response(self) -> None:
        """Kept, gone on from, and forgotten or left to the store's limit."""
        body = {"model": self.model, "input": self.text(), "max_output_tokens": 16}
        first = expect(await self.post("/v1/responses", body), "id")
        second = expect(await self.post("/v1/responses", body | {"previous_response_id": first}), "id")
        if self.random.random() < 0.5:
            await self.client.call("DELETE", f"/v1/responses/{second}")

    async def streamed_response(self) -> None:
        body = {"model": self.model, "input": self.text(), "max_output_tokens": 16, "stream": True, "store": False}
        answer = Whole()
        await self.post("/v1/responses", body, answer)

    async def background(self) -> None:
        body = {"model": self.model, "input": self.text(), "max_output_tokens": 16, "background": True}
        name = expect(await self.post("/v1/responses", body), "id")
        if self.random.random() < 0.5:
            await self.client.call("POST", f"/v1/responses/{name}/cancel")
        else:
            await self.until(f"/v1/responses/{name}", "completed", "incomplete", "failed")
        await self.client.call("DELETE", f"/v1/responses/{name}")

    async def conversation(self) -> None:
        name = expect(await self.post("/v1/conversations", {"items": []}), "id")
        for _ in range(2):
            body = {"model": self.model, "input": self.text(), "max_output_tokens": 8, "conversation": name}
            expect(await self.post("/v1/responses", body), "id")
        if self.random.random() < 0.8:
            await self.client.call("DELETE", f"/v1/conversations/{name}")

    async def message(self) -> None:
        expect(await self.post("/v1/messages", self.body()), "stop_reason")  # its text may be empty

    async def tokens(self) -> None:
        expect(await self.post("/tokenize", {"model": self.model, "prompt": self.text()}), "tokens")

    async def wrong(self) -> None:
        """Each is refused, and costs nothing."""
        body = self.random.choice((
            {"messages": 5}, self.body(max_tokens=-1), self.body(response_format={"type": "odd"}),
            self.body(structured_outputs={"regex": "("}), self.body(max_tokens=100_000),
            self.body(messages=[{"role": "user", "content": "long " * 2000}]),
        ))  # fmt: skip
        try:
            await self.post("/v1/chat/completions", body)
        except Failure as failure:
            if not 400 <= failure.status < 500:
                raise
        else:
            raise Failure(f"was answered: {str(body)[:100]}")

    async def look(self) -> None:
        for path in ("/v1/models", "/metrics", "/health"):
            await self.client.call("GET", path)
        await self.attempt(404, "GET", "/v1/nothing")

    async def attempt(self, allowed: int, method: str, path: str) -> None:
        """Requests that may be refused with this status."""
        try:
            await self.client.call(method, path)
        except Failure as failure:
            if failure.status != allowed:
                raise

    async def upload(self, lines: list[str]) -> str:
        form = ['--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n',
                '--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n',
                "\n".join(lines) + "\r\n--b--\r\n"]  # fmt: skip
        return expect(json.loads(await self.forms.call("POST", "/v1/files", "".join(form).encode())), "id")

    async def file(self) -> None:
        name = await self.upload(["{}"] * 100)
        await self.client.call("GET", f"/v1/files/{name}/content")
        await self.client.call("DELETE", f"/v1/files/{name}")

    async def batch(self) -> None:
        """Each of its lines counts as a request; a fifth of the batches is cancelled."""
        url, count = "/v1/chat/completions", 20
        lines = [json.dumps({"custom_id": str(i), "method": "POST", "url": url, "body": self.body()})
                 for i in range(count)]  # fmt: skip
        name = await self.upload(lines)
        self.asked["batch line"] += count
        window = {"input_file_id": name, "endpoint": url, "completion_window": "24h"}
        batch = expect(await self.post("/v1/batches", window), "id")
        if self.random.random() < 0.2:
            await self.attempt(400, "POST", f"/v1/batches/{batch}/cancel")  # it may be over already
        ended = await self.until(f"/v1/batches/{batch}", "completed", "cancelled", "failed", "expired")
        if ended["status"] == "completed" and ended["request_counts"]["completed"] != count:
            raise Failure(f"a batch with {ended['request_counts']}")
        for kept in (name, ended.get("output_file_id"), ended.get("error_file_id")):
            if kept:
                await self.client.call("GET", f"/v1/files/{kept}/content")
                await self.client.call("DELETE", f"/v1/files/{kept}")

    async def until(self, path: str, *ends: str) -> dict[str, Any]:
        for _ in range(2000):
            found = json.loads(await self.client.call("GET", path))
            if found["status"] in ends:
                return found
            await asyncio.sleep(0.1)
        raise Failure(f"{path} is still {found['status']}")


class Leaver(Answer):
    """A stream that is given up after so many events."""

    def __init__(self, events: int):
        super().__init__()
        self.left = events
        self.leave: Callable[[], object] = lambda: None

    def event(self, now: float, payload: bytes) -> None:
        self.left -= 1
        if self.left < 0:
            self.leave()

    def check(self) -> None: ...


class Whole(Answer):
    """A stream of /v1/responses, which ends with an event of its own."""

    ended_with = ""

    def event(self, now: float, payload: bytes) -> None:
        if payload != b"[DONE]":
            self.ended_with = json.loads(payload)["type"]

    def check(self) -> None:
        if self.ended_with not in ("response.completed", "response.incomplete"):
            raise Failure(f"a stream that ended with {self.ended_with!r}")


def expect(said: Any, key: str) -> Any:
    if not said or not said.get(key):
        raise Failure(f"no {key} in {str(said)[:200]}")
    return said[key]


# -- the server


class Job:
    """A `phalanx` command in directories of its own, which are removed at the end."""

    def __init__(self, command: Callable[[Path], list[str]]):
        """command: the words after `phalanx`; may write to the directory that it is given."""
        self.place = Path(tempfile.mkdtemp(prefix="soak-"))
        shared = Path(tempfile.mkdtemp(prefix="soak-", dir="/dev/shm"))
        self.directories = {name: self.place / name for name in ("tmp", "state", "store")} | {"shared": shared}
        for directory in self.directories.values():
            directory.mkdir(exist_ok=True)
        hand_on_kernels(Path(tempfile.gettempdir()), self.directories["tmp"])
        self.log = self.place / "log"
        environ = os.environ | {
            "TMPDIR": str(self.directories["tmp"]),
            "XDG_STATE_HOME": str(self.directories["state"]),
            "OMPI_MCA_btl_sm_backing_directory": str(shared),
            "OMPI_MCA_btl_vader_backing_directory": str(shared),  # Open MPI 4
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        words = child_python.command("-m", "phalanx.launcher.cli", *command(self.place))
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, stdout=log,
                                            stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        self.seen: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """All of its processes, with their kind; ranks by number."""
        found = []
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self.process.pid)
            found = [first, *first.children(recursive=True)]
        found.sort(key=lambda process: process.pid)
        kinds, ranks = [], 0
        for process in found:
            self.seen[process.pid] = process
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()  # mpirun's go on with those of a rank
                match = re.search(MPIRUN, " ".join(words[:2])) or re.search(KINDS, " ".join(words))
                kind = RENAMED.get(match[1], match[1]) if match else "launcher"
                if kind == "rank":
                    kind, ranks = f"rank {ranks}", ranks + 1
                kinds.append((kind.removeprefix("rank.server.").removeprefix("rank.scheduler."), process))
        return kinds

    def held(self, figures: dict[str, float]) -> dict[str, Any]:
        """Counts of what its processes and directories hold now."""
        memory, files, threads, processes = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
        for kind, process in self.processes():
            with contextlib.suppress(psutil.Error):  # a text worker may end now
                memory[kind] += process.memory_info().rss
                files[kind] += process.num_fds()
                threads[kind] += process.num_threads()
                processes[kind] += 1
        everything = {name: list(place.rglob("*")) for name, place in self.directories.items()}
        # The record of a batch that is over stays, of a thousand batches.
        everything["store"] = [one for one in everything["store"] if one.parent.name != "batches"]
        return {
            "memory": dict(memory), "files": dict(files), "threads": dict(threads), "processes": dict(processes),
            "blocks": {"used": figures["phalanx_kv_cache_usage_ratio"] * figures["phalanx_kv_cache_blocks"]},
            "shared": {"bytes": sum(size(one) for one in everything["shared"])},
            "places": {name: len(found) for name, found in everything.items()},
            "log": {"bytes": size(self.log)},
        }  # fmt: skip

    def ended(self) -> bool:
        return self.process.poll() is not None

    def left(self, files: bool = True) -> list[str]:
        """Its leftovers: processes, which are killed then, and files."""
        left = []
        for process in psutil.wait_procs(self.seen.values(), 15)[1]:
            with contextlib.suppress(psutil.Error):
                left.append(f"process {process.pid}: {' '.join(process.cmdline())[:200]}")
                process.kill()
        if files:
            for name in ("tmp", "shared"):
                found = [one.name for one in self.directories[name].iterdir()]
                left += [f"{name}: {one}" for one in found if not one.startswith("phalanx-kernels")]
            left += [f"state: {one.name}" for one in self.directories["state"].rglob("*.json") if "jobs" in one.parts]
        return left

    def stop(self) -> list[str]:
        """End it in order; what was wrong with that."""
        self.processes()
        self.process.send_signal(signal.SIGTERM)
        try:
            if code := self.process.wait(SETTLE):
                return [f"exit code {code}:\n{self.output[-2000:]}"]
        except subprocess.TimeoutExpired:
            return [f"it did not end in time:\n{self.output[-2000:]}"]
        return []

    def remove(self) -> None:
        """Kill what is left, and remove its directories."""
        self.processes()
        for process in self.seen.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait()
        hand_on_kernels(self.directories["tmp"], Path(tempfile.gettempdir()))
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.rmtree(self.directories["shared"], ignore_errors=True)


class Server(Job):
    """`phalanx serve` of tiny models."""

    def __init__(self, models: int = 1, ranks: int = 2, device: str = "cpu", options: Sequence[str] = ()):
        self.models = [f"tiny-{i}" for i in range(models)]

        def command(place: Path) -> list[str]:
            for name in self.models:
                tiny_model(place / name)
            given = ["--w", str(place / "tiny-0"), "--served-model-name", "tiny-0", "--file-store",
                     str(place / "store")]  # fmt: skip
            if models > 1:
                listed = [{"name": name, "local_path": str(place / name)} for name in self.models]
                (place / "models.yaml").write_text(json.dumps({"models": listed}))  # YAML, too
                given = ["--models-config", str(place / "models.yaml")]
            return ["serve", *given, *RANKS, "--np", str(ranks), "--device", device, "--max-num-seqs", "16",
                    "--response-store", "64", "--conversation-store", "32", "--p", "0", *options]  # fmt: skip

        super().__init__(command)

    def address(self) -> str | None:
        """None: it is not ready yet."""
        found = re.search(r"ready: (http://\S+)/v1", self.output)
        return found[1] if found else None

    def wait_ready(self, seconds: float) -> str:
        """The address."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.ended():
            if address := self.address():
                return address
            time.sleep(0.2)
        raise Failure(f"the server is not ready:\n{self.output[-2000:]}")


def size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:
        return 0  # gone meanwhile


def tiny_model(place: Path) -> None:
    """A model's directory without weights: the built-in model's tokenizer and a smaller configuration."""
    left_out = shutil.ignore_patterns("*.py", "__pycache__", "*.safetensors")
    shutil.copytree(builtin_model.DIRECTORY, place, ignore=left_out)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | SMALL))


def hand_on_kernels(source: Path, target: Path) -> None:
    """Link compiled kernels of one temporary directory into another: compiling takes a minute on a busy machine."""
    name = f"phalanx-kernels-{os.getuid()}"
    with contextlib.suppress(OSError, shutil.Error):  # what is there already
        shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("tmp*"), copy_function=os.link,
                        dirs_exist_ok=True)  # fmt: skip


async def figures(client: Client) -> dict[str, float]:
    text = (await client.call("GET", "/metrics")).decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)}


async def idle(client: Client) -> dict[str, float]:
    """The figures once nothing is asked or computed, and the statistics are those of an idle scheduler."""
    until = time.monotonic() + SETTLE
    while True:
        await asyncio.sleep(0.7)  # statistics come every half second
        found = await figures(client)
        busy = {name: found[name] for name in IDLE if found.get(name)}
        if not busy:
            return found
        if time.monotonic() > until:
            raise Failure(f"not idle after {SETTLE:g} s: {busy}")


# -- the verdict


def slope(xs: list[float], ys: list[float]) -> float:
    """Theil-Sen: the median of the slopes of all pairs, which outliers hardly move."""
    x, y = np.asarray(xs, float), np.asarray(ys, float)
    first, second = np.triu_indices(len(x), 1)
    apart = x[second] != x[first]
    if not apart.any():
        return 0.0
    return float(np.median((y[second] - y[first])[apart] / (x[second] - x[first])[apart]))


def growth(samples: list[dict[str, Any]], warm: float) -> dict[str, dict[str, Any]]:
    """The median of everything that samples hold, by how much it grew after the warm-up, and whether that is flat.

    warm: the share of the requests in which caches and pools fill.
    """
    last = samples[-1]["requests"]
    kept = [one for one in samples if one["requests"] >= warm * last]
    found = {}
    for what, tolerance in TOLERANCE.items():
        for name in sorted({name for one in kept for name in one[what]}):
            values = [one[what].get(name, 0) for one in kept]
            if what in ("memory", "files", "threads"):
                values = [x / one["processes"].get(name, 1) for x, one in zip(values, kept, strict=True)]
            grew = slope([one["requests"] for one in kept], values) * (last - kept[0]["requests"])
            median = float(np.median(values))
            most = max(tolerance.least, tolerance.share * median)
            if what == "blocks":  # none may stay for a moment
                grew = max(values)
            found[f"{what} {name}"] = {
                "first": values[0], "median": median, "last": values[-1], "grew": grew, "flat": grew <= most,
            }  # fmt: skip
    return found


def verdict(slice: dict[str, Any]) -> list[str]:
    """Why a slice is not what it should be; nothing: it is."""
    why = [f"{count} x {text}" for text, count in slice["failures"].items()]
    why += [f"left behind: {one}" for one in slice["left"]]
    if len(slice["samples"]) < 3:
        return [*why, "too few samples"]
    for name, one in growth(slice["samples"], slice["warm"]).items():
        if not one["flat"]:
            why.append(f"{name} grew by {one['grew']:g} from {one['first']:g}")
    return why


# -- slices


def load(path: Path, requests: int) -> dict[str, Any]:
    if path.exists():
        return json.loads(path.read_text())
    return {"requests": requests, "slices": []}


def save(path: Path, run: dict[str, Any]) -> None:
    with durable.atomically(str(path)) as file:
        file.write(json.dumps(run).encode())


def done(run: dict[str, Any]) -> int:
    return sum(one["asked"] for one in run["slices"])


async def soak(asked: argparse.Namespace, run: dict[str, Any]) -> dict[str, Any]:
    """One slice; the file is written after every round."""
    goal = min(asked.slice or run["requests"], run["requests"] - done(run))
    server = Server(asked.models, asked.ranks, asked.device, asked.option)
    slice: dict[str, Any] = {"began": round(time.time()), "models": asked.models, "warm": asked.warm, "asked": 0,
                             "seconds": 0.0, "kinds": {}, "failures": {}, "left": [], "samples": []}  # fmt: skip
    run["slices"].append(slice)
    began = time.monotonic()
    try:
        asker = Asker(server.wait_ready(asked.start), server.models, asked.seed + len(run["slices"]))
        while asker.count < goal and time.monotonic() < began + asked.seconds and not asked.stopped:
            await asker.round(min(asked.round, goal - asker.count), asked.clients)
            held = server.held(await idle(asker.client))
            slice["samples"].append({"requests": asker.count, **held})
            slice |= {"asked": asker.count, "seconds": round(time.monotonic() - began, 1),
                      "kinds": dict(asker.asked), "failures": dict(asker.failures)}  # fmt: skip
            save(asked.file, run)
            if server.ended():
                raise Failure("the server has ended")
    except Failure as failure:
        slice["failures"][str(failure)] = slice["failures"].get(str(failure), 0) + 1
    finally:
        slice["left"] += [*server.stop(), *server.left()]
        server.remove()
        slice["why"] = verdict(slice)
        save(asked.file, run)
    return slice


def table(slice: dict[str, Any]) -> Iterator[str]:
    yield f"{slice['asked']} requests in {slice['seconds']:.0f} s, {slice['models']} model(s), " + ", ".join(
        f"{name} {count}" for name, count in sorted(slice["kinds"].items(), key=lambda one: -one[1])
    )
    if len(slice["samples"]) >= 3:
        yield f"| | after {100 * slice['warm']:g} % | median | last | growth | flat |"
        yield "|---|---|---|---|---|---|"
        for name, one in growth(slice["samples"], slice["warm"]).items():
            unit, name, form = (1e6, f"{name} (MB)", ".2f") if name.startswith("memory") else (1, name, ".0f")
            shown = " | ".join(format(one[key] / unit, form) for key in ("first", "median", "last", "grew"))
            yield f"| {name} | {shown} | {'yes' if one['flat'] else 'NO'} |"
    yield from (f"NOT FLAT: {why}" for why in slice.get("why", ["not ended"]))


def total(slices: list[dict[str, Any]]) -> Iterator[str]:
    """The sum of slices. What is let in a short one may be a leak of a long run: so the longest one's second half, in
    which nothing fills any more."""
    asked, seconds = (sum(one[key] for one in slices) for key in ("asked", "seconds"))
    failed, left = (sum(map(count, slices)) for count in (lambda one: sum(one["failures"].values()),
                                                          lambda one: len(one["left"])))  # fmt: skip
    yield f"{asked} requests in {seconds / 3600:.1f} h, {len(slices)} slices; {failed} failed, {left} left behind"
    kinds = sum((Counter(one["kinds"]) for one in slices), Counter[str]())
    yield ", ".join(f"{name} {count}" for name, count in kinds.most_common())
    judged = [one for one in slices if len(one["samples"]) >= 3]
    if not judged:
        return
    longest = max(judged, key=lambda one: one["asked"])
    late = growth(longest["samples"], 0.5)
    found = [growth(one["samples"], one["warm"]) for one in judged]
    yield f"| | median | most growth | flat in | second half of {longest['asked']} requests |"
    yield "|---|---|---|---|---|"
    for name in dict.fromkeys(name for one in found for name in one):
        each = [one[name] for one in found if name in one]
        unit, title, form = (1e6, f"{name} (MB)", ".2f") if name.startswith("memory") else (1, name, ".0f")
        numbers = [float(np.median([one["median"] for one in each])), max(one["grew"] for one in each)]
        numbers.append(late[name]["grew"] if name in late else 0.0)
        median, grew, then = (format(number / unit, form) for number in numbers)
        yield f"| {title} | {median} | {grew} | {sum(one['flat'] for one in each)} of {len(each)} | {then} |"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("file", type=Path, nargs="+", help="of the run's state, JSON; made where there is none")
    made.add_argument("--requests", type=int, default=1_000_000, help="of the whole run (1000000)")
    made.add_argument("--slice", type=int, help="requests of this slice at most")
    made.add_argument("--seconds", type=float, default=3600.0, help="of this slice at most (3600)")
    made.add_argument("--round", type=int, default=500, help="requests from one sample to the next (500)")
    made.add_argument("--warm", type=float, default=0.05, help="share of a slice in which caches fill (0.05)")
    made.add_argument("--clients", type=int, default=12, help="that ask at once (12)")
    made.add_argument("--models", type=int, default=1, choices=(1, 2), help="2: they take turns, and no batches (1)")
    made.add_argument("--ranks", type=int, default=2, help="of the server (2)")
    made.add_argument("--device", default="cpu", help="of the ranks, as `phalanx serve` takes it (cpu)")
    made.add_argument("--start", type=float, default=180.0, help="seconds for the server to be ready (180)")
    made.add_argument("--seed", type=int, default=0, help="of what is asked; another one for each file (0)")
    made.add_argument("--option", action="append", default=[], help="a further word for `phalanx serve`")
    made.add_argument("--table", action="store_true", help="print what the files say, and run nothing")
    return made


def main(argv: list[str] | None = None) -> int:
    made = parser()
    asked = made.parse_args(argv)
    if asked.table:
        if lost := [str(file) for file in asked.file if not file.exists()]:
            made.error(f"there is no {', '.join(lost)}")
        slices = [slice for file in asked.file for slice in load(file, asked.requests)["slices"]]
        print("\n".join(line for slice in slices for line in table(slice)))
        if len(slices) > 1:
            print("\n".join(total(slices)))
        return int(any(slice.get("why", True) for slice in slices))
    if len(asked.file) > 1:
        made.error("several files can only be added up, with --table")
    (asked.file,) = asked.file
    asked.stopped = False
    run = load(asked.file, asked.requests)
    if done(run) >= run["requests"]:
        print(f"soak.py: {asked.file} has all its {run['requests']} requests", file=sys.stderr)
        return 0

    def stop(*_: object) -> None:  # the round under way is finished
        asked.stopped = True

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with many_files():
            slice = asyncio.run(soak(asked, run))
    finally:
        signal.signal(signal.SIGTERM, before)
    print("\n".join(table(slice)))
    print(f"{done(run)} of {run['requests']} requests")
    return 1 if slice["why"] else 0


if __name__ == "__main__":
    sys.exit(main())
