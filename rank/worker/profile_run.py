"""The profile run: the first steps on a GPU, before the KV cache is allocated.

The largest step shows how much memory steps need. Small ones compile the kernels that requests would wait for.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import cast

import numpy as np
import torch

from ...comm.mesh import Mesh
from ...kernels.attention.prefill import WIDENED_BYTES
from .. import protocol
from ..model.base import Model
from ..model.batch import Batch
from ..model.cache_spec import E4M3, CacheSpec, Indexed, PagedKV, PagedLatent
from ..model.drafts import DraftSource
from ..model.experts.fused import FusedExperts
from . import kv_cache
from .batch_builder import build_batches
from .sampler import Sampler, tp_argmax
from .state import BatchState, ScheduledBatch
from .token_masks import RowMasks
from .upload import Upload

TIMED = 5  # runs of a step that is timed; the shortest counts: the first ones ask CUDA for memory
# Triton attention (attention_triton.py) and GEMMs of small M (pipelined_gemm.py) have a kernel for each range of
# lengths. These lists have one length of each range. Prompt tokens in a step:
PROMPTS = 2, 3, 9, 17, 33, 65
# Tokens that a decoding sequence attends to:
ATTENDED = 1, 257, 513, 1025, 2049, 4097
# Latent attention has a kernel for each range of the number of decoding sequences (mla_triton.py, mla_store_triton.py):
DECODING = 17, 33, 65
# Parameters by which rows are sampled in the ways that take most memory: with everything that a request may ask for,
# and with noise for the whole vocabulary.
SAMPLED = (
    protocol.SamplingParams(max_tokens=1, top_p=0.9, repetition_penalty=1.1, presence_penalty=1.0, logprobs=20),
    protocol.SamplingParams(max_tokens=1, min_p=0.1),
)


@torch.no_grad()
def profile_run(
    model: Model, mesh: Mesh, sampler: Sampler, tokens: int, sequences: int, block_size: int,
    kept: torch.dtype | None = None, sampled: int = 0, query_lens: tuple[int, ...] = (1,),
    source: DraftSource | None = None,
) -> int:  # fmt: skip
    """Run the largest step and the small ones. Returns the peak bytes of the largest. Collective over the mesh.

    The largest step has `tokens` prompt tokens and samples `sequences` rows; where indexers choose there are several.
    Afterwards all kernels are compiled. kept: the dtype of caches, as CacheSpec.block takes it; None: the model's.
    sampled: tokens that are sampled where these are more, as with drafts. query_lens: tokens of a sequence in steps
    that decode. source: of drafts, on this rank.
    """
    device = sampler.device
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    hidden = None
    if not mesh.first:
        hidden = torch.zeros(tokens, model.received_size, dtype=model.dtype, device=device)
    tower = largest_image(model, device)
    next(tower, None)  # steps go on while the tower has begun with an image
    upload = Upload(device)
    hidden = model.forward([prompts(model, tokens, block_size, upload, kept)], hidden)
    if mesh.last:
        sampled = max(sampled, sequences)
        shard = model.logits(hidden[torch.arange(sampled, device=device) % tokens])
        tp_argmax(shard, mesh.tensor)  # compiles what greedy sequences need
        logits = mesh.tensor.all_gather(shard).permute(1, 0, 2).reshape(sampled, -1)[:, : model.vocab_size]
        if mesh.tensor.rank == 0:
            penalised, drawn = SAMPLED
            sample(sampler, logits[:sequences], penalised, sequences)  # a row's further tokens are sampled after it
            sample(sampler, logits, drawn, sequences)
        del shard, logits
        if source is not None:
            largest = prompts(cast(Model, source), tokens, block_size, upload, kept or model.dtype)
            draft(source, hidden, sequences, largest)
    hidden = hidden[:0].clone()  # others may be as large
    of = model, tokens, block_size, upload, kept
    others = [*small_steps(*of, query_lens), *indexed_steps(*of)]
    if mesh.last:  # this stage's last layer computes sampled rows only
        others += [last_token_only(model, longest, block_size, upload, kept) for longest in (2, model.max_model_len)]
    for batch in others:
        model.forward([batch], hidden.new_zeros(len(batch.ids), model.received_size))
    for _ in tower:
        pass
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    drafts, longest = [] if source is None else source.cache_specs(), model.max_model_len
    layers = model.cache_specs(), drafts
    return found + max(context_bytes(one, longest, tokens, model.dtype, kept or model.dtype) for one in layers)


def largest_image(model: Model, device: torch.device) -> Iterator[None]:
    """The tower's parts of work on the largest image that a prompt can have; none where there is no tower."""
    if model.vision is not None:
        height, width = model.vision.rules.largest(model.max_model_len)
        yield from model.vision.pieces(torch.zeros(height, width, 3, dtype=torch.uint8, device=device))


