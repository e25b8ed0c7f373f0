"""cuBLASLt's proposals for GEMMs against f32, with NaN in and behind what they write, eager and in graphs."""

import pytest
import torch
from phalanx.kernels import kernel_cache
from phalanx.kernels.gemm import autotune, cublaslt
from phalanx.kernels.gemm.linear import linear
from phalanx.kernels.norm import norm

from ...devices import require_gpu

require_gpu()
NAN = float("nan")


@pytest.fixture
def lib():
    torch.manual_seed(0)
    try:
        made = cublaslt.Library()
    except OSError as error:
        pytest.skip(str(error))
    device = torch.device("cuda", torch.cuda.current_device())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cublaslt.in_use, device, made)
        yield made


def guarded(rows, columns, dtype):
    """NaN, as is what comes after it."""
    room = torch.full((rows * columns + 4096,), NAN, device="cuda", dtype=dtype)
    return room[: rows * columns].view(rows, columns), room[rows * columns :]


def apart(got, want):
    assert got.shape == want.shape and got.isfinite().all()
    return ((got.double() - want).norm() / want.norm()).item()


PRODUCTS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2560, 8192), (1000, 1032), (96, 640)]
COUNTS = 80, 128, 272, 448, 512


def added(outputs, dtype):
    return torch.randn(outputs, device="cuda").to(dtype)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs, inputs", PRODUCTS)
@pytest.mark.parametrize("count", COUNTS)
def test_products_by_every_proposal(count, outputs, inputs, dtype, biased, lib):
    """For these rows and for others; each serves all the rows that `nearest` gives it."""
    sizes = cublaslt.GemmShape(dtype, outputs, inputs, bias=biased)
    own, bias = lib.proposals(sizes, count), added(outputs, dtype) if biased else None
    algos = dict.fromkeys(algo for rows in COUNTS for algo in lib.proposals(sizes, rows))
    assert own and len(algos) > len(own)
    weight, taken = torch.randn(outputs, inputs, device="cuda").to(dtype) / 8, 0
    for rows in (count, count - 1, count * 7 // 8 + 1, count * 3 // 4 + 1):
        x = torch.randn(rows, inputs, device="cuda").to(dtype) / 8
        want = (x.float() @ weight.float().T).double() + (bias.double() if biased else 0)
        for i, algo in enumerate(algos):
            lib.choose({sizes: {count: algo}})
            if rows == count:
                y, after = guarded(rows, outputs, dtype)
                if lib.run(lib.plan(sizes, rows), x, weight, y.data_ptr(), bias):
                    taken += 1
                    assert apart(y, want) < 4e-3, i
                    assert after.isnan().all(), i
            elif algo in own:
                assert apart(linear(x, weight, bias), want) < 4e-3, (rows, i)
    assert taken > 1


@pytest.mark.parametrize("rows", [80, 448])
@pytest.mark.parametrize("parts", [3, 4])
def test_parts_with_their_shares_of_a_bias_by_every_proposal(rows, parts, lib):
    """Parts as they are scattered over a group's ranks, with gaps."""
    width, inputs, dtype = 512, 1024, torch.bfloat16
    pitch = rows * width + 4096
    sizes, taken = cublaslt.GemmShape(dtype, parts * width, inputs, parts, pitch, bias=True), 0
    x, weight = (torch.randn(n, inputs, device="cuda").to(dtype) / 8 for n in (rows, parts * width))
    bias = added(parts * width, dtype)
    want = (x.double() @ weight.double().T + bias.double()).view(rows, parts, width).transpose(0, 1)
    for algo in lib.proposals(sizes, rows):
        room, _ = guarded(parts, pitch, dtype)
        if lib.run(lib.plan_of(algo, sizes, rows), x, weight, room.data_ptr(), bias):
            taken += 1
            assert apart(room[:, : rows * width].view(parts, rows, width), want) < 4e-3
            assert room[:, rows * width :].isnan().all()
    assert taken


@pytest.mark.parametrize("rows", [73, 96, 400, 447])
def test_library_products_in_a_graph(rows, lib):
    """GEMMs between kernels of ours, twice in turn through the same workspace."""
    sizes = cublaslt.GemmShape(torch.bfloat16, 4096, 4096)
    count = next(count for count in (96, 448) if count >= rows)
    lib.choose({sizes: {count: lib.proposals(sizes, count)[-1]}})
    x, weight, gain = (torch.randn(n, 4096, device="cuda").bfloat16() / 8 for n in (rows, 4096, 1))

    def step():
        y = linear(norm.rms_norm(x, gain[0], 1e-5), weight)
        return linear(norm.rms_norm(y, gain[0], 1e-5), weight)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        want = step()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        out = step()
        graph.capture_end()
        for _ in range(3):
            out.fill_(NAN)
            graph.replay()
            assert torch.equal(out, want)
        x.normal_()
        graph.replay()
        normed = norm.rms_norm_reference(x, gain[0], 1e-5)
        y = norm.rms_norm_reference(torch.nn.functional.linear(normed, weight), gain[0], 1e-5)
        assert apart(out, (y.float() @ weight.float().T).double()) < 2e-2


def test_choosing_among_gemms(lib, tmp_path, monkeypatch):
    """Chooses as a start does, and the next one; then all rows of all sizes against f32."""
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: tmp_path)
    weights = [torch.randn(n, 4096, device="cuda").bfloat16() / 8 for n in (6144, 28672, 4096, 6144, 28672, 4096)]
    biases = [added(6144, torch.bfloat16), None, added(4096, torch.bfloat16)] * 2
    counts = [*range(80, 257, 16), 448, 2048]

    def requests():
        for weight, bias in zip(weights, biases, strict=True):
            yield autotune.TuneRequest(weight, counts, bias=bias is not None)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first = autotune.tune(requests())
        assert f"{3 * len(counts)} GEMMs" in first
        assert "measured in" in first
        again = autotune.tune(requests())
        assert again.startswith(first.split("measured in")[0]) and "read from" in again
        for weight, bias in zip(weights[:3], biases[:3], strict=True):
            for rows in (1, 65, 79, 100, 191, 256, 400, 1500, 2048):
                x = torch.randn(rows, 4096, device="cuda").bfloat16() / 8
                want = (x.float() @ weight.float().T).double() + (0 if bias is None else bias.double())
                assert apart(linear(x, weight, bias), want) < 4e-3
        stream.synchronize()
