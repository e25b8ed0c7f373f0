"""Which layouts there are, what fits of them, and the command that serves one; sums by hand, GB are 10^9 bytes."""

import dataclasses

import pytest
from phalanx.benchmarks.shapes import CONFIGS as SHAPES
from phalanx.launcher.commands.fit import devices, memory, plan, report
from phalanx.launcher.commands.fit.devices import DEVICES
from phalanx.launcher.commands.fit.memory import Layout, Workload

from .configs import ASKED, CONFIGS, GPU80, GPU141, read, write


@pytest.fixture
def shape(tmp_path):
    return lambda name: read(write(tmp_path / name, CONFIGS[name]))


def cluster(device=GPU141, nodes=1, per_node=8, **more):
    return plan.Cluster(nodes, per_node, device, 50e9, **more)


def test_layouts(shape):
    dense = plan.layouts(shape("Llama-3.1-70B"), cluster(nodes=2))
    assert all(one.ranks == 16 and one.tp <= 8 and one.ep == 1 for one in dense)
    assert {(one.tp, one.pp, one.dp) for one in dense} >= {(8, 2, 1), (8, 1, 2), (4, 4, 1), (1, 16, 1), (1, 1, 16)}
    assert len(dense) == 5 + 4 + 3 + 2  # tp 1, 2, 4, 8
    assert plan.layouts(shape("Llama-3.1-70B"), cluster(nodes=2), tp=16) == [Layout(16, 1, 1)]  # asked for: over nodes
    assert plan.layouts(shape("Llama-3.1-70B"), cluster(nodes=2), tp=3) == []
    mixture = plan.layouts(shape("Qwen3-30B-A3B"), cluster())
    assert {Layout(8), Layout(8, ep=8), Layout(1, 1, 8, ep=8)} <= set(mixture)
    assert Layout(1, 8, 1, ep=1) in mixture and Layout(1, 8, 1, ep=8) not in mixture
    two = plan.layouts(shape("Qwen3-30B-A3B"), cluster(), ep=2)
    assert {one.ep for one in two} == {2} and not [one for one in two if one.tp == 1 and one.dp != 2]
    assert plan.layouts(shape("Llama-3.1-70B"), cluster(), ep=2) == []
    assert plan.layouts(shape("Qwen3-30B-A3B"), cluster(), tp=2, ep=3) == []


def test_experts_of_several_copies_are_not_shared_out_yet(shape):
    model = shape("Qwen3-30B-A3B")
    within, over = (
        plan.estimate(model, one, cluster(), ASKED) for one in (Layout(2, dp=4, ep=2), Layout(2, dp=4, ep=8))
    )
    assert within.unserved == "" and "several replicas" in over.unserved
    assert within.memory.activations > plan.estimate(model, Layout(2, dp=4), cluster(), ASKED).memory.activations


def figures(model, where, asked=ASKED):
    return plan.estimates(model, plan.layouts(model, where), where, asked)


