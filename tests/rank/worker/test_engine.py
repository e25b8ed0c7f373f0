"""Messages of a rank about the sizes that it chooses: sequences at once, and the KV cache."""

import functools
import json
import logging
import threading
from types import SimpleNamespace

import pytest
import torch
from phalanx import errors
from phalanx.comm import mesh, threads
from phalanx.comm.watchdog import LocalWatchdog
from phalanx.kernels import host_memory
from phalanx.rank.model.cache_spec import PagedKV, PagedLatent, RecurrentState, row_bytes
from phalanx.rank.model.layer_offload import LayerOffload
from phalanx.rank.model.load import load
from phalanx.rank.model.load_memory import OthersRefuse
from phalanx.rank.options import Options
from phalanx.rank.worker import engine as module
from phalanx.rank.worker import host_copy, kv_cache
from phalanx.rank.worker.engine import Engine, LoadRefused, RankContext

from ...checkpoints import make_config

CPU = torch.device("cpu")


def engine(world, model=None, device=CPU, **options):
    grid = SimpleNamespace(pipe=SimpleNamespace(rank=0), stages=1)
    place = RankContext(world, ["here"] * world.size, grid, device, LocalWatchdog(world.rank))
    made = Engine(Options(**options), place)
    made.model = model
    return made


def size_cache(made):
    """The cache of an engine for 8 sequences, in blocks of 16 tokens, without a peak of steps."""
    return made._size_cache(made._layout(8, 16), 8, 16, 512, 0)


def test_large_weights_on_cpus_run_few_sequences_at_once(caplog):
    model = SimpleNamespace(num_weights=50_000_000_000)
    with caplog.at_level(logging.INFO, "phalanx"):
        assert threads.run(lambda w: engine(w, model, max_num_seqs=32)._token_budget(), 2) == [(10, 10)] * 2
    (said,) = caplog.messages
    assert "10 sequences" in said


def test_a_prompt_beside_decoding_sequences_is_one_step_of_copied_experts():
    gpu = torch.device("cuda")

    def budget(offload, **options):
        model = SimpleNamespace(offload=offload)
        (found,) = threads.run(lambda w: engine(w, model, gpu, max_num_seqs=32, **options)._token_budget(), 1)
        return found

    assert budget(None) == (8192, 32) and budget(object()) == (8224, 32)
    assert budget(object(), max_num_batched_tokens=100) == (100, 32)


