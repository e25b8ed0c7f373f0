"""Experts that stay quantised: logits of the dequantised weights, however they are stored, loaded and cut."""

import functools
import itertools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.errors import MODEL, USAGE
from phalanx.kernels import host_memory
from phalanx.kernels.cpp import ops
from phalanx.kernels.quantized import gpu_layout, packed_gemm
from phalanx.kernels.quantized.int8_codes import q5_0, q8_0
from phalanx.kernels.quantized.linear import dequantize
from phalanx.kernels.quantized.stack import Stack, stack
from phalanx.kernels.quantized.super_blocks import q4_0, q4_1, q4_k, q5_k, q6_k
from phalanx.rank.model.experts import host, host_buffers, offload, streamer
from phalanx.rank.model.experts.fused import FusedExperts, StackedLinear
from phalanx.rank.model.experts.offload import ON_DEVICE, OffloadOptions
from phalanx.rank.model.formats import find
from phalanx.rank.model.formats._stacks import StackOfParts
from phalanx.rank.model.load import load
from safetensors.torch import load_file, save_file

from .... import gguf_files
from ...reference import Reference
from ..harness import distance, run_steps, tokens
from ..stored_formats import packers
from ..stored_formats.test_stored import awq, check_greedy, compressed_ints, gptq, marlin, refused
from ..test_architectures import write
from .test_host import Passed

TOLERANCE = 3e-4  # of sums of 512
WAYS = "auto", "cpu", "stream"
MODEL_OF = dict(
    model_type="qwen3_moe", hidden_size=256, intermediate_size=512, moe_intermediate_size=512, head_dim=256,
    num_attention_heads=6, num_key_value_heads=6, num_hidden_layers=2, num_experts=5, num_experts_per_tok=2,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], vocab_size=509, max_position_embeddings=512,
)  # fmt: skip
ROUTER = "mlp.gate."
EACH = itertools.cycle(["Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q5_K", "IQ4_XS", "Q5_1"])
kind_of = functools.cache(lambda name: next(EACH))  # the same for a name that comes again
KINDS = {
    "super-blocks": lambda name: kind_of(name.replace("ffn_up_exps", "ffn_gate_exps")),
    "blocks of 32": lambda name: "F32" if "gate_inp" in name else "Q8_0",
    "halves": lambda name: {"ffn_gate_exps.weight": "Q8_0"}.get(name.partition(".")[2].partition(".")[2], "Q4_0"),
}
STORED = {
    "gptq": gptq(4, 32, False), "gptq of 8 bits": gptq(8, 128), "awq": awq(64), "marlin": marlin(128),
    "gptq ordered": gptq(4, 64, False, ordered=True), "w4a16": compressed_ints(4, 64),
    "w8a16": compressed_ints(8, 0, False),
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("source"), **MODEL_OF)


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """name → a quantised checkpoint and options to load it with, and a plain one of the dequantised weights."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp("quantised")
        if name in KINDS:
            same = gguf_files.dequantised(source, folder / "same", KINDS[name])
            return gguf_files.write(source, folder / "x.gguf", KINDS[name]), same, {}
        if name in STORED:
            pack, settings = STORED[name]
            settings = settings | {"modules_to_not_convert": ["gate", "lm_head"]}
            packers.quantise(source, folder, pack, settings, (ROUTER,))
            return folder / "quantised", folder / "plain", {}
        return source, in_situ(source, folder / "same", name), dict(isq=name)

    return make


def in_situ(path, to, name):
    codec = find(name).codec
    shutil.copytree(path, to)
    state = load_file(path / "model.safetensors")
    for key, x in state.items():
        if x.dim() == 2 and ROUTER not in key and "embed" not in key:
            state[key] = dequantize(codec.pack(*codec.encode(x.float())))
    save_file(state, to / "model.safetensors", {"format": "pt"})
    return to


CASES = [
    ("super-blocks", dict()), ("super-blocks", dict(tp=6, ep=3)), ("blocks of 32", dict(tp=2)), ("gptq", dict(tp=3)),
    ("awq", dict()), ("marlin", dict(tp=2)), ("gptq ordered", dict(tp=2)),
    ("w4a16", dict(tp=2, ep=2)), ("q4k", dict(tp=2)),
]  # fmt: skip
# FP8 shares a scale among as many inputs as divide those of a rank: other ranks, other weights.
LONG = [
    ("super-blocks", dict(tp=2, pp=2)), ("halves", dict(tp=2, ep=2)), ("gptq", dict()), ("gptq of 8 bits", dict(tp=2)),
    ("w8a16", dict(tp=3)), ("q6k", dict()), ("q8_0", dict(tp=3)), ("q4_0", dict(tp=2, ep=2)), ("fp8", dict()),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("name, layout", [*CASES, *(pytest.param(*one, marks=pytest.mark.long) for one in LONG)])
def test_logits(made, expected, name, layout):
    """Many tokens at once, and one; some experts have none."""
    (path, same, options), ids = made(name), tokens(40, vocab=509)
    steps = [[(0, 34)], *[[(0, 1)]] * 6]
    (logits,) = run_steps(path, [ids], steps, max_model_len=512, **layout, **options)
    assert distance(logits, expected(same, ids)) < TOLERANCE


LONG_IN_HOST = "awq", "halves", "blocks of 32", "gptq", "gptq of 8 bits", "gptq ordered", "w8a16", "q4_0"
ROOMS = [
    OffloadOptions(9, placement="cpu"),
    OffloadOptions(9, placement="stream"),
    *(OffloadOptions(2, placement=placement) for placement in WAYS),
]


@pytest.mark.parametrize(
    "name",
    ["super-blocks", "fp8", *(pytest.param(one, marks=pytest.mark.long) for one in LONG_IN_HOST)],
)
def test_in_host_memory(made, name):
    """Bit by bit among all ways, and within rounding what is computed where all experts are on the device."""
    (path, _, options), ids = made(name), tokens(40, vocab=509)
    steps = [[(0, 34)], *[[(0, 1)]] * 6]
    (want,) = run_steps(path, [ids], steps, max_model_len=512, **options)
    first = None
    for room in ROOMS:
        (got,) = run_steps(path, [ids], steps, max_model_len=512, experts=room, **options)
        first = got if first is None else first
        assert torch.equal(got, first), room
    assert distance(first, want) < TOLERANCE


@pytest.mark.parametrize("placement", WAYS)
def test_what_a_gpu_does(made, monkeypatch, placement):
    """Experts are repacked into the form of a GPU's kernels, which torch dequantises here."""
    monkeypatch.setattr(host_buffers.torch.cuda, "Event", Passed)
    monkeypatch.setattr(host_memory, "pin_memory", lambda memory: None)
    monkeypatch.setattr(host_memory, "check_pinned", lambda what, tensors: None)
    monkeypatch.setattr(host, "LOOKED", 4)
    gpu = SimpleNamespace(type="cuda")
    monkeypatch.setattr(offload, "HostStack", lambda stack, device: host_buffers.HostStack(stack, gpu))
    monkeypatch.setattr(streamer, "BUFFER", 1)  # an expert at a time

    def rank(world):
        loaded = (load(made("super-blocks")[0], mesh.build(world, 1, 1), experts=one) for one in (ON_DEVICE, room))
        both = ([x for x in one.modules() if isinstance(x, FusedExperts)] for one in loaded)
        for wanted, layer in zip(*both, strict=True):
            assert not layer.host.layer.same and isinstance(layer.host.slots.stack.w2.packed, packed_gemm.Packed)
            layer.host.on_gpu = True
            draw = torch.Generator().manual_seed(0)
            for count in (1, 3, 20, 1, 2, 2, 2, 2, 2):
                x, weights = torch.randn(count, 256, generator=draw), torch.rand(count, 2, generator=draw)
                ids = torch.stack([torch.randperm(5, generator=draw)[:2] for _ in range(count)]).int()
                given = x, ids, weights
                torch.testing.assert_close(layer(*given).local(), wanted(*given).local(), atol=1e-4, rtol=1e-4)

    room = OffloadOptions(2, placement=placement)
    threads.run(rank, 1)