@pytest.mark.long
def test_as_few_experts_in_host_memory_as_fit(shape):
    model, where = shape("DeepSeek-V3"), cluster(GPU80)
    asked = Workload(8192, 4, 4096)
    for layout in (Layout(8), Layout(8, ep=8), Layout(8, ep=2)):
        plain, other = plan.estimates(model, [layout], where, asked)
        assert "weights do not fit" in plain.verdict
        assert other.runs
        assert other.verdict == ""
        count = other.layout.offload
        assert 0 < count < 256 // layout.ep and other.layout.ep == layout.ep
        fewer = plan.estimate(model, dataclasses.replace(layout, offload=count - 1), where, asked)
        assert fewer.verdict and other.speed.decode_ms > fewer.speed.decode_ms
        assert plan.estimates(model, [layout], where, asked, 100)[0].layout.offload == min(100, 256 // layout.ep)
    # Each node's memory holds its own ranks' experts: half of them on two nodes.
    one, two = (cluster(GPU80, nodes, host_memory=600e9) for nodes in (1, 2))
    assert not plan.estimate(model, Layout(8, ep=8, offload=32), one, asked).runs
    assert plan.estimate(model, Layout(8, 2, ep=8, offload=32), two, asked).runs
    # The cache and steps have as much of a GPU as serving leaves them, where not all that is asked for fits.
    small = cluster(DEVICES["RTX4090"], per_node=1)
    found = plan.estimates(shape("Qwen3-30B-A3B"), [Layout(1)], small, ASKED)[1]
    assert found.runs and "64 sequences" in found.verdict
    fit, (stage,) = found.memory, found.memory.stages
    spare = fit.free - 0.15 * (small.device.memory - fit.runtime)
    assert 0 <= spare < stage.resident / (128 - found.layout.offload)
    assert len(plan.estimates(model, [Layout(8)], cluster(), asked)) == 1, "it fits"
    on_cpu = plan.Cluster(1, 1, devices.cpu(devices.TYPICAL, 1, 8e9, ""), 50e9)
    assert len(plan.estimates(shape("Qwen3-30B-A3B"), [Layout(1)], on_cpu, ASKED)) == 1, "one memory"


def test_verdicts(shape):
    model = shape("Llama-3.1-70B")
    by_layout = {one.layout: one for one in figures(model, cluster(GPU80, per_node=4))}
    # 141.1 GB of weights, 1.0 of libraries, 8192 x 2 x (4 x 8192 + 3 x 28672) = 1.9 for a step: 144.0 on 85
    assert "fit: 59.1 GB" in by_layout[Layout(1, 1, 4)].verdict
    # tp 4: 0.95 x (85 - 1.0 - 35.3 - 0.9 for a step) / 81,920 bytes = 554,600 tokens: 67 sequences of 8192
    assert (by_layout[Layout(4)].verdict, by_layout[Layout(4)].together) == ("", 67)
    # tp 2: 0.95 x (85 - 1.0 - 70.6 - 1.2) / 163,840 = 70,900 tokens, 8 sequences in each of two copies
    assert "64 sequences" in by_layout[Layout(2, 1, 2)].verdict
    assert by_layout[Layout(2, 1, 2)].unserved == ""
    long = Workload(context=131072, concurrency=1, length=65536)
    held = plan.estimate(model, Layout(2, 1, 2), cluster(GPU80, per_node=4), long)
    # 131,072 x 163,840 / 0.95 = 22.6 GB wanted of 12.1
    assert "131072 tokens" in held.verdict and "10.5 GB" in held.verdict and "little" in held.verdict
    # DeepSeek's experts are 674.3 GB in fp8; a host of 256 GB lacks the rest
    experts = plan.estimate(shape("DeepSeek-V3"), Layout(8, offload=256), cluster(GPU80, host_memory=256e9), ASKED)
    assert "experts" in experts.verdict and "418.3 GB" in experts.verdict
    copies = plan.estimate(shape("DeepSeek-V3"), Layout(1, 1, 8, offload=256), cluster(GPU80), ASKED)
    lacks = plan._host_lacks(copies.memory, copies.layout, cluster(GPU80, host_memory=256e9))
    assert 410e9 < lacks < 430e9, "once for all"
    assert not experts.runs


def test_layers_in_host_memory(shape):
    """In 70 GB the table of 128256 x 8192 numbers, and each second layer or so: 39 of 2 x (150,994,944 + 704,643,072)
    bytes; two slots of the device take two."""
    model, where = shape("Llama-3.1-70B"), cluster(GPU80, per_node=1)
    asked = Workload(8192, 4, 4096, cpu_offload=70 * 10**9)
    one = plan.estimate(model, Layout(1), where, asked)
    (stage,) = one.memory.stages
    table, layers = 128256 * 8192 * 2, 39 * 1_711_276_032
    assert stage.host == stage.parked == table + layers and stage.slots == 2 * 1_711_276_032
    assert stage.loaded == sum(memory.stages(model, Layout(1), ASKED.context)[0].weights.values()) - stage.host
    assert one.runs and one.speed.decode_ms == pytest.approx((layers + 4 * 8192 * 2) / 54e9 * 1e3)
    assert " --cpu-offload-gb 65.1926" in plan.command("/m", one, where, asked)[0]
    assert not plan.estimate(model, Layout(1), cluster(GPU80, per_node=1, host_memory=6e10), asked).runs


def test_embeddings_for_layers_in_host_memory(tmp_path):
    """5.25 GiB of Gemma 4 E4B: its table of 262144 x 42 x 256 numbers, of which a token reads 21.5 kB; no layer."""
    model = read(write(tmp_path, SHAPES["gemma4-e4b"] | {"torch_dtype": "bfloat16"}))
    where, size = cluster(GPU141, per_node=1), 262144 * 42 * 256 * 2
    there, here = (
        plan.estimate(model, Layout(1), where, Workload(8192, 256, 4096, cpu_offload=most)) for most in (size, size - 1)
    )
    (stage,), (plain,) = there.memory.stages, here.memory.stages
    assert (stage.host, stage.slots) == (size, 0) and plain.host < size
    assert stage.loaded == sum(memory.stages(model, Layout(1), ASKED.context)[0].weights.values()) - size
    free = plan.estimate(model, Layout(1), where, Workload(8192, 256, 4096))
    rows = there.speed.running * 42 * 256 * 2 / 54e9 * 1e3
    assert there.speed.running == free.speed.running
    assert there.speed.decode_ms - free.speed.decode_ms == pytest.approx(rows)
    assert rows < 0.05 * free.speed.decode_ms
    assert there.speed.prefill_per_s > 0.95 * free.speed.prefill_per_s
    assert " --cpu-offload-gb 5.25" in plan.command("/m", there, where, Workload(8192, 256, 4096, cpu_offload=size))[0]
    assert any("5.64 in host memory" in line for line in report.breakdown(there))
    asked = Workload(8192, 256, 4096, cpu_offload=size // 2)
    halves = plan.estimate(model, Layout(2), cluster(GPU141, per_node=2), asked)
    assert halves.memory.stages[0].host == size // 2


def test_a_table_beside_experts_in_host_memory(shape):
    """Qwen3-30B-A3B's 151936 x 2048 numbers: a step reads its tokens' rows once."""
    model, where, size = shape("Qwen3-30B-A3B"), cluster(GPU141, per_node=1, host_memory=256e9), 151936 * 2048 * 2
    there, here = (
        plan.estimate(model, Layout(1, offload=64), where, Workload(8192, 16, 4096, cpu_offload=most))
        for most in (size, 0)
    )
    assert there.memory.stages[0].parked == size and there.speed.running == here.speed.running
    rows = there.speed.running * 2048 * 2 / 54e9 * 1e3
    assert there.speed.decode_ms - here.speed.decode_ms == pytest.approx(rows)


def test_the_best_is_served_fits_and_is_fast(shape):
    best = plan.best(figures(shape("Llama-3.1-70B"), cluster(nodes=2)))
    assert best.unserved == "" and best.runs and best.layout.tp * best.layout.pp * best.layout.dp == 16
    assert plan.best(figures(shape("Llama-3.1-405B"), cluster(GPU80))) is None
    only = plan.best(figures(shape("DeepSeek-V3"), cluster(GPU80)))
    assert only.layout.offload and not only.unserved


def test_the_fewest_ranks(shape):
    # 405B in bf16, 811.7 GB: 6 ranks of 139.8 GiB would do, but 6 divides neither the heads' 128 nor 126 layers over 8
    assert plan.fewest(shape("Llama-3.1-8B"), cluster(), ASKED).ranks == 1
    smallest = plan.fewest(shape("Llama-3.1-405B"), cluster(), ASKED)
    assert smallest.ranks == 6 and (smallest.tp, smallest.pp) == (1, 6)  # 126 / 6 = 21 layers a stage
    assert plan.fewest(shape("Llama-3.1-405B"), cluster(DEVICES["L4"]), Workload(131072, 1, 1), most=4) is None


def test_commands(shape):
    model = shape("Llama-3.1-70B")
    one = plan.estimate(model, Layout(8, 2), cluster(nodes=2), ASKED)
    serve = "phalanx serve --model /m --d 0,1,2,3,4,5,6,7 --tp 8 --pp 2 --max-model-len 8192 --max-num-seqs 64"
    assert plan.command("/m", one, cluster(nodes=2), ASKED) == [
        "phalanx hostfile --slots 8 --mpi openmpi -o hosts",
        f"mpirun -np 16 -hostfile hosts --bind-to none --map-by slot {serve}",
        f"srun --mpi=pmix --nodes=2 --ntasks-per-node=8 {serve}",
    ]
    one = plan.estimate(model, Layout(8), cluster(), ASKED)
    assert plan.command("/a b", one, cluster(), ASKED, ASKED.dtype) == [
        "phalanx serve --model '/a b' --d 0,1,2,3,4,5,6,7 --tp 8 --pp 1 --max-model-len 8192 --max-num-seqs 64 "
        "--dtype bf16"
    ]
    slow = plan.Cluster(1, 2, devices.cpu(devices.TYPICAL, 2, 64e9, ""), 50e9)
    asked = Workload(4096, 4, 2048, "f32", kv_fraction=0.5)
    (line,) = plan.command("/m", plan.estimate(model, Layout(2), slow, asked), slow, asked)
    assert "serve --model /m --device" in line
