"""Runs a checkpoint through the paged cache on threads, and through transformers for comparison."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from phalanx.comm import mesh, threads
from phalanx.comm.base import Comm
from phalanx.rank.model.base import Model
from phalanx.rank.model.batch import Batch, StepArrays, step_arrays
from phalanx.rank.model.cache_spec import Caches
from phalanx.rank.model.load import load
from phalanx.rank.worker import kv_cache
from torch import Tensor

BLOCK = 4  # tokens: partial blocks are everywhere
Step = Sequence[tuple[int, int]]  # (sequence, tokens to compute) in batch order, single tokens first
# Prompts in chunks beside sequences that decode.
MIXED_LENGTHS = (90, 33, 5, 64, 1)
MIXED_STEPS = (
    [(4, 1), (0, 31), (2, 3)],
    [(2, 1), (0, 1), (1, 32)],  # decodes of different lengths, a prompt beside them
    [(2, 1), (1, 1), (0, 1), (3, 17)],
    [(0, 50), (3, 46)],  # two chunks that continue, none decodes
    [(3, 1), (0, 7)],
)


def make_batch(
    parts: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    block_size: int,
    caches: Any,
    rows: Sequence[int] | None = None,
    query_len: int = 1,
) -> Batch:
    """A batch that samples at all tokens. parts: (token ids to compute, tokens computed before, block table) of each
    sequence. rows: of each, in caches of whole sequences."""
    query_lens = [len(ids) for ids, _, _ in parts]
    at = np.arange(len(parts)) if rows is None else np.array(rows, np.int64)
    table = np.zeros((max(at, default=0) + 1, max((len(table) for _, _, table in parts), default=1)), np.int32)
    for row, (_, _, blocks) in zip(at, parts, strict=True):
        table[row, : len(blocks)] = blocks
    starts, counts = np.array([done for _, done, _ in parts], np.int64), np.array(query_lens, np.int64)
    arrays = StepArrays(*map(torch.from_numpy, step_arrays(table, block_size, at, starts, counts, counts)))
    ids = torch.tensor([t for ids, _, _ in parts for t in ids], dtype=torch.int64)
    return Batch.of(ids, arrays, query_lens, arrays.lengths.tolist(), caches, query_len)


def moved(batch: Batch, device: torch.device | str) -> Batch:
    """The batch with its tensors on a device; its caches are there."""
    given = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: x.to(device) for name, x in given.items() if isinstance(x, Tensor)})


def run_steps(
    path: Path,
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Step] | None = None,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    **options: Any,
) -> list[Tensor]:
    """Logits [tokens, vocab] of each sequence, computed step by step on threads; by default all in one step."""
    if steps is None:
        order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]) > 1)
        steps = [[(i, len(sequences[i])) for i in order]]
    results = threads.run(lambda comm: compute(comm, path, sequences, steps, tp, pp, ep, **options), tp * pp)
    for other in results[1:tp]:  # the last stage's tensor group agrees bit for bit
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    return results[0]


def compute(
    comm: Comm,
    path: Path,
    sequences: Sequence[Sequence[int]],
    steps: Sequence[Step],
    tp: int,
    pp: int,
    ep: int = 1,
    **options: Any,
) -> list[Tensor]:
    """One rank's part of run_steps; the logits on the last stage, which has the first ranks.

    Blocks are handed out in random order from a cache filled with NaN: a read of a slot that was never written shows.
    """
    needed = [-(-len(sequence) // BLOCK) for sequence in sequences]
    blocks = sum(needed) + 2  # block 0, which pads the tables, may be anybody's or nobody's
    free = list(range(blocks))
    random.Random(0).shuffle(free)
    tables = [[free.pop() for _ in range(n)] for n in needed]
    grid = mesh.build(comm, tp, pp, ep=ep)
    model = load(path, grid, **options)
    caches = nan_caches(model, blocks, len(sequences))
    done = [0] * len(sequences)
    found = [[torch.empty(0, model.vocab_size)] for _ in sequences]
    for step in steps:
        parts = [(sequences[i][done[i] : done[i] + n], done[i], tables[i]) for i, n in step]
        batch = make_batch(parts, BLOCK, caches, [i for i, _ in step])
        logits = forward(model, grid, batch)
        if logits is not None:
            for (i, _), rows in zip(step, logits.split(batch.query_lens), strict=True):
                found[i].append(rows)
        for i, n in step:
            done[i] += n
    return [torch.cat(rows) for rows in found]


def nan_caches(model: Model, blocks: int, rows: int = 0) -> Caches:
    """Caches in which a read of a slot that was never written shows."""
    caches = kv_cache.allocate(model.cache_specs(), blocks, BLOCK, model.dtype, torch.device("cpu"), rows)
    for tensor in (tensor for layer in caches for tensor in layer):
        tensor.fill_(float("nan"))
    return caches


def forward(model: Model, grid: mesh.Mesh, batch: Batch) -> Tensor | None:
    """One step through all stages; the whole vocabulary's logits on the last stage."""
    hidden = None
    if not grid.first:
        hidden = torch.empty(len(batch.ids), model.received_size, dtype=model.dtype)
        grid.pipe.recv(hidden, grid.pipe.rank - 1)
    hidden = model([batch], hidden)
    if not grid.last:
        grid.pipe.send(hidden, grid.pipe.rank + 1)
        return None
    shard = model.logits(hidden[batch.sample_at])
    assert shard.dtype == model.dtype
    width = model.lm_head.vocab.stop - model.lm_head.vocab.start
    assert torch.isfinite(shard[:, :width]).all() and torch.isneginf(shard[:, width:]).all()
    return grid.tensor.all_gather(shard).permute(1, 0, 2).flatten(1)[:, : model.vocab_size].float()


def reference(path: Path) -> Any:
    """transformers' model of a checkpoint, in f32."""
    from transformers import AutoConfig

    model = auto_model(AutoConfig.from_pretrained(path))
    return model.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def auto_model(config: Any) -> Any:
    """transformers' class that makes a model of this config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Mistral4Config, Mistral4ForCausalLM

    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)  # which finds it by itself not

    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def reference_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """[tokens, vocab]; the checkpoint must be one whose logits can tell right from wrong."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    assert logits.std() >= 1
    return logits


def tokens(count: int, seed: int = 0, vocab: int = 512) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def distance(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def main() -> None:
    """A rank under mpirun: the arguments of run_steps come from a JSON file, the logits go beside it."""
    from phalanx.comm import mpi

    torch.set_num_threads(1)
    file = Path(sys.argv[1])
    job = json.loads(file.read_text())
    world = mpi.join(job["tp"] * job["pp"])
    logits = compute(world, Path(job["path"]), job["sequences"], job["steps"], job["tp"], job["pp"])
    if world.rank == 0:
        torch.save(logits, file.with_suffix(".pt"))
    world.barrier()
    mpi.leave()


if __name__ == "__main__":
    main()