@pytest.mark.parametrize("name, layout", [("super-blocks", dict(tp=2, ep=2)), ("gptq", dict(tp=2, pp=2))])
def test_in_host_memory_of_several_ranks(made, name, layout):
    (path, _, options), ids = made(name), tokens(40, vocab=509)
    steps = [[(0, 34)], *[[(0, 1)]] * 6]
    want, got = (
        run_steps(path, [ids], steps, max_model_len=512, experts=room, **layout, **options)[0]
        for room in (ON_DEVICE, OffloadOptions(1))
    )
    assert distance(got, want) < TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("name", ["super-blocks", "awq"])
def test_greedy_tokens(made, name):
    path, plain = made(name)[:2]
    check_greedy(path, Reference(plain))


def stacks(path, tp=1, rank=0, ep=1, **options):
    model = threads.run(lambda world: load(path, mesh.build(world, tp, 1, ep=ep), **options), tp)[rank]
    return [one for one in model.modules() if isinstance(one, StackedLinear)]


@pytest.mark.parametrize(
    "name, tp, ep", [("super-blocks", 2, 1), ("gptq", 3, 1), ("q4k", 2, 2), ("gptq of 8 bits", 1, 1)]
)
def test_they_stay_quantised_and_take_what_fit_says(made, name, tp, ep):
    path, _, options = made(name)
    for one in stacks(path, tp, tp - 1, ep, **options):
        assert isinstance(one.packed, Stack) and not list(one.parameters())
        local_experts = sum(x.nbytes for x in one.buffers())
        assert local_experts == one.kept_bytes(torch.float32, torch.device("cpu")) < 1.3 * one.num_weights


