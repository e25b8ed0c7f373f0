"""The residual stream: whoever reads it or a norm of it gets the same, whichever kernels that is fused into."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.comm.base import FusedComm
from phalanx.errors import FatalError
from phalanx.kernels.norm.norm import layer_norm, rms_norm
from phalanx.rank.model.formats import dense
from phalanx.rank.model.layers import residual
from phalanx.rank.model.layers.linear import ColumnParallel, Linear, RowParallel
from phalanx.rank.model.layers.mlp import MLP, activation
from phalanx.rank.model.layers.norm import AddLayerNorm, AddRMSNorm
from phalanx.rank.model.layers.residual import PostNormed, ResidualStream
from phalanx.rank.model.shard import whole
from phalanx.rank.model.weights.filler import Filler
from phalanx.rank.model.weights.slicing import ShardedModule, Source, slices

ROWS, HIDDEN, INNER = 5, 32, 48


def filled(layer):
    """Random weights that do not depend on the rank."""
    if isinstance(layer, Linear):
        layer.build([Source("x")] * len(layer.outputs), dense)
    filler = Filler([m for m in layer.modules() if isinstance(m, ShardedModule)], torch.device("cpu"), torch.float32)
    for module in list(layer.modules()):
        if isinstance(module, ShardedModule):
            module.sources = module.sources or (Source("x"),) * len(module.outputs)
            for part in slices(module):
                generator = torch.Generator().manual_seed(len(part.shape) + part.starts[0])
                whole_tensor = torch.randn(part.shape, generator=generator) / 4
                cut = tuple(slice(start, stop) for start, stop in part.ranges)
                filler.target(part).copy_(whole_tensor[cut])
    filler.close()
    return layer


def world(function, size=1):
    """function(grid) of each rank of a tensor group; what rank 0 returns, which has to be all ranks'."""

    def one(comm):
        torch.set_grad_enabled(False)
        return function(mesh.build(comm, size, 1))

    found = threads.run(one, size)
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            torch.testing.assert_close(x, y)
    return found[0]


def parts(grid):
    down = filled(RowParallel(INNER, HIDDEN, grid))
    norm = filled(AddRMSNorm(HIDDEN, 1e-5))
    generator = torch.Generator().manual_seed(7)
    value, x = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(ROWS, INNER, generator=generator)
    return down, norm, value, x[:, down.inputs.start : down.inputs.stop].contiguous()


def plain():
    """Contents and norm of these tests' streams."""
    grid = mesh.build(threads_of_one(), 1, 1)
    down, norm, value, x = parts(grid)
    total = value + x @ down.matrix.T
    return total, rms_norm(total, norm.weight, norm.eps)


