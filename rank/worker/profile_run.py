"""The profile run: the first steps on a GPU, before the KV cache is allocated.

The largest step shows how much memory steps need. Small ones compile the kernels that requests would wait for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from ...comm.mesh import Mesh
from .. import protocol
from ..model.base import Model
from ..model.batch import Batch
from ..model.experts.fused import FusedExperts
from . import kv_cache
from .sampler import Sampler, tp_argmax

# Triton attention (attention_triton.py) and GEMMs of few rows (skinny.py) have a kernel for each range of lengths.
# These lists have one length of each range. Prompt tokens in a step:
PROMPTS = 2, 3, 9, 17, 33, 65
# Tokens that a decoding sequence attends to:
ATTENDED = 1, 257, 513, 1025, 2049, 4097


@torch.no_grad()
def profile_run(model: Model, mesh: Mesh, sampler: Sampler, tokens: int, sequences: int, block_size: int) -> int:
    """Run the largest step and the small ones. Returns the peak bytes of the largest. Collective over the mesh.

    The largest step has `tokens` prompt tokens and samples `sequences` rows. Afterwards all kernels are compiled.
    """
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
        tp_argmax(shard, mesh.tensor)  # compiles what greedy sequences need
        logits = mesh.tensor.all_gather(shard).permute(1, 0, 2).reshape(sequences, -1)[:, : model.vocab_size]
        if mesh.tensor.rank == 0:
            for row in range(sequences):
                sampling = protocol.SamplingParams(max_tokens=1, top_p=0.9)  # a full sort takes the most memory
                sampler.enter(protocol.NewSequence(row, protocol.pack_u32([0]), 1, 0, b"", sampling))
            sampler.sample(logits.float(), np.arange(sequences), np.zeros(sequences, np.int64))
    small = list(small_steps(model, tokens, block_size, device))
    if mesh.last:  # this stage's last layer computes sampled rows only
        two = _prompts(model, 2, block_size, device)
        small += [_last_token_only(two, longest) for longest in (2, model.max_model_len)]
    for batch in small:
        model.forward([batch], hidden.new_zeros(len(batch.ids), model.hidden_size))
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return found


def small_steps(model: Model, tokens: int, block_size: int, device: torch.device) -> Iterator[Batch]:
    """Steps that together use every kernel that a step of at most `tokens` tokens may choose.

    A kernel takes seconds to compile, which must not happen while a request waits.
    """
    experts = {n for one in model.modules() if isinstance(one, FusedExperts) for n in one.kernel_rows()}
    for count in sorted({*PROMPTS, *experts}):
        if count <= tokens:
            yield _prompts(model, count, block_size, device)
    for longest in ATTENDED:
        if longest <= model.max_model_len:
            yield _decode(model, longest, block_size, device)
    for longest in (2, model.max_model_len):
        yield _mixed(model, longest, block_size, device)


def _prompts(model: Model, tokens: int, block_size: int, device: torch.device) -> Batch:
    """A step of prompts as long as the model takes, all rows through all layers: no step needs more memory."""
    longest = min(tokens, model.max_model_len)
    counts = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    return _whole(model, counts, block_size, device)


def _decode(model: Model, longest: int, block_size: int, device: torch.device) -> Batch:
    """A step of one decoding sequence. longest: its length, by which kernels are chosen."""
    one = _whole(model, [1], block_size, device)
    return dataclasses.replace(one, num_decodes=1, kv_lens=[longest])


def _mixed(model: Model, longest: int, block_size: int, device: torch.device) -> Batch:
    """A step of one decoding sequence and a prompt."""
    two = _whole(model, [1, 2], block_size, device)
    return dataclasses.replace(two, num_decodes=1, kv_lens=[longest, 2])


def _whole(model: Model, counts: list[int], block_size: int, device: torch.device) -> Batch:
    """A step of prompts with these token counts, all in the same blocks of the same caches."""
    tokens, blocks = sum(counts), -(-max(counts) // block_size)
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
        caches=kv_cache.allocate_shared(model.cache_specs(), blocks, block_size, model.dtype, device),
    )


def _last_token_only(prompt: Batch, longest: int) -> Batch:
    """The step of which only the prompt's last token is sampled. longest: its length, by which kernels are chosen."""
    none = prompt.query_starts[:1]
    last = dataclasses.replace(
        prompt, ids=prompt.ids[:0], positions=prompt.positions[-1:], slots=prompt.slots[-1:], sample_at=none.long(),
        query_starts=torch.cat((none, none + 1)), num_decodes=1, query_lens=[1], kv_lens=[longest], scratch={},
    )  # fmt: skip
    return dataclasses.replace(prompt, sample_at=prompt.query_starts[-1:].long() - 1, sampled=last)