@pytest.mark.parametrize("name", ["super-blocks", "gptq", "q6k"])
def test_striped_loading_makes_the_same_bits(made, name):
    path, _, options = made(name)
    for one, other in zip(stacks(path, 2, 1, **options), stacks(path, 2, 1, way="striped", **options), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.packed.tensors, other.packed.tensors, strict=True))


def test_gate_and_up_of_different_types_are_dequantised(made):
    up, down = stacks(made("halves")[0])[:2]
    assert up.packed is None and isinstance(down.packed, Stack)


def test_random_weights(made):
    (logits,) = run_steps(made("gptq")[0], [tokens(9, vocab=509)], load_format="dummy", max_model_len=64)
    assert 0.1 < logits.std() < 10


def test_ranks_that_super_blocks_are_too_few_for(source, tmp_path):
    """Two super-blocks of inputs, and three ranks; experts that are shared out whole need no cut."""
    file = gguf_files.write(source, tmp_path / "x.gguf", "Q4_K")
    assert stacks(file, 3, ep=3)
    refused(file, USAGE, "3 ranks cannot share 512 inputs of each expert", tp=3)


def test_experts_in_smaller_groups_where_super_blocks_do_not_fit(made, expected):
    path, _, options = made("q4k")
    parts = {one.stored.part.name for one in stacks(path, 3, **options)}
    assert parts == {"q4k", "q5_0"}  # of gate and up, and of down


@pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
@pytest.mark.parametrize("inputs", [96, 128])
@pytest.mark.parametrize("codec", [q4_1, q5_0, q8_0])
def test_what_has_no_form_on_a_gpu_becomes_plain(codec, inputs):
    """Everything else is repacked there."""
    part, layer = SimpleNamespace(codec=codec), SimpleNamespace(inputs=SimpleNamespace(width=inputs))
    becomes_plain = functools.partial(StackOfParts.becomes_plain, SimpleNamespace(part=part), layer)
    assert becomes_plain(torch.device("cuda")) is (codec is q4_1 and inputs == 96)
    assert not becomes_plain(torch.device("cpu"))
    if not becomes_plain(torch.device("cuda")):
        made = gpu_layout.repack_for_gpu(stack(codec, lambda _: codec.encode(torch.randn(16, inputs)), (2, 16, inputs)))
        assert isinstance(made.packed, packed_gemm.Packed)


@pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
@pytest.mark.parametrize("codec", [q4_0, q4_1, q4_k, q5_k, q6_k, q8_0])
def test_a_slot_takes_what_gpus_make_of_host_memory(codec):
    """Exactly that of super-blocks, and at most of others."""
    made = stack(codec, lambda _: codec.encode(torch.randn(32, 512)), (2, 32, 512))
    part = SimpleNamespace(codec=codec, kept_bits=lambda device: codec.kept_bits(512, device))
    layer, like = SimpleNamespace(width=32), StackOfParts.__new__(StackOfParts)
    like.part = part
    local_experts = sum(x.nbytes for x in gpu_layout.parts(gpu_layout.repack_for_gpu(made)).tensors)
    counted = like.slot_bits(layer, torch.device("cuda")) * 2 * 32 * 512 / 8
    assert local_experts == counted if codec in (q4_1, q4_k, q5_k, q6_k) else local_experts <= counted


def changed(path, tmp_path, **settings):
    path = shutil.copytree(path, tmp_path / "changed")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= settings
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_experts_that_differ_are_named(made, tmp_path, load_format):
    left_out = ["gate", "lm_head", "model.layers.1.mlp.experts.3"]
    path = changed(made("gptq")[0], tmp_path, modules_to_not_convert=left_out)
    words = "model.layers.1.mlp.experts.3.gate_proj and model.layers.1.mlp.experts.0.gate_proj are stored in different"
    refused(path, MODEL, words, load_format=load_format)


def test_experts_that_order_their_inputs_become_plain(made, caplog):
    caplog.set_level("INFO", "phalanx")
    for one in stacks(made("gptq ordered")[0]):
        assert isinstance(one.packed, torch.Tensor) and one.packed.dtype == torch.float32
        local_experts, cpu = one.packed.nbytes, torch.device("cpu")
        assert local_experts == one.kept_bytes(torch.float32, cpu) == one.host_bytes(torch.float32, cpu)
        assert local_experts == one.slot_bytes(torch.float32, cpu) * len(one.packed)
    assert any("desc_act are dequantised" in line for line in caplog.messages)
    for one, half in zip(*(stacks(made("gptq ordered")[0], dtype=dtype) for dtype in ("f32", "bf16")), strict=True):
        assert torch.equal(one.packed.bfloat16(), half.packed)  # scales are not rounded before they are multiplied
