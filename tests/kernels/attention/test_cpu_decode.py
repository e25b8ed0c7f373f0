"""Steps of one token a sequence beside the torch reference, with poison wherever nothing may be read."""

from types import SimpleNamespace

import pytest
import torch
from phalanx.kernels.attention import cpu_decode
from phalanx.kernels.attention.attention import AttentionParams, paged_attention
from phalanx.kernels.attention.backend import Part
from phalanx.kernels.attention.reference import paged_attention_reference

from ..conftest import DTYPES, close


def cache(lengths, size, kv_heads, dim, dtype):
    """Block tables, keys and values of sequences of these lengths; NaN in every slot that they do not own."""
    n, most = len(lengths), -(-max(*lengths, 1) // size) + 1
    blocks = torch.randperm(n * most).view(n, most).int()
    keys, values = torch.full((2, n * most, size, kv_heads, dim), float("nan"), dtype=dtype)
    for row, length in zip(blocks.long(), lengths, strict=True):
        for position in range(length):
            for part in (keys, values):
                part[row[position // size], position % size] = torch.randn(kv_heads, dim).to(dtype)
    return blocks, keys, values


def rows_of(blocks, lengths, query_len=1):
    return SimpleNamespace(
        block_tables=blocks, lengths=torch.tensor(lengths, dtype=torch.int32), query_starts=None,
        num_decodes=len(lengths), query_len=query_len, query_lens=[query_len] * len(lengths), kv_lens=lengths,
        reach=None, scratch={},
    )  # fmt: skip


SHAPES = [  # lengths, heads, kv_heads, dim
    ([1], 1, 1, 8),
    ([16], 6, 2, 64),
    ([5, 40, 33], 5, 5, 33),
    ([100] * 9, 16, 1, 80),
    ([700, 1, 3], 18, 1, 16),
    ([1000], 6, 2, 64),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths, heads, kv_heads, dim", SHAPES)
@pytest.mark.parametrize("window, cap", [(0, 0.0), (7, 2.0), (300, 0.0)])
def test_decode(isa, threads, called, dtype, lengths, heads, kv_heads, dim, window, cap):
    blocks, keys, values = cache(lengths, 16, kv_heads, dim, dtype)
    q = torch.randn(len(lengths), heads + 3, dim).to(dtype)[:, :heads]
    scores = AttentionParams(dim**-0.5, window, cap)
    rows = rows_of(blocks, lengths)
    want = paged_attention_reference(q.float(), keys.float(), values.float(), rows, scores)
    close(paged_attention(q, keys, values, rows, scores), want, dtype, atol=2e-5)
    assert [name.rpartition("_")[0] for name in called] == ["decode", "merge"]


def one_token_each(blocks, lengths, query_len):
    """The tokens as sequences of one token."""
    ends = [length - after for length in lengths for after in range(query_len - 1, -1, -1)]
    return rows_of(blocks.repeat_interleave(query_len, 0), ends)


@pytest.mark.sample(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_len", [2, 4, 17])
@pytest.mark.parametrize("lengths, heads, kv_heads, dim", [*SHAPES[2:], ([17, 150, 18], 4, 2, 16)])
@pytest.mark.parametrize("window, cap, sink", [(0, 0.0, False), (3, 2.0, False), (300, 0.0, True)])
def test_several_tokens_of_a_sequence(
    isa, threads, called, dtype, query_len, lengths, heads, kv_heads, dim, window, cap, sink
):
    """Each sees the tokens up to itself, in its own window."""
    lengths = [max(length, query_len) for length in lengths]
    blocks, keys, values = cache(lengths, 16, kv_heads, dim, dtype)
    q = torch.randn(len(lengths) * query_len, heads + 3, dim).to(dtype)[:, :heads]
    params = AttentionParams(dim**-0.5, window, cap, torch.randn(heads) if sink else None)
    single = one_token_each(blocks, lengths, query_len)
    want = paged_attention_reference(q.float(), keys.float(), values.float(), single, params)
    rows = rows_of(blocks, lengths, query_len)
    close(paged_attention(q, keys, values, rows, params), want, dtype, atol=2e-5)
    assert [name.rpartition("_")[0] for name in called] == ["decode", "merge"]
    close(paged_attention_reference(q.float(), keys.float(), values.float(), rows, params), want, torch.float32)


@pytest.mark.parametrize("lengths, heads, kv_heads, dim", SHAPES)
@pytest.mark.parametrize("window, cap", [(0, 0.0), (300, 2.0)])
def test_sinks(threads, lengths, heads, kv_heads, dim, window, cap):
    """Also of sequences that several threads share: a sink counts once."""
    blocks, keys, values = cache(lengths, 16, kv_heads, dim, torch.float32)
    sinks = torch.randn(heads) * 4
    sinks[0] = 200.0  # leaves next to nothing to the values
    q, rows = torch.randn(len(lengths), heads, dim), rows_of(blocks, lengths)
    scores = AttentionParams(dim**-0.5, window, cap, sinks)
    want = paged_attention_reference(q, keys, values, rows, scores)
    out = paged_attention(q, keys, values, rows, scores)
    close(out, want, torch.float32, atol=2e-5)
    assert out.view(q.shape)[:, 0].abs().max() < 1e-30


def test_a_sequence_of_no_tokens_gives_zeros(isa, threads):
    blocks, keys, values = cache([0, 300, 0], 8, 2, 16, torch.float32)
    q = torch.randn(3, 4, 16)
    out = paged_attention(q, keys, values, rows_of(blocks, [0, 300, 0]), AttentionParams(0.25)).view(q.shape)
    assert (out[[0, 2]] == 0).all() and out[1].isfinite().all() and (out[1] != 0).all()


def test_large_scores(isa):
    """No score is too large, the softmax of one that leads is that one's value, and NaN is seen."""
    blocks, keys, values = cache([50], 16, 1, 16, torch.float32)
    keys[blocks[0, 1].long(), 5] = 1000
    q = torch.ones(1, 2, 16) * 100
    rows = rows_of(blocks, [50])
    out = paged_attention(q, keys, values, rows, AttentionParams(1.0)).view(q.shape)
    torch.testing.assert_close(out[0, 1], values[blocks[0, 1].long(), 5, 0])
    q[0, 0, 3] = float("nan")
    out = paged_attention(q, keys, values, rows, AttentionParams(1.0)).view(q.shape)
    assert out[0, 0].isnan().all() and out[0, 1].isfinite().all()


def test_what_is_left_to_torch(called):
    blocks, keys, values = cache([5, 9], 16, 2, 8, torch.float32)
    rows, scores, q = rows_of(blocks, [5, 9]), AttentionParams(1.0), torch.randn(2, 4, 8)

    def supports(q, values=values, first=0):
        return cpu_decode.supports(Part(q, keys, values, rows, scores, first, 2, q))

    assert supports(q)
    assert not supports(q.bfloat16())  # a cache of another type
    assert not supports(torch.randn(2, 2, cpu_decode.MAX_DIM + 1)) and not supports(torch.randn(2, 8, 4).mT)
    assert not supports(q, values[..., :5].contiguous())
    assert called == []
    rows.num_decodes = 1
    assert not supports(q, first=1)
    want = paged_attention_reference(q, keys, values, rows, scores)
    close(paged_attention(q, keys, values, rows, scores), want, torch.float32, atol=2e-5)
    assert called == ["decode_f32", "merge_f32"]  # of the sequence that decodes
