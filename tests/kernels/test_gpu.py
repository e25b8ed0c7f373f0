"""Every GPU kernel against its torch reference, on random shapes with NaN in all that must not be read or left."""

import random

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.activation import activation, xielu
from phalanx.kernels.attention import attention, reference
from phalanx.kernels.attention.attention import AttentionParams
from phalanx.kernels.attention.backend import CurrentKV
from phalanx.kernels.device import device_caps
from phalanx.kernels.embedding import embedding
from phalanx.kernels.gemm import linear, skinny, swiglu_gemm
from phalanx.kernels.norm import norm
from phalanx.kernels.rope import rope
from phalanx.kernels.sampling import argmax, decode_inputs, logits
from torch.nn.functional import gelu, silu

from .attention import decoding
from .attention.test_attention import make_caches, make_rows
from .sampling import test_decode_inputs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KINDS = [(torch.float32, 3e-6), (torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)]
NAN = float("nan")
needs_tma = pytest.mark.skipif(
    not torch.cuda.is_available() or not device_caps(torch.device("cuda", 0)).has_tma,
    reason="needs the tensor memory accelerator of sm_90 or sm_100, and their shared memory",
)


def near(got, want, bound):
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got.float().cpu(), want.float().cpu(), atol=bound, rtol=bound)


@pytest.fixture(autouse=True)
def poison():
    """Fresh memory holds NaN: what a kernel does not write shows."""
    torch.manual_seed(0)
    held = [torch.full((n,), NAN, device="cuda") for n in (1 << 8, 1 << 12, 1 << 16, 1 << 20)]
    del held
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("rows, size", [(0, 8), (1, 1), (3, 33), (17, 64), (4, 14336), (3, 1020)])
@pytest.mark.parametrize("act", activation.PLAIN)
def test_activate(rows, size, dtype, bound, act):
    x = (torch.randn(rows, size, device="cuda") * 3).to(dtype)
    near(activation.activate(x.clone(), act), activation.activate_reference(x, act), bound)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("rows, size", [(0, 8), (1, 1), (3, 33), (37, 4096)])
def test_xielu(rows, size, dtype, bound):
    x = (torch.randn(rows, size, device="cuda") * 3).to(dtype)
    near(xielu.xielu(x.clone(), 0.9, 1.3), xielu.xielu_reference(x, 0.9, 1.3), bound)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("rows, size", [(0, 8), (1, 1), (3, 33), (17, 64), (4, 14336), (3, 1020)])
@pytest.mark.parametrize("act", activation.ACTIVATIONS)
def test_gated_activation(rows, size, dtype, bound, act):
    x = (torch.randn(rows, 2 * size, device="cuda") * 3).to(dtype)
    near(activation.gated_activation(x, act), activation.gated_activation_reference(x, act), bound)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize(
    "dim, turned", [(128, 128), (64, 64), (80, 80), (96, 96), (112, 112), (256, 256), (80, 32), (10, 6)]
)
@pytest.mark.parametrize("tokens, heads, kv_heads", [(0, 2, 1), (1, 4, 4), (37, 8, 2), (5, 16, 1), (300, 5, 3)])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_write(dim, turned, tokens, heads, kv_heads, with_norms, interleaved, dtype, bound):
    angles = torch.rand(tokens, 1, turned // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    turn = rope.CosSin(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), interleaved)
    y = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda").to(dtype)
    weights = torch.randn(2, dim, device="cuda").to(dtype)
    norms = rope.QKNorm(weights[0], weights[1], 1e-6) if with_norms else None
    block_size, blocks = 16, 19
    slots = torch.randperm(blocks * block_size, device="cuda")[:tokens]
    found = []
    for call in (rope.rope_and_store_kv_cuda, rope.rope_and_store_kv_reference):
        q, k, v = y.clone().view(tokens, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], 1)
        cache = torch.full((2, blocks, block_size, kv_heads, dim), NAN, device="cuda", dtype=dtype)
        found.append((call(q, k, v, turn, norms, (cache[0], cache[1]), slots), cache))
    near(found[0][0], found[1][0], bound)
    torch.testing.assert_close(found[0][1], found[1][1], atol=bound, rtol=bound, equal_nan=True)


