"""Layers whose weights are in host memory: logits to the last bit as with all on the device, in every format."""

import pytest
import torch
from phalanx import errors
from phalanx.comm import mesh, threads
from phalanx.kernels import host_memory
from phalanx.rank import layer_slots
from phalanx.rank.model import layer_offload
from phalanx.rank.model.experts.offload import OffloadOptions
from phalanx.rank.model.formats import dense
from phalanx.rank.model.layer_offload import LayerOffload, left_of_host
from phalanx.rank.model.layers.embedding import VocabParallelEmbedding
from phalanx.rank.model.load import load
from phalanx.rank.model.load_memory import weight_memory
from phalanx.rank.model.weights.dummy import Dummy
from phalanx.rank.worker.host_copy import HostCopy, storages

from ...checkpoints import make_checkpoint
from .harness import BLOCK, make_batch, nan_caches, run_steps, tokens
from .stored_formats.packers import awq, quantise
from .test_architectures import MODELS, write

ALL, SOME = 1 << 30, 440_000  # bytes: of every layer, and of `plain`'s table and one of its four on one rank
SEQUENCES = [tokens(30, 1), tokens(9, 2)]
STEPS = [[(0, 20), (1, 9)], *[[(0, 1)]] * 10]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("layers") / "plain", "qwen3", hidden_size=64, intermediate_size=128)


@pytest.fixture(scope="module")
def made(plain, tmp_path_factory):
    """Checkpoints by name."""

    def make(name):
        place = tmp_path_factory.mktemp("made")
        if name in MODELS:
            return write(place, **MODELS[name])
        if name == "awq":
            settings = dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm")
            quantise(plain, place, awq(32), settings)
            return place / "quantised"
        return plain

    return make


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name, layers, tp, pp, options",
    [
        ("plain", ALL, 1, 1, {}),
        ("plain", ALL, 2, 1, {"isq": "q8_0"}),
        ("plain", SOME, 1, 1, {"isq": "q4_0", "load_format": "dummy"}),
        ("plain", SOME, 2, 2, {}),
        ("awq", ALL, 1, 1, {}),
        ("deepseek_v3", ALL, 2, 1, {}),
        ("gemma2", ALL, 1, 2, {}),
        ("gemma4_text small", ALL, 2, 1, {}),
        ("qwen3_moe", ALL, 1, 1, {"experts": OffloadOptions(offload=3)}),
    ],
)
def test_logits(made, caplog, name, layers, tp, pp, options):
    path = made(name)
    expected = run_steps(path, SEQUENCES, STEPS, tp=tp, pp=pp, **options)
    with caplog.at_level("INFO"):
        found = run_steps(path, SEQUENCES, STEPS, tp=tp, pp=pp, layers=layers, **options)
    assert "host memory" in caplog.text
    assert all(map(torch.equal, found, expected))


def test_what_moves_and_what_the_log_says(plain, caplog):
    def one(comm):
        with caplog.at_level("INFO"):
            return load(plain, mesh.build(comm, 1, 1), layers=SOME)

    (model,) = threads.run(one, 1)
    (line,) = [one.message for one in caplog.records if "layers are in host memory" in one.message]
    assert "host memory," in line and "a last resort" in line
    offload = model.layer_offload
    slots = {copy.slot.untyped_storage().data_ptr() for copies in offload._copies for copy in copies}
    assert len(offload._copies) == 1 and len(slots) == 1
    weight = model.model.layers["3"].mlp.down_proj.matrix
    assert weight.untyped_storage().data_ptr() in slots
    assert model.model.layers["2"].mlp.down_proj.matrix.untyped_storage().data_ptr() not in slots


