"""CUDA graphs of decode steps: one call replays a step in which every sequence has as many tokens, query_len.

A graph reads what DeviceDecodeBatch has sent and ends with the residual stream; head and sampler run outside it. A few
batch sizes are captured, and batches are padded with rows that write and read nothing. Where experts are in host
memory, segments between the host's parts are captured (kernels/segmented_graph.py). NCCL's collectives are captured
too, so all ranks must capture the same sizes in the same order, and must free the graphs before the communicators.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import cast

import torch
from torch import Tensor

from ...comm.custom_allreduce import symmetric_memory_of
from ...kernels import jit
from ...kernels.device import device_caps
from ...kernels.gemm import linear
from ...kernels.gemm.autotune import TuneRequest
from ...kernels.gemm.pipelined_gemm import MAX_ROWS
from ...kernels.segmented_graph import SegmentedGraph
from ..model.base import BESIDE, Model
from ..model.batch import Batch
from ..model.cache_spec import Caches
from ..model.formats._part import Part
from ..model.layers.linear import Linear, RowParallel
from ..model.layers.mla import PlainColumnParallel
from .decode_batch import DeviceDecodeBatch
from .state import BatchState, ScheduledBatch
from .upload import Upload

LARGEST = 512  # sequences; beyond, kernel launches are no bottleneck


def capture_sizes(max_num_seqs: int, most: int = LARGEST) -> list[int]:
    """The batch sizes that are captured, close enough together that padding costs little. most: sequences that such
    steps have."""
    most = max(1, min(max_num_seqs, most))
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, LARGEST + 1, 16)]
    return [size for size in steps if size < most] + [most]


def eager_sizes(tokens: int) -> list[int]:
    """Rows of steps with prompts, of up to `tokens` rows, that together choose nearly every kernel of quantised weights
    (packed_gemm.py, e4m3_wgmma.py): all of the fewest, then as close together as tiles are high, until all tiles are
    full."""
    steps = [*range(1, 9), 16, 33, *range(48, 1025, 16), *range(1088, 2049, 64), *range(2560, tokens, 512)]
    return [size for size in steps if size < tokens] + [tokens]


def gemms(model: Model, max_num_seqs: int) -> Iterator[TuneRequest]:
    """The GEMMs of captured steps that are tuned: those of more than MAX_ROWS rows."""
    captured = [size for size in capture_sizes(max_num_seqs) if size > MAX_ROWS]
    peers = symmetric_memory_of(model.tensor)
    for module in _linears(model):
        matrix, bias = module.matrix, module.added_bias is not None
        if matrix is not None:
            yield TuneRequest(matrix, captured, bias=bias)
        if matrix is not None and peers and isinstance(module, RowParallel):
            yield TuneRequest(matrix, captured, peers, bias=bias)


def gemm_variants(model: Model, max_num_seqs: int, tokens: int, device: torch.device) -> Iterator[jit.KernelVariant]:
    """The kernels to compile ahead for GEMMs: of captured steps, each of whose sizes has its own variants, and then of
    quantised weights in steps with prompts, of up to `tokens` rows. profile_run.py runs those of plain weights."""
    sizes, found = capture_sizes(max_num_seqs), device_caps(device)
    few = [size for size in sizes if size <= MAX_ROWS]
    packed = dict[Hashable, tuple[Part, str]]()  # quantised weights, with their gates
    for module in _linears(model):
        gate = module.activation
        if (matrix := module.matrix) is not None:
            yield from linear.variants(few, matrix, gate, module.added_bias is not None, found)
        else:
            gate = gate if len(module.parts) == 1 else ""  # else its outputs are gated together
            for part in cast(Iterable[Part], module.parts):
                packed.setdefault(_kind(part, gate), (part, gate))
    for rows in sizes, eager_sizes(tokens):
        for part, gate in packed.values():
            yield from part.variants(rows, gate, model.dtype, found)


def _kind(part: Part, gate: str) -> Hashable:
    """Facts that the kernels of quantised weights depend on: layers have the same."""
    sizes = (x.shape if isinstance(x, Tensor) else x for x in part.packed or ())
    return type(part.packed), gate, part.added_bias is None, *sizes


def _linears(model: Model) -> Iterator[Linear]:
    """Linears of captured steps. Weights that latent attention absorbs are multiplied otherwise (mla.py)."""
    named = ((name, one) for name, one in model.named_modules() if isinstance(one, Linear))
    return (one for name, one in named if not isinstance(one, PlainColumnParallel) and not name.startswith(BESIDE))


class DecodeGraphs:
    """Decode graphs of a GPU rank. Made and used in the step thread, on its CUDA stream."""

    head = None  # it runs outside the graph

    def __init__(
        self, model: Model, state: BatchState, last: Tensor, caches: Caches, upload: Upload,
        query_lens: tuple[int, ...] = (1,), verified_tokens: int = 0,
    ):  # fmt: skip
        """query_lens: of the steps that are captured. verified_tokens: of all sequences, the most where these have
        several; 0: any number."""
        self.model = model
        self.sizes = capture_sizes(len(state.length))
        self._sizes = {
            query_len: capture_sizes(len(state.length), verified_tokens // query_len)
            if verified_tokens and query_len > 1
            else self.sizes
            for query_len in query_lens
        }
        self._inputs: dict[int, DeviceDecodeBatch] = {}  # by query_len
        for query_len in query_lens:
            of = state, last, caches, self._sizes[query_len][-1], upload, query_len
            self._inputs[query_len] = DeviceDecodeBatch(*of, next(iter(self._inputs.values()), None))
        self._longest = min(model.max_model_len, state.table.shape[1] * state.block_size)
        self._captured: dict[tuple[int, int], tuple[SegmentedGraph, Tensor]] = {}  # by sequences, and tokens of each
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, reached: Callable[[int], None]) -> None:
        """Capture all sizes. The largest goes first, so that the others reuse its memory. Calls reached(sizes done)."""
        wanted = sorted(((size, n) for n, sizes in self._sizes.items() for size in sizes), key=math.prod)
        for done, (size, query_len) in enumerate(reversed(wanted)):
            reached(done)
            # A warm-up: compiling, loading and first allocations must not happen in a capture.
            self._run(size, query_len)
            torch.cuda.current_stream().synchronize()
            segmented = SegmentedGraph(self._pool)
            hidden = segmented.capture(functools.partial(self._run, size, query_len))
            self._captured[size, query_len] = segmented, hidden

    def close(self) -> None:
        torch.cuda.current_stream().synchronize()
        self._captured.clear()

    def supports(self, scheduled: ScheduledBatch) -> bool:
        sizes = self._sizes.get(scheduled.query_len)
        return sizes is not None and len(scheduled.rows) <= sizes[-1] and scheduled.all_decode

    @property
    def steps(self) -> list[tuple[int, int]]:
        """The captured steps, by sequences, and tokens of each."""
        return list(self._captured)

    def captured_step(self, size: int, query_len: int) -> tuple[Batch, Tensor]:
        """A captured step's batch, with the rows that fill it up, and its [T, hidden]; their memory stays."""
        return self._inputs[query_len].batch(size, [self._longest] * size), self._captured[size, query_len][1]

    def replay(self, scheduled: ScheduledBatch) -> tuple[Tensor, Tensor]:
        """The residual stream [T, hidden] of a supported step, and the row of each token [T] int32. Valid until the
        next replay."""
        n, query_len = len(scheduled.rows), scheduled.query_len
        rows = self._inputs[query_len].send(scheduled)
        segmented, hidden = self._captured[next(size for size in self._sizes[query_len] if size >= n), query_len]
        segmented.replay(n)
        return hidden[: n * query_len], rows if query_len == 1 else rows.repeat_interleave(query_len)

    def batch(self, scheduled: ScheduledBatch) -> Batch:
        """The batch that was replayed last, without the rows that fill it up."""
        lengths = (scheduled.starts + scheduled.query_len).tolist()
        return self._inputs[scheduled.query_len].batch(len(lengths), lengths)

    def _run(self, size: int, query_len: int) -> Tensor:
        inputs = self._inputs[query_len]
        inputs.fill(size)
        return self.model.forward([inputs.batch(size, [self._longest] * size)])
