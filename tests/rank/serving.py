"""Ranks that serve one model after the other, as reloading.py's, and have each answer the same requests.

MODELS names the directories, a colon between, and REQUESTS a JSON file with a list that has for each:

    prompts   lists of tokens
    count     tokens that each gets
    known     of the last prompt's answer: so many are added to the prompt, and the rest is asked for again, with
              log-probabilities of all tokens
    blocks    in the pool

Rank 0 writes the answers beside each model's config.json, or its GGUF file, under the name that ANSWERS gives:

    tokens    of each prompt
    again     of the last prompt with its known tokens
    logprobs  of each of these [token, log-probability], the likeliest first
    cached    tokens of that prompt that were not computed again
    chunks, preemptions  while all prompts were computed
    unit      tokens of which a prefix hit is a multiple
    windows   whether blocks are freed behind windows, so that sequences may grow without a preemption
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
from phalanx.rank import __main__ as main
from phalanx.rank import cache_groups, protocol
from phalanx.rank.scheduler.blocks import Blocks
from reloading import ReloadingRank

cache_groups.TILE = 1  # blocks are freed as soon as no window reads them: tests' sequences are short


class ServingRank(ReloadingRank):
    def run_scheduler(self, replicas, model):
        (replica,) = replicas
        asked = SimpleNamespace(**json.loads(Path(os.environ["REQUESTS"]).read_text())[self.served])
        scheduler = replica.scheduler
        pool = scheduler.blocks
        assert pool.count > asked.blocks
        of = pool.size, pool.prefix_cache
        scheduler.blocks = Blocks(asked.blocks, *of, snapshots=pool.snapshots, groups=pool.groups)
        tokens = [
            [token for delta in deltas for token in delta.tokens]
            for deltas in answer(replica, asked.prompts, asked.count)
        ]
        first = scheduler.stats()
        known = [*asked.prompts[-1], *tokens[-1][: asked.known]]
        (deltas,) = answer(replica, [known], asked.count - asked.known, model.vocab_size)
        scheduler.check_empty()
        answers = dict(
            tokens=tokens,
            again=[token for delta in deltas for token in delta.tokens],
            logprobs=[entry.top for delta in deltas for entry in delta.logprobs],
            cached=scheduler.stats().cached_tokens - first.cached_tokens,
            chunks=first.chunks,
            preemptions=first.preemptions,
            windows=pool.windows,
            unit=pool.unit * pool.size,
        )
        model = Path(os.environ["MODELS"].split(":")[self.served])
        ((model if model.is_dir() else model.parent) / os.environ["ANSWERS"]).write_bytes(msgspec.json.encode(answers))
        self.served += 1
        replica.executor.start(protocol.Plan(step=-1, stop=0))
        return 0

    served = 0  # models


def answer(replica, prompts, count, logprobs=-1):
    """The deltas of each prompt, all computed together."""
    sampling = protocol.SamplingParams(max_tokens=count, temperature=0.0, logprobs=logprobs)
    found = {str(i): [] for i in range(len(prompts))}
    for name, prompt in zip(found, prompts, strict=True):
        replica.scheduler.add(protocol.Request(name, protocol.pack_u32(prompt), sampling))
    while not replica.idle:
        if not replica.plan():
            replica.wait_with_progress()
            for delta in replica.finish():
                found[delta.id].append(delta)
    return list(found.values())


if __name__ == "__main__":
    os._exit(main.main(ServingRank))