def test_negative_slots_are_not_written():
    turn = rope.CosSin(torch.ones(3, 1, 8, device="cuda"), torch.zeros(3, 1, 8, device="cuda"))
    q, k, v = torch.randn(3, 3, 8, device="cuda").split(1, 1)
    cache = torch.full((2, 2, 4, 1, 8), NAN, device="cuda")
    rope.rope_and_store_kv(q, k, v, turn, None, (cache[0], cache[1]), torch.tensor([-1, 5, -1], device="cuda"))
    assert cache.isnan().sum() == 2 * 7 * 8 and torch.equal(cache[1, 1, 1], v[1])


def check_attention(
    query_lens, kv_lens, heads, kv_heads, dim, dtype, bound, window=0, block_size=16, cap=0.0, sinks=False
):
    blocks = sum(-(-n // block_size) for n in kv_lens) + 2
    rows = make_rows(query_lens, kv_lens, block_size, blocks)
    keys, values = (c.cuda() for c in make_caches(rows, block_size, blocks, kv_heads, dim, dtype))
    for name in ("block_tables", "lengths", "query_starts"):
        setattr(rows, name, getattr(rows, name).cuda())
    q = torch.randn(sum(query_lens), heads + 2 * kv_heads, dim, device="cuda").to(dtype)[:, :heads]
    scores = AttentionParams(dim**-0.5, window, cap, torch.randn(heads, device="cuda") * 3 if sinks else None)
    want = reference.paged_attention_reference(q, keys, values, rows, scores)
    rows.scratch.clear()
    near(attention.paged_attention(q, keys, values, rows, scores), want, bound)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 112, 128, 256])
def test_attention_head_sizes(dim, dtype, bound):
    check_attention([1, 1, 1, 40, 130], [17, 1, 300, 40, 333], 8, 2, dim, dtype, bound)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("window", [0, 1, 24, 1000])
def test_attention_groups_and_windows(ratio, window):
    check_attention([1] * 5 + [70, 3], [16, 64, 65, 1, 511, 70, 140], 2 * ratio, 2, 64, torch.float16, 2e-3, window)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("window, cap", [(0, 0.0), (128, 0.0), (0, 1.5)])
def test_attention_sinks(window, cap, dim, dtype, bound):
    bound = max(bound, 5e-5)
    lengths = [17, 1, 300, 5000, 40, 333]
    check_attention([1, 1, 1, 1, 40, 130], lengths, 16, 2, dim, dtype, bound, window, cap=cap, sinks=True)
    check_attention([2560], [2560], 4, 1, dim, dtype, bound, window, cap=cap, sinks=True)


def test_attention_random_shapes():
    draw = random.Random(3)
    for _ in range(20):
        query_lens = [1] * draw.randint(0, 40) + [draw.randint(2, 200) for _ in range(draw.randint(0, 3))]
        kv_lens = [n + draw.choice([0, draw.randint(0, 700)]) for n in query_lens]
        dtype, bound = draw.choice(KINDS)
        kv_heads, block_size = draw.randint(1, 3), draw.choice([16, 16, 8, 64])
        heads = kv_heads * draw.choice([1, 4, 7])
        window, cap = draw.choice([0, 0, 100]), draw.choice([0.0, 0.0, 1.5])
        check_attention(query_lens, kv_lens, heads, kv_heads, 128, dtype, bound, window, block_size, cap)


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("dim", [64, 80, 256])
@pytest.mark.parametrize("window, cap", [(0, 0.02), (0, 1.5), (24, 1.5), (100, 50.0)])
def test_attention_soft_caps(window, cap, dim, dtype, bound):
    bound = max(bound, 5e-5)  # a few units in the last place of an f32 near 72, which is 50 to the base 2
    check_attention([1, 1, 1, 40, 130], [17, 1, 300, 40, 333], 8, 2, dim, dtype, bound, window, cap=cap)


@pytest.mark.parametrize("dtype, bound", KINDS[1:])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("by_triton", [False, True])
def test_prompts_of_all_lengths(by_triton, dim, dtype, bound, monkeypatch):
    """Rows and keys that end in the middle of a tile, at its end and just past it, with and without keys before."""
    if by_triton:
        monkeypatch.setattr(attention.attention_tma, "supports_prefill", lambda *_: False)
    for block_size, window, before in ((16, 0, 0), (8, 0, 33), (128, 0, 200), (64, 90, 64), (32, 0, 1000)):
        lens = [2, 63, 64, 65, 127, 128, 129, 500, 1024]
        random.Random(before).shuffle(lens)
        check_attention(lens, [n + before for n in lens], 8, 2, dim, dtype, bound, window, block_size)


