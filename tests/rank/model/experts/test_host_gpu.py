"""Experts in host memory beside a GPU: each way makes what the GPU makes of all of them, also in captured pieces."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.device import device_caps
from phalanx.kernels.quantized import packed_gemm
from phalanx.kernels.segmented_graph import SegmentedGraph
from phalanx.rank.model.experts import host_buffers, small_batch, streamer
from phalanx.rank.model.experts.fused import FusedExperts
from phalanx.rank.model.experts.offload import ON_DEVICE, Offload, OffloadOptions
from phalanx.rank.model.load import load

from ....devices import require_gpu
from ..test_architectures import MODELS, write

require_gpu()

ROOMS = [OffloadOptions(100, placement=placement) for placement in ("auto", "cpu", "stream")]
ROOMS += [OffloadOptions(3, placement=placement) for placement in ("auto", "cpu", "stream")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(
        tmp_path_factory.mktemp("gpu"), **MODELS["qwen3_moe"] | {"moe_intermediate_size": 32, "hidden_size": 96}
    )


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """For super-blocks, in the layer without experts, and in half an expert, too."""
    sizes = {"moe_intermediate_size": 512, "hidden_size": 512, "intermediate_size": 512, "head_dim": 256}
    return write(tmp_path_factory.mktemp("wide"), **MODELS["qwen3_moe"] | sizes)


def experts(path, room, dtype, **options):
    """The first layer's, whose weights are the same every time."""

    def rank(world):
        model = load(path, mesh.build(world, 1, 1), "cuda", dtype, experts=room, **options)
        return next(one for one in model.modules() if isinstance(one, FusedExperts)), model.offload

    return threads.run(rank, 1)[0]


def tokens(layer, count, seed=0, dtype=None):
    draw = torch.Generator().manual_seed(seed)
    hidden, total = layer.down_proj.outputs[0].size, layer.down_proj.experts.size
    x = torch.randn(count, hidden, generator=draw).to("cuda", dtype or layer.gate_up_proj.weight.dtype)
    ids = torch.stack([torch.randperm(total, generator=draw)[: layer.top_k] for _ in range(count)]).int().cuda()
    return x, ids, torch.rand(count, layer.top_k, generator=draw).cuda()


@pytest.mark.parametrize("dtype, tolerance", [("f32", 1e-4), ("bf16", 5e-2)])
@pytest.mark.parametrize("room", ROOMS, ids=str)
@torch.no_grad()
def test_eager(checkpoint, room, dtype, tolerance):
    """One token, some, many, and so many that all are copied without a look."""
    (plain, _), (layer, offload) = experts(checkpoint, ON_DEVICE, dtype), experts(checkpoint, room, dtype)
    for turn, count in enumerate((1, 3, 8, 600, 1, 200) * 3):
        given = tokens(plain, count, turn)
        want, got = plain(*given).local(), layer(*given).local()
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    counters = offload.counters
    assert room.placement == "auto" or getattr(counters, {"stream": "streamed"}.get(room.placement, room.placement)) > 0


@pytest.mark.parametrize("room", ROOMS, ids=str)
@pytest.mark.parametrize("most", [4, 40])
@torch.no_grad()
def test_captured(checkpoint, room, most):
    """Replayed with other tokens, fewer than were captured, and a resident set that moves."""
    (plain, _), (layer, _) = experts(checkpoint, ON_DEVICE, "bf16"), experts(checkpoint, room, "bf16")
    x, ids, weights = tokens(plain, most)
    with torch.cuda.stream(torch.cuda.Stream()):
        layer(x, ids, weights).local()
        torch.cuda.synchronize()
        segmented = SegmentedGraph(torch.cuda.graph_pool_handle())
        y = segmented.capture(lambda: layer(x, ids, weights).local() + 0)
        few = layer.host._small_batch(x, ids, weights) is not None
        assert few == (most <= host_buffers.KEPT)
        assert len(segmented) == (1 if few else 3 if layer.host.set.slots else 2)
        for turn in range(40):
            given = tokens(plain, most, turn % 5)
            for static, new in zip((x, ids, weights), given, strict=True):
                static.copy_(new)
            real = 1 + turn * 7 % most
            segmented.replay(real)
            want = plain(*given).local()
            torch.testing.assert_close(y[:real], want[:real], atol=5e-2, rtol=5e-2)
        torch.cuda.synchronize()


