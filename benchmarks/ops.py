"""Every kernel next to its torch reference, the best library and the least time its bytes or its arithmetic take.

    python benchmarks/ops.py [--only attention] [--shapes 70b-tp4] [--energy] [--json FILE]

Shapes are Llama-3.1-8B's in bf16; --shapes takes those of a rank of a tensor group. Each call is timed in a CUDA graph
that rotates over copies of its inputs which do not fit in the cache together, so that weights and keys come from memory
as they do in a model. --energy: each call's millijoules, too, at which a GPU at its power limit is to be measured.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial

import torch
from phalanx.benchmarks.ops_table import BF16, SHAPES, Table, copies, make_rows, randn
from phalanx.benchmarks.timing import Call
from phalanx.kernels.activation import activation
from phalanx.kernels.attention import decode
from phalanx.kernels.attention.attention import AttentionParams, paged_attention, store_and_attend
from phalanx.kernels.device import device_caps
from phalanx.kernels.embedding import embedding
from phalanx.kernels.gemm import gemv, pipelined_gemm
from phalanx.kernels.gemm.linear import gated_linear, linear
from phalanx.kernels.norm import norm
from phalanx.kernels.rope import fp8_cache, rope
from phalanx.kernels.rope.rope import CurrentKV
from phalanx.kernels.sampling import argmax
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import scaled_dot_product_attention as sdpa

SCORES = AttentionParams(128**-0.5)


def small(table: Table) -> None:
    for rows in (1, 64, 256, 8192):
        norms(table, rows)
        gates(table, rows)
        ropes(table, rows)
        if rows < 8192:
            lookups(table, rows)


def norms(table: Table, rows: int) -> None:
    weight, n = randn(4096), rows * 4096 * 2
    pairs = [(randn(rows, 4096), randn(rows, 4096)) for _ in range(copies(2 * n))]
    table.add(
        f"add_rms_norm {rows}x4096", 4 * n,
        {"ours": [partial(norm.add_rms_norm, a, b, weight, 1e-5) for a, b in pairs],
         "reference": [partial(norm.add_rms_norm_reference, a, b, weight, 1e-5) for a, b in pairs]},
    )  # fmt: skip


def gates(table: Table, rows: int) -> None:
    xs = [randn(rows, 28672) for _ in range(copies(rows * 28672 * 2))]
    table.add(
        f"silu_mul {rows}x14336", 3 * rows * 14336 * 2,
        {"ours": [partial(activation.gated_activation, x) for x in xs],
         "reference": [partial(activation.gated_activation_reference, x, "silu") for x in xs]},
    )  # fmt: skip


def ropes(table: Table, rows: int) -> None:
    cos_sin = rope.CosSin(*torch.rand(2, rows, 1, 128, device="cuda"))
    cache = randn(2, 640, 16, 8, 128)
    slots = torch.randperm(640 * 16, device="cuda")[:rows]
    ys = [randn(rows, 48, 128).split([32, 8, 8], 1) for _ in range(copies(rows * 48 * 256))]
    kept = cache[0], cache[1]
    given = [(y[0], CurrentKV(y[1], y[2], cos_sin, None, slots), kept) for y in ys]
    table.add(
        f"rope_write {rows}x48x128", 2 * rows * 48 * 256,
        {"ours": [partial(rope.rope_and_store_kv, *one) for one in given],
         "reference": [partial(rope.rope_and_store_kv_reference, *one) for one in given]},
    )  # fmt: skip


def lookups(table: Table, rows: int) -> None:
    """Operations at the beginning and the end of a step."""
    weight, cos_sin_table = randn(128256, 4096), torch.rand(8192, 2, 64, device="cuda")
    ids, positions = torch.randint(128256, (rows,), device="cuda"), torch.randint(8192, (rows,), device="cuda")
    xs = [randn(rows, 128256) for _ in range(copies(rows * 128256 * 2))]
    table.add(
        f"embedding {rows}x4096", 2 * rows * 4096 * 2,
        {"ours": [partial(embedding.embedding, ids, weight)],
         "reference": [partial(embedding.embedding_reference, ids, weight, 0, True)]},
    )  # fmt: skip
    table.add(
        f"cos_sin {rows}x128", rows * 128 * 12,
        {"ours": [partial(rope.cos_sin, cos_sin_table, positions)],
         "reference": [partial(rope.cos_sin_reference, cos_sin_table, positions)]},
    )  # fmt: skip
    table.add(
        f"argmax {rows}x128256", rows * 128256 * 2,
        {"ours": [partial(argmax.argmax, x) for x in xs],
         "reference": [partial(argmax.argmax_reference, x) for x in xs],
         "torch.argmax": [partial(torch.argmax, x, -1) for x in xs]},
    )  # fmt: skip


def gemms(table: Table, shapes: str) -> None:
    for outputs, inputs in SHAPES[shapes]:
        weights = [randn(outputs, inputs) for _ in range(copies(outputs * inputs * 2))]
        for rows in (1, 2, 4, 8, 16, 64):
            gemm(table, randn(rows, inputs), weights)


def gemm(table: Table, x: Tensor, weights: list[Tensor]) -> None:
    rows, (outputs, inputs) = len(x), weights[0].shape
    versions: dict[str, list[Call]] = {"cublas": [partial(torch_linear, x, w) for w in weights]}
    if gemv.supports(x, weights[0]) or pipelined_gemm.supports(x, weights[0]):
        versions["ours"] = [partial(linear, x, w) for w in weights]
    for config in tile_configs(rows, inputs):
        versions["m{}k{}".format(*config)] = [
            partial(pipelined_gemm.pipelined_gemm, x, w, config=config) for w in weights
        ]
    bytes_ = 2 * (outputs * inputs + rows * (inputs + outputs))
    table.add(f"linear {rows} x {outputs}x{inputs}", bytes_, versions, 2 * rows * outputs * inputs)


def tile_configs(rows: int, inputs: int) -> Iterator[pipelined_gemm.TileConfig]:
    found = device_caps(torch.device("cuda", 0))
    return pipelined_gemm.tile_configs(rows, inputs, pipelined_gemm.whole_tiles(rows, found))


def library_and_silu(x: Tensor, weight: Tensor) -> Tensor:
    return activation.gated_activation(torch_linear(x, weight))


class Layers:
    """The GEMMs of eight layers and what lies between them, as a decode step runs them."""

    def __init__(self, shapes: str, rows: int):
        (qkv, self.hidden), (_, self.heads), (gate_up, _), *_ = SHAPES[shapes]
        self.kv_heads, self.shapes, self.rows = (qkv - self.heads) // 256, SHAPES[shapes][:4], rows
        self.weights = [[randn(*shape) / 64 for shape in self.shapes] for _ in range(8)]
        self.norm = torch.ones(self.hidden, device="cuda", dtype=BF16)
        self.cos_sin = rope.CosSin(*torch.rand(2, rows, 1, 128, device="cuda"))
        self.batch, blocks = make_rows([1] * rows, [256] * rows)
        self.batch.slots = self.batch.block_tables[:, 15].long() * 16 + 15
        self.cache = randn(2, blocks, 16, self.kv_heads, 128)
        self.x, self.residual = randn(2, rows, self.hidden)

    def run(self, linears: dict[str, Callable[..., Tensor]]) -> None:
        x = self.x
        for qkv, o, gate_up, down in self.weights:
            y = linears["qkv"](self.normed(x), qkv).view(self.rows, -1, 128)
            q, k, v = y.split([self.heads // 128, self.kv_heads, self.kv_heads], 1)
            cache = self.cache[0], self.cache[1]
            x = store_and_attend(q, CurrentKV(k, v, self.cos_sin, None, self.batch.slots), cache, self.batch, SCORES)
            x = linears["o"](x, o)
            x = linears["down"](linears["gate_up"](self.normed(x), gate_up), down)

    def normed(self, x: Tensor) -> Tensor:
        return norm.add_rms_norm(x, self.residual, self.norm, 1e-5)[0]


def layers(table: Table, shapes: str) -> None:
    """Microseconds of eight layers by the library's GEMMs, as they are chosen, and with one GEMM in other tiles."""
    if table.only not in "8 layers":
        return
    chosen: dict[str, Callable[..., Tensor]] = {"qkv": linear, "o": linear, "gate_up": gated_linear, "down": linear}
    library = dict.fromkeys(chosen, torch_linear) | {"gate_up": library_and_silu}
    for rows in (1, 2, 8, 16, 32, 64, 256):
        made = Layers(shapes, rows)
        versions: dict[str, list[Call]] = {"cublas": [partial(made.run, library)], "ours": [partial(made.run, chosen)]}
        for name, shape in zip(chosen, made.shapes, strict=True):
            is_gated = name == "gate_up"
            versions[f"{name} cublas"] = [partial(made.run, chosen | {name: library[name]})]
            if rows <= gemv.ROWS:
                for warp in [(2, 4)] if is_gated else [(1, 8), (2, 4)]:
                    ours = partial(gemv.gemv, gate="silu" if is_gated else "", config=warp)
                    versions[f"{name} gemv {warp[0]}"] = [partial(made.run, chosen | {name: ours})]
            for config in tile_configs(rows, shape[1]):
                ours = partial(pipelined_gemm.pipelined_gemm, config=config, gate="silu" if is_gated else "")
                versions["{} m{}k{}".format(name, *config)] = [partial(made.run, chosen | {name: ours})]
        bytes_ = 8 * sum(2 * a * b for a, b in made.shapes) + 8 * rows * 256 * made.kv_heads * 512
        table.add(f"8 layers {rows}", bytes_, versions, least=2)


