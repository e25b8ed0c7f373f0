"""Decode steps of several tokens of a sequence, beside steps of one token: as speculation verifies what was drafted."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from phalanx.comm import mesh, mpi, threads
from phalanx.comm.shm import ShmComm
from phalanx.comm.watchdog import LocalWatchdog
from phalanx.kernels.cpp import ops
from phalanx.rank import protocol
from phalanx.rank.model.load import load
from phalanx.rank.options import Options
from phalanx.rank.worker import kv_cache
from phalanx.rank.worker.batch_builder import build_batches
from phalanx.rank.worker.cpu_graphs import CpuDecodeGraphs
from phalanx.rank.worker.engine import Engine, RankContext
from phalanx.rank.worker.graphs import DecodeGraphs
from phalanx.rank.worker.model_runner import step_stream
from phalanx.rank.worker.state import BatchState, ScheduledBatch
from phalanx.rank.worker.upload import Upload

from ...checkpoints import make_checkpoint
from ...ranks import run_ranks
from ..model.harness import BLOCK, distance, tokens
from ..model.hybrids import HYBRIDS
from ..model.test_architectures import MODELS, write

TOLERANCE = 1e-4
LENGTH, QUERY = 64, 4
PROMPTS = [17, 5, 30, 1]  # tokens of each sequence's prompt
NAMES = [
    "llama",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v32",
    "minimax_m3_vl_text",
    "deepseek_v4",
    "gemma3_text",
    "qwen3_next",
    "gpt_oss",
    "falcon_h1",
    "lfm2",
    "kimi_linear",
    "llama4_text",
]
REPLAYED = set(NAMES) - {
    "deepseek_v2",
    "deepseek_v32",
    "minimax_m3_vl_text",
    "kimi_linear",
    "deepseek_v4",
}  # on CPUs torch computes latent attention, which is not recorded


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> its checkpoint, made once."""

    def make(name):
        path = tmp_path_factory.mktemp("model")
        if name == "llama":
            return make_checkpoint(path, tokenizer=False)
        return write(path, **(MODELS | HYBRIDS)[name])

    return functools.cache(make)


class Rank:
    """One rank's model, caches and sequences, of which the host knows all tokens."""

    def __init__(self, grid, path, replays, device="cpu"):
        torch.set_grad_enabled(False)
        count, device = len(PROMPTS), torch.device(device)
        if device.type == "cuda":
            torch.cuda.set_stream(step_stream(device))  # the default stream cannot be captured
        self.tensor, self.model = grid.tensor, load(path, grid, device, "f32", max_model_len=LENGTH)
        self.state = BatchState(count, LENGTH, BLOCK)
        self.state.table[:] = np.random.default_rng(0).permutation(self.state.table.size).reshape(count, -1)
        self.ids = np.array([tokens(LENGTH, seed) for seed in range(count)])
        self.state.tokens, self.state.known[:] = list(self.ids.copy()), LENGTH
        self.state.num_blocks[:] = self.state.table.shape[1]
        specs = self.model.cache_specs()
        self.caches = kv_cache.allocate(specs, self.state.table.size, BLOCK, self.model.dtype, device, count, QUERY)
        for tensor in (tensor for layer in self.caches for tensor in layer):
            tensor.fill_(float("nan"))
        last, upload = torch.zeros(count, 1, dtype=torch.int64, device=device), Upload(device)
        self.step_of = functools.partial(build_batches, self.state, last=last, caches=self.caches, upload=upload)
        self.graphs = None
        if replays and device.type == "cpu":
            self.graphs = CpuDecodeGraphs(self.model, self.state, last, self.caches)
        elif replays:
            self.graphs = DecodeGraphs(self.model, self.state, last, self.caches, upload, (QUERY,))
            self.graphs.capture(lambda done: None)

    def step(self, rows, starts, counts, query_len=1, drafts=None):
        """The logits of all the step's tokens, for each row. drafts: ids of all but each row's first token."""
        for row, start in zip(rows, starts, strict=True):
            self.state.tokens[row] = self.ids[row].copy()
            if drafts is not None:
                self.state.tokens[row][start + 1 : start + query_len] = drafts
        work = ScheduledBatch(
            *map(np.array, (rows, starts, counts)), np.ones(len(rows), bool), np.zeros(len(rows), int), query_len
        )
        if self.graphs is not None and self.graphs.supports(work):
            hidden, _ = self.graphs.replay(work)
        else:
            batches, _ = self.step_of(work)
            hidden = self.model.forward(batches)
        logits = self.tensor.all_gather(self.model.logits(hidden)).permute(1, 0, 2).flatten(1)
        return list(logits[:, : self.model.vocab_size].to("cpu", copy=True).split(list(counts)))

    def prefill(self):
        rows = sorted(range(len(PROMPTS)), key=lambda row: PROMPTS[row] > 1)
        self.step(rows, [0] * len(rows), [PROMPTS[row] for row in rows])

    def decode(self, rows, starts, query_len, drafts=None):
        return torch.stack(self.step(rows, starts, [query_len] * len(rows), query_len, drafts))


