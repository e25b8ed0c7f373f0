"""Requests without text or HTTP, measured as vLLM's LLM.generate is measured; one JSON line for each result.

    python benchmarks/offline.py --config llama3-8b --tp 1 [--parts abc] [--reps 3]
    python benchmarks/offline.py --config qwen3.5-27b --parts a --batches 1,16 --prompt 8000 --speculate mtp \
        --accept 3.39/3

(a) decode: B prompts of 128 tokens, or --prompt; ms per token of each = (t(256 new) - t(32 new)) / 224
(b) prefill: one prompt of max_model_len - 1 tokens, 16 of 1024; 1 new token
(c) mixed: 512 requests, prompt U[64, 1024], output U[64, 512], seed 0
(m) arrivals: B sequences of 128 tokens decode 150, and at every sixth step a prompt comes whose first token is wanted:
    ms of steps with such a prompt and without one, medians, by its length
(g) decode as in (a), without and with a grammar (a JSON schema) for all sequences: what masks cost; needs llguidance
(p) on a GPU, in addition: the time of a decode step of (a), kernel by kernel, and how long no kernel runs before it
(q) the same of the one prompt of (b)
(t) the same of all of (c), with steps of prompts apart

With --accept L/K each step of (a) verifies K drafts of each sequence, of which as many are taken for right as give L
tokens on average (acceptance.py); one of a model's head where --speculate says so, which is computed too. `accepted`
of the result is what it was.

Weights are random unless --load-format is another. `start` ends with the first token. The ranks, the model, the
scheduler and its step loop are the server's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from phalanx.benchmarks import acceptance, budget, constrained, parts
from phalanx.benchmarks import step as bench
from phalanx.benchmarks.shapes import CONFIGS, QUANTIZED
from phalanx.rank import __main__ as program
from phalanx.rank import protocol
from phalanx.rank.model.base import Model
from phalanx.rank.options import Options
from phalanx.rank.scheduler.grammar import Grammar, Grammars
from phalanx.rank.scheduler.replica import Replica
from phalanx.rank.scheduler.speculation import Speculation
from phalanx.rank.worker.engine import Engine, Limits

ARRIVING = 64, 256, 512, 1024, 2048  # tokens of prompts that come while others decode
DECODED, EVERY = 150, 6  # tokens of those; steps between two prompts
SETTLED = 20  # steps without prompts, at the beginning and at the end


class Ask(msgspec.Struct):
    config: str
    tp: int
    parts: str
    batches: list[int]
    reps: int
    n_mixed: int
    started: float  # time.time() when the program began
    ep: int = 1
    prompt: int = 128
    accept: str = ""
    temperature: float = 0.0


class OfflineRank(program.Rank):
    """A rank whose scheduler makes its own requests."""

    def connect(self) -> None: ...

    def _steps(self, engine: Engine, limits: Limits, lines: program.Lines) -> int:
        self.vocab_size = engine.model.vocab_size
        if accept():
            acceptance.force(engine.runner)
        return super()._steps(engine, limits, lines)

    def _speculation(self, limits: Limits) -> Speculation | None:  # type: ignore[override]
        if not (found := accept()):
            return super()._speculation(limits)
        most = limits.max_num_seqs * limits.query_lens[-1]
        return acceptance.Wanted(
            *acceptance.parsed(found), self.vocab_size, limits.query_lens, most, limits.draft_model
        )

    def run_scheduler(self, replicas: list[Replica], model: Model) -> int:
        (replica,) = replicas
        offline = Offline(msgspec.json.decode(os.environ[bench.ASK], type=Ask), replica, model.vocab_size)
        offline.run(self.options.max_num_seqs)
        replica.executor.start(protocol.Plan(step=-1, stop=0))
        return 0


def accept() -> str:
    """--accept, on a rank."""
    return msgspec.json.decode(os.environ[bench.ASK], type=Ask).accept


class Offline:
    def __init__(self, ask: Ask, replica: Replica, vocab_size: int):
        self.ask, self.scheduler = ask, replica.scheduler
        self._bench = bench.Bench(replica, vocab_size, bench.Clock())
        self._random = random.Random(0)
        self._vocab = vocab_size
        self._names = 0
        self._grammars: Grammars | None = None

    def run(self, max_num_seqs: int) -> None:
        ask = self.ask
        self.generate([self.prompt(8)], [1])
        self.say(what="start", seconds=round(time.time() - ask.started, 1), max_num_seqs=max_num_seqs,
                 max_num_batched_tokens=self.scheduler.token_budget,
                 num_gpu_blocks=self.scheduler.blocks.count)  # fmt: skip
        self.generate([self.prompt(128) for _ in range(4)], [16] * 4)  # first-call costs
        if "a" in ask.parts:
            for batch in ask.batches:
                self.decode(batch)
        if "b" in ask.parts:
            for batch, length in parts.prefills(self.scheduler.max_model_len):
                self.say(**parts.prefill(self._prompted, batch, length, ask.reps))
        if "c" in ask.parts:
            for line in parts.mixed(self._prompted, ask.n_mixed, self.scheduler.max_model_len, ask.reps):
                self.say(**line)
        if "m" in ask.parts:
            for batch in ask.batches:
                for length in ARRIVING:
                    self.arrivals(batch, length)
        if "g" in ask.parts:
            self._grammars = constrained.grammars(self._vocab)
            self._bench.rest = self._grammars.take
            for batch in ask.batches:
                self.constrained(batch)
        if "p" in ask.parts:
            for batch in ask.batches:
                self.budget(batch)
        if "q" in ask.parts:
            self.prefill_budget(self.scheduler.max_model_len - 1)
        if "t" in ask.parts:
            self.trace()

    def say(self, **line: Any) -> None:
        about = dict(engine="phalanx", version=VERSION, config=self.ask.config, tp=self.ask.tp, ep=self.ask.ep)
        print(json.dumps(about | line), flush=True)

    def prompt(self, length: int) -> bytes:
        return protocol.pack_u32([self._random.randrange(1000, self._vocab - 1000) for _ in range(length)])

    def generate(self, prompts: list[bytes], outs: list[int], text: str = "") -> float:
        """Seconds for the whole list; outs: how many tokens each gets; text: a grammar for all."""
        before = self.scheduler.counters.output_tokens
        start = time.perf_counter()
        for ids, new in zip(prompts, outs, strict=True):
            self._add(ids, new, text)
        self._bench.steps()
        seconds = time.perf_counter() - start
        assert self.scheduler.counters.output_tokens - before == sum(outs)
        return seconds

    def _prompted(self, lengths: list[int], outs: list[int], text: str = "") -> float:
        return self.generate([self.prompt(length) for length in lengths], outs, text)

    def _add(self, ids: bytes, new: int, text: str = "") -> str:
        """The request's name."""
        self._names += 1
        name, heat = str(self._names), self.ask.temperature
        sampling = protocol.SamplingParams(max_tokens=new, temperature=heat, seed=self._names)
        request = protocol.Request(name, ids, sampling, grammar=text)
        self.scheduler.add(request, grammar=self._compiled(request) if text else None)
        return name

    def _compiled(self, request: protocol.Request) -> Grammar:
        assert self._grammars is not None
        self._grammars.compile(request)
        while not (made := self._grammars.take()[0]):
            time.sleep(1e-4)  # 0.1 ms, a small part of what compiling takes
        ((_, grammar),) = made
        assert isinstance(grammar, Grammar), grammar
        return grammar

    def arrivals(self, batch: int, length: int) -> None:
        for _ in range(batch):
            self._add(self.prompt(128), DECODED)
        came, times, last = set[str](), dict[bool, list[float]]({True: [], False: []}), time.perf_counter()
        for count, (end, deltas) in enumerate(self._bench.each_step(), 1):
            times[any(one.id in came for one in deltas)].append(end - last)
            last = end
            if count % EVERY == 0 and SETTLED < count < DECODED - SETTLED:
                came.add(self._add(self.prompt(length), 1))
        with_one, without = (round(statistics.median(times[kind][SETTLED * (not kind) :]) * 1e3, 3) for kind in times)
        self.say(what="arrivals", batch=batch, prompt=length, ms_with_prompt=with_one, ms_without=without,
                 prompts=len(came))  # fmt: skip

    def constrained(self, batch: int) -> None:
        free = self.decode(batch)
        held = self.decode(batch, constrained.grammar())
        self.say(what="constrained", batch=batch, loss_percent=round((held / free - 1) * 100, 2))

    def decode(self, batch: int, grammar: str = "") -> float:
        """Milliseconds of a step."""
        before = self._verified()

        def generate(lengths: list[int], outs: list[int]) -> float:
            return self._prompted(lengths, outs, grammar)

        line = parts.decode(generate, batch, self.ask.prompt, self.ask.reps)
        self.say(**(line | {"what": "constrained decode"} if grammar else line), **self._accepted(before))
        return float(line["ms_per_token"])

    def _verified(self) -> tuple[int, int]:
        """How often a sequence had drafts, and how many were accepted."""
        counts = self.scheduler.speculation.counts.values() if self.scheduler.speculation is not None else ()
        return sum(one.drafts for one in counts), sum(sum(one.accepted) for one in counts)

    def _accepted(self, before: tuple[int, int]) -> dict[str, Any]:
        """Tokens that a step with drafts has given a sequence since then."""
        drafts, right = (now - then for now, then in zip(self._verified(), before, strict=True))
        return {"accept": self.ask.accept, "accepted": round(1 + right / drafts, 2)} if drafts else {}

    def budget(self, batch: int) -> None:
        """The step of part (a) in the middle of its 256 tokens."""
        made = [self.prompt(240) for _ in range(batch)]
        new = 32 * (1 + (acceptance.parsed(self.ask.accept)[1] if self.ask.accept else 0))
        events = budget.traced(lambda: self.generate(made, [new] * batch))
        lines = budget.budget(events)
        total = sum(line["us"] for line in lines)
        self.say(what="budget", batch=batch, us=round(total, 1), idle_us=round(budget.idle(events), 1), kernels=lines)

    def prefill_budget(self, length: int) -> None:
        self.generate([self.prompt(length)], [1])
        made, wall = self.prompt(length), [0.0]

        def run() -> None:
            wall[0] = self.generate([made], [1])

        found = budget.shares(budget.traced(run))["prompt"]
        seconds = round(sum(found.values()), 5)
        self.say(what="prefill budget", prompt=length, seconds=seconds, wall_s=round(wall[0], 5), kernels=found)

    def trace(self) -> None:
        lengths, outs = parts.requests(self.ask.n_mixed, self.scheduler.max_model_len)
        self._prompted(lengths[:32], outs[:32])
        prompts = [self.prompt(length) for length in lengths]
        found = budget.shares(budget.traced(lambda: self.generate(prompts, outs)))
        totals = {f"{kind}_s": round(sum(names.values()), 3) for kind, names in found.items()}
        self.say(what="trace", **totals, kernels=found)


