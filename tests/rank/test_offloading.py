"""A live job whose experts are in host memory: greedy tokens as with all on the device, by every way to serve one."""

import functools
import os
import random
import re
import signal
from pathlib import Path

import pytest
from phalanx import errors
from phalanx.rank import protocol

from ..engine import Engine, greedy
from .model.test_architectures import MODELS, write
from .test_swapping import SWAPPING

pytestmark = pytest.mark.timeout(300)

COUNT = 20
PROMPTS = [[random.Random(i).randrange(3, 512) for _ in range(20 + 9 * i)] for i in range(3)]
OPTIONS = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("experts"), **MODELS["qwen3_moe"])


def answers(checkpoint, ranks=1, **options):
    """The tokens of each prompt, what the ranks logged, and their figures."""
    with Engine(checkpoint, ranks=ranks, **OPTIONS, **options) as engine:
        outputs = engine.generate({str(i): (prompt, greedy(COUNT)) for i, prompt in enumerate(PROMPTS)})
        stats = engine.rest()
        assert engine.drain() == 0
        return [outputs[str(i)].tokens for i in range(len(PROMPTS))], engine.log(), stats


@pytest.fixture(scope="module")
def expected(checkpoint):
    return functools.cache(lambda: answers(checkpoint)[0])


@pytest.fixture(scope="module")
def wide_experts(tmp_path_factory):
    return write(tmp_path_factory.mktemp("memory"), **MODELS["qwen3_moe"] | dict(moe_intermediate_size=280))


@pytest.mark.parametrize(
    "way, offload",
    [
        ("auto", 5),
        *(pytest.param(way, 100, marks=pytest.mark.long) for way in ("auto", "cpu", "stream")),
    ],
)
def test_each_way(checkpoint, expected, way, offload):
    got, log, stats = answers(checkpoint, num_experts_offload_per_rank=offload, expert_placement=way)
    assert got == expected()
    resident = max(0, 10 - offload)
    assert re.search(f" {resident} .*resident", log)
    served = {"resident": stats.experts_resident, "cpu": stats.experts_cpu, "stream": stats.experts_streamed}
    if way == "auto":
        assert bool(served["resident"]) == (offload == 5)
        assert served["cpu"] + served["stream"] > 0
    else:
        assert sum(served.values()) == served[way] > 0


@pytest.mark.long
def test_as_many_resident_as_memory_is_given(wide_experts):
    """--expert-memory in place of a number: 1 MB has room for 3 of 10 experts of two layers."""
    want, _, _ = answers(wide_experts)
    got, log, stats = answers(wide_experts, expert_memory=1)
    assert got == want
    one = 2 * 3 * 48 * 280 * 4  # bytes: layers, matrices
    assert (1 << 20) // one == 3
    assert "3 of them resident" in log
    assert stats.experts_resident > 0 and stats.experts_cpu + stats.experts_streamed > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "tp, pp, ep, way",
    [
        *((2, 2, ep, "auto") for ep in (1, 2)),
        *((2, 1, 2, way) for way in ("cpu", "stream")),
    ],
)
def test_ranks(checkpoint, expected, tp, pp, ep, way):
    """Four as threads, which start in half the time."""
    room = dict(num_experts_offload_per_rank=3, expert_placement=way, threads=pp > 1)
    got, log, stats = answers(checkpoint, tp * pp, tp=tp, pp=pp, ep=ep, **room)
    assert got == expected() and "in host memory" in log
    assert stats.experts_resident > 0 and stats.experts_cpu + stats.experts_streamed > 0
    assert way == "auto" or (stats.experts_cpu > 0) == (way == "cpu")