def test_experts_that_a_token_visits_count_in_a_step(tmp_path, monkeypatch):
    config = make_config("llama", num_hidden_layers=1) | {
        "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    attention, two_experts, head = 48 * 96 * 2 + 48 * 48 * 2, 2 * 3 * 48 * 100, 48 * 512
    monkeypatch.setattr(module, "CPU_STEP", 2 * 20 * (attention + two_experts + head))

    def budget(world):
        return engine(world, load(tmp_path, mesh.build(world, 1, 1), load_format="dummy"))._token_budget()

    assert threads.run(budget, 1) == [(20, 20)]


def test_the_cache_gets_its_part_of_the_free_memory(caplog, monkeypatch):
    monkeypatch.setattr(kv_cache, "free_memory", lambda device, here: 10_000_000)
    specs = [PagedKV(4, 16, 16), PagedKV(2, 40, 24)]  # as many bytes
    model = SimpleNamespace(cache_specs=lambda: specs, max_model_len=4096, dtype=torch.float32)
    with caplog.at_level(logging.INFO, "phalanx"):  # 4,000,000 bytes for blocks of 16,384
        assert threads.run(lambda w: size_cache(engine(w, model)), 1) == [(244, 3904, 0)]
    (said,) = caplog.messages
    assert "244 blocks of 16" in said and "4 MiB" in said and said.count("3904 tokens") == 2


def test_no_rank_goes_on_with_a_later_model_that_one_cannot_hold(monkeypatch):
    """A rank that cannot load the first model ends the job; for a later model all ranks report it."""
    specs = [PagedKV(4, 16, 16)]
    model = SimpleNamespace(cache_specs=lambda: specs, max_model_len=4096, dtype=torch.float32)

    def refuse(blocks, *_):
        raise errors.FatalError("no room", errors.MEMORY)

    def both(world):
        made = engine(world, model)
        made._served = True
        with pytest.raises(LoadRefused, match="states"):
            made._together(lambda: less_states(world.rank))
        with pytest.raises(LoadRefused, match="no room"):
            size_cache(made)
        return made._together(lambda: world.rank)

    def less_states(rank):
        if rank == 1:
            raise errors.FatalError("no room for the states", errors.MEMORY)
        raise OthersRefuse("another rank", errors.MEMORY)

    monkeypatch.setattr(kv_cache, "fit_length", refuse)
    assert threads.run(both, 2) == [0, 1]
    with pytest.raises(errors.FatalError, match="no room") as stopped:
        threads.run(lambda world: size_cache(engine(world, model)), 1)
    assert not isinstance(stopped.value, LoadRefused)


STATE = RecurrentState(3, 64, 4, 64, 64)
NO_MEMORY = "there is no memory for snapshots of states; lower --max-num-seqs"


@pytest.mark.parametrize(
    "options, snapshots, shares, said",
    [
        ({}, 13, (True, False), []),
        ({"kvcache_mem_cpu": 8}, 13, (True, False), ["--kvcache-mem-cpu is not used: this model's states are"]),
        ({"prefix_cache": False}, 0, (False, False), []),
        ({"mem": 1}, 0, (False, False), [f"no prefix cache: {NO_MEMORY} or --max-model-len, or raise --mem"]),
    ],
)
def test_prompts_begin_with_blocks_where_states_have_snapshots(caplog, monkeypatch, options, snapshots, shares, said):
    monkeypatch.setattr(kv_cache, "free_memory", lambda device, here: 10_000_000)
    specs = [PagedKV(4, 16, 16), STATE]
    model = SimpleNamespace(cache_specs=lambda: specs, max_model_len=1000, dtype=torch.float32)

    def sized(world):
        made = engine(world, model, **options)
        blocks, _, found = size_cache(made)
        caplog.clear()
        return blocks, found, made._may_share(found)

    with caplog.at_level(logging.INFO, "phalanx"):
        ((blocks, found, shared),) = threads.run(sized, 1)
    assert (found, shared) == (snapshots, shares)
    room = (options.get("mem", 0) << 20 or 4_000_000) - (8 + snapshots) * row_bytes(STATE)
    assert blocks == min(8 * 63, room // (16 * 4 * 32 * 4))
    assert len(caplog.messages) == len(said)
    assert all(one.startswith(start) for one, start in zip(caplog.messages, said, strict=True))


def test_snapshots_have_a_part_where_the_longest_sequence_is_shortened():
    """Blocks of 1000 tokens leave nothing for snapshots, which 4096 tokens, of which no more fit, would not either."""
    specs = [PagedKV(4, 16, 16), STATE]

    def sized(world, length):
        model = SimpleNamespace(cache_specs=lambda: specs, max_model_len=length, dtype=torch.float32)
        return size_cache(engine(world, model, mem=1))

    found = [threads.run(functools.partial(sized, length=length), 1) for length in (1000, 4096)]
    assert found == [[(63, 1000, 0)], [(55, 880, 1)]]


@pytest.mark.parametrize("specs", [[PagedKV(8, 128, 128)] * 2, [PagedLatent(576)] * 3])
def test_a_cache_in_fp8_holds_twice_the_tokens(specs, monkeypatch):
    model = SimpleNamespace(cache_specs=lambda: specs, max_model_len=1 << 20, dtype=torch.bfloat16)

    def blocks(world, **options):
        return size_cache(engine(world, model, mem=64, **options))[0]

    (plain,), (narrow,) = (threads.run(functools.partial(blocks, **one), 1) for one in ({}, {"kv_cache_dtype": "fp8"}))
    assert 1.98 * plain < narrow <= 2 * plain


def test_host_memory_is_what_weights_and_a_cpus_cache_leave(monkeypatch):
    """Asked when the weights are loaded; the cache's pages are not touched yet, and count as free."""
    monkeypatch.setattr(kv_cache, "free_memory", lambda device, here: 5000)
    pool = [torch.zeros(2, 100), torch.zeros(2, 100, dtype=torch.uint8), torch.zeros(5)]

    def left(world, device=CPU):
        return engine(world, device=device)._free_of_host(pool)

    assert threads.run(left, 1) == [5000 - 800 - 200 - 20]
    assert threads.run(lambda world: left(world, torch.device("cuda")), 1) == [5000]


def no_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


GPU = SimpleNamespace(device=torch.device("cuda"))  # a sampler there


@pytest.mark.parametrize("options", [{"speculate": "none"}, {"mem": 100}, {"kv_cache_dtype": "fp8"}])
def test_gpus_are_warmed_up_whatever_the_cache_gets(options, monkeypatch, caplog):
    """With --mem nothing has to be measured, but the first prompts would wait for compilers."""
    calls = []
    monkeypatch.setattr(module.graphs, "gemm_variants", lambda *_: ["programs"])
    monkeypatch.setattr(module.jit, "compile_ahead", lambda programs, device: calls.append(programs))
    monkeypatch.setattr(module, "profile_run", lambda *args: calls.append(args[3:]) or 5 << 20)
    model = SimpleNamespace(dtype=torch.bfloat16, cache_specs=list)
    with caplog.at_level(logging.INFO, "phalanx"):
        assert threads.run(lambda w: engine(w, model, **options)._warm_up(GPU, 8192, 64, 16), 1) == [5 << 20]
    kept = torch.float8_e4m3fn if "kv_cache_dtype" in options else torch.bfloat16
    verified = (64, (1,)) if "speculate" in options else (128, (1, 2, 4, 8))
    assert calls == [["programs"], (8192, 64, 16, kept, *verified, None)]
    (said,) = caplog.messages
    assert "8192 tokens" in said and "5 MiB" in said


def test_cpus_compile_while_they_load(monkeypatch):
    monkeypatch.setattr(module, "profile_run", lambda *_: pytest.fail("there is nothing to find"))
    sampler = SimpleNamespace(device=CPU)
    assert threads.run(lambda w: engine(w)._warm_up(sampler, 512, 8, 16), 1) == [0]


def test_a_step_that_does_not_fit_names_its_options(monkeypatch):
    monkeypatch.setattr(module, "profile_run", no_memory)
    monkeypatch.setattr(module.graphs, "gemm_variants", lambda *_: [])
    monkeypatch.setattr(module.jit, "compile_ahead", lambda *_: None)
    with pytest.raises(errors.FatalError, match="enough.*99999 tokens") as caught:
        model = SimpleNamespace(dtype=torch.bfloat16, cache_specs=list)
        threads.run(lambda w: engine(w, model)._warm_up(GPU, 99999, 77, 16), 1)
    assert caught.value.code == errors.MEMORY
    assert "--max-num-batched-tokens (now 99999)" in str(caught.value)
    assert "--max-num-seqs (now 77)" in str(caught.value)


@pytest.mark.parametrize("ranks, refused", [(1, True), (2, False)])
def test_a_step_of_a_later_model_that_does_not_fit(ranks, refused, monkeypatch):
    """One rank goes back to the model before. Of several the others wait within the step, which ends the job."""
    monkeypatch.setattr(module, "profile_run", no_memory)
    monkeypatch.setattr(module.graphs, "gemm_variants", lambda *_: [])
    monkeypatch.setattr(module.jit, "compile_ahead", lambda *_: None)

    def later(world):
        made = engine(world, SimpleNamespace(dtype=torch.bfloat16, cache_specs=list))
        made._served = True
        with pytest.raises(errors.FatalError, match="enough.*99999 tokens") as caught:
            made._warm_up(GPU, 99999, 77, 16)
        return isinstance(caught.value, LoadRefused)

    assert threads.run(later, ranks) == [refused] * ranks


@pytest.mark.parametrize("options, named", [({"mem": 4096}, "--mem (now 4096)"), ({}, "--kv-fraction (now 0.4)")])
def test_a_cache_that_does_not_fit_names_its_option(options, named, monkeypatch):
    monkeypatch.setattr(kv_cache, "allocate", no_memory)
    model = SimpleNamespace(cache_specs=lambda: [PagedKV(4, 16, 16)] * 2, max_model_len=4096, dtype=torch.float32)
    with pytest.raises(errors.FatalError, match="enough.*3200 tokens") as caught:
        threads.run(lambda w: (made := engine(w, model, **options))._allocate(made._layout(8, 16), 200, 16, 8), 1)
    assert caught.value.code == errors.MEMORY and named in str(caught.value)


def test_weights_that_the_host_has_no_memory_for(monkeypatch):
    monkeypatch.setattr(module, "load_model", lambda *_, **__: torch.empty(1 << 50))
    with pytest.raises(errors.FatalError, match="weights.*allocate memory") as caught:
        threads.run(lambda w: engine(w)._load(engine(w)._directory(), 0, 0), 1)
    assert caught.value.code == errors.MEMORY and "--tp" in str(caught.value)


@pytest.fixture
def gpu(monkeypatch):
    """A device of CUDA's kind whose tensors are the CPU's."""
    monkeypatch.setattr(module, "storages", lambda model, device: host_copy.storages(model, CPU))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    return SimpleNamespace(type="cuda")


def sleeps(world, gpu, **model):
    """An engine whose model has been put to sleep, and the model's weights."""
    weights = torch.arange(64.0)
    loaded = SimpleNamespace(weights=weights, offload=None, layer_offload=None)
    vars(loaded).update(model)
    made = engine(world, loaded, gpu)
    made.runner, made.source = object(), SimpleNamespace(head=torch.ones(8))
    made._served = True
    made.unload(keep=True)
    return made, weights


def test_what_is_in_host_memory_stays_there(gpu):
    """A table's rows are not copied; a slot of layers on the device comes back with the rest."""
    layers = LayerOffload({}, [], 0, torch.float32, CPU)

    def one(world):
        table = host_memory.zeros((8,), torch.float32, pin=False).fill_(3)
        slot = torch.ones(8)
        made, weights = sleeps(world, gpu, layer_offload=layers, table=table, slot=slot[:4])
        assert made.kept and weights.untyped_storage().nbytes() == slot.untyped_storage().nbytes() == 0
        assert table.tolist() == [3] * 8
        made.load_weights()
        return weights.tolist() == list(range(64)) and slot.tolist() == [1] * 8

    assert threads.run(one, 2) == [True, True]


def test_weights_are_kept_on_all_ranks_and_come_back(gpu, caplog):
    caplog.set_level(logging.INFO, "phalanx")

    def one(world):
        made, weights = sleeps(world, gpu)
        assert made.kept and weights.untyped_storage().nbytes() == made.source.head.untyped_storage().nbytes() == 0
        made.unload(keep=True)  # again
        made.load_weights()
        assert torch.equal(weights, torch.arange(64.0)) and torch.equal(made.source.head, torch.ones(8))
        made.unload(keep=True)  # with its weights alone
        assert weights.untyped_storage().nbytes() == 0
        made.unload()
        return made.kept

    assert threads.run(one, 2) == [False, False]
    assert "copied back" in caplog.text


@pytest.mark.sample(3)
@pytest.mark.parametrize("why", ["room", "refused", "offload"])
def test_weights_that_cannot_be_kept_are_dropped_on_all_ranks(gpu, monkeypatch, caplog, why):
    caplog.set_level(logging.INFO, "phalanx")
    local = threading.local()
    free = lambda device, ranks: 100 if why == "room" and local.rank else 1 << 30  # noqa: E731
    monkeypatch.setattr(kv_cache, "free_memory", free)
    zeros = host_copy.host_memory.zeros

    def refuse(*args, **more):
        if local.rank and why == "refused":
            raise errors.HostMemoryError("no")
        return zeros(*args, pin=False)

    monkeypatch.setattr(host_copy.host_memory, "zeros", refuse)

    def one(world):
        local.rank = world.rank
        return sleeps(world, gpu, **({"offload": object()} if why == "offload" else {}))[0].kept

    assert threads.run(one, 2) == [False, False]
    assert "dropped" in caplog.text


@pytest.mark.long
def test_weights_whose_memory_is_taken_meanwhile(gpu, monkeypatch):
    def no_room(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(host_copy.HostCopy, "restore", no_room)

    def one(world):
        made, _ = sleeps(world, gpu)
        with pytest.raises(LoadRefused, match="memory"):
            made.load_weights()
        made.abandon()
        return made.kept

    assert threads.run(one, 2) == [False, False]


@pytest.mark.parametrize("options, pp, states, device, found", [
    ({}, 1, False, "cpu", (1, 2, 4, 8)), ({"speculate": "none"}, 1, False, "cpu", (1,)), ({}, 1, True, "cpu", (1,)),
    ({}, 2, False, "cpu", (1,)), ({}, 1, False, "cuda", (1,)), ({"speculate": "ngram"}, 2, True, "cuda", (1, 8)),
    ({"num_speculative_tokens": 2}, 1, False, "cpu", (1, 2, 3)),
])  # fmt: skip
def test_tokens_that_steps_verify(options, pp, states, device, found):
    """No option has to ask for steps that take neither memory nor graphs."""
    spec = RecurrentState(3, 7, 2, 4, 5) if states else PagedKV(2, 8, 8)

    def rank(world):
        made = engine(world, SimpleNamespace(cache_specs=lambda: [spec]), **options)
        made.place = made.place._replace(device=torch.device(device), mesh=SimpleNamespace(stages=pp))
        return made._query_lens

    assert threads.run(rank, 1) == [found]