def run(function, path, tp, replays, device="cpu"):
    return threads.run(lambda comm: function(Rank(mesh.build(comm, tp, 1), path, replays, device)), tp)[0]


def plain(rank):
    """Logits [rows, 20, vocab] of one token a step."""
    rank.prefill()
    rows = list(range(len(PROMPTS)))
    return torch.cat([rank.decode(rows, [n + i for n in PROMPTS], 1) for i in range(20)], 1)


@pytest.fixture(scope="module")
def wanted(made):
    return functools.cache(lambda name: run(plain, made(name), 1, False))


SIZES = [(4, 1), (4, 3), (4, 4)]  # of captured steps: sequences, and tokens of each


def several(rank):
    """Logits [rows, 17, vocab] of four, one and three tokens a step."""
    rank.prefill()
    rows = list(range(len(PROMPTS)))
    found = [rank.decode(rows, [n + i for n in PROMPTS], QUERY) for i in (0, 4, 8)]
    found += [rank.decode(rows, [n + i for n in PROMPTS], 1) for i in (12, 13)]
    return torch.cat([*found, rank.decode(rows, [n + 14 for n in PROMPTS], 3)], 1)


WAYS = [(1, False), (1, True), (2, False)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("tp, replays", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_four_tokens_is_four_steps_of_one(made, wanted, name, tp, replays):
    if replays and not ops.available():
        pytest.skip("no C++ compiler that works")

    def steps(rank):
        found = several(rank)
        if replays and name in REPLAYED:
            assert sorted(rank.graphs._captured) == SIZES
        return found

    found = run(steps, made(name), tp, replays)
    assert distance(found, wanted(name)[:, :17]) < TOLERANCE


@pytest.mark.long  # test_served.py replays steps of two ranks in the short run
@pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
def test_replayed_steps_of_two_ranks(made, wanted, tmp_path):
    """Under mpirun, where all-reduces are C++ and are recorded with the rest."""
    found = on_two_ranks(tmp_path, {name: str(made(name)) for name in REPLAYED}, "cpu")
    for name, (logits, captured) in found.items():
        assert captured == SIZES and distance(logits, wanted(name)[:, :17]) < TOLERANCE


def on_two_ranks(directory, paths, device):
    """Logits by models' names, of `several` and the captured sizes, of ranks that replay steps under mpirun."""
    job, script = directory / "job.json", directory / "ranks.py"
    job.write_text(json.dumps(paths))
    script.write_text("import sys\nfrom phalanx.tests.rank.worker.test_query_len import main\nmain(*sys.argv[1:])\n")
    done = run_ranks(2, script, str(job), device, timeout=300)
    assert done.returncode == 0, done.stderr
    return torch.load(job.with_suffix(".pt"))


def main(job, device):
    """A rank of on_two_ranks."""
    torch.set_num_threads(1)
    world, found = mpi.join(2), {}
    if device == "cpu":
        grid = mesh.build(world, 2, 1, tp_backend_factory=ShmComm)
    else:
        from phalanx.comm.custom_allreduce import CustomAllReduceComm
        from phalanx.comm.nccl import NcclComm

        device = f"cuda:{world.rank}"
        torch.cuda.set_device(device)
        grid = mesh.build(world, 2, 1, NcclComm, CustomAllReduceComm)
    for name, path in json.loads(Path(job).read_text()).items():
        rank = Rank(grid, Path(path), True, device)
        found[name] = several(rank), sorted(rank.graphs._captured)
        rank.graphs.close()
    if world.rank == 0:
        torch.save(found, Path(job).with_suffix(".pt"))
    world.barrier()
    mpi.leave()


@pytest.mark.sample(5)
@pytest.mark.parametrize("tp, replays", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_rejected_tokens_leave_no_trace(made, wanted, name, tp, replays):
    if replays and not ops.available():
        pytest.skip("no C++ compiler that works")
    check_rejected(made(name), wanted(name), tp, replays)


def check_rejected(path, want, tp, replays, device="cpu"):
    """Two sequences keep what was drafted up to their own token, and go on there; then a prompt's chunk does."""

    def steps(rank):
        rank.prefill()
        first = rank.decode([0, 2], [17, 30], QUERY, drafts=[3, 5, 7])  # all drafts are wrong
        assert distance(first[:, :1], want[[0, 2], :1]) < TOLERANCE
        second = rank.decode([2, 0], [31, 18], QUERY)  # two of these are kept
        assert distance(second, want[[2, 0], 1:5]) < TOLERANCE
        wrong = rank.decode([0, 2], [20, 33], QUERY, drafts=[9, 9, 9])
        assert distance(wrong[:, :1], want[[0, 2], 3:4]) < TOLERANCE
        one = rank.decode([0], [21], 1)
        assert distance(one, want[:1, 4:5]) < TOLERANCE
        (chunk,) = rank.step([2], [34], [9])
        assert distance(chunk, want[2, 4:13]) < TOLERANCE
        after = rank.decode([0, 2], [22, 43], QUERY)
        return torch.cat((after[0] - want[0, 5:9], after[1] - want[2, 13:17]))

    assert run(steps, path, tp, replays, device).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_beside_prompts(made, wanted, name):
    """Rows that decode come first; a prompt's chunk may be shorter than they are."""

    def steps(rank):
        rank.step([3, 1], [0, 0], [1, 5])
        decoded, chunk, short = rank.step([1, 0, 3], [5, 0, 1], [4, 17, 2], QUERY)
        assert chunk.isfinite().all() and len(chunk) == 17
        assert distance(short, wanted(name)[3, :2]) < TOLERANCE
        return decoded

    assert distance(run(steps, made(name), 1, False), wanted(name)[1, :4]) < TOLERANCE


PARAMETERS = {
    "greedy": dict(temperature=0.0),
    "drawn": dict(temperature=1.0, seed=3, presence_penalty=0.5, frequency_penalty=0.5),
}


def serve(world, path, tp, parameters):
    """Tokens of a sequence: one each step; and of another, of several each step that were drafted right, then wrong."""
    place = RankContext(
        world, ["here"] * world.size, mesh.build(world, tp, world.size // tp), torch.device("cpu"), LocalWatchdog()
    )
    engine = Engine(Options(model=str(path), max_num_seqs=2, max_model_len=128, mem=1), place)
    engine.load()
    runner, prompt, steps = engine.runner, [5, 7, 11, 13, 17], iter(range(100))
    apply, state = runner.state.apply, runner.state

    def run(row, start, count, outputs, query_len=1, drafts=()):
        """Tokens from `start` on: those that the host knows, or the newest one alone, and drafts."""
        work = ScheduledBatch(
            *(np.array([x]) for x in (row, start, count)), np.ones(1, bool), np.array([outputs]), query_len,
            np.array([drafts[1:]]) if drafts else None,
        )  # fmt: skip
        new = []
        if not start:
            sampling = protocol.SamplingParams(max_tokens=99, **parameters)
            blocks = protocol.pack_u32(range(row * 8, row * 8 + 8))
            new = [protocol.NewSequence(row, protocol.pack_u32(prompt), len(prompt), 0, blocks, sampling)]

        def applied(plan):
            apply(plan)
            if drafts:
                state.tokens[row], state.known[row] = np.array([0] * start + list(drafts)), start + len(drafts)
            elif start:
                state.known[row] = 0
            return work

        state.apply = applied
        future = runner.start(protocol.Plan(step=next(steps), new=new))
        assert future.wait(60)
        return protocol.unpack_u32(future.output().ids)

    alone, several = run(0, 0, 5, 0), run(1, 0, 5, 0)
    for i in range(12):
        alone += run(0, 5 + i, 1, 1 + i)
    mine = torch.tensor(alone) if world.rank == 0 else torch.zeros(13, dtype=torch.int64)
    right = world.broadcast(mine, 0).tolist()
    several += run(1, 5, 4, 1, 4, right[:4])
    several += run(1, 9, 1, 5)  # the newest token is where the sampler left it
    wrong = [right[5], right[6], (right[7] + 1) % 512, right[8]]
    several += run(1, 10, 4, 6, 4, wrong)[:2]
    several += run(1, 12, 4, 8, 4, right[7:11])
    runner.finish()
    engine.unload()
    return alone, several


@pytest.mark.sample(4)
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", PARAMETERS)
def test_what_the_worker_samples(made, name, tp, pp):
    results = threads.run(lambda world: serve(world, made("llama"), tp, PARAMETERS[name]), tp * pp)
    alone, several = results[0]
    assert len(set(alone)) > 3 and several == alone[:12]