@pytest.mark.parametrize(
    "layout",
    [dict(), *(pytest.param(one, marks=pytest.mark.long) for one in (dict(tp=2), dict(tp=2, ep=2), dict(dp=2)))],
)
def test_fixed_experts(checkpoint, expected, monkeypatch, layout):
    """On the device alone, as with all there, half or none; they count as resident. model/experts/test_fixed.py has
    each way to serve the others."""
    monkeypatch.setenv("FAULT", "fixed:0:1")
    program, out = (str(Path(__file__).parent / "faulty.py"),), 2 if "ep" in layout else 5
    more = dict(num_experts_offload_per_rank=out, program=program)
    got, log, stats = answers(checkpoint, 2 if layout else 1, **layout, **more)
    assert got == expected()
    held = 5 if "ep" in layout else 10
    told = rf"experts: {held - 1} a layer in host memory, .*; {held - 1 - out} of them resident, .*; 1 more fixed on"
    assert re.search(told, log), log
    assert stats.experts_resident > 0 and stats.experts_cpu + stats.experts_streamed > 0


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """With blocks of 128 KiB, of which few fit into the smallest cache."""
    sizes = dict(head_dim=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=4)
    return write(tmp_path_factory.mktemp("wide"), **MODELS["qwen3_moe"] | sizes)


SMALL = dict(max_model_len=112, max_num_seqs=8, max_num_batched_tokens=64)
EIGHT = [[random.Random(100 + i).randrange(3, 512) for _ in range(60)] for i in range(8)]


def sent_together(engine: Engine) -> list[list[int]]:
    outputs = engine.generate({str(i): (prompt, greedy(COUNT)) for i, prompt in enumerate(EIGHT)})
    return [outputs[str(i)].tokens for i in range(len(EIGHT))]


@pytest.mark.long
def test_preemption_aborts_and_prefix_hits(wide):
    """In a cache that is too small, while the resident sets follow what is chosen: tokens as with room for all."""
    with Engine(wide, **SMALL) as engine:
        want = sent_together(engine)
    with Engine(wide, 4, tp=2, pp=2, ep=2, mem=1, num_experts_offload_per_rank=3, **SMALL) as engine:
        for turn in range(2):
            sent = {f"{turn}-{i}": (prompt, greedy(COUNT)) for i, prompt in enumerate(EIGHT)}
            gone = protocol.Request("gone", protocol.pack_u32(EIGHT[0][::-1]), greedy(48))
            engine.send(gone, *(protocol.Request(n, protocol.pack_u32(p), s) for n, (p, s) in sent.items()))
            engine.send(protocol.Abort(["gone"]))
            outputs = engine.collect(sent)
            assert [outputs[f"{turn}-{i}"].tokens for i in range(len(EIGHT))] == want
        again = engine.generate({name: (EIGHT[7], greedy(COUNT)) for name in ("first", "again")})
        assert again["first"].tokens == again["again"].tokens == want[7]
        stats = engine.rest()
        assert stats.preemptions > 0 and stats.cached_tokens > 0 and stats.experts_loaded > 0
        assert stats.experts_resident > 0 and stats.experts_cpu + stats.experts_streamed > 0
        assert engine.drain() == 0


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """A checkpoint whose matrices have whole super-blocks also in halves, and its tokens, by --isq, where nothing is in
    host memory and no sequence has to wait."""
    sizes = dict(hidden_size=256, moe_intermediate_size=512, intermediate_size=512, head_dim=128)
    heads = dict(num_attention_heads=4, num_key_value_heads=4)
    path = write(tmp_path_factory.mktemp("quantised"), **MODELS["qwen3_moe"] | sizes | heads)

    @functools.cache
    def tokens(isq: str) -> list[list[int]]:
        with Engine(path, isq=isq, **SMALL) as engine:
            return sent_together(engine)

    return path, tokens


