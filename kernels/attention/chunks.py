"""Chunked attention: a token attends to those of its chunk alone, of `chunk` tokens each.

No kernel knows of chunks. To attention, a sequence's tokens of one chunk are a causal sequence, whose block table
begins with the chunk's first block. So a step's rows are cut where chunks end, once for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cpp import ops
from ..device import upload
from .backend import AttentionMetadata


@dataclass(slots=True)
class ChunkRows:
    """A step's tokens by chunks, as AttentionMetadata: each token of a sequence that decodes is a row, and of another
    sequence all tokens of a chunk are one."""

    slots: Tensor
    block_tables: Tensor
    lengths: Tensor
    query_starts: Tensor  # read of prompts alone
    num_decodes: int
    query_lens: list[int]
    kv_lens: list[int]
    query_len: int = 1
    reach: Tensor | None = None
    scratch: dict[Any, Any] = field(default_factory=dict)


class _Piece(NamedTuple):
    """Tokens of a sequence that are in one chunk."""

    sequence: int
    first: int  # token of the chunk
    tokens: int
    length: int  # of the chunk up to the last of these


def by_chunks(rows: AttentionMetadata, chunk: int, block_size: int) -> AttentionMetadata:
    """The rows of a step that attends within chunks, which are whole blocks; made once a step."""
    if rows.block_tables.shape[1] * block_size <= chunk:
        return rows
    found = rows.scratch.get(("chunks", chunk))
    if found is None:
        found = rows.scratch["chunks", chunk] = _made(rows, chunk, block_size)
    return found


def _made(rows: AttentionMetadata, chunk: int, block_size: int) -> ChunkRows:
    assert rows.reach is None, "tokens of images attend to each other beyond chunks"
    n, query_len, width = rows.num_decodes, rows.query_len, chunk // block_size
    ends = [length - after for length in rows.kv_lens[:n] for after in range(query_len - 1, -1, -1)]
    # Bounds on GPUs, where drafts may be rejected that the host still counts.
    seen = [min(end, chunk) if rows.lengths.is_cuda else (end - 1) % chunk + 1 for end in ends]
    tables, lengths = _decoding(rows, chunk, block_size, width)
    ones, starts = [1] * len(ends), rows.query_starts
    pieces = _pieces(rows, chunk)
    if pieces:
        device = rows.block_tables.device
        counts = [*ones, *(piece.tokens for piece in pieces)]
        starts = upload(np.cumsum([0, *counts]).astype(np.int32), device)
        sequence, first, _, length = upload(np.array(pieces, np.int64).T.copy(), device)
        tables = torch.cat((tables, _tables(rows.block_tables, sequence, first // block_size, width)))
        lengths = torch.cat((lengths, length.int()))
    return ChunkRows(
        rows.slots, tables, lengths, starts, len(ends), ones + [piece.tokens for piece in pieces],
        seen + [piece.length for piece in pieces],
    )  # fmt: skip


def _pieces(rows: AttentionMetadata, chunk: int) -> list[_Piece]:
    """The prompts' tokens."""
    found = []
    for sequence in range(rows.num_decodes, len(rows.query_lens)):
        end = rows.kv_lens[sequence]
        at = end - rows.query_lens[sequence]
        while at < end:
            first = at // chunk * chunk
            stop = min(end, first + chunk)
            found.append(_Piece(sequence, first, stop - at, stop - first))
            at = stop
    return found


def _decoding(rows: AttentionMetadata, chunk: int, block_size: int, width: int) -> tuple[Tensor, Tensor]:
    """Block tables and lengths of the tokens of sequences that decode."""
    tables, n, query_len = rows.block_tables, rows.num_decodes, rows.query_len
    if tables.device.type != "cpu" or not ops.available() or tables.stride(1) != 1:
        return decoding_reference(rows, chunk, block_size, width)
    own, seen = tables.new_empty(n * query_len, width), rows.lengths.new_empty(n * query_len)
    sizes = n, query_len, chunk, block_size, tables.stride(0), tables.shape[1], width
    ops.op("chunks", "chunks")(tables, rows.lengths, own, seen, *sizes)
    return own, seen


def decoding_reference(rows: AttentionMetadata, chunk: int, block_size: int, width: int) -> tuple[Tensor, Tensor]:
    n, query_len, device = rows.num_decodes, rows.query_len, rows.lengths.device
    after = torch.arange(query_len - 1, -1, -1, dtype=torch.int32, device=device)
    ends = (rows.lengths[:n, None] - after).flatten()
    first = (ends - 1).clamp_(min=0) // chunk * chunk
    sequence = torch.arange(n * query_len, device=device) // query_len
    return _tables(rows.block_tables, sequence, first // block_size, width), (ends - first).clamp_(min=0)


def _tables(tables: Tensor, sequence: Tensor, first: Tensor, width: int) -> Tensor:
    """[rows, width] entries of these sequences' block tables, from these on; any behind a table's end."""
    at = first[:, None] + torch.arange(width, device=tables.device)
    return tables[sequence[:, None], at.clamp_(max=tables.shape[1] - 1)]
