"""Chunked attention by rows that are cut where chunks end, against attention token by token."""

import pytest
import torch
from phalanx.kernels.attention.attention import AttentionParams, paged_attention
from phalanx.kernels.attention.chunks import by_chunks, decoding_reference
from phalanx.kernels.attention.reference import paged_attention_reference
from phalanx.kernels.cpp import ops

from .test_attention import make_caches, make_rows, plain

BLOCK, CHUNK = 4, 16


@pytest.mark.parametrize(
    "query_len, query_lens, kv_lens",
    [
        (1, [1, 1, 1, 1], [1, 16, 17, 70]),
        (1, [1, 40, 1, 33], [33, 40, 48, 50]),  # prompts, of which one begins with a chunk's last token
        (1, [16, 5], [32, 37]),
        (4, [4, 4, 4, 4], [4, 18, 16, 67]),  # rows that cross into a chunk
        (4, [4, 4, 1, 21], [17, 34, 20, 48]),
    ],
)
def test_attention_within_chunks(query_len, query_lens, kv_lens):
    blocks = sum(-(-n // BLOCK) for n in kv_lens) + 2
    rows = make_rows(query_lens, kv_lens, BLOCK, blocks, query_len=query_len)
    rows.slots = torch.zeros(sum(query_lens), dtype=torch.int64)
    keys, values = make_caches(rows, BLOCK, blocks, 2, 8, torch.float32)
    q, params = torch.randn(sum(query_lens), 4, 8), AttentionParams(8**-0.5)
    want = plain(q, keys, values, rows, params, CHUNK)
    for table, count, length in zip(rows.block_tables.tolist(), query_lens, kv_lens, strict=True):
        for block in table[: (length - count) // CHUNK * CHUNK // BLOCK]:  # they may be another's
            keys[block] = values[block] = float("nan")
    cut = by_chunks(rows, CHUNK, BLOCK)
    assert by_chunks(rows, CHUNK, BLOCK) is cut  # of the next layer
    for attend in (paged_attention, paged_attention_reference):
        torch.testing.assert_close(attend(q, keys, values, cut, params).double(), want, atol=2e-6, rtol=2e-6)


def test_short_contexts_are_left_as_they_are():
    rows = make_rows([1, 3], [CHUNK, 3], BLOCK, 10, spare=0)
    assert by_chunks(rows, CHUNK, BLOCK) is rows


@pytest.mark.skipif(not ops.available(), reason="needs a compiler")
@pytest.mark.parametrize("query_len", [1, 3])
def test_rows_in_cpp_are_those_of_torch(query_len):
    """With a row of no sequence, as one that fills a captured step up."""
    rows = make_rows([query_len] * 5, [query_len, CHUNK, CHUNK + 1, CHUNK + query_len, 61], BLOCK, 60, 0, query_len)
    rows.lengths = torch.cat((rows.lengths, rows.lengths.new_zeros(1)))
    rows.block_tables = torch.cat((rows.block_tables, rows.block_tables.new_zeros(1, rows.block_tables.shape[1])))
    rows.num_decodes, rows.kv_lens, rows.query_lens = 6, [*rows.kv_lens, 0], [query_len] * 6
    rows.slots = torch.zeros(6 * query_len, dtype=torch.int64)
    cut = by_chunks(rows, CHUNK, BLOCK)
    tables, lengths = decoding_reference(rows, CHUNK, BLOCK, CHUNK // BLOCK)
    assert torch.equal(cut.lengths, lengths) and lengths.tolist()[-query_len:] == [0] * query_len
    for own, theirs, length in zip(cut.block_tables, tables, lengths.tolist(), strict=True):
        used = -(-length // BLOCK)
        assert own[:used].tolist() == theirs[:used].tolist()
