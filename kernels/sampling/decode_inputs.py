"""Inputs of a captured decode step: decode_inputs.cu."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit

THREADS = 128


def num_columns(query_len: int) -> int:
    """The number of columns of `sent`, which decode_inputs.cu explains."""
    return 6 + query_len


class DecodeInputs(NamedTuple):
    """Tensors of up to `most` sequences of query_len tokens each, always at the same place."""

    ids: Tensor  # [most * query_len] int64, as positions and slots
    positions: Tensor
    slots: Tensor
    rows: Tensor  # [most] int64
    lengths: Tensor  # [most] int32
    tables: Tensor  # [most, width] int32


def empty(most: int, width: int, device: torch.device, query_len: int = 1) -> DecodeInputs:
    ids, positions, slots = torch.zeros(3, most * query_len, dtype=torch.int64, device=device)
    rows = torch.zeros(most, dtype=torch.int64, device=device)
    lengths = torch.zeros(most, dtype=torch.int32, device=device)
    tables = torch.zeros(most, width, dtype=torch.int32, device=device)
    return DecodeInputs(ids, positions, slots, rows, lengths, tables)


def decode_inputs(
    sent: Tensor, table: Tensor, last: Tensor, inputs: DecodeInputs, size: int, block_size: int, query_len: int = 1
) -> None:
    """Fill the inputs of the first `size` sequences.

    sent: [1 + num_columns * n + new blocks or more] int32. table: [rows, width] int32, the rows' block tables, to which
    the new blocks are added. last: [rows, 1 + drafts] int64, each row's newest token and the drafts made behind it.
    GPUs only; it may be captured in a graph.
    """
    kernel = jit.kernel("decode_inputs", "decode_inputs", torch.int64, QUERY=query_len)
    kernel((size, 1, 1), THREADS, sent, table, last, *inputs, table.stride(0), last.stride(0), block_size)
    jit.written(table.device, inputs.lengths, inputs.tables)


def decode_inputs_reference(
    sent: Tensor, table: Tensor, last: Tensor, inputs: DecodeInputs, size: int, block_size: int, query_len: int = 1
) -> None:
    n, count = int(sent[0]), num_columns(query_len)
    columns, fresh = sent[1 : 1 + count * n].view(count, n), sent[1 + count * n :]
    for b, (row, given, position, held, blocks, first, shift, *rest) in enumerate(columns.T.tolist()):
        table[row, held:blocks] = fresh[first : first + blocks - held]
        inputs.tables[b, :blocks] = table[row, :blocks]
        tokens, at = slice(b * query_len, (b + 1) * query_len), torch.arange(position, position + query_len)
        at = at.to(table.device)
        ids = [last[row, -1 - one].item() if one < 0 else one for one in (given, *rest)]
        inputs.ids[tokens] = torch.tensor(ids).to(table.device)
        inputs.positions[tokens] = at + shift
        inputs.slots[tokens] = table[row, at // block_size].long() * block_size + at % block_size
        inputs.rows[b], inputs.lengths[b] = row, position + query_len
    for x, value in zip(inputs[:3], (-1, 0, -1), strict=True):  # ids, positions, slots
        x[n * query_len : size * query_len] = value
    inputs.rows[n:size], inputs.lengths[n:size] = -1, 0
