"""A stand-in for cuBLASLt: GEMMs of many rows are tested without a GPU as well."""

import ctypes
from types import SimpleNamespace

import torch
from phalanx.kernels.collective.allreduce import RECV_BUFFER, SymmetricMemory
from phalanx.kernels.gemm import cublaslt
from phalanx.kernels.gemm.cublaslt import MAX_PROPOSALS, GemmShape

BF16 = torch.bfloat16
STREAM = 0x7F0123456780
SIZES = GemmShape(BF16, 48, 32)


def algo(number):
    """The algorithm that Lib calls so."""
    return number.to_bytes(cublaslt.ALGORITHM, "little")


class Lib:
    """Stands for cuBLASLt: keeps what it is given as the library would, and multiplies where algorithm `works`."""

    def __init__(self, proposals=3, works=(0, 1, 2), proposed=None):
        """proposed: the algorithms for a number of rows, where those are not the first `proposals` ones."""
        self.count, self.works, self.proposed = proposals, works, proposed or {}
        self.made, self.attributes, self.gemms, self.seen = {}, [], 0, []
        self.batches = {}  # of layouts: how many, and elements from one to the next
        self.epilogues = {}  # of matmuls: what is added, where that is and elements from one batch's to the next's

    def _make(self, into, *what):
        into._obj.value = 0x7F00_0000_0000 + len(self.made)
        self.made[into._obj.value] = what
        return 0

    def cublasLtGetVersion(self):
        return 130100

    def cublasLtCreate(self, handle):
        return self._make(handle, "handle")

    def cublasLtMatmulDescCreate(self, desc, compute, scale):
        return self._make(desc, "matmul", compute, scale)

    def cublasLtMatmulPreferenceCreate(self, wishes):
        return self._make(wishes, "wishes")

    def cublasLtMatrixLayoutCreate(self, layout, dtype, rows, columns, pitch):
        return self._make(layout, dtype, rows, columns, pitch)

    def cublasLtMatrixLayoutSetAttribute(self, layout, attribute, value, size):
        assert (attribute, size) in ((5, 4), (6, 8))  # BATCH_COUNT, STRIDED_BATCH_OFFSET
        self.batches.setdefault(layout.value, {})[attribute] = value._obj.value
        return 0

    def cublasLtMatmulDescSetAttribute(self, what, attribute, value, size):
        self.attributes.append((*self.made[what.value], attribute, value._obj.value, size))
        if self.made[what.value][0] == "matmul" and attribute > 3:  # EPILOGUE, BIAS_POINTER, BIAS_BATCH_STRIDE
            assert (attribute, size) in ((7, 4), (8, 8), (10, 8))
            self.epilogues.setdefault(what.value, {})[attribute] = value._obj.value
        return 0

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def _sizes(self, weight, x, y, result):
        """Rows, outputs and inputs."""
        (kind, inputs, outputs), of_x, of_y = (self.made[layout.value][:3] for layout in (weight, x, y))
        assert of_x[:2] == (kind, inputs) and of_y == (kind, outputs, of_x[2]) and y.value == result.value
        return of_x[2], outputs, inputs

    def cublasLtMatmulAlgoGetHeuristic(self, handle, matmul, weight, x, y, result, wishes, most, found, count):
        rows, *_ = self._sizes(weight, x, y, result)
        proposed = self.proposed.get(rows, range(self.count))
        if not proposed:
            return 15
        assert self._epilogue(matmul)[1] != 0  # what is proposed depends on the alignment
        assert (
            self.made[handle.value] == ("handle",) and self.made[wishes.value] == ("wishes",) and most == MAX_PROPOSALS
        )
        for i, algorithm in enumerate(proposed):
            found[i].algorithm[0] = algorithm
        count._obj.value = len(proposed)
        return 0

    def _epilogue(self, matmul):
        """The epilogue: 4, a bias; where it is, and elements from one batch's to the next's."""
        given = self.epilogues.get(matmul.value, {})
        assert given.get(7, 4) == 4 and (7 in given) == (8 in given)
        return given.get(7), given.get(8), given.get(10, 0)

    def cublasLtMatmul(
        self, handle, matmul, one, a, of_a, b, of_b, beta, c, of_c, d, of_d, algorithm, space, size, stream
    ):  # fmt: skip
        assert one._obj.value == 1 and beta._obj.value == 0 and c == d and stream == STREAM
        assert space == cublaslt.workspace(torch.device("cpu"), STREAM).data_ptr() and size == cublaslt.WORKSPACE
        rows, outputs, inputs = self._sizes(of_a, of_b, of_c, of_d)
        if algorithm[0] not in self.works:
            return 15
        self.gemms += 1
        self.seen.append((algorithm[0], a))
        of = [self.batches.get(layout.value, {5: 1, 6: 0}) for layout in (of_a, of_b, of_d)]
        assert len({batch[5] for batch in of}) == 1
        pitches = [self.made[layout.value][3] for layout in (of_a, of_b, of_d)]
        for i in range(of[0][5]):
            starts = (start + i * batch[6] * 2 for start, batch in zip((a, b, d), of, strict=True))
            sizes = (outputs, inputs), (rows, inputs), (rows, outputs)
            weight, x, y = (at(*one) for one in zip(starts, sizes, pitches, strict=True))
            added, bias, apart = self._epilogue(matmul)
            if added:
                y.copy_(x.float() @ weight.float().T + at(bias + i * apart * 2, (1, outputs), outputs))
            else:
                y.copy_(x @ weight.T)
        return 0


def at(address, size, pitch):
    rows, columns = size
    room = (ctypes.c_char * (((rows - 1) * pitch + columns) * 2)).from_address(address)
    return torch.frombuffer(room, dtype=BF16).as_strided(size, (pitch, 1))


def plain(rows, columns, dtype=BF16):
    """Aligned as the library wants it."""
    room = torch.zeros(rows * columns + cublaslt.ALIGNED, dtype=dtype)
    skip = -room.data_ptr() % cublaslt.ALIGNED // room.element_size()
    return room[skip : skip + rows * columns].view(rows, columns).normal_()


def in_memory(size, rank=0):
    """A rank's symmetric memory, here in the host's, and the receive buffers in it, [size, RECV_BUFFER] uint8."""
    regions = torch.full((size, RECV_BUFFER), 0xFF, dtype=torch.uint8)
    peers = SymmetricMemory(rank, size, regions.data_ptr(), RECV_BUFFER)
    vars(peers)["recv_buffer"] = regions[rank]
    return peers, regions


def put(lib, choices, monkeypatch):
    """`lib` in the library's place, and weights and rows in this machine's memory go to it by these choices."""
    monkeypatch.setattr(cublaslt, "current_stream", lambda: STREAM)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(cublaslt, "load", lambda: lib)
    made = cublaslt.Library()
    made.choose(choices)
    monkeypatch.setitem(cublaslt.in_use, torch.device("cpu"), made)
    return lib


def check(x, weight):
    assert torch.equal(cublaslt.linear(x, weight), torch.nn.functional.linear(x, weight))


def near(got, x, weight, added):
    """got: x [T, I] times the transpose of weight [O, I], plus what is added, rounded once or twice."""
    torch.testing.assert_close(got.float(), x.float() @ weight.float().T + added.float(), atol=0.05, rtol=0.01)
