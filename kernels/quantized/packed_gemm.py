"""Linears on GPUs whose weights are quantised, in the packed layouts of cuda_layouts.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit
from ..activation.activation import gate_sizes, gated_activation
from ..device import DeviceCaps, device_caps
from . import e4m3_rows, e4m3_wgmma, quantized_gemm, quantized_wgmma
from .e4m3_rows import E4m3Rows
from .e4m3_wgmma import E4m3Config
from .packed_layouts import N_TILE, Tables
from .quantized_gemm import GemvConfig, GroupedConfig, TileConfig
from .quantized_wgmma import WgmmaConfig

Plain = Callable[[Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """How tiles of a format look to the kernels. Equal by value: threads may make the same one twice."""

    header: str  # the file that knows them, which stands for FORMAT in the kernels' sources
    inputs: int  # of a tile
    bytes: int  # of a tile
    widening: float  # cycles of a multiprocessor to make weights of 16 inputs of an output, roughly
    tables: Tables
    plain: Plain = field(compare=False)  # the weight in f32 that the tables' numbers mean
    sizes: tuple[tuple[str, int], ...] = ()  # constants of the header
    chunk: int = 0  # inputs of a chunk, of which fewer are slow to copy
    alike: int = 1  # tiles along the inputs that have the same scales
    streamed: int = 0  # inputs that quantized_experts.cu streams at a time, where these are not a tile's
    weight_only: bool = False  # activations keep their 16 bits, also where tensor cores could multiply 8

    @property
    def bits(self) -> float:
        """Bits of a weight, with its share of the rest."""
        return self.bytes * 8 / (N_TILE * self.inputs)

    @property
    def constants(self) -> dict[str, jit.Size]:
        """The format's name in the kernels' sources."""
        return {"FORMAT": self.header, **dict(self.sizes)}


class Packed(NamedTuple):
    """A weight [O, I]: uint8 [ceil(O / 16), I / layout.inputs, layout.bytes]; outputs past O are zeros."""

    tiles: Tensor
    outputs: int
    layout: Layout

    @property
    def inputs(self) -> int:
        return self.tiles.shape[1] * self.layout.inputs

    def part(self, first: int, last: int) -> Packed:
        """Outputs first to last; first is an n-tile's."""
        return self._replace(tiles=self.tiles[first // N_TILE : -(-last // N_TILE)], outputs=last - first)

    def numbers(self) -> dict[str, Tensor]:
        """The contents of the tables, [O, N] each."""
        return {name: x[: self.outputs] for name, x in self.layout.tables.unpack(self.tiles).items()}

    def dequantize(self, dtype: torch.dtype, first: int, last: int) -> Tensor:
        part = self.part(first, last)
        return part.layout.plain(part.numbers()) if dtype == torch.float32 else dequantize(part, dtype)


RUN = 4  # packed tiles that a warp of dequantize_tiles.cu takes


def dequantize(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The weight [O, I] in a dtype of 16 bits, each element rounded once."""
    out = torch.empty(packed.outputs, packed.inputs, dtype=dtype, device=packed.tiles.device)
    kernel = jit.kernel("dequantize_tiles", "dequantize", dtype, 0, **dequantize_sizes(packed.inputs, packed.layout))
    n_tiles, groups, _ = packed.tiles.shape
    warps = min(8, -(-groups // RUN))
    kernel((-(-groups // (RUN * warps)), n_tiles, 1), warps * 32, packed.tiles, out, packed.outputs)
    return out


def dequantize_sizes(inputs: int, layout: Layout) -> dict[str, jit.Size]:
    """Compile-time constants of dequantize_tiles.cu."""
    return dict(I=inputs, RUN=RUN, **layout.constants)


# The kernel of each kind of config. A config sets how a kernel splits a GEMM: `shared`, `sizes` and `grid`.
SOURCES = {
    GemvConfig: "quantized_gemv",
    GroupedConfig: "grouped_gemv",
    TileConfig: "quantized_gemm",
    WgmmaConfig: "quantized_wgmma",
    E4m3Config: "e4m3_wgmma",
}
KernelConfig = GemvConfig | GroupedConfig | TileConfig | WgmmaConfig | E4m3Config


def sizes(rows: int, inputs: int, config: KernelConfig, gate: str, bias: bool, layout: Layout) -> dict[str, jit.Size]:
    """Compile-time constants of the config's kernel."""
    of_format = {} if isinstance(config, E4m3Config) else layout.constants  # it takes one format
    return dict(I=inputs, **of_format, **config.sizes(rows, inputs, layout), **gate_sizes(gate), BIAS=int(bias))


def gemm(
    x: Tensor | E4m3Rows, packed: Packed, config: KernelConfig, gate: str = "", bias: Tensor | None = None
) -> Tensor:
    """`linear` by the config's kernel. x: E4m3Rows for E4m3Config. gate: of outputs whose halves share no n-tile."""
    given, *scales = x[:2] if isinstance(x, E4m3Rows) else (x,)
    rows, outputs, inputs, layout = len(given), packed.outputs, packed.inputs, packed.layout
    y = given.new_empty(rows, outputs // 2 if gate else outputs, dtype=x.dtype)
    of, shared = sizes(rows, inputs, config, gate, bias is not None, layout), config.shared(rows, inputs, layout)
    grid = config.grid(rows, outputs, layout, device_caps(given.device).num_sms)
    of_x: Tensor | jit.TensorMap = given
    counts: tuple[int, ...] = (outputs,)
    if grid.box:
        width = given.shape[1] * given.itemsize // 2  # in elements of two bytes
        of_x = jit.tensor_map(given.data_ptr(), rows, width, grid.box, width)
        counts = (rows, outputs) if isinstance(config, TileConfig) else (rows, outputs, grid.box)
    args = of_x, *scales, packed.tiles, y if bias is None else bias, y, *counts
    source = SOURCES[type(config)]
    kernel = jit.kernel(source, source, x.dtype, shared, **of)
    kernel((grid.blocks, 1, 1), grid.threads, *args, shared=shared, cluster=grid.cluster)
    return y


def takes(x: Tensor, packed: Packed, bias: Tensor | None) -> bool:
    """Whether kernels that read packed tiles take x [T, I] and bias [O]."""
    typed = x.dtype in (torch.bfloat16, torch.float16) and (bias is None or bias.dtype == x.dtype)
    return x.is_cuda and x.dim() == 2 and typed and jit.plain(x, packed.tiles)


def supports(x: Tensor, packed: object, gate: str = "", bias: Tensor | None = None) -> bool:
    """Whether `linear` takes x [T, I] and bias [O], and is faster than `dequantize` and a GEMM."""
    if not isinstance(packed, Packed) or not takes(x, packed, bias):
        return False
    return _plan(len(x), packed, "", device_caps(x.device))[0] is not None


def takes_e4m3(x: Tensor, packed: object, bias: Tensor | None = None) -> bool:
    """Whether `linear` of these is by tensor cores of 8 bits: then it takes x in e4m3 as well."""
    if not isinstance(packed, Packed) or not takes(x, packed, bias):
        return False
    return e4m3_wgmma.chosen(len(x), packed.layout, device_caps(x.device))


def linear(x: Tensor | E4m3Rows, packed: Packed, gate: str = "", bias: Tensor | None = None) -> Tensor:
    """x [T, I] times the transpose of the weight [O, I], plus bias [O], where `supports` shows it; accumulated in f32.

    gate: an activation of the first half of the outputs times the second half; "": the outputs as they are.
    """
    given = x.codes if isinstance(x, E4m3Rows) else x
    config, fused = _plan(len(given), packed, gate, device_caps(given.device))
    assert config is not None, "supports() was not asked"
    if isinstance(config, E4m3Config) and isinstance(x, Tensor):
        x = e4m3_rows.encode(x)
    y = gemm(x, packed, config, fused, bias)
    return y if fused == gate else gated_activation(y, gate)


def variants(
    rows: Iterable[int], packed: object, dtype: torch.dtype, gate: str, bias: bool, caps: DeviceCaps
) -> Iterator[jit.KernelVariant]:
    """Programs to compile for GEMMs of so many rows, each; none for a weight that is not packed."""
    if not isinstance(packed, Packed):
        return
    for n in rows:
        config, fused = _plan(n, packed, gate, caps)
        if isinstance(config, E4m3Config):
            yield jit.variant("e4m3_rows", dtype, **e4m3_rows.sizes(packed.inputs))
        if config is not None:
            of = sizes(n, packed.inputs, config, fused, bias, packed.layout)
            yield jit.variant(SOURCES[type(config)], dtype, **of)


def _plan(rows: int, packed: Packed, gate: str, caps: DeviceCaps) -> tuple[KernelConfig | None, str]:
    """How the GEMM is computed, and the gate if that takes it: not where its halves share an n-tile."""
    of = packed.outputs, packed.inputs, packed.layout
    if gate and packed.outputs % (2 * N_TILE) == 0 and (config := choose(rows, *of, True, caps)):
        return config, gate
    return choose(rows, *of, False, caps), ""


class GemmSizes(NamedTuple):
    rows: int
    inputs: int
    layout: Layout
    caps: DeviceCaps


class PackedCandidate(NamedTuple):
    """A kernel that reads packed tiles. It declares what a Candidate does."""

    name: str
    devices: str
    takes: str
    supports: Callable[[GemmSizes], bool]
    # The fastest config for so many rows, outputs and inputs of a layout, gated or not, on so many multiprocessors;
    # None: the kernel does not take them.
    config: Callable[[int, int, int, Layout, bool, int], KernelConfig | None]


# The first one that supports a GEMM and has a config for it computes it.
CANDIDATES = (
    PackedCandidate(
        "e4m3_wgmma.cu", "sm_90", f"FP8 with a scale for 128 inputs or more, from {e4m3_wgmma.LEAST_ROWS} rows on",
        lambda given: e4m3_wgmma.chosen(given.rows, given.layout, given.caps), e4m3_wgmma.choose,
    ),
    PackedCandidate(
        "quantized_wgmma.cu", "sm_90",
        f"{quantized_wgmma.ROWS[0]} to {quantized_wgmma.ROWS[-1]} rows, inputs a multiple of "
        f"{quantized_wgmma.LENGTHS[-1]}",
        lambda given: given.caps.hopper and given.rows in quantized_wgmma.ROWS
        and given.inputs % max(quantized_wgmma.LENGTHS[-1], given.layout.inputs) == 0,
        quantized_wgmma.choose,
    ),
    # A step of one sequence takes 6 % less of Llama-3.1-8B in Q4_K_M by this GEMV than by the GEMM; of four sequences
    # the GEMM's takes 4 % less (docs/measurements/small-batches.md).
    PackedCandidate(
        "grouped_gemv.cu", "sm_90, sm_100", "a row of super-blocks",
        lambda given: given.caps.has_tma and given.rows == 1, quantized_gemm.choose_grouped,
    ),
    PackedCandidate(
        "quantized_gemm.cu", "sm_90, sm_100", f"up to {quantized_gemm.MAX_ROWS} rows",
        lambda given: given.caps.has_tma and given.rows <= quantized_gemm.MAX_ROWS, quantized_gemm.choose,
    ),
    PackedCandidate(
        "quantized_gemv.cu", "GPUs", f"up to {quantized_gemm.GEMV_ROWS} rows, as far as they fit in shared memory",
        lambda given: True, quantized_gemm.choose_gemv,
    ),
    PackedCandidate(
        "dequantize_tiles.cu", "GPUs", "all else, before a GEMM of plain weights", lambda given: True, lambda *_: None
    ),
)  # fmt: skip


@functools.cache
def choose(rows: int, outputs: int, inputs: int, layout: Layout, gated: bool, caps: DeviceCaps) -> KernelConfig | None:
    """The fastest kernel for these sizes; None: weights are dequantised first."""
    takes = [one for one in CANDIDATES if one.supports(GemmSizes(rows, inputs, layout, caps))] if rows else []
    found = (one.config(rows, outputs, inputs, layout, gated, caps.num_sms) for one in takes)
    return next((config for config in found if config is not None), None)