@pytest.mark.parametrize("dtype, bound", KINDS[1:])
def test_long_prompts(dtype, bound):
    """Whole prompts that cuDNN takes where attention_tma does not take them, among others and alone."""
    check_attention([1, 60, 2049, 5], [77, 60, 2049, 9], 4, 2, 128, dtype, bound)
    check_attention([2560], [2560], 4, 1, 64, dtype, bound)
    check_attention([2560], [2560], 4, 1, 64, dtype, bound, cap=1.5)  # not by cuDNN


def test_empty_decode_rows_give_zeros():
    rows = make_rows([1, 1, 1], [20, 1, 16], 16, 8)
    rows.lengths = torch.tensor([20, 0, 16], dtype=torch.int32).cuda()
    rows.block_tables = rows.block_tables.cuda()
    cache = torch.randn(2, 8, 16, 2, 64, device="cuda").half()
    out = attention.paged_attention(
        torch.randn(3, 4, 64, device="cuda").half(), cache[0], cache[1], rows, AttentionParams(0.1)
    )
    assert (out[1] == 0).all() and out.isfinite().all() and (out[[0, 2]] != 0).any()


@pytest.mark.parametrize("dtype, bound", KINDS)
@pytest.mark.parametrize("case", decoding.CASES)
def test_decode_kernel(case, dtype, bound):
    decoding.check(case, dtype, max(bound, 1e-5), "cuda")
    assert not jit.counters(torch.device("cuda", 0), torch.cuda.current_stream().cuda_stream).any()


def test_decode_kernel_random_shapes():
    for i, case in enumerate(decoding.random_cases(15)):
        dtype, bound = KINDS[i % 3]
        decoding.check(case, dtype, max(bound, 1e-5), "cuda")


@needs_tma
@pytest.mark.parametrize("dtype, bound", KINDS[1:])
@pytest.mark.parametrize("case", decoding.BOXES)
def test_decode_by_boxes(case, dtype, bound):
    decoding.check(case, dtype, bound, "cuda", by_boxes=True)
    assert not jit.counters(torch.device("cuda", 0), torch.cuda.current_stream().cuda_stream).any()


@needs_tma
def test_decode_by_boxes_random_shapes():
    for i, case in enumerate(decoding.random_boxes(40)):
        dtype, bound = KINDS[1 + i % 2]
        decoding.check(case, dtype, bound, "cuda", by_boxes=True)


@pytest.mark.parametrize("turned", [64, 32])
@pytest.mark.parametrize("query_lens, kv_lens", [([1] * 4, [3000, 1, 17, 500]), ([1, 1, 9], [300, 16, 40])])
def test_write_and_attend(query_lens, kv_lens, turned):
    """As one kernel, or as two where heads are turned in part or a step has a prompt."""
    rows, cache, y, rest = a_step(query_lens, kv_lens, turned)
    theirs = cache.clone()
    q = rope.rope_and_store_kv_reference(*split(y), *rest, (theirs[0], theirs[1]), rows.slots)
    want = reference.paged_attention_reference(q, theirs[0], theirs[1], rows, AttentionParams(0.125))
    rows.scratch.clear()
    near(attention.store_and_attend(*split(y), *rest, (cache[0], cache[1]), rows, AttentionParams(0.125)), want, 2e-3)
    torch.testing.assert_close(cache, theirs, atol=2e-3, rtol=2e-3, equal_nan=True)