@pytest.mark.long
@pytest.mark.parametrize("isq, ep", [("q4km", 2), ("q8_0", 1)])
def test_quantised_experts_of_two_ranks_while_sequences_are_swapped(quantised, isq, ep):
    """Split (ep 1) or shared out (ep 2). The pool has 16 blocks, of eight sequences of six."""
    path, tokens = quantised
    small = dict(mem=2, kvcache_mem_cpu=8, num_experts_offload_per_rank=3)
    with Engine(path, 2, program=SWAPPING, tp=2, ep=ep, isq=isq, **small, **SMALL) as engine:
        assert sent_together(engine) == sent_together(engine) == tokens(isq)
        stats = engine.rest()
        assert stats.preemptions > 0 and stats.swapped_in > 0 and stats.host_loads > 0
        assert stats.experts_resident > 0 and stats.experts_cpu > 0 and stats.experts_streamed > 0
        assert engine.drain() == 0


@pytest.mark.long
def test_replicas_of_a_node_have_the_experts_once(checkpoint, expected):
    """Each maps the same memory; it has no name, and a rank that is killed leaves nothing."""
    with Engine(checkpoint, ranks=2, dp=2, num_experts_offload_per_rank=5, **OPTIONS) as engine:
        sent = {str(i): (prompt, greedy(COUNT)) for i, prompt in enumerate(PROMPTS)}
        outputs = engine.generate(sent)
        assert [outputs[name].tokens for name in sent] == expected()
        assert "node share; 5" in engine.log()
        found = [shared_memory(pid) for pid in engine.ready.pids]
        assert set(found[0]) == set(found[1])
        weights = 2 * 10 * 3 * 48 * 28 * 4  # layers, experts, matrices
        halves = sum(found[0].values()), sum(found[1].values())
        assert weights <= sum(halves) < weights + (1 << 16)
        os.kill(engine.ready.pids[1], signal.SIGKILL)
        assert engine.wait(60) == errors.RANK_KILLED


def shared_memory(pid: int) -> dict[str, int]:
    """Bytes of experts that a process has mapped, by the memory's number; what two have mapped counts half in each."""
    found: dict[str, int] = {}
    number = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if mapping := re.match(r"[0-9a-f]+-[0-9a-f]+ (\S+) \S+ \S+ (\d+) +(.*)", line):
            number = mapping[2] if mapping[1].endswith("s") and mapping[3].startswith("/memfd:phalanx") else ""
        elif number and line.startswith("Pss:"):
            found[number] = found.get(number, 0) + 1024 * int(line.split()[1])
    return found


@pytest.mark.long
def test_threads_and_memory_are_of_the_node_that_is_named(checkpoint, expected, tmp_path, monkeypatch):
    """Node 0, as no other may be here, with one of this machine's processors."""
    cpu, node = max(os.sched_getaffinity(0)), tmp_path / "devices/system/node/node0"
    node.mkdir(parents=True)
    (node / "cpulist").write_text(f"{cpu}\n")
    monkeypatch.setenv("NODES", str(tmp_path))
    monkeypatch.setenv("MAP_NUMA_NODE", "0")
    program = (str(Path(__file__).parent / "on_nodes.py"),)
    with Engine(checkpoint, program=program, device="cpu", num_experts_offload_per_rank=5, **OPTIONS) as engine:
        outputs = engine.generate({str(i): (prompt, greedy(COUNT)) for i, prompt in enumerate(PROMPTS)})
        assert [one.tokens for one in outputs.values()] == expected()
        assert f"cpus {cpu}" in engine.log()
        process = Path(f"/proc/{engine.ready.pids[0]}")
        threads = [(one / "status").read_text() for one in (process / "task").iterdir()]
        assert {re.search(r"Cpus_allowed_list:\t(\S+)", text)[1] for text in threads} == {str(cpu)} and len(threads) > 1
        if "memory of node 0 first" in engine.log():  # containers often forbid it
            maps = [one.split() for one in (process / "numa_maps").read_text().splitlines()]
            own = [one for one in maps if any(word.startswith("anon=") for word in one)]
            assert {one[1] for one in own} == {"prefer:0"}, own
        assert engine.drain() == 0
