"""A KV cache that is too small, with and without a second tier in host memory (`--kvcache-mem-cpu`).

    python benchmarks/host_tier.py                                   Llama-3.1-8B's shape, random weights, one GPU
    python benchmarks/host_tier.py --prompt 1024 --new 3072          the same total, more of it decoded
    python benchmarks/host_tier.py --config llama3-70b --isq q4km --kv-cache-dtype fp8 --prompt 1024 --new 3072
    python benchmarks/host_tier.py --config tiny --device cpu --sequences 6 --prompt 64 --new 64 \
        --conversations 4 --turns 3 --first 96 --question 16 --answer 8

Two jobs, one without the tier and one with it, have a pool of a third of what all --sequences need. They run one after
the other; with --only each can run on a GPU of its own at the same time. In each:

(a) all sequences at once: each has a prompt of its own and an answer of full length, so that they preempt each other.
    Tokens per second are of all answers; the prompts' first computation is part of the time.
(b) conversations that alternate, --at-once of them at a time: each question comes with its whole conversation. Their
    prefixes exceed the pool, by default about twice at the end. Time to first token of turns from the second on.

The ranks, the model, the scheduler and its step loop are the server's; there is no text and no HTTP.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from phalanx.benchmarks import shapes, step
from phalanx.rank import protocol
from phalanx.rank.model.base import Model
from phalanx.rank.options import Options
from phalanx.rank.scheduler.replica import Replica

JOBS = "recomputed", "host"  # without the tier and with it
WIDTH = {"f32": 4, "bf16": 2, "f16": 2}  # bytes
MIB = 1 << 20


class Ask(msgspec.Struct):
    sequences: int
    prompt: int
    new: int
    conversations: int
    turns: int
    first: int
    question: int
    answer: int
    at_once: int


class TierRank(step.BenchRank):
    def run_scheduler(self, replicas: list[Replica], model: Model) -> int:
        (replica,) = replicas
        Load(msgspec.json.decode(os.environ[step.ASK], type=Ask), replica, model.vocab_size).run()
        replica.executor.start(protocol.Plan(step=-1, stop=0))
        return 0


class Turn(msgspec.Struct):
    """A request under way."""

    conversation: int
    sent: float
    first: float = 0.0  # when its first token came; 0: not yet
    cached: int = 0
    tokens: list[int] = []


class Load:
    def __init__(self, ask: Ask, replica: Replica, vocab_size: int):
        self.ask, self.replica, self._vocab = ask, replica, vocab_size
        self._random = random.Random(0)
        self._open: dict[str, Turn] = {}
        self._names = 0

    def run(self) -> None:
        self._send(self._tokens(8), 2, 0)  # first-call costs
        while self._open:
            self._step()
        self._oversubscribed()
        self._talk()

    def _oversubscribed(self) -> None:
        ask, before, began = self.ask, self.replica.stats(), time.perf_counter()
        for _ in range(ask.sequences):
            self._send(self._tokens(ask.prompt), ask.new, 0)
        while self._open:
            self._step()
        seconds, tokens = time.perf_counter() - began, ask.sequences * ask.new
        step.say(what="oversubscribed", seconds=round(seconds, 3), tokens_per_s=round(tokens / seconds, 1),
                 **self._moved(before))  # fmt: skip

    def _talk(self) -> None:
        ask, before = self.ask, self.replica.stats()
        said = [self._tokens(ask.first) for _ in range(ask.conversations)]
        for turn in range(1, ask.turns + 1):
            waiting, done, sent = list(range(ask.conversations)), [], 0
            while waiting or self._open:
                while waiting and len(self._open) < ask.at_once:
                    index = waiting.pop(0)
                    said[index] += self._tokens(ask.question)
                    self._send(said[index], ask.answer, index)
                    sent += len(said[index])
                done += self._step()
            for one in done:
                said[one.conversation] += one.tokens
            times = [one.first - one.sent for one in done]
            cached = sum(one.cached for one in done) / sent  # of the prompts' tokens
            step.say(what="turn", turn=turn, ttft_ms=round(statistics.mean(times) * 1e3, 2),
                     median_ms=round(statistics.median(times) * 1e3, 2), cached=round(cached, 3))  # fmt: skip
        step.say(what="conversations", **self._moved(before))

    def _moved(self, before: protocol.Stats) -> dict[str, int]:
        after = self.replica.stats()
        names = "preemptions", "swapped_in", "host_stores", "host_loads"
        return {name: getattr(after, name) - getattr(before, name) for name in names}

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(count)]

    def _send(self, ids: list[int], new: int, conversation: int) -> None:
        self._names += 1
        name = str(self._names)
        self._open[name] = Turn(conversation, time.perf_counter())
        sampling = protocol.SamplingParams(max_tokens=new, temperature=0.0)
        self.replica.scheduler.add(protocol.Request(name, protocol.pack_u32(ids), sampling))

    def _step(self) -> list[Turn]:
        """Plan what can be planned and wait for a step. What ended by it."""
        while self.replica.plan():
            pass
        self.replica.wait_with_progress()
        now, ended = time.perf_counter(), []
        for delta in self.replica.finish():
            one = self._open[delta.id]
            if delta.tokens and not one.first:
                one.first, one.cached = now, delta.cached_tokens
            one.tokens += delta.tokens
            if delta.finish:
                assert delta.finish == "length", delta.error
                ended.append(self._open.pop(delta.id))
        return ended


def token_bytes(config: dict[str, Any], dtype: str, fp8: bool) -> int:
    """Bytes of a token's keys and values in all layers, without FP8's scales."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    size = config["num_key_value_heads"] * config.get("head_dim", hidden // heads)
    return int(2 * config["num_hidden_layers"] * size * (1 if fp8 else WIDTH[dtype]))