def a_step(query_lens, kv_lens, turned):
    """Rows with slots, a cache, rows of a merged projection, and rotation and norms."""
    rows = make_rows(query_lens, kv_lens, 16, sum(kv_lens) // 16 + len(kv_lens) + 2)
    cache = torch.stack(make_caches(rows, 16, sum(kv_lens) // 16 + len(kv_lens) + 2, 2, 64, torch.float16)).cuda()
    spans = [torch.arange(n - count, n) for count, n in zip(query_lens, kv_lens, strict=True)]
    slots = [t[p // 16].long() * 16 + p % 16 for t, p in zip(rows.block_tables, spans, strict=True)]
    rows.slots = torch.cat(slots)
    for name in ("block_tables", "lengths", "query_starts", "slots"):
        setattr(rows, name, getattr(rows, name).cuda())
    angles = torch.rand(sum(query_lens), 1, turned // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    turn = rope.CosSin(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    norms = rope.QKNorm(*torch.randn(2, 64, device="cuda").half(), 1e-6)
    return rows, cache, torch.randn(sum(query_lens), 12, 64, device="cuda").half(), (turn, norms)


def split(y):
    return y.clone().split([8, 2, 2], 1)


def test_one_kernel_in_a_graph():
    """Captured for long sequences, replayed for others: each time as many parts as the lengths at hand ask for."""
    from phalanx.kernels.attention import attention_triton

    rows, cache, y, rest = a_step([1] * 4, [3000, 2000, 2500, 700], 64)
    cache.nan_to_num_(0)
    q, k, v = split(y)

    def step():
        return attention.store_and_attend(q, k, v, *rest, (cache[0], cache[1]), rows, AttentionParams(0.125))

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        out = step()
        graph.capture_end()
        for lengths in ([3000, 2000, 2500, 700], [1, 256, 0, 700], [2999, 0, 0, 0], [600, 700, 800, 500]):
            rows.lengths.copy_(torch.tensor(lengths))
            graph.replay()
            found = out.clone()
            near(found, step(), 2e-3)
            alone = torch.empty_like(q, memory_format=torch.contiguous_format)
            new = CurrentKV(k, v, *rest, rows.slots)
            attention_triton.decode(
                q, cache[0], cache[1], rows.block_tables, rows.lengths, alone, *AttentionParams(0.125), 1, new
            )
            near(found, alone.flatten(1), 2e-3)
        assert not jit.counters(q.device, stream.cuda_stream).any()


def apart(got, want):
    assert got.shape == want.shape and got.isfinite().all()
    return ((got.double() - want).norm() / want.norm()).item() if got.numel() else 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs, inputs", [(64, 512), (192, 4096), (128, 14336), (64, 1536), (128, 384), (96, 640)])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 64, 65])
def test_products_of_a_few_rows(rows, outputs, inputs, dtype):
    x, weight = (torch.randn(n, inputs, device="cuda").to(dtype) / 8 for n in (rows, outputs))
    for bias in (None, torch.randn(outputs, device="cuda").to(dtype)):
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert apart(linear.linear(x, weight, bias), want) < 4e-3
        assert apart(linear.gated_linear(x, weight, bias=bias), gate(want, dtype)) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs, inputs", [(64, 512), (6144, 4096), (28672, 4096), (192, 1536), (128, 8192)])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("gated", ["", "silu", "gelu_tanh"])
def test_products_that_norm_their_rows(gated, rows, outputs, inputs, dtype):
    """Beside the two operations; x and the residual stay as they are, as other blocks read them."""
    x, residual, norm_weight = (torch.randn(*n, inputs, device="cuda").to(dtype) for n in ((rows,), (rows,), ()))
    weight = torch.randn(outputs, inputs, device="cuda").to(dtype) / 8
    before = x.clone(), residual.clone()
    assert skinny.supports_norm(x, residual, norm_weight, weight) is (rows * inputs <= skinny.NORMED)
    normed, total = norm.add_rms_norm_reference(x.clone(), residual.clone(), norm_weight, 1e-5)
    want = normed.double() @ weight.double().T
    for bias in (None, torch.randn(outputs, device="cuda").to(dtype)):
        want += 0 if bias is None else bias.double()
        y, stream = skinny.normed_linear(x, residual, norm_weight, 1e-5, weight, gated, bias)
        assert torch.equal(stream, total) and torch.equal(x, before[0]) and torch.equal(residual, before[1])
        assert apart(y, gate(want, dtype, gated) if gated else want) < 4e-3
    odd = torch.empty(rows * inputs + 1, device="cuda", dtype=dtype)[1:].view(rows, inputs)
    assert not skinny.supports_norm(x, odd, norm_weight, weight)
    assert not skinny.supports_norm(x, residual, norm_weight.float(), weight)


def gate(y, dtype, act="silu"):
    """act of the first half times the second, both rounded."""
    first, second = y.to(dtype).double().chunk(2, 1)
    return (silu(first) if act == "silu" else gelu(first, approximate="tanh")) * second


@needs_tma
@pytest.mark.parametrize("gated", ["", "silu", "gelu_tanh"])
@pytest.mark.parametrize(
    "outputs, inputs, dtype",
    [(1344, 2048, torch.float16), (28672, 4096, torch.bfloat16), (4096, 14336, torch.bfloat16)],
)
@pytest.mark.parametrize("rows", [1, 7, 16, 29, 50, 64])
def test_products_by_staging(rows, outputs, inputs, gated, dtype):
    """Every way to cut them, twice in a row into memory that holds NaN: a race would show as a difference."""
    x, weight = (torch.randn(n, inputs, device="cuda").to(dtype) / 8 for n in (rows, outputs))
    bias = torch.randn(outputs, device="cuda").to(dtype)
    want = x.double() @ weight.double().T + bias.double()
    want = gate(want, dtype, gated) if gated else want
    found = device_caps(x.device)
    for cut in skinny.tile_configs(rows, outputs, inputs, found.num_sms, skinny.whole_tiles(rows, found)):
        made = [skinny.pipelined(x, weight, cut, gated, bias) for _ in range(4)]
        assert all(apart(y, want) < 4e-3 for y in made), cut
        differ = [(y != made[0]).nonzero() for y in made]
        assert not any(map(len, differ)), (cut, [(len(at), at[:8].tolist(), at[-1:].tolist()) for at in differ])


@needs_tma
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs, inputs", [(128, 64), (384, 4096), (14336, 512), (3072, 1088)])
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 256, 1000, 2049, 4500])
def test_gated_products_of_many_rows(rows, outputs, inputs, dtype):
    """Three times each into memory that holds NaN: a race would show as a difference."""
    if not device_caps(torch.device("cuda")).hopper:
        pytest.skip("for Hopper alone")
    x, weight = (torch.randn(n, inputs, device="cuda").to(dtype) / 8 for n in (rows, 2 * outputs))
    want = gate(x.double() @ weight.double().T, dtype)
    found = [swiglu_gemm.swiglu_gemm(x, weight) for _ in range(3)]
    assert apart(found[0], want) < 4e-3
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, width", [(0, 8), (1, 1), (1, 128256), (3, 33), (300, 1000), (40, 32000), (700, 128)])
def test_largest(rows, width, dtype):
    """bf16 has many equal ones: the first counts. -inf and NaN are in between; twice, as blocks count each other."""
    x = torch.randn(rows, width, device="cuda").to(dtype)
    x[:, width // 2 :: 3] = float("-inf")
    for _ in range(2):
        values, ids = argmax.argmax(x)
        want, where = (y.cuda() for y in argmax.argmax_reference(x.cpu()))
        assert torch.equal(values, want) and torch.equal(ids, where)
    if width > 8:
        x[:, 5] = NAN
        kept = x.clone()
        kept[:, 5] = float("-inf")
        assert torch.equal(argmax.argmax(x)[1], argmax.argmax_reference(kept.cpu())[1].cuda())
        assert (argmax.argmax(torch.full_like(x, float("-inf")))[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width, present", [(4096, 4096), (4096, 4001), (37, 30)])
@pytest.mark.parametrize("scale, softcap", [(1.0, 0.0), (0.125, 0.0), (3.0, 2.5)])
def test_the_end_of_the_head(dtype, width, present, scale, softcap):
    x = (torch.randn(5, width, device="cuda") * 20).to(dtype)
    want = logits.finish_logits_reference(x.clone(), present, scale, softcap)
    torch.testing.assert_close(logits.finish_logits(x, present, scale, softcap), want)
    assert logits.finish_logits(x[:0], present, scale, softcap).shape == (0, width)


@pytest.mark.parametrize("width", [4096, 36, 7])
def test_rows_of_tables(width):
    table = torch.randn(50, width, device="cuda").half()
    ids = torch.randint(90, (13,), device="cuda")
    want = embedding.embedding_reference(ids, table, 20, whole=False)
    assert torch.equal(embedding.embedding(ids, table, 20, whole=False), want)
    scaled = embedding.embedding_reference(ids, table, 20, whole=False, scale=6.93)
    assert torch.equal(embedding.embedding(ids, table, 20, whole=False, scale=6.93), scaled)
    assert embedding.embedding(ids[:0], table).shape == (0, width)
    table[0] = float("nan")  # a row of no token reads none
    none = torch.tensor([-1, 3], device="cuda")
    assert torch.equal(embedding.embedding(none, table), torch.stack([torch.zeros_like(table[3]), table[3]]))
    angles = torch.randn(90, 2, width, device="cuda")
    for got, wanted in zip(rope.cos_sin(angles, ids)[:2], rope.cos_sin_reference(angles, ids)[:2], strict=True):
        assert torch.equal(got, wanted)


def test_inputs_of_a_decode_step():
    test_decode_inputs.check(decode_inputs.decode_inputs, "cuda")
