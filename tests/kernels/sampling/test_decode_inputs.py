"""decode_inputs.cu against its reference. Its threads do not wait for each other: without a GPU they run in turn."""

import ctypes
import random
import shutil
import subprocess

import pytest
import torch
from phalanx.kernels import jit
from phalanx.kernels.sampling import decode_inputs as module

ROWS, WIDTH, MOST, BLOCK_SIZE = 9, 300, 6, 16
HARNESS = """
struct Index { int x; };
static Index blockIdx, threadIdx;
static const Index blockDim = {%d};
static void launch_dependents() {}
static void grid_wait() {}
#define __global__
typedef long long T;
constexpr int QUERY = %d;
%s
extern "C" void launch(int grid, const int* sent, int* table, const T* last, T* ids, T* positions, T* slots,
                       T* rows, int* lengths, int* tables, int table_row, int last_row, int block_size) {
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
            decode_inputs(sent, table, last, ids, positions, slots, rows, lengths, tables, table_row, last_row,
                          block_size);
}
"""


def sent_of(draw: random.Random, query_len: int) -> list[int]:
    """A step of rows whose blocks the table holds all, in part or not at all."""
    n = draw.randint(0, MOST)
    blocks = [draw.randint(1, WIDTH) for _ in range(n)]
    held = [draw.choice([0, count, count - 1, draw.randint(0, count)]) for count in blocks]
    counts = [count - known for count, known in zip(blocks, held, strict=True)]
    first = [sum(counts[:i]) for i in range(n)]
    positions = [
        max(0, (count - 1) * BLOCK_SIZE + draw.randrange(BLOCK_SIZE - query_len + 1) - draw.randrange(query_len))
        for count in blocks
    ]
    given = [draw.choice([-1, 5]) for _ in range(n)]
    fresh = [draw.randrange(1 << 20) for _ in range(sum(counts))]
    shifts = [draw.choice([0, -7]) for _ in range(n)]
    drafts = [draw.choice([-1 - j, draw.randrange(1000)]) for j in range(1, query_len) for _ in range(n)]
    return [n, *draw.sample(range(ROWS), n), *given, *positions, *held, *blocks, *first, *shifts, *drafts, *fresh]


def check(launch, device: str = "cpu", query_len: int = 1) -> None:
    """launch: decode_inputs."""
    draw = random.Random(4)
    for _ in range(40):
        table = torch.randint(1 << 20, (ROWS, WIDTH), dtype=torch.int32)
        last = 1000 + torch.arange(ROWS * query_len).view(ROWS, query_len)
        sent = torch.tensor(sent_of(draw, query_len), dtype=torch.int32)
        want, found = (module.empty(MOST, WIDTH, torch.device(where), query_len) for where in ("cpu", device))
        theirs = table.to(device, copy=True)
        module.decode_inputs_reference(sent, table, last, want, MOST, BLOCK_SIZE, query_len)
        launch(sent.to(device), theirs, last.to(device), found, MOST, BLOCK_SIZE, query_len)
        assert torch.equal(theirs.cpu(), table)
        for got, wanted in zip(found, want, strict=True):
            assert torch.equal(got.cpu(), wanted)


def test_one_step():
    """Three rows sent, a captured batch of five: the rest is empty and leaves the tables alone."""
    columns = [(4, 0, 2), (-1, 9, -1), (17, 0, 31), (1, 0, 2), (2, 1, 2), (0, 1, 2), (0, 0, -3)]
    sent = torch.tensor([3, *(x for column in columns for x in column), 6, 7], dtype=torch.int32)
    table, last = torch.zeros(5, 7, dtype=torch.int32), torch.arange(100, 105)[:, None]
    table[4, 0], table[2, :2] = 5, torch.tensor([9, 10])
    inputs = module.DecodeInputs(*(x.fill_(-7) for x in module.empty(5, 7, torch.device("cpu"))))
    module.decode_inputs_reference(sent, table, last, inputs, 5, 16)
    assert inputs.ids.tolist() == [104, 9, 102, -1, -1] and inputs.positions.tolist() == [17, 0, 28, 0, 0]
    assert inputs.slots.tolist() == [6 * 16 + 1, 7 * 16, 10 * 16 + 15, -1, -1]
    assert inputs.lengths.tolist() == [18, 1, 32, 0, 0]
    assert inputs.tables[:, :2].tolist() == [[5, 6], [7, -7], [9, 10], [-7, -7], [-7, -7]]
    assert (inputs.tables[:, 2:] == -7).all()
    assert table[4, :2].tolist() == [5, 6] and table[0, 0] == 7


def test_several_tokens_of_a_row():
    """The second and third token cross into the row's next block; what is beyond the step is empty. One draft was
    made on the device."""
    columns = [(3, 1), (-1, 8), (14, 0), (1, 0), (2, 1), (0, 1), (0, 4), (70, -2), (71, 91)]
    sent = torch.tensor([2, *(x for column in columns for x in column), 6, 7], dtype=torch.int32)
    table, last = torch.zeros(5, 7, dtype=torch.int32), torch.arange(100, 115).view(5, 3)
    table[3, 0] = 5
    inputs = module.DecodeInputs(*(x.fill_(-7) for x in module.empty(3, 7, torch.device("cpu"), 3)))
    module.decode_inputs_reference(sent, table, last, inputs, 3, 16, 3)
    assert inputs.ids.tolist() == [109, 70, 71, 8, 104, 91, -1, -1, -1]
    assert inputs.positions.tolist() == [14, 15, 16, 4, 5, 6, 0, 0, 0]
    assert inputs.slots.tolist() == [5 * 16 + 14, 5 * 16 + 15, 6 * 16, 7 * 16, 7 * 16 + 1, 7 * 16 + 2, -1, -1, -1]
    assert inputs.rows.tolist() == [3, 1, -1] and inputs.lengths.tolist() == [17, 3, 0]


@pytest.mark.parametrize("query_len", [1, 4])
def test_the_kernel(tmp_path, query_len):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, library = tmp_path / "harness.cpp", tmp_path / "harness.so"
    source.write_text(HARNESS % (module.THREADS, query_len, jit.SOURCES["decode_inputs.cu"].read_text()))
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    kernel = ctypes.CDLL(str(library)).launch

    def launch(sent, table, last, inputs, size, block_size, _):
        pointers = [ctypes.c_void_p(x.data_ptr()) for x in (sent, table, last, *inputs)]
        kernel(size, *pointers, table.stride(0), last.stride(0), block_size)

    check(launch, query_len=query_len)