def table(without: list[dict[str, Any]], beside: list[dict[str, Any]]) -> str:
    """Both jobs' lines, and how much better the tier is."""

    def of(lines: list[dict[str, Any]], what: str) -> list[dict[str, Any]]:
        return [line for line in lines if line["what"] == what]

    (plain,), (tier,) = (of(lines, "oversubscribed") for lines in (without, beside))
    rows = [f"{'':<26} {'recomputed':>12} {'host memory':>12} {'better':>8}"]

    def row(name: str, a: float, b: float, better: float) -> None:
        rows.append(f"{name:<26} {a:>12,.1f} {b:>12,.1f} {better:>7.2f}x")

    speeds = plain["tokens_per_s"], tier["tokens_per_s"]
    row("(a) tokens/s", speeds[0], speeds[1], speeds[1] / speeds[0])
    both = list(zip(of(without, "turn"), of(beside, "turn"), strict=True))
    for a, b in both:
        row(f"(b) turn {a['turn']}, first token ms", a["ttft_ms"], b["ttft_ms"], a["ttft_ms"] / b["ttft_ms"])
    later = [statistics.mean(line["ttft_ms"] for line in lines) for lines in zip(*both[1:], strict=True)]
    if later:
        row("(b) from turn 2 on", later[0], later[1], later[0] / later[1])
    counted = [line for lines in (without, beside) for line in lines if "preemptions" in line]
    return "\n".join(rows + [json.dumps(line) for line in counted])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama3-8b", choices=sorted(shapes.CONFIGS), help="a shape with heads")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", choices=sorted(WIDTH), help="bf16, on CPUs f32")
    parser.add_argument("--isq", default="none", help="quantise the weights while loading, as serve does")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8"), help="of the KV cache")
    parser.add_argument("--sequences", type=int, default=64, help="(a): how many at once")
    parser.add_argument("--prompt", type=int, default=3072, help="(a): tokens of each")
    parser.add_argument("--new", type=int, default=1024, help="(a): tokens of each answer")
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--first", type=int, default=3072, help="(b): tokens that a conversation begins with")
    parser.add_argument("--question", type=int, default=256, help="(b): tokens of each turn")
    parser.add_argument("--answer", type=int, default=32, help="(b): tokens of each answer")
    parser.add_argument("--at-once", type=int, default=4, help="(b): conversations that wait for an answer together")
    parser.add_argument("--only", choices=JOBS, help="run this job alone and print its raw lines")
    parser.add_argument("--json", help="append raw lines to this file")
    asked = parser.parse_args()
    config = shapes.CONFIGS[asked.config]
    dtype = asked.dtype or ("f32" if asked.device == "cpu" else "bf16")
    size = token_bytes(config, dtype, asked.kv_cache_dtype == "fp8")
    total = asked.sequences * (asked.prompt + asked.new)
    talked = asked.conversations * (asked.first + asked.turns * (asked.question + asked.answer))
    pool = math.ceil(total / 3 * size / MIB)
    host = math.ceil(1.1 * max(total, talked) * size / MIB)
    ask = Ask(**{name: getattr(asked, name) for name in Ask.__struct_fields__})
    times = talked * size / pool / MIB
    print(f"a pool of {pool} MiB, a third of (a)'s {total} tokens; (b) has {times:.1f} times as many as it in the end")
    with tempfile.TemporaryDirectory() as made:
        Path(made, "config.json").write_text(json.dumps(config))
        found = []
        for job in [asked.only] if asked.only else JOBS:
            memory = host if job == "host" else 0
            options = Options(
                model=made,
                ranks=1,
                device=asked.device,
                dtype=dtype,
                isq=asked.isq,
                kv_cache_dtype=asked.kv_cache_dtype,
                load_format="dummy",
                speculate="none",
                max_num_seqs=max(asked.sequences, asked.at_once),
                mem=pool,
                kvcache_mem_cpu=memory,
                timeout=600.0,
            )
            found.append(step.start(options, ask, __file__))
            if asked.json:
                about = {key: getattr(asked, key) for key in ("config", "isq", "kv_cache_dtype")}
                about |= dict(pool=pool, host=memory) | msgspec.to_builtins(ask)
                with open(asked.json, "a") as file:
                    file.writelines(json.dumps(about | line) + "\n" for line in found[-1])
    print("\n".join(map(json.dumps, found[0])) if asked.only else table(*found))


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        step.become_rank(TierRank)
    main()