def test_tables_come_first(monkeypatch):
    """The largest that fits, whole, and none that a head reads; on a GPU they get no memory there."""
    monkeypatch.setattr(host_memory, "in_reach", lambda device: True)
    dtype = torch.bfloat16

    def one(comm):
        grid = mesh.build(comm, 1, 1)
        small, large, tied = (VocabParallelEmbedding(100, width, grid) for width in (8, 16, 16))
        tied.tied = True
        for table in (small, large, tied):
            table.build("table", dense)
        for device, size, want in (
            ("cuda", 5000, [small, large]), ("cuda", 4700, [large]), ("cuda", 1599, []), ("cpu", 5000, []),
        ):  # fmt: skip
            tables = [small, large, tied]
            for table in tables:
                table.in_host = False
            found = LayerOffload({}, tables, size, dtype, torch.device(device))
            assert [table for table in tables if table.in_host] == want
            if device == "cuda":
                kept = weight_memory(tables, Dummy(), dtype, dtype, torch.device(device))
                assert (found.table_bytes, kept) == (sum(2 * t.weight.numel() for t in want), 8000 - found.table_bytes)
            assert not found.copies_layers and not found.host_bytes
        return found

    (found,) = threads.run(one, 1)
    assert found.table_bytes == 4800
    (line,) = found.attach(aside=True)
    assert "2 embedding tables" in line and "host memory" in line

    monkeypatch.setattr(host_memory, "in_reach", lambda device: False)
    (found,) = threads.run(one_out_of_reach, 1)
    (line,) = found.attach(aside=True)
    assert not found.table_bytes and "tables stay" in line


def one_out_of_reach(comm):
    table = VocabParallelEmbedding(100, 8, mesh.build(comm, 1, 1))
    table.build("table", dense)
    return LayerOffload({}, [table], 5000, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("name", ["plain", "gemma4_text small"])
def test_a_model_that_slept(made, name):
    """Slots and what stays on the device leave it and come back, with what reads them."""

    def one(comm):
        model = load(made(name), mesh.build(comm, 1, 1), layers=ALL)
        found = []
        for _ in range(2):
            caches = nan_caches(model, 16)
            found.append(model([make_batch([(SEQUENCES[0], 0, list(range(8)))], BLOCK, caches)]).clone())
            copy = HostCopy(storages(model, torch.device("cpu")))
            copy.give_device_memory()
            copy.restore()
        return found

    ((expected, found),) = threads.run(one, 1)
    assert torch.equal(found, expected)


def test_two_microbatches(plain):
    """One is a sublayer ahead of the other: no slot may be filled anew before both have left."""

    def one(comm):
        batches = []
        grid, found = mesh.build(comm, 1, 1), []
        for layers in (0, ALL):
            model = load(plain, grid, layers=layers)
            caches = nan_caches(model, 16)
            batches = [
                make_batch(
                    [(SEQUENCES[i], 0, list(range(8 * i, 8 * i + -(-len(SEQUENCES[i]) // BLOCK))))], BLOCK, caches
                )
                for i in range(2)
            ]
            found.append(model(batches).clone())
        return found

    ((expected, found),) = threads.run(one, 1)
    assert torch.equal(found, expected)


def test_layers_lie_apart():
    sizes = [10] * 8
    assert layer_slots.choose(sizes, 1000) == list(range(8))
    assert layer_slots.choose(sizes, 29) == [3, 7]
    assert layer_slots.choose(sizes, 9) == layer_slots.choose([], 9) == []
    assert layer_slots.slots(layer_slots.choose([10] * 5, 30)) == 2  # 0, 2 and 4
    assert layer_slots.slots([1, 2]) == 3 and layer_slots.slots([0]) == 2


@pytest.mark.parametrize("layers, nothing, words", [
    (1000, False, "a table or a layer is more than that; all weights stay on the device"),
    (SOME, True, "on this machine no weights can be moved; all stay where they are"),
])  # fmt: skip
def test_where_none_move(plain, caplog, monkeypatch, layers, nothing, words):
    caplog.set_level("INFO")
    if nothing:  # as where oneDNN has packed all of them
        monkeypatch.setattr(layer_offload, "_tensors", lambda part: iter(()))
    threads.run(lambda comm: load(plain, mesh.build(comm, 1, 1), layers=layers), 1)
    assert f"--cpu-offload-gb: {words}" in caplog.messages


def test_more_than_the_host_has():
    gpu = torch.device("cuda")
    assert left_of_host(3, "layers", gpu, 10) == 7
    assert left_of_host(3, "layers", gpu, None) is None
    with pytest.raises(errors.FatalError, match="layers.*take 3.00.*2.00 GB") as e:
        left_of_host(3 * 10**9, "layers", gpu, 2 * 10**9)
    assert e.value.code == errors.MEMORY


def test_memory_that_is_not_pinned():
    with pytest.raises(errors.FatalError, match="--test.*20.0 MB.*ulimit -l") as e:
        host_memory.check_pinned("--test", [torch.empty(2 * 10**7, dtype=torch.uint8), torch.empty(0)])
    assert e.value.code == errors.MEMORY
