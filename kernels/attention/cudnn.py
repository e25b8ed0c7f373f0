"""Long whole prompts by cuDNN, on GPUs that prefill.cu is not for; it leaves the others to Triton.

cuDNN plans again for every length, so prompts are padded to a multiple of STEP.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..candidate import Candidate
from .backend import AttentionMetadata, Part

FROM = 2048  # tokens of a prompt
STEP = 512
MAX_DIM = 128


def supports(part: Part) -> bool:
    q, params = part.q, part.params
    if params.window or params.softcap or params.sinks is not None:
        return False
    if part.decodes or part.reach is not None or part.scales is not None or part.keys.shape != part.values.shape:
        return False
    fits = q.element_size() == 2 and q.shape[2] % 8 == 0 and q.shape[2] <= MAX_DIM
    return fits and any(_is_long(part.rows, i) for i in range(part.first, part.stop))


def _is_long(rows: AttentionMetadata, i: int) -> bool:
    """Whether all of the sequence is in this step, and much."""
    return rows.query_lens[i] == rows.kv_lens[i] >= FROM


def plan(part: Part) -> list[tuple[bool, int, int]]:
    """Neighbouring sequences first:stop that go one way: by cuDNN one at a time, or by Triton in one launch."""
    key = "cudnn", part.first, part.stop
    found = part.rows.scratch.get(key)
    if found is None:
        found = part.rows.scratch[key] = []
        for i in range(part.first, part.stop):
            long = _is_long(part.rows, i)
            if found and not long and not found[-1][0]:
                found[-1] = False, found[-1][1], i + 1
            else:
                found.append((long, i, i + 1))
    return found


def run(part: Part) -> None:
    from . import attention_triton

    rows = part.rows
    start = sum(rows.query_lens[: part.first])
    for long, first, stop in plan(part):
        end = start + sum(rows.query_lens[first:stop])
        if long:
            _whole_prompt(part, rows.block_tables[first], start, end)
        else:
            attention_triton.run(part._replace(first=first, stop=stop))
        start = end


def _whole_prompt(part: Part, table: Tensor, start: int, stop: int) -> None:
    """The sequence whose tokens are rows start:stop, over gathered keys."""
    q, keys, length = part.q[start:stop], part.keys, stop - start
    block_size = keys.shape[1]
    blocks = -(-length // block_size)
    padded = -(-blocks * block_size // STEP) * STEP
    k, v = room = keys.new_empty(2, padded, *keys.shape[2:])
    for cache, gathered in ((keys, k), (part.values, v)):
        whole = gathered[: blocks * block_size].view(blocks, *cache.shape[1:])
        torch.index_select(cache, 0, table[:blocks], out=whole)
    room[:, length:] = 0  # no query reads them, but zero times the NaN that may lie there is a NaN
    if padded > length:
        q = torch.cat((q, q.new_zeros(padded - length, *q.shape[1:])))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        done = scaled_dot_product_attention(q, k, v, scale=part.params.scale, is_causal=True, enable_gqa=True)
    part.out[start:stop].copy_(done[0, :, :length].transpose(0, 1))


CANDIDATE = Candidate(
    "cudnn.py", "GPUs", f"whole prompts from {FROM} tokens on, causal, heads of up to {MAX_DIM} elements, f16 or bf16",
    supports, run,
)  # fmt: skip
