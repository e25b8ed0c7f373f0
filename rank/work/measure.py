"""What the largest step needs beside weights and cache, found by running one: on GPUs the rest goes to the cache."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from ...comm.mesh import Mesh
from .. import step
from ..model.base import Model
from ..model.batch import Batch
from .sampler import Sampler


@torch.no_grad()
def step_memory(model: Model, mesh: Mesh, sampler: Sampler, tokens: int, sequences: int, block_size: int) -> int:
    """Bytes at the peak of a step of `tokens` prompt tokens that samples `sequences` rows. Collective over the mesh."""
    device = sampler.device
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    hidden = None
    if not mesh.first:
        hidden = torch.zeros(tokens, model.hidden_size, dtype=model.dtype, device=device)
    hidden = model.forward([_prompts(model, tokens, block_size, device)], hidden)
    if mesh.last:
        shard = model.logits(hidden[torch.arange(sequences, device=device) % tokens])
        logits = mesh.tensor.all_gather(shard).permute(1, 0, 2).reshape(sequences, -1)[:, : model.vocab_size]
        if mesh.tensor.rank == 0:
            for row in range(sequences):
                sampling = step.Sampling(max_tokens=1, top_p=0.9)  # a full sort: what takes most
                sampler.enter(step.NewSequence(row, step.pack_u32([0]), 1, 0, b"", sampling))
            sampler.sample(logits.float(), np.arange(sequences), np.zeros(sequences, np.int64))
        # What the last layer takes when only sampled rows go on: compiled here, not while the first request waits.
        for longest in (2, model.max_model_len):  # which some GPUs have a kernel of its own for
            two = _prompts(model, 2, block_size, device)
            model.forward([_narrowed(two, longest)], hidden.new_zeros(2, model.hidden_size))
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return found


def _prompts(model: Model, tokens: int, block_size: int, device: torch.device) -> Batch:
    """Prompts as long as the model takes, all in the same blocks of one layer's cache.

    As beside embeddings all rows go through all layers together: no step takes more.
    """
    longest = min(tokens, model.max_model_len)
    counts = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    blocks = -(-longest // block_size)
    spec = model.kv_spec
    cache = torch.zeros(2, blocks, block_size, spec.kv_heads, spec.head_dim, dtype=model.dtype, device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in counts])
    lengths = torch.tensor(counts, dtype=torch.int32)
    return Batch(
        ids=torch.zeros(tokens, dtype=torch.int64, device=device),
        positions=positions,
        slots=positions,
        block_tables=torch.arange(blocks, dtype=torch.int32, device=device).repeat(len(counts), 1),
        lengths=lengths.to(device),
        query_starts=torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32))).to(device),
        sample_at=positions[:0],
        num_decodes=0,
        query_lens=counts,
        kv_lens=counts,
        caches=[(cache[0], cache[1])] * spec.layers,
    )


def _narrowed(prompt: Batch, longest: int) -> Batch:
    """Of the same, one sequence: its last token alone is sampled. longest: its length, as far as kernels go by that."""
    none = prompt.query_starts[:1]
    last = dataclasses.replace(
        prompt, ids=prompt.ids[:0], positions=prompt.positions[-1:], slots=prompt.slots[-1:], sample_at=none.long(),
        query_starts=torch.cat((none, none + 1)), num_decodes=1, query_lens=[1], kv_lens=[longest], scratch={},
    )  # fmt: skip
    return dataclasses.replace(prompt, sample_at=prompt.query_starts[-1:].long() - 1, sampled=last)