def check_captured(plain, layer, turns):
    """A captured step of four tokens, replayed for each of `turns`: the tokens' seed, and how many of them are real."""
    x, ids, weights = tokens(plain, 4, 0, torch.bfloat16)
    with torch.cuda.stream(torch.cuda.Stream()):
        layer(x, ids, weights).local()
        torch.cuda.synchronize()
        segmented = SegmentedGraph(torch.cuda.graph_pool_handle())
        y = segmented.capture(lambda: layer(x, ids, weights).local() + 0)
        for seed, real in turns:
            given = tokens(plain, 4, seed, torch.bfloat16)
            for static, new in zip((x, ids, weights), given, strict=True):
                static.copy_(new)
            segmented.replay(real)
            torch.testing.assert_close(y[:real], plain(*given).local()[:real], atol=5e-2, rtol=5e-2)
        torch.cuda.synchronize()


def check_quantised(got, want, isq):
    """Hopper rounds the rows of many pairs of FP8 experts to e4m3, CPUs do not: what GEMMs read is off by 0.026, and
    what three of ten experts on the CPU make of 600 tokens by 0.025 of all, but single elements by 0.16."""
    if isq == "fp8" and device_caps(got.device).hopper:
        assert (got - want).norm() < 6e-2 * want.norm()
    else:
        torch.testing.assert_close(got, want, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("isq", ["q4k", "q6k", "q4_0", "q8_0", "fp8"])
@pytest.mark.parametrize("room", [ROOMS[1], ROOMS[2], *ROOMS[3:]], ids=str)
@torch.no_grad()
def test_quantised(wide, room, isq):
    """Made over on the GPU they are what it makes of all of them; captured too."""
    plain, _ = experts(wide, ON_DEVICE, "bf16", isq=isq)
    layer, offload = experts(wide, room, "bf16", isq=isq)
    assert isinstance(layer.host.slots.stack.w2.packed, packed_gemm.Packed) and not layer.host.layer.same
    for turn, count in enumerate((1, 3, 8, 600, 1, 200) * 2):
        given = tokens(plain, count, turn, torch.bfloat16)
        check_quantised(layer(*given).local(), plain(*given).local(), isq)
    assert (
        room.placement == "auto"
        or getattr(offload.counters, {"stream": "streamed"}.get(room.placement, room.placement)) > 0
    )
    check_captured(plain, layer, [(turn % 5, 1 + turn % 4) for turn in range(20)])


@pytest.fixture(params=["measured", "the CPU's"])
def missing(request, monkeypatch):
    """Who computes missing experts in steps of few pairs: as measured, or the CPU, whatever that costs."""
    if request.param != "measured":
        monkeypatch.setattr(small_batch, "DEARER", 1e9)


@pytest.mark.parametrize("missing", ["the CPU's"], indirect=True)
@pytest.mark.parametrize("isq", ["none", "q4k", "q6k", "q8_0"])
@torch.no_grad()
def test_the_cpu_alone(wide, isq, missing):
    """Experts that are chosen again and again become resident."""
    plain, _ = experts(wide, ON_DEVICE, "bf16", isq=isq)
    layer, made = experts(wide, OffloadOptions(2), "bf16", isq=isq)
    x, ids, weights = tokens(plain, 1, 0, torch.bfloat16)
    assert ids.numel() <= small_batch.CPU_ROUTED
    for turn in range(20):  # eager
        given = tokens(plain, 1 + turn % 4, turn, torch.bfloat16)
        torch.testing.assert_close(layer(*given).local(), plain(*given).local(), atol=5e-2, rtol=5e-2)
    with torch.cuda.stream(torch.cuda.Stream()):
        layer(x, ids, weights).local()
        torch.cuda.synchronize()
        assert layer.host.small_batch._arrivals(ids.numel()) is not None
        segmented = SegmentedGraph(torch.cuda.graph_pool_handle())
        y = segmented.capture(lambda: layer(x, ids, weights).local() + 0)
        for turn in range(60):
            given = tokens(plain, 1, turn // 20, torch.bfloat16)
            for static, new in zip((x, ids, weights), given, strict=True):
                static.copy_(new)
            segmented.replay(1)
            torch.testing.assert_close(y, plain(*given).local(), atol=5e-2, rtol=5e-2)
        torch.cuda.synchronize()
    layer.host._drain()
    assert made.counters.cpu > 0 and made.counters.resident > 0
    assert made.counters.streamed == 0 and made.counters.loaded > 0


@pytest.mark.parametrize("isq", ["none", "q4k", "fp8"])
@torch.no_grad()
def test_no_buffer_is_overwritten_while_it_is_read(wide, isq, monkeypatch):
    """An expert at a time through two buffers, of many steps that are launched without a look: copies are far ahead of
    what computes. Between them lies a GEMM that keeps the GPU busy."""
    monkeypatch.setattr(streamer, "BUFFER", 1)
    plain, _ = experts(wide, ON_DEVICE, "bf16", isq=isq)
    layer, offload = experts(wide, OffloadOptions(100, placement="stream"), "bf16", isq=isq)
    given = [tokens(plain, 600, seed, torch.bfloat16) for seed in range(4)]
    want = [plain(*one).local().clone() for one in given]
    busy = torch.randn(4096, 4096, device="cuda")
    layer(*given[0]).local()  # compiled, and the tables are found
    torch.cuda.synchronize()
    got = []
    for turn in range(40):
        busy @ busy
        got.append(layer(*given[turn % 4]).local())
    torch.cuda.synchronize()
    for turn, one in enumerate(got):
        torch.testing.assert_close(one, want[turn % 4], atol=5e-2, rtol=5e-2)
    assert offload.counters.streamed >= 41 * layer.down_proj.experts.size


@pytest.mark.parametrize("tp, ep", [(2, 1), (2, 2)])
@pytest.mark.parametrize("isq", ["none", "q4k"])
@torch.no_grad()
def test_captured_parts_of_ranks(wide, isq, tp, ep, missing):
    """Two ranks on one GPU, half of whose experts are in host memory: captured steps make sums that add up."""

    def rank(world):
        model = load(wide, mesh.build(world, tp, 1, ep=ep), "cuda", "bf16", experts=OffloadOptions(2), isq=isq)
        return next(one for one in model.modules() if isinstance(one, FusedExperts)), model.offload

    plain, _ = experts(wide, ON_DEVICE, "bf16", isq=isq)
    ranks = threads.run(rank, tp)
    x, ids, weights = tokens(plain, 4, 0, torch.bfloat16)
    with torch.cuda.stream(torch.cuda.Stream()):
        captured = []
        for layer, _ in ranks:
            layer(x, ids, weights).local()
            torch.cuda.synchronize()
            segmented = SegmentedGraph(torch.cuda.graph_pool_handle())
            captured.append((segmented, segmented.capture(lambda layer=layer: layer(x, ids, weights).local() + 0)))
            assert len(segmented) == 1
        for turn in range(60):
            given = tokens(plain, 4, turn % 5, torch.bfloat16)
            for static, new in zip((x, ids, weights), given, strict=True):
                static.copy_(new)
            for segmented, _ in captured:
                segmented.replay(4)
            total = sum(y.float() for _, y in captured)
            torch.testing.assert_close(total, plain(*given).local().float(), atol=5e-2, rtol=5e-2)
        torch.cuda.synchronize()
    for layer, offload in ranks:
        layer.host._drain()
        assert offload.counters.resident > 0 and offload.counters.cpu + offload.counters.streamed > 0


@pytest.mark.parametrize("isq", ["none", "q4k"])
@pytest.mark.parametrize(
    "room", [OffloadOptions(100, placement="cpu", defers=True), OffloadOptions(3, defers=True)], ids=str
)
@torch.no_grad()
def test_deferral(wide, room, isq, missing):
    """Eager and captured steps: a layer adds what the CPU has made of the layer before, and nothing is lost."""

    def layers(room):
        def rank(world):
            model = load(wide, mesh.build(world, 1, 1), "cuda", "bf16", experts=room, isq=isq)
            return [one for one in model.modules() if isinstance(one, FusedExperts)], model.offload

        return threads.run(rank, 1)[0]

    plain, (late, offload) = layers(ON_DEVICE)[0], layers(room)
    assert len(late) > 1
    given = [tokens(plain[0], 1, seed, torch.bfloat16) for seed in range(len(late))]
    offload.deferral.step = True

    def run(some):
        return torch.stack([layer(*one).local() for layer, one in zip(some, given, strict=True)])

    def check(got):
        want = run(plain).float()
        torch.testing.assert_close(got.float().sum(0), want.sum(0), atol=0.1, rtol=5e-2)
        assert room.placement != "cpu" or not got[0].any()

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            check(run(late))
        torch.cuda.synchronize()
        segmented = SegmentedGraph(torch.cuda.graph_pool_handle())
        captured = segmented.capture(lambda: run(late))
        for turn in range(40):
            for place, one in enumerate(given):
                for static, new in zip(one, tokens(plain[0], 1, turn % 7 + place, torch.bfloat16), strict=True):
                    static.copy_(new)
            segmented.replay(1)
            check(captured)
        torch.cuda.synchronize()
    late[0].host._drain()
    assert offload.counters.cpu > 0


def test_what_does_not_fit_goes_to_the_host(checkpoint):
    def rank(world):
        room = load(checkpoint, mesh.build(world, 1, 1), "cuda", "bf16").weight_bytes - 1
        return load(checkpoint, mesh.build(world, 1, 1), "cuda", "bf16", room=room).offload

    (offload,) = threads.run(rank, 1)
    assert offload is not None and offload.slots == 0 and offload.host_bytes > 0


@pytest.mark.parametrize("isq", ["none", "q4k", "q8_0", "fp8"])
@pytest.mark.parametrize("placement, fixed", [("auto", 3), ("auto", 7), ("cpu", 3), ("stream", 3)])
@torch.no_grad()
def test_fixed(wide, isq, placement, fixed, monkeypatch):
    """Three of ten experts are on the host alone and some on the GPU alone: eager and captured steps, and prompts."""
    monkeypatch.setattr(Offload, "fewest_fixed", lambda *_: fixed)
    plain, _ = experts(wide, ON_DEVICE, "bf16", isq=isq)
    layer, offload = experts(wide, OffloadOptions(3, placement=placement), "bf16", isq=isq)
    slots = [x[-fixed:].clone() for x in layer.host.slots.tensors]
    assert layer.host.layer.stack.size == 10 - fixed and all(x.is_pinned() for x in layer.host.layer.tensors)
    for turn, count in enumerate((1, 3, 8, 600, 1, 200) * 3):
        given = tokens(plain, count, turn, torch.bfloat16)
        check_quantised(layer(*given).local(), plain(*given).local(), isq)
    # Some experts become resident as tokens repeat.
    check_captured(plain, layer, [(turn // 20, 4) for turn in range(60)])
    layer.host._drain()
    assert offload.counters.resident > 0
    if placement == "auto" and isq != "fp8":  # of which few tokens' kernels copy none
        assert (offload.counters.loaded > 0) == (fixed < 7)
    assert all(torch.equal(a[-fixed:], b) for a, b in zip(layer.host.slots.tensors, slots, strict=True))
    assert layer.host._slot[:fixed].tolist() == [7 - fixed + one for one in range(fixed)]


@pytest.mark.parametrize("isq", ["none", "q4k"])
@torch.no_grad()
def test_what_does_not_fit_on_the_host_is_fixed(wide, isq):
    plain, _ = experts(wide, ON_DEVICE, "bf16", isq=isq)
    _, whole = experts(wide, OffloadOptions(2), "bf16", isq=isq)
    layer, offload = experts(wide, OffloadOptions(2), "bf16", isq=isq, host_room=int(0.9 * whole.all_bytes))
    assert 0 < offload.fixed <= offload.slots == 8 and offload.host_bytes < 0.9 * whole.all_bytes
    for turn, count in enumerate((1, 16, 600)):
        given = tokens(plain, count, turn, torch.bfloat16)
        torch.testing.assert_close(layer(*given).local(), plain(*given).local(), atol=5e-2, rtol=5e-2)
