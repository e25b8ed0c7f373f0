"""Experts in host memory: whatever is resident, and however the others are served, logits are the same."""

import functools

import numpy as np
import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.errors import MEMORY, USAGE, FatalError
from phalanx.kernels import host_memory
from phalanx.kernels.moe.host_choice import DECAY, Residency
from phalanx.rank.model.experts import host, host_buffers
from phalanx.rank.model.experts.fused import FusedExperts
from phalanx.rank.model.experts.offload import ON_DEVICE, OffloadOptions, overflowing
from phalanx.rank.model.load import load

from ....checkpoints import make_checkpoint
from ..harness import distance, run_steps, tokens
from ..test_architectures import MODELS, write

NAMES = ("qwen3_moe", "mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3")
OTHERS = (
    "deepseek_v2 glm4_moe glm4_moe_lite minimax_m2 qwen3_next qwen3_5_moe_text qwen3_5_moe kimi_k25 dots1 olmoe "
    "granitemoe gemma4_text lfm2_moe granitemoehybrid ernie4_5_moe hunyuan_v1_moe mistral4 qwen3_vl_moe hy_v3 "
    "deepseek_v32 deepseek_v4 glm_moe_dsa kimi_linear bailing_hybrid glm5_next step3p7 minimax_m3_vl_text "
    "minimax_m3_vl llama4 llama4_text"
).split() + ["mistral3 of mistral4"]
ALL = 1 << 20
ROOMS = [
    *(OffloadOptions(offload=ALL, placement=placement) for placement in ("auto", "cpu", "stream")),
    *(OffloadOptions(offload=3, placement=placement) for placement in ("auto", "cpu", "stream")),
    OffloadOptions(memory=1 << 40),
]
STEPS = [[(0, 1)], [(1, 7)], [(0, 1), (1, 1)], [(1, 4), (0, 30)], [(0, 2)]]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return functools.cache(lambda name: write(tmp_path_factory.mktemp(name), **MODELS[name]))


def test_names_are_all_model_types_with_experts():
    with_experts = {
        options["model_type"]
        for options in MODELS.values()
        if any("experts" in key for key in options | options.get("text_config", {}))
    }
    assert with_experts == {MODELS[name]["model_type"] for name in (*NAMES, *OTHERS, "nemotron_h")}


def test_experts_without_a_gate_are_refused(made):
    with pytest.raises(FatalError, match="experts without a gate"):
        run_steps(made("nemotron_h"), [[1]], experts=ROOMS[0])


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_logits(made, name):
    """Bit by bit among all ways, and within rounding what is computed where all experts are on the device."""
    sequences = [tokens(34, seed=1), tokens(12, seed=2)]
    plain = run_steps(made(name), sequences, STEPS)
    first = None
    for room in ROOMS:
        got = run_steps(made(name), sequences, STEPS, experts=room)
        first = first or got
        assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True)), room
    assert all(distance(a, b) < 1e-5 for a, b in zip(first, plain, strict=True))


@pytest.mark.parametrize("tp, pp, ep", [(2, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 2)])
def test_ranks(made, tp, pp, ep):
    ids = [tokens(30)]
    (want,) = run_steps(made("qwen3_moe"), ids, tp=tp, pp=pp, ep=ep)
    for room in (OffloadOptions(offload=2), OffloadOptions(offload=ALL, placement="stream")):
        (got,) = run_steps(made("qwen3_moe"), ids, tp=tp, pp=pp, ep=ep, experts=room)
        assert distance(got, want) < 1e-5


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_16_bits(made, dtype):
    ids = [tokens(30)]
    (want,) = run_steps(made("qwen3_moe"), ids, dtype=dtype)
    (got,) = run_steps(made("qwen3_moe"), ids, dtype=dtype, experts=OffloadOptions(offload=4))
    assert distance(got.float(), want.float()) < 0.15  # a few of bf16's last places


class Passed:
    """An event of a stream that computes at once."""

    def record(self):
        pass

    synchronize = query = record


@pytest.mark.parametrize("room", ROOMS[:-1], ids=str)
def test_what_a_gpu_does(made, monkeypatch, room):
    """The parts of a step as a GPU's, its kernels being the CPU's: few tokens by a look at them, many without one."""
    monkeypatch.setattr(host_buffers.torch.cuda, "Event", Passed)
    monkeypatch.setattr(host_memory, "pin_memory", lambda memory: None)
    monkeypatch.setattr(host_memory, "check_pinned", lambda what, tensors: None)
    monkeypatch.setattr(host, "LOOKED", 4)

    def rank(world):
        plain, model = (load(made("gpt_oss"), mesh.build(world, 1, 1), experts=one) for one in (ON_DEVICE, room))
        wanted, layer = (next(x for x in one.modules() if isinstance(x, FusedExperts)) for one in (plain, model))
        layer.host.on_gpu = True
        draw = torch.Generator().manual_seed(0)
        total, k, hidden = layer.down_proj.experts.size, layer.top_k, layer.down_proj.outputs[0].size
        for count in (1, 3, 5, 40, 1, 2, 2, 2, 2, 2, 2, 2, 40):
            x, weights = torch.randn(count, hidden, generator=draw), torch.rand(count, k, generator=draw)
            ids = torch.stack([torch.randperm(total, generator=draw)[:k] for _ in range(count)]).int()
            torch.testing.assert_close(layer(x, ids, weights).local(), wanted(x, ids, weights).local())
        return model.offload.counters

    (found,) = threads.run(rank, 1)
    assert room.placement == "auto" or getattr(found, {"stream": "streamed"}.get(room.placement, room.placement)) > 0


