"""What a captured decode step reads: decode_inputs.cu."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import jit

COLUMNS = 6  # of `sent`, as decode_inputs.cu explains them
THREADS = 128


class DecodeInputs(NamedTuple):
    """Of up to `most` sequences of one token each, always at the same place."""

    ids: Tensor  # [most] int64, as positions, slots and rows
    positions: Tensor
    slots: Tensor
    rows: Tensor
    lengths: Tensor  # [most] int32
    tables: Tensor  # [most, width] int32


def empty(most: int, width: int, device: torch.device) -> DecodeInputs:
    long = torch.zeros(4, most, dtype=torch.int64, device=device)
    lengths = torch.zeros(most, dtype=torch.int32, device=device)
    tables = torch.zeros(most, width, dtype=torch.int32, device=device)
    return DecodeInputs(long[0], long[1], long[2], long[3], lengths, tables)


def decode_inputs(sent: Tensor, table: Tensor, last: Tensor, inputs: DecodeInputs, size: int, block_size: int) -> None:
    """Fill the first `size` entries of `inputs`.

    sent: [1 + COLUMNS * n + new blocks or more] int32. table: [rows, width] int32, the rows' block tables, to which the
    new blocks are added. last: [rows] int64, each row's newest token. GPUs only; it may be captured in a graph.
    """
    kernel = jit.kernel("decode_inputs", "decode_inputs", torch.int64)
    kernel((size, 1, 1), THREADS, sent, table, last, *inputs, table.stride(0), block_size)


def decode_inputs_reference(
    sent: Tensor, table: Tensor, last: Tensor, inputs: DecodeInputs, size: int, block_size: int
) -> None:
    n = int(sent[0])
    columns, fresh = sent[1 : 1 + COLUMNS * n].view(COLUMNS, n), sent[1 + COLUMNS * n :]
    for b, (row, given, position, held, blocks, first) in enumerate(columns.T.tolist()):
        table[row, held:blocks] = fresh[first : first + blocks - held]
        inputs.tables[b, :blocks] = table[row, :blocks]
        inputs.ids[b] = last[row] if given < 0 else given
        inputs.positions[b] = position
        inputs.slots[b] = table[row, position // block_size].long() * block_size + position % block_size
        inputs.rows[b], inputs.lengths[b] = row, position + 1
    for x, value in zip(inputs[:5], (-1, 0, -1, -1, 0), strict=True):  # ids, positions, slots, rows, lengths
        x[n:size] = value
