"""Steps of a few rows on one core: kernels/compiled.py beside the torch references, on odd sizes and strided inputs."""

import sys
from types import SimpleNamespace

import phalanx.kernels
import pytest
import torch
from phalanx.kernels import cpu, jit
from phalanx.kernels.activation import silu_mul, silu_mul_reference
from phalanx.kernels.attention import Scores, paged_attention, paged_attention_reference
from phalanx.kernels.linear import PACK_FROM, linear, pack
from phalanx.kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from phalanx.kernels.rope import HeadNorms, rope_write, rope_write_reference, rotation

find = cpu._compiled
compiled = pytest.importorskip("phalanx.kernels.compiled", reason="Numba is not installed")


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """One thread; what was called of the compiled functions, with their outputs poisoned before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    names = []

    class Told:
        def __getattr__(self, name):
            names.append(name)
            return getattr(compiled, name)

    told = Told()
    monkeypatch.setattr(cpu, "_compiled", lambda: told)
    real = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *a, **k: real(x, *a, **k).fill_(float("nan")))
    yield names
    torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (4, 8), (9, 6), (255, 257), (64, 1000)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(calls, rows, outputs, inputs, biased):
    x, weight = torch.randn(rows, 2 * inputs)[:, :inputs], torch.randn(outputs, inputs)
    bias = torch.randn(outputs) if biased else None
    want = x.double() @ weight.double().T + (bias.double() if biased else 0)
    torch.testing.assert_close(linear(x, weight, bias).double(), want, atol=1e-4, rtol=1e-5)
    assert calls == ["linear"]


def test_weights_stay_plain_for_it():
    weight = torch.randn(PACK_FROM // 64, 128)
    assert pack(weight) is weight


def test_more_rows_and_other_types_and_more_threads_are_left_to_torch(calls):
    weight = torch.randn(8, 8)
    assert linear(torch.randn(cpu.MOST_ROWS + 1, 8), weight).shape == (cpu.MOST_ROWS + 1, 8)
    assert linear(torch.randn(2, 8).bfloat16(), weight.bfloat16()).dtype == torch.bfloat16
    assert linear(torch.randn(0, 8), weight).shape == (0, 8)
    torch.set_num_threads(2)
    assert linear(torch.randn(2, 8), weight).shape == (2, 8)
    assert calls == []


def forget(monkeypatch):
    for name in ("compiled", "compiler"):
        monkeypatch.delitem(sys.modules, f"phalanx.kernels.{name}")
        monkeypatch.delattr(phalanx.kernels, name)


@pytest.fixture
def found_anew(monkeypatch):
    """compiled.py is not imported yet; whatever is made of it here is forgotten."""
    forget(monkeypatch)
    monkeypatch.setattr(cpu, "_compiled", find)
    find.cache_clear()
    yield
    find.cache_clear()


def test_without_numba_torch_computes(monkeypatch, found_anew, caplog):
    monkeypatch.setitem(sys.modules, "numba", None)
    weight = torch.randn(PACK_FROM // 64, 128)
    with caplog.at_level("INFO", "phalanx"):
        assert cpu.one_core(weight[:1]) is None and pack(weight).is_mkldnn
    said = "Numba is not installed (phalanx[cpu]): a sequence alone takes up to three times as long on one core"
    assert caplog.messages == [said]


def test_where_numba_cannot_compile_torch_computes(monkeypatch, found_anew, caplog):
    monkeypatch.setattr("numba.njit", lambda *a, **k: 1 / 0)
    assert cpu.one_core(torch.randn(1, 8)) is None
    said = "torch computes steps of few rows, as Numba cannot compile them here: division by zero"
    assert caplog.messages == [said]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["damaged", "not writable"])
def test_a_cache_that_is_no_use_is_done_without(monkeypatch, found_anew, tmp_path, fault):
    monkeypatch.setattr(jit.tempfile, "gettempdir", lambda: str(tmp_path))
    if fault == "damaged":
        assert cpu.one_core(torch.randn(1, 8)) is not None
        files = list(tmp_path.rglob("*.nbi"))
        assert len(files) > 5
        for file in files:
            file.write_bytes(b"")
        forget(monkeypatch)
        find.cache_clear()
    else:
        (tmp_path / f"phalanx-kernels-{jit.os.getuid()}").touch()
    module = cpu.one_core(torch.randn(1, 8))
    assert module is not None
    y = torch.empty(1, 4)
    module.silu_mul(torch.zeros(1, 8).numpy(), y.numpy())
    assert y.tolist() == [[0.0] * 4]


@pytest.mark.parametrize("rows, size", [(1, 1), (3, 33), (16, 64)])
def test_norms(calls, rows, size):
    x, residual, weight = torch.randn(rows, size) * 5, torch.randn(rows, size), torch.randn(size)
    before = x.clone()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(before, weight, 1e-5))
    assert torch.equal(x, before)
    want = add_rms_norm_reference(x.clone(), residual.clone(), weight, 1e-5)
    normed, stream = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(stream, want[1])
    torch.testing.assert_close(normed, want[0])
    assert calls == ["rms_norm", "add_rms_norm"]


def test_a_nan_stays_one(calls):
    x = torch.ones(2, 8)
    x[1, 3] = float("nan")
    got = rms_norm(x, torch.ones(8), 1e-5)
    assert got[0].isfinite().all() and got[1].isnan().all()


@pytest.mark.parametrize("rows, size", [(1, 1), (3, 33), (16, 64)])
def test_silu_mul(calls, rows, size):
    x = torch.randn(rows, 2 * size) * 20
    x[0, 0], x[-1, size - 1] = 200, -200
    torch.testing.assert_close(silu_mul(x), silu_mul_reference(x.clone()), atol=1e-6, rtol=2e-6)
    assert calls == ["silu_mul"]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("heads, kv_heads, dim, rotated", [(4, 2, 8, 8), (3, 1, 10, 4), (2, 2, 64, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write(calls, rows, heads, kv_heads, dim, rotated, normed):
    wide = torch.randn(rows, heads + 2 * kv_heads, dim)
    table = torch.randn(20, 2, rotated // 2)
    turn = rotation(table, torch.randint(20, (rows,)))
    norms = HeadNorms(torch.randn(dim), torch.randn(dim), 1e-6) if normed else None
    slots = torch.tensor([7, 0, 11])[:rows]
    found = []
    for write in (rope_write_reference, rope_write):
        caches = torch.full((4, 3, kv_heads, dim), float("nan")), torch.full((4, 3, kv_heads, dim), float("nan"))
        q, k, v = wide.clone().split([heads, kv_heads, kv_heads], 1)
        found.append((write(q, k, v, turn, norms, caches, slots), *caches))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
    assert calls == ["rotation", "rope_write"]


@pytest.mark.parametrize("lengths", [[1], [16], [5, 40, 33], [100] * 20])
@pytest.mark.parametrize("heads, kv_heads, dim", [(1, 1, 8), (6, 2, 64), (16, 1, 80), (5, 5, 33)])
@pytest.mark.parametrize("window", [0, 7])
def test_attention(calls, lengths, heads, kv_heads, dim, window):
    n, size = len(lengths), 16
    blocks = torch.randperm(n * 8).view(n, 8).int()
    keys, values = (torch.full((n * 8, size, kv_heads, dim), float("nan")) for _ in range(2))
    for row, length in zip(blocks.long(), lengths, strict=True):
        for position in range(length):
            for cache in (keys, values):
                cache[row[position // size], position % size] = torch.randn(kv_heads, dim)
    wide = torch.randn(n, heads + 3, dim)
    q = wide[:, :heads]
    rows = SimpleNamespace(
        block_tables=blocks, lengths=torch.tensor(lengths, dtype=torch.int32), query_starts=None, num_decodes=n,
        query_lens=[1] * n, kv_lens=lengths, scratch={},
    )  # fmt: skip
    scores = Scores(dim**-0.5, window)
    want = paged_attention_reference(q, keys, values, rows, scores)
    torch.testing.assert_close(paged_attention(q, keys, values, rows, scores), want, atol=1e-5, rtol=1e-5)
    assert calls == ["attend"]