VERSION = "0.1.0"


def main() -> None:
    started = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama3-8b", help=f"{', '.join(sorted(CONFIGS))}, or a config.json")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1, help="ranks of tp that share experts out")
    parser.add_argument("--parts", default="abc", help="which of a, b, c, m, g, p, q, t to run")
    parser.add_argument("--batches", default="1,16,64,256")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=0, help="the device's own default unless given")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--n-mixed", type=int, default=512)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--isq", default="none", help="quantise the weights while loading, as serve does")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"), help="of the KV cache")
    parser.add_argument("--quantized", choices=QUANTIZED, help="a checkpoint that is quantised so")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompts of (a)")
    parser.add_argument("--offload", type=int, default=0, help="experts of a layer in host memory alone")
    parser.add_argument("--cpu-offload-gb", type=float, default=0.0, help="GiB of tables and layers in host memory")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="1: texts of random weights repeat nothing, as greedy ones do"
    )
    parser.add_argument(
        "--speculate", default="", help="what guesses tokens: ngram, mtp; none unless --accept is given"
    )
    parser.add_argument("--accept", default="", metavar="L/K", help="tokens that a step with K drafts gives on average")
    asked = parser.parse_args()
    try:
        drafts = acceptance.parsed(asked.accept)[1] if asked.accept else 0
    except ValueError as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as made:
        config = CONFIGS.get(asked.config) or json.loads(Path(asked.config).read_text())
        if asked.quantized:
            config |= {"quantization_config": QUANTIZED[asked.quantized]}
        Path(made, "config.json").write_text(json.dumps(config))
        options = Options(
            model=made, ranks=asked.tp, tp=asked.tp, ep=asked.ep, dtype=asked.dtype, isq=asked.isq, device=asked.device,
            kv_cache_dtype=asked.kv_cache_dtype, prefix_cache=False, load_format=asked.load_format,
            max_num_seqs=asked.max_num_seqs, max_model_len=asked.max_model_len,
            max_num_batched_tokens=asked.max_num_batched_tokens, num_speculative_tokens=drafts,
            num_experts_offload_per_rank=asked.offload, cpu_offload_gb=asked.cpu_offload_gb,
            speculate=asked.speculate or ("ngram" if asked.accept else "none"),
        )  # fmt: skip
        batches = [int(b) for b in asked.batches.split(",")]
        of = asked.config, asked.tp, asked.parts, batches, asked.reps, asked.n_mixed, started, asked.ep
        ask = Ask(*of, asked.prompt, asked.accept, asked.temperature)
        raise SystemExit(bench.run_ranks(options, ask, __file__, None).returncode)


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        bench.become_rank(OfflineRank)
    main()