def attentions(table: Table) -> None:
    for batch, length in ((1, 256), (1, 8192), (16, 256), (64, 256), (64, 2048), (256, 256), (256, 1024), (512, 800)):
        decode_attention(table, f"{batch} x {length}", [length] * batch)
    draw = random.Random(0)
    for batch in (64, 256, 512):
        decode_attention(table, f"{batch} of 64 to 1400", [draw.randint(64, 1400) for _ in range(batch)])
    for batch, length in itertools.product((1, 16, 64), (1024, 8192, 32768)):
        fp8_attention(table, batch, length)
    for batch, length in ((1, 8192), (16, 1024)):
        prompt_attention(table, batch, length)


def decode_attention(table: Table, name: str, lengths: list[int]) -> None:
    """Attention of tokens that are not rotated yet. Each call is behind an operation of torch's, whose time is in it:
    behind another of its kind it would fetch its keys while that one still computes, which in a model it cannot."""
    from phalanx.kernels.attention import attention_triton

    batch, bytes_ = len(lengths), sum(lengths) * 4096
    rows, blocks = make_rows([1] * batch, lengths)
    newest = rows.lengths.long() - 1
    rows.slots = rows.block_tables.gather(1, newest[:, None] // 16)[:, 0].long() * 16 + newest % 16
    caches = [randn(2, blocks, 16, 8, 128) for _ in range(min(4, copies(bytes_)))]
    q, k, v = randn(batch, 48, 128).split([32, 8, 8], 1)
    new = CurrentKV(k, v, rope.CosSin(*torch.rand(2, batch, 1, 128, device="cuda")), None, rows.slots)
    out = torch.empty(q.shape, device="cuda", dtype=BF16)
    splits = attention_triton.choose_kv_splits(batch * 8, 8192, 132)  # as in a graph, which does not know the lengths

    def unfused(c: Tensor) -> None:
        # Attention as a step with prompts does it; q is rotated further each time, which changes nothing here.
        rotated = rope.rope_and_store_kv(q, new, (c[0], c[1]))
        paged_attention(rotated, c[0], c[1], rows, SCORES)

    def by_triton(c: Tensor) -> None:
        attention_triton.decode(q, c[0], c[1], rows.block_tables, rows.lengths, out, *SCORES, splits, new)

    versions: dict[str, list[Call]] = {
        "ours": [partial(store_and_attend, q, new, (c[0], c[1]), rows, SCORES) for c in caches],
        "ours, rotated before": [partial(unfused, c) for c in caches],
        "ours by triton": [partial(by_triton, c) for c in caches],
    }
    if batch * 8 <= decode.SEQUENCES:  # the same bytes as if a block held one head's tokens after another's
        apart = (rows.block_tables[:, None] * 8 + torch.arange(8, device="cuda")[:, None]).flatten(0, 1).int()
        each = q.reshape(batch * 8, 4, 128), apart, rows.lengths.repeat_interleave(8), torch.empty_like(out)
        versions["heads apart"] = [partial(decode_apart, *each, c.view(2, -1, 16, 1, 128)) for c in caches]
        whole = q.contiguous(), rows.block_tables, rows.lengths, out
        versions["heads together"] = [partial(decode_apart, *whole, c) for c in caches]
    if len(set(lengths)) == 1:
        keys = [randn(2, batch, 8, lengths[0], 128) for _ in range(min(4, copies(bytes_)))]
        alone = q.reshape(batch, 32, 1, 128)
        versions["sdpa, not paged"] = [partial(sdpa, alone, x[0], x[1], enable_gqa=True) for x in keys]
    tick = torch.zeros(1, device="cuda")
    for key, calls in versions.items():
        versions[key] = [partial(_behind, tick, call) for call in calls]
    table.add(f"attention decode {name}", bytes_, versions)


def fp8_attention(table: Table, batch: int, length: int) -> None:
    """A decode step of a cache in e4m3, and one of bf16 with as many tokens; in DRAM, whatever their bytes are."""
    from phalanx.kernels.attention import attention_triton

    bytes_ = batch * length * 2 * 8 * (128 + 1)
    rows, blocks = make_rows([1] * batch, [length] * batch)
    newest = rows.lengths.long() - 1
    rows.slots = rows.block_tables.gather(1, newest[:, None] // 16)[:, 0].long() * 16 + newest % 16
    plain = [randn(2, blocks, 16, 8, 128) for _ in range(min(4, copies(bytes_)))]
    narrow = []
    for c in plain:
        (keys, k_scales), (values, v_scales) = (fp8_cache.quantize(x) for x in c)
        scales = torch.stack((k_scales, v_scales), 2).permute(0, 3, 2, 1).contiguous()  # [blocks, heads, 2, size]
        narrow.append((keys, values, scales))
    q, k, v = randn(batch, 48, 128).split([32, 8, 8], 1)
    new = CurrentKV(k, v, rope.CosSin(*torch.rand(2, batch, 1, 128, device="cuda")), None, rows.slots)
    out = torch.empty(q.shape, device="cuda", dtype=BF16)
    splits = attention_triton.choose_kv_splits(batch * 8, length, device_caps(q.device).num_sms)

    def by_triton(keys: Tensor, values: Tensor, scales: Tensor) -> None:
        attention_triton.decode(q, keys, values, rows.block_tables, rows.lengths, out, *SCORES, splits, new, scales)

    versions: dict[str, list[Call]] = {
        "fp8": [partial(store_and_attend, q, new, c, rows, SCORES) for c in narrow],
        "fp8 by triton": [partial(by_triton, *c) for c in narrow],
        "bf16": [partial(store_and_attend, q, new, (c[0], c[1]), rows, SCORES) for c in plain],
    }
    tick = torch.zeros(1, device="cuda")
    for key, calls in versions.items():
        versions[key] = [partial(_behind, tick, call) for call in calls]
    table.add(f"attention decode, fp8 cache {batch} x {length}", bytes_, versions)


def _behind(tick: Tensor, call: Call) -> None:
    tick.add_(1)
    call()


def decode_apart(q: Tensor, tables: Tensor, lengths: Tensor, out: Tensor, c: Tensor) -> None:
    decode.decode(len(q), q, c[0], c[1], tables, lengths, out.view(q.shape), *SCORES)


def prompt_attention(table: Table, batch: int, length: int) -> None:
    from phalanx.kernels.attention import attention_triton

    rows, blocks = make_rows([length] * batch, [length] * batch)
    keys, values = randn(2, blocks, 16, 8, 128)
    q = randn(batch * length, 48, 128)[:, :32]
    out = torch.empty(q.shape, device="cuda", dtype=BF16)

    def by_triton() -> None:
        tables, lengths, starts = rows.block_tables, rows.lengths, rows.query_starts
        attention_triton.prefill(q, keys, values, tables, lengths, starts, out, *SCORES, 0, batch, length)

    versions: dict[str, list[Call]] = {"ours": [partial(paged_attention, q, keys, values, rows, SCORES)]}
    versions["ours by triton"] = [by_triton]
    x, k = randn(batch, 32, length, 128), randn(batch, 8, length, 128)

    def library(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(x, k, k, is_causal=True, enable_gqa=True)

    for name, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("fa2", SDPBackend.FLASH_ATTENTION)):
        versions[name] = [partial(library, backend)]
    table.add(f"attention prompt {batch} x {length}", 0, versions, batch * 2 * 32 * 128 * length**2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--shapes", choices=SHAPES, default="8b", help="others than 8b: the GEMMs alone")
    parser.add_argument("--energy", action="store_true", help="millijoules of each call, for two seconds each")
    parser.add_argument("--json", help="append raw lines to this file")
    asked = parser.parse_args()
    torch.manual_seed(0)
    table = Table(asked.only, asked.energy)
    with torch.no_grad():
        if asked.shapes == "8b":
            small(table)
        layers(table, asked.shapes)
        gemms(table, asked.shapes)
        if asked.shapes == "8b":
            attentions(table)
    table.append(asked.json)


if __name__ == "__main__":
    main()
