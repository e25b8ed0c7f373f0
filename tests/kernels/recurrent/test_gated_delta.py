"""The gated delta net's convolution and recurrence against the plainest computation: one token at a time, in f64."""

import pytest
import torch
from phalanx.kernels.recurrent import gated_delta
from phalanx.kernels.recurrent.gated_delta import DeltaSizes, Gates

from ..interpreter import interpret
from ..test_compile import Recorder, compile_launch
from .steps import PUBLISHED, SIZES, Layer, make_rows

CASES = [  # tokens of each sequence in the step and in all, tokens of one that decodes, entries of the rings
    ([1, 1, 1], [1, 2, 70], 1, 1),
    ([1, 2, 64, 65, 130], [5, 2, 64, 100, 1000], 1, 1),  # chunks: full, not full, and several; begun and new
    ([3], [3], 1, 1),
    ([1], [1], 1, 1),
    ([1, 1, 2, 70], [3, 9, 2, 100], 1, 4),
    ([4, 4, 4], [4, 9, 70], 4, 4),
    ([3, 3], [4, 60], 3, 5),
    ([4, 4, 2, 64, 65, 130], [4, 50, 3, 64, 100, 1000], 4, 4),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    "query_len, entries, plain, channels",
    [(1, 1, False, True), (1, 3, True, False), (4, 4, False, False), (2, 5, True, True)],
)
def test_decode_steps_in_cpp(sizes, dtype, bound, query_len, entries, plain, channels):
    """Against torch, from rows whose states are NaN where a sequence begins; other rows stay as they are."""
    torch.manual_seed(0)
    lengths = [9, query_len, 300, query_len + 1]
    rows = make_rows([query_len] * 4, lengths, [4, 0, 6, 1], query_len)
    floor = -5.0 if channels and plain else 0.0
    layer = Layer(sizes, rows, dtype=dtype, entries=entries, plain=plain, channels=channels, floor=floor)
    kept, state = layer.convolution.clone(), layer.state.clone()
    how = layer.bias, layer.silu
    y = gated_delta.causal_conv_reference(layer.x, layer.weight, layer.convolution, layer.batch, *how)
    got = gated_delta.conv_step_cpu(layer.x, layer.weight, kept, layer.batch, *how)
    torch.testing.assert_close(got, y, atol=bound, rtol=bound)
    torch.testing.assert_close(kept, layer.convolution, atol=0, rtol=0, equal_nan=True)
    want = gated_delta.gated_delta_reference(y, layer.gates, layer.state, layer.batch, sizes)
    got = gated_delta.delta_step_cpu(y, layer.gates, state, layer.batch, sizes)
    torch.testing.assert_close(got, want, atol=bound, rtol=bound)
    torch.testing.assert_close(state, layer.state, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_no_sequence_in_cpp(dtype):
    """They return zeros and write no state; the others' are what they are without them."""
    torch.manual_seed(0)
    sizes, layer = SIZES[0], Layer(SIZES[0], make_rows([1] * 3, [9, 3, 2], [2, 0, 1]), dtype=dtype)
    kept, state = layer.convolution.clone(), layer.state.clone()
    want = layer.run()
    layer.batch.rows = torch.tensor([2, -1, 1])
    y = gated_delta.conv_step_cpu(layer.x, layer.weight, before := kept.clone(), layer.batch)
    out = gated_delta.delta_step_cpu(y, layer.gates, held := state.clone(), layer.batch, sizes)
    assert not y[1].any() and not out[1].any()
    assert torch.equal(before[0], kept[0]) and torch.equal(held[0], state[0])
    got, wanted = (out[[0, 2]], before[1:], held[1:]), (want[0][[0, 2]], want[1][1:], want[2][1:])
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("sizes, channels", [*((one, False) for one in SIZES), *((one, True) for one in SIZES[:2])])
@pytest.mark.parametrize("query_lens, kv_lens, query_len, entries", CASES)
def test_chunks_and_sequences_that_decode(sizes, channels, query_lens, kv_lens, query_len, entries):
    torch.manual_seed(0)
    rows = make_rows(query_lens, kv_lens, query_len=query_len)
    plain = sizes.key_heads == 3
    floor = -5.0 if channels and plain else 0.0
    layer = Layer(sizes, rows, 2 + sizes.key_heads, entries=entries, plain=plain, channels=channels, floor=floor)
    want = layer.plain()
    for got, wanted in zip(layer.run(), want, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=2e-5, equal_nan=True)


@pytest.mark.parametrize("channels", [False, True])
def test_equal_keys_in_a_row(channels):
    """The system within a chunk is then as far from the unit matrix as it can be."""
    torch.manual_seed(0)
    layer = Layer(SIZES[0], make_rows([128], [128]), channels=channels)
    layer.x[:] = layer.x[0]
    want = layer.plain()
    for got, wanted in zip(layer.run(), want, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=2e-5)


def test_channels_that_forget_all_at_once():
    """Behind such a token a channel forgets slowly again: of differences of large sums little would be left."""
    torch.manual_seed(0)
    layer = Layer(SIZES[0], make_rows([130], [130]), channels=True)
    a = torch.where(torch.rand(layer.gates.a.shape) < 0.05, 2000.0, -8.0)
    layer.gates = layer.gates._replace(a=a, A_log=torch.zeros_like(layer.gates.A_log))
    want = layer.plain()
    for got, wanted in zip(layer.run(), want, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("channels", [False, True])
def test_16_bits(channels):
    torch.manual_seed(0)
    layer = Layer(SIZES[0], make_rows([1, 70], [4, 90]), dtype=torch.bfloat16, channels=channels)
    want = layer.plain()
    for got, wanted in zip(layer.run(), want, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=3e-2, rtol=3e-2)


def test_decays_of_any_size_in_cpp():
    """States that nothing is written to: the softplus is small, and large, and both of its series are used."""
    sizes = DeltaSizes(1, 64, 4, 4)
    layer = Layer(sizes, make_rows([1] * 3, [9, 8, 7]))
    a = torch.cat((torch.linspace(-100, 100, 64), torch.linspace(-4, 4, 64), torch.linspace(-20, 25, 64)))
    gates = Gates(torch.full((3, 64), -100.0), a.view(3, 64), torch.linspace(-6, 3, 64), torch.linspace(-1, 1, 64))
    before = layer.state[layer.batch.rows, 0].double()
    gated_delta.delta_step_cpu(layer.x, gates, layer.state, layer.batch, sizes)
    g, _ = Gates(*(x.double() for x in gates[:4])).decays()
    want = before * g.double().exp()[..., None]
    torch.testing.assert_close(layer.state[layer.batch.rows, 0].double(), want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("dim", [8, 37, 128])
def test_gated_norm(dtype, bound, dim):
    x, z, weight = (torch.randn(*shape, dim).to(dtype) for shape in ((2, 3), (2, 3), ()))
    wide, gate = x.double(), z.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight.double() * gate.sigmoid()
    for norm in (gated_delta.gated_norm, gated_delta.gated_norm_reference):
        torch.testing.assert_close(norm(x, z, weight, 0.1).double(), want * gate, atol=bound, rtol=bound)
        torch.testing.assert_close(norm(x, z, weight, 0.1, silu=False).double(), want, atol=bound, rtol=bound)


def test_ungroup():
    """Two key heads of two value heads each, as Qwen3-Next's linears have them."""
    sizes = gated_delta.DeltaSizes(2, 4, 1, 1)
    rows = [f"{name}{head}" for head in range(2) for name in ("q", "k", "v0", "v1", "z0", "z1")]
    gates = [f"{name}{head}" for head in range(2) for name in ("b0", "b1", "a0", "a1")]
    found = gated_delta.ungroup(*(torch.arange(len(names))[None] for names in (rows, gates)), sizes)
    told = [[names[i] for i in one[0]] for one, names in zip(found, (rows, rows, gates, gates), strict=True)]
    assert told[0] == ["q0", "q1", "k0", "k1", "v00", "v10", "v01", "v11"] and told[1] == ["z00", "z10", "z01", "z11"]
    assert told[2:] == [["b00", "b10", "b01", "b11"], ["a00", "a10", "a01", "a11"]]


@pytest.mark.long
@pytest.mark.parametrize("module", ["steps", "channel_steps"])
def test_kernels_in_the_interpreter(module):
    interpret(f"recurrent.{module}", timeout=110)


KINDS = [(torch.bfloat16, 90), (torch.float16, 80), (torch.float32, 100)]


@pytest.mark.long
@pytest.mark.parametrize("dtype, arch", KINDS)
def test_compiles(dtype, arch, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.recurrent import gated_delta_triton

    for q, channels in ((1, False), (4, False), (2, True)):
        layer = Layer(PUBLISHED, make_rows([q, q], [q + 3, q], query_len=q), dtype=dtype, channels=channels)
        with monkeypatch.context() as patch:
            compile_all(gated_delta_triton, ("conv_kernel", "delta_kernel"), layer.steps, arch, patch)

    def around():
        x = torch.zeros(2, PUBLISHED.value_heads, PUBLISHED.value_dim, dtype=dtype)
        gated_delta_triton.gated_norm(x, x, x[0, 0], 1e-6)
        gated_delta_triton.ungroup(torch.zeros(2, 12288, dtype=dtype), torch.zeros(2, 64, dtype=dtype), PUBLISHED)

    compile_all(gated_delta_triton, ("gated_norm_kernel", "ungroup_kernel"), around, arch, monkeypatch)


PROMPT_KINDS = [
    (torch.bfloat16, 90),
    pytest.param(torch.bfloat16, 100, marks=pytest.mark.long),
    pytest.param(torch.float16, 80, marks=pytest.mark.long),
    pytest.param(torch.float32, 90, marks=pytest.mark.long),
]


SYSTEMS = {False: ("system_kernel",), True: ("pairs_kernel", "solve_kernel")}


@pytest.mark.sample(2)
@pytest.mark.parametrize("channels", SYSTEMS)
@pytest.mark.parametrize("dtype, arch", PROMPT_KINDS)
def test_kernels_of_prompts_compile(dtype, arch, channels, monkeypatch):
    pytest.importorskip("triton")
    from phalanx.kernels.recurrent import gated_delta_chunks_triton

    layer = Layer(PUBLISHED, make_rows([1, 70], [4, 70]), dtype=dtype, channels=channels)
    names = "conv_chunk_kernel", *SYSTEMS[channels], "state_kernel"
    compiled = compile_all(gated_delta_chunks_triton, names, layer.chunks, arch, monkeypatch)
    assert dtype == torch.float32 or "wgmma" not in compiled["state_kernel"].asm["ptx"]  # ptxas 12.8 fails at them


def compile_all(module, names, run, arch, monkeypatch):
    kernels = {name: getattr(module, name) for name in names}
    launches, made = {name: Recorder() for name in names}, {}
    for name, recorder in launches.items():
        monkeypatch.setattr(module, name, recorder)
    run()
    for name, recorder in launches.items():
        ((args, options),) = recorder.found
        compiled = compile_launch(kernels[name], args, options, arch)
        assert compiled.metadata.shared <= 99 << 10, name
        made[name] = compiled
    return made