def threads_of_one():
    found = []
    threads.run(lambda comm: found.append(comm) or 0, 1)
    return found[0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("read_first", [False, True])
def test_a_norm_adds_what_is_pending_once(size, read_first):
    def rank(grid):
        down, norm, value, x = parts(grid)
        stream = ResidualStream(value)
        stream.add(down(x))
        normed = norm(stream)
        if read_first:
            stream.read()
        first = normed.tensor().clone()
        return first, normed.tensor(), norm(stream).tensor(), stream.read()

    total, want = plain()
    first, again, other, value = world(rank, size)
    for got in (first, again, other):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(value, total, atol=1e-5, rtol=1e-4)


def test_a_stream_without_a_norm():
    """It is what was added so far, and keeps the sampled rows."""
    grid = mesh.build(threads_of_one(), 1, 1)
    down, _, value, x = parts(grid)
    stream = ResidualStream(value.clone())
    stream.add((x @ down.matrix.T).clone())
    h = residual.Unnormed(stream)
    h.begin()
    total = value + x @ down.matrix.T
    torch.testing.assert_close(h.tensor(), total)
    matrix = ColumnParallel(whole(HIDDEN), (whole(INNER),), bias=False)
    torch.testing.assert_close(filled(matrix)(h), total @ matrix.matrix.T)
    h.keep(torch.tensor([3, 1]))
    torch.testing.assert_close(h.tensor(), total[[3, 1]])
    torch.testing.assert_close(stream.read(), total[[3, 1]])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("reader", ["norm", "stream"])
def test_a_whole_tensor_is_not_summed_over_the_ranks(size, lazy, reader):
    """A post-norm's output is equal on all ranks: only a Partial goes through the all-reduce."""

    def rank(grid):
        down, norm, value, x = parts(grid)
        stream, post = ResidualStream(value), PostNormed(norm, down(x).sum())
        stream.add(post if lazy else post.tensor())
        normed = norm(stream)
        (normed if reader == "norm" else stream).begin()
        return normed.tensor(), stream.read()

    grid = mesh.build(threads_of_one(), 1, 1)
    down, norm, value, x = parts(grid)
    total = value + rms_norm(x @ down.matrix.T, norm.weight, norm.eps)
    got, stream = world(rank, size)
    torch.testing.assert_close(stream, total, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got, rms_norm(total, norm.weight, norm.eps), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_two_partials_of_one_norm_are_one_sum(size):
    """Parallel attention and feed-forward."""

    def rank(grid):
        down, norm, value, x = parts(grid)
        calls = []
        group = grid.tensor
        real = group.all_reduce
        group.all_reduce = lambda y: calls.append(y.shape) or real(y)
        stream = ResidualStream(value)
        stream.add(down(x) + down(2 * x))
        got = stream.read()
        assert len(calls) == 1
        return (got,)

    grid = mesh.build(threads_of_one(), 1, 1)
    down, _, value, x = parts(grid)
    (got,) = world(rank, size)
    torch.testing.assert_close(got, value + 3 * x @ down.matrix.T, atol=1e-5, rtol=1e-4)


def test_two_adds_without_a_norm_between():
    def rank(grid):
        down, _, value, x = parts(grid)
        stream = ResidualStream(value)
        stream.add(down(x))
        stream.add(down(x))
        return (stream.read(),)

    grid = mesh.build(threads_of_one(), 1, 1)
    down, _, value, x = parts(grid)
    torch.testing.assert_close(world(rank, 2)[0], value + 2 * x @ down.matrix.T, atol=1e-5, rtol=1e-4)


def test_a_row_parallel_bias_is_added_once():
    def rank(grid):
        *_, x = parts(grid)
        down = filled(RowParallel(INNER, HIDDEN, grid, bias=True))
        assert (down.added_bias is None) == (grid.tensor.rank > 0)
        return (down(x).sum(),)

    torch.testing.assert_close(world(rank, 3)[0], world(rank, 1)[0], atol=1e-5, rtol=1e-4)
    biased, plain = world(rank, 1)[0], world(lambda grid: (parts(grid)[0](parts(grid)[3]).sum(),), 1)[0]
    torch.testing.assert_close(biased - plain, (biased - plain)[:1].expand(ROWS, -1), atol=1e-5, rtol=1e-4)
    assert (biased - plain).abs().max() > 0.1


def test_rows_that_are_kept_are_those_of_the_stream_and_of_the_norm():
    def rank(grid):
        down, norm, value, x = parts(grid)
        stream = ResidualStream(value)
        stream.add(down(x))
        normed = norm(stream)
        normed.tensor()
        normed.keep(torch.tensor([3, 1]))
        return normed.tensor(), stream.read()

    total, want = plain()
    got, value = world(rank, 2)
    torch.testing.assert_close(got, want[[3, 1]], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(value, total[[3, 1]], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", ["read", "begun", "whole", "nothing pending"])
def test_a_layer_norm_plays_the_same_part(size, bias, how, monkeypatch):
    """Even where the group fuses RMS norms."""

    def rank(grid):
        down, _, value, x = parts(grid)
        norm = filled(AddLayerNorm(HIDDEN, 1e-5, bias))
        assert (norm.bias is not None) is bias
        assert isinstance(grid.tensor, FusedComm)
        stream = ResidualStream(value)
        stream.add(down(x).sum() if how == "whole" else down(x))
        normed = norm(stream)
        if how == "begun":
            normed.begin()
        elif how == "nothing pending":
            stream.read()
        assert normed.packed_linear(norm.weight[None]) is None  # kernels that norm their rows know RMS norms
        return normed.tensor(), normed.tensor(), stream.read(), norm.weight, norm.bias if bias else norm.weight

    class Fused(threads.ThreadComm, FusedComm):
        def all_reduce_add_norm(self, *_):
            raise AssertionError("a layer norm was given to an RMS norm's kernel")

        gemm_all_reduce_add_norm = all_reduce_add_norm

    monkeypatch.setattr(threads, "ThreadComm", Fused)
    monkeypatch.setattr(residual.packed_gemm, "takes_e4m3", lambda *_: True)
    total, _ = plain()
    got, again, value, weight, added = world(rank, size)
    want = layer_norm(total, weight, added if bias else None, 1e-5)
    for one in (got, again):
        torch.testing.assert_close(one, want, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(value, total, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [AddRMSNorm, AddLayerNorm])
@pytest.mark.parametrize("kept", [None, [3, 1], []])
@pytest.mark.parametrize("size", [1, 2])
def test_a_parallel_block_reads_its_norm_twice(kind, kept, size):
    """Attention keeps the sampled rows in the last layer; the MLP's norm is then that of the
    stream, which is added up once."""

    def rank(grid):
        down, _, value, x = parts(grid)
        norm, mlp = filled(kind(HIDDEN, 1e-5)), MLP(HIDDEN, INNER, grid, "gelu_new", bias=True)
        filled(mlp.up_proj), filled(mlp.down_proj)
        qkv = filled(ColumnParallel(whole(HIDDEN), (whole(INNER),), bias=False))
        stream = ResidualStream(value)
        stream.add(down(x))
        h = norm(stream)
        read = qkv(h)
        rows = list(range(ROWS)) if kept is None else kept
        if kept is not None:
            h.keep(torch.tensor(rows, dtype=torch.int64))
        attended = read[rows][:, down.inputs.start : down.inputs.stop].contiguous()
        stream.add(down(attended) + mlp(h))
        return read, stream.read()

    def expected(grid):
        down, _, value, x = parts(grid)
        norm, mlp = filled(kind(HIDDEN, 1e-5)), MLP(HIDDEN, INNER, grid, "gelu_new", bias=True)
        up, out = filled(mlp.up_proj), filled(mlp.down_proj)
        total = value + x @ down.matrix.T
        h = norm.norm(total)
        read = filled(ColumnParallel(whole(HIDDEN), (whole(INNER),), bias=False)).multiply(h)
        inner = torch.nn.functional.gelu(h @ up.matrix.T + up.added_bias, approximate="tanh")
        return read, total + read @ down.matrix.T + inner @ out.matrix.T + out.added_bias

    want_read, want = world(expected, 1)
    read, value = world(rank, size)
    torch.testing.assert_close(read, want_read, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(value, want if kept is None else want[kept], atol=1e-4, rtol=1e-4)


def test_names_of_activations():
    assert activation("gelu_fast") == activation("gelu_new")  # the same formula
    with pytest.raises(FatalError, match="'mish' is not supported.*gelu_new"):
        MLP(HIDDEN, INNER, mesh.build(threads_of_one(), 1, 1), act="mish")


class Apart:
    """A summand whose terms are apart, as those of experts on GPUs."""

    matrix = added_bias = None

    def __init__(self, group):
        self.group, self.asked = group, []

    def multiply(self, terms):
        self.asked.append("sum")
        return terms.sum(1)

    def terms_of(self, terms):
        self.asked.append("terms")
        return terms


def test_a_norm_adds_up_terms_that_are_apart():
    def run(grid):
        down, norm, value, x = parts(grid)
        terms = torch.randn(ROWS, 3, HIDDEN, generator=torch.Generator().manual_seed(1))
        found = []
        for more in ((), ((down, x),)):
            for scale in (1.0, 0.5):
                made = residual.Partial((Apart(grid.tensor), terms), *more, scale=scale)
                want = terms.sum(1) + (down.multiply(x) if more else 0)
                normed, stream = made.add_norm(value.clone(), norm)
                torch.testing.assert_close(stream, value + want * scale)
                torch.testing.assert_close(normed, rms_norm(stream, norm.rms_weight, norm.eps))
                found += [normed, stream]
        return found

    world(run)


def test_a_linear_leaves_terms_to_the_norm_that_it_does_not_fuse():
    def run(grid):
        up, norm = filled(ColumnParallel(whole(HIDDEN), (whole(INNER),), bias=False)), filled(AddRMSNorm(HIDDEN, 1e-5))
        generator = torch.Generator().manual_seed(1)
        value, terms = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(ROWS, 3, HIDDEN, generator=generator)
        stream, apart = ResidualStream(value.clone()), Apart(grid.tensor)
        stream.add(residual.Partial((apart, terms)))
        found = up(norm(stream))
        assert apart.asked == ["terms"]
        torch.testing.assert_close(found, up(rms_norm(value + terms.sum(1), norm.rms_weight, norm.eps)))
        return [found]

    world(run)