def draft(source: DraftSource, hidden: torch.Tensor, sequences: int, batch: Batch) -> None:
    """Have a draft model read the largest step, whose hidden states are kept meanwhile, and choose."""
    made = source.forward(batch, source.read(hidden) if source.FOLLOWS else None)
    source.logits(made[torch.arange(sequences, device=made.device) % len(made)])


def sample(sampler: Sampler, logits: torch.Tensor, sampling: protocol.SamplingParams, most: int) -> None:
    """Sample all of logits [S, vocab] with the same parameters and with masks, as tokens of up to so many rows, and
    forget the rows again."""
    count, vocab = logits.shape
    rows = np.sort(np.arange(count) % most)
    for row in range(min(count, most)):
        sampler.enter(protocol.NewSequence(row, protocol.pack_u32([0]), 1, 0, b"", sampling))
    at = torch.arange(count, dtype=torch.int32, device=logits.device)
    masks = RowMasks(at, torch.full((count, -(-vocab // 32)), -1, dtype=torch.int32, device=logits.device))
    sampler.sample(logits, rows, np.zeros(count, np.int64), masks)
    for row in range(min(count, most)):
        sampler.leave(row)


def context_bytes(specs: list[CacheSpec], longest: int, tokens: int, dtype: torch.dtype, kept: torch.dtype) -> int:
    """An upper bound of what a prompt's attention takes in one of these layers for a context of `longest` tokens beyond
    what it takes for one of `tokens`, which the largest step has shown: copies of the context's cached tokens. dtype:
    of the model. kept: of caches."""
    longer, gathered = max(0, longest - tokens), max(0, read_whole(specs, longest) - tokens)
    most = 0
    for spec in specs:
        if isinstance(spec, Indexed):
            spec = spec.kept
        if isinstance(spec, PagedLatent):  # mla.attend_expanded
            most = max(most, gathered * spec.width * (dtype.itemsize + kept.itemsize))
        elif isinstance(spec, PagedKV) and kept == E4M3:  # widened: prefill.widened_blocks
            each = spec.kv_heads * (spec.key_dim + spec.value_dim) * dtype.itemsize
            most = max(most, min(WIDENED_BYTES, longer * each))
    return most


def read_whole(specs: list[CacheSpec], longest: int) -> int:
    """Tokens of the longest context that attention reads whole: indexers choose from longer ones."""
    return min([longest, *(spec.topk for spec in specs if isinstance(spec, Indexed))])


@torch.no_grad()
def step_seconds(
    model: Model, mesh: Mesh, tokens: int, block_size: int, device: torch.device, kept: torch.dtype | None = None,
    min_tokens: int = 0,
) -> float:  # fmt: skip
    """Seconds that a step of so many prompt tokens takes on this rank. Collective over the tensor group.

    min_tokens: of a microbatch, as in build_batches.
    """
    batches = _prompts(model, tokens, block_size, Upload(device), kept, min_tokens)
    times = []
    for _ in range(TIMED):
        hidden = None
        if not mesh.first:
            hidden = torch.zeros(tokens, model.received_size, dtype=model.dtype, device=device)
        started = time.perf_counter()
        model.forward(batches, hidden)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


def small_steps(
    model: Model, tokens: int, block_size: int, upload: Upload, kept: torch.dtype | None = None,
    query_lens: tuple[int, ...] = (1,),
) -> Iterator[Batch]:  # fmt: skip
    """Steps that together use every kernel that a step of at most `tokens` tokens may choose, but for those of
    quantised weights that are compiled meanwhile (graphs.gemm_variants).

    A kernel takes seconds to compile, which must not happen while a request waits.
    """
    experts = {n for one in model.modules() if isinstance(one, FusedExperts) for n in one.kernel_rows()}
    for count in sorted({*PROMPTS, *experts}):
        if count <= tokens:
            yield prompts(model, count, block_size, upload, kept)
    for longest in ATTENDED:
        for count in query_lens:
            if longest + count - 1 <= model.max_model_len:
                step = _step(model, [count], block_size, upload, kept, query_len=count)
                yield dataclasses.replace(step, kv_lens=[longest + count - 1])
    if any(isinstance(spec, PagedLatent | Indexed) for spec in model.cache_specs()):
        yield from latent_steps(model, tokens, block_size, upload, kept)
    for count in query_lens:
        for longest in (count + 1, model.max_model_len):
            step = _step(model, [count, count + 1], block_size, upload, kept, query_len=count)
            yield dataclasses.replace(step, kv_lens=[longest, count + 1])


def latent_steps(
    model: Model, tokens: int, block_size: int, upload: Upload, kept: torch.dtype | None
) -> Iterator[Batch]:
    """`small_steps` of latent attention: a short chunk, and decoding sequences alone and with a prompt (mla.py)."""
    for longest in sorted({read_whole(model.cache_specs(), model.max_model_len), model.max_model_len}):
        yield _step(model, [2], block_size, upload, kept, context=longest)
        for count in DECODING:
            for prompt in ([], [2]):
                if count + sum(prompt) <= tokens:
                    step = _step(model, [1] * count + prompt, block_size, upload, kept)
                    yield dataclasses.replace(step, kv_lens=[longest] * count + prompt)


def indexed_steps(
    model: Model, tokens: int, block_size: int, upload: Upload, kept: torch.dtype | None
) -> Iterator[Batch]:
    """The largest steps where indexers choose from long contexts: one of such a context, and one of contexts that are
    read whole. `prompts` is one kind alone."""
    longest = model.max_model_len
    whole = read_whole(model.cache_specs(), longest)
    if whole < longest:
        yield _step(model, [min(tokens, longest)], block_size, upload, kept, context=longest)
        (batch,) = _prompts(model, tokens, block_size, upload, kept, 0, whole)
        yield batch


def last_token_only(
    model: Model, longest: int, block_size: int, upload: Upload, kept: torch.dtype | None = None
) -> Batch:
    """A prompt of which only the last token is sampled. longest: its length, by which kernels are chosen."""
    prompt = _step(model, [2], block_size, upload, kept, samples=True)
    assert prompt.sampled is not None
    return dataclasses.replace(prompt, sampled=dataclasses.replace(prompt.sampled, kv_lens=[longest]))


def prompts(model: Model, tokens: int, block_size: int, upload: Upload, kept: torch.dtype | None = None) -> Batch:
    """A step of prompts as long as the model takes, all rows through all layers: no step needs more memory."""
    (batch,) = _prompts(model, tokens, block_size, upload, kept, 0)
    return batch


def _prompts(
    model: Model, tokens: int, block_size: int, upload: Upload, kept: torch.dtype | None, min_tokens: int,
    longest: int = 0,
) -> list[Batch]:  # fmt: skip
    longest = min(tokens, longest or model.max_model_len)
    counts = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
    return _batches(model, sorted(counts, key=lambda count: count > 1), block_size, upload, kept, False, min_tokens)


def _step(
    model: Model, counts: list[int], block_size: int, upload: Upload, kept: torch.dtype | None, samples: bool = False,
    query_len: int = 1, context: int = 0,
) -> Batch:  # fmt: skip
    (batch,) = _batches(model, counts, block_size, upload, kept, samples, 0, query_len, context)
    return batch


def _batches(
    model: Model, counts: list[int], block_size: int, upload: Upload, kept: torch.dtype | None, samples: bool,
    min_tokens: int, query_len: int = 1, context: int = 0,
) -> list[Batch]:  # fmt: skip
    """A step of prompts with these token counts, all in the same blocks of the same caches. samples: of the last layer,
    only their last tokens are computed. min_tokens: as in build_batches. query_len: tokens of those that decode.
    context: tokens of each sequence, with those of the step; these blocks hold all of them."""
    n = len(counts)
    lengths = np.maximum(counts, context)
    state = BatchState(n, int(lengths.max()), block_size)
    columns, blocks = state.table.shape[1], -(-max(counts) // block_size)
    state.table[:] = np.arange(columns) % blocks
    state.tokens, state.known[:] = [np.zeros(length, np.int64) for length in lengths], lengths
    zeros = np.zeros(n, np.int64)
    work = ScheduledBatch(np.arange(n), lengths - counts, np.array(counts), np.full(n, samples), zeros, query_len)
    last = torch.zeros(n, 1, dtype=torch.int64, device=upload.device)
    of = blocks, block_size, kept or model.dtype, upload.device, n, query_len
    caches = kv_cache.allocate_shared(model.cache_specs(), *of)
    return build_batches(state, work, last, caches, upload, samples, min_tokens)[0]