def counters(path, room, steps=6):
    """After so many steps of a few tokens."""

    def rank(world):
        model = load(path, mesh.build(world, 1, 1), experts=room)
        layers = [one for one in model.modules() if getattr(one, "host", None) is not None]
        draw = torch.Generator().manual_seed(0)
        for _ in range(steps):
            for layer in layers:
                x = torch.randn(2, layer.down_proj.outputs[0].size, generator=draw)
                ids = torch.randint(7, 10, (2, 2), generator=draw, dtype=torch.int32)  # of ten; 0 to 6 are resident
                layer(x, ids, torch.ones(2, 2)).local()
        assert len(layers) > 0
        return model.offload.counters

    return threads.run(rank, 1)[0]


def test_counters_prove_which_way_ran(made):
    path = made("qwen3_moe")
    cpu, stream = (counters(path, OffloadOptions(offload=3, placement=placement)) for placement in ("cpu", "stream"))
    assert cpu.cpu == stream.streamed > 0 and not (cpu.resident or cpu.streamed or stream.resident or stream.cpu)
    assert not (cpu.loaded or stream.loaded)
    auto = counters(path, OffloadOptions(offload=3), steps=40)
    assert auto.loaded > 0 and auto.resident > auto.cpu + auto.streamed  # the set follows what is chosen
    everything = counters(path, OffloadOptions(memory=1 << 40))
    assert everything.resident > 0 and not (everything.cpu or everything.streamed)


def observe(residents, counts):
    residents.scores[:] = residents.scores * DECAY + (counts > 0)


def test_the_resident_set_keeps_what_is_chosen_often_and_lately():
    residents = Residency.of_first(6, 2)
    assert residents.exchange() is None
    counts = np.array([3, 0, 0, 0, 9, 0])
    for _ in range(4):
        observe(residents, counts)
    assert residents.exchange() == (4, 1)
    assert residents.replace(1, 4) == 1
    assert residents.exchange() is None and residents.slot_of.tolist() == [0, -1, -1, -1, 1, -1]
    for _ in range(200):
        observe(residents, np.array([1, 0, 1, 0, 0, 0]))
    assert residents.exchange() == (2, 1)


@pytest.mark.parametrize("exponent, least, most", [(0.0, 0.45, 80), (0.8, 0.75, 80)])
def test_the_resident_set_follows_popularity_and_not_chance(exponent, least, most):
    """Half of 128 experts, 8 of which each step draws by a Zipf law: how many of steps 400 to 800 are resident, and how
    many exchanges 800 steps make."""
    draw, exchanged, found = np.random.default_rng(0), 0, []
    order, likely = draw.permutation(128), -exponent * np.log(np.arange(1, 129))
    residents = Residency.of_first(128, 64)
    for step in range(800):
        chosen = order[np.argsort(likely + draw.gumbel(size=128))[-8:]]
        found.append(np.mean(residents.slot_of[chosen] >= 0))
        observe(residents, np.isin(np.arange(128), chosen))
        if step % host.TURN == 0 and (wanted := residents.exchange()):
            expert, slot = wanted
            residents.replace(slot, expert)
            exchanged += 1
    assert np.mean(found[400:]) > least and exchanged < most


@pytest.mark.parametrize("share, some", [(2.0, False), (0.9, True), (0.01, True)])
def test_what_does_not_fit_goes_to_the_host(made, share, some, caplog):
    """All ranks do it as soon as one has to, where the user says nothing."""
    caplog.set_level("INFO", "phalanx")

    def rank(world):
        model = load(made("qwen3_moe"), mesh.build(world, 2, 1))
        need, gpu = 1 << 34, torch.device("cuda")  # far more than buffers
        room = int(need * share) if world.rank else 2 * need
        return overflowing(model, lambda: need, room, torch.float32, gpu, world), room

    rooms = threads.run(rank, 2)
    told = f"the weights do not fit on all GPUs (17.18 GB on rank 1's, where {17.18 * share:.2f} GB are free)"
    assert any(message.startswith(told) for message in caplog.messages) == some
    for found, room in rooms:
        assert bool(found) == some
        assert not some or (found.memory < 0.85 * room and not found.offload)
    if share == 0.01:
        assert rooms[1][0].memory == 1, "none is resident"


def test_what_cannot_be_served_is_refused(made, tmp_path):
    def refused(path, pp=1, **options):
        with pytest.raises(FatalError) as stop:
            threads.run(lambda world: load(path, mesh.build(world, 1, pp), experts=OffloadOptions(1), **options), pp)
        return str(stop.value), stop.value.code

    dense = make_checkpoint(tmp_path / "dense", num_hidden_layers=2, tokenizer=False)
    for pp in (1, 2):
        message, code = refused(dense, pp)
        assert "no experts" in message and code == USAGE
    message, code = refused(made("qwen3_moe"), room=1000)
    assert "this rank's weights take" in message and code == MEMORY
