"""Decode steps that are replayed on CPUs, beside the same steps computed as any other."""

import numpy as np
import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.cpp import ops
from phalanx.rank.model.cache_spec import cache_dtype
from phalanx.rank.model.load import load
from phalanx.rank.options import IN_SITU
from phalanx.rank.worker import kv_cache
from phalanx.rank.worker.batch_builder import build_batches
from phalanx.rank.worker.cpu_graphs import MAX_ROWS, CpuDecodeGraphs
from phalanx.rank.worker.state import BatchState, ScheduledBatch
from phalanx.rank.worker.upload import Upload

from ...checkpoints import make_checkpoint
from ..model import test_architectures

pytestmark = pytest.mark.skipif(not ops.available(), reason="no C++ compiler that works")
BLOCK, LENGTH, MAX_NUM_SEQS = 4, 64, 6
MODELS = {
    "llama": dict(),
    "qwen3": dict(model_type="qwen3"),
    "biased": dict(attention_bias=True, mlp_bias=True),
    "windows": dict(model_type="qwen3", use_sliding_window=True, sliding_window=5, max_window_layers=1),
}
# Model types, and one shape, whose decode steps are not recorded: torch computes latent attention, Gemma 4's norm of
# values, what Hunyuan norms behind the rotation, OPT's ReLU, and the clipping of some OLMo.
EAGER = {
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "gemma4",
    "gemma4_text",
    "glm4_moe_lite",
    "glm5_next",
    "glm_moe_dsa",
    "gpt_neox",
    "kimi_k25",
    "kimi_linear",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "minicpm3",
    "minimax_m3_vl",
    "minimax_m3_vl_text",
    "mistral3 of mistral4",
    "mistral4",
    "olmo clipped",
    "opt",
}
RECORDED = {name: one for name, one in test_architectures.MODELS.items() if not {name, one["model_type"]} & EAGER}


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def random_like(x, make):
    if x.dtype == torch.uint8:  # scales of about 1
        return torch.randint(116, 122, x.shape, generator=make, dtype=torch.uint8)
    return torch.randn(x.shape, generator=make).mul(100 if x.itemsize == 1 else 1).to(x.dtype)


class Rank:
    def __init__(self, comm, path, kept="auto", **options):
        self.mesh = mesh.build(comm, comm.size, 1)
        self.model = model = load(path, self.mesh, **options)
        self.rows = BatchState(MAX_NUM_SEQS, LENGTH, BLOCK)
        order = np.random.default_rng(0).permutation(self.rows.table.size)
        self.rows.table[:] = order.reshape(self.rows.table.shape)
        self.last = torch.arange(MAX_NUM_SEQS)[:, None] * 7 + 1
        make = torch.Generator().manual_seed(comm.rank)
        specs = model.cache_specs()
        dtype = cache_dtype(kept, model.dtype)
        caches = kv_cache.allocate(specs, self.rows.table.size, BLOCK, dtype, torch.device("cpu"), MAX_NUM_SEQS)
        caches = [[random_like(x, make) for x in layer] for layer in caches]
        self.replayed, self.plain = ([tuple(x.clone() for x in layer) for layer in caches] for _ in range(2))
        self.graphs = CpuDecodeGraphs(model, self.rows, self.last, self.replayed)

    def step(self, chosen, starts):
        """One of these rows at these lengths, in both ways: how far the stream and the caches differ."""
        n = len(chosen)
        ones = np.ones(n, np.int64)
        work = ScheduledBatch(np.array(chosen), np.array(starts), ones, ones.astype(bool), ones)
        assert self.graphs.supports(work)
        upload = Upload(torch.device("cpu"))
        batches, rows = build_batches(self.rows, work, self.last, self.plain, upload)
        want = self.model.forward(batches)
        logits = self.model.logits(want)
        got, same = self.graphs.replay(work)
        assert torch.equal(same, rows)
        torch.testing.assert_close(self.graphs.head.logits, logits, atol=1e-3, rtol=1e-3)
        assert torch.equal(self.graphs.head.argmax(self.mesh.tensor), logits.argmax(-1))
        pairs = zip(self.replayed, self.plain, strict=True)
        caches = max(
            float((a.float() - b.float()).abs().max())
            for mine, other in pairs
            for a, b in zip(mine, other, strict=True)
        )
        return max(float((got - want).abs().max()), caches)


STEPS = [([2], [0]), ([2], [1]), ([0, 4, 5], [7, 0, 40]), ([2], [2]), ([5, 0, 1], [41, 8, 30]), ([2, 3], [3, 63])]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [1, 2])
def test_replayed_steps_are_what_the_others_are(tmp_path, name, count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    path = make_checkpoint(tmp_path, tokenizer=False, **MODELS[name])

    def run(comm):
        rank = Rank(comm, path)
        rank.rows.known[3], rank.rows.tokens[3] = 64, np.arange(64)  # of this one the host knows the token
        assert max(rank.step(*step) for step in STEPS) < 1e-4
        assert sorted(rank.graphs._captured) == [(1, 1), (2, 1), (3, 1)]
        rank.graphs.close()

    threads.run(run, 1)
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_cache_in_fp8(tmp_path, dtype):
    path = make_checkpoint(tmp_path, tokenizer=False, **MODELS["windows"])

    def run(comm):
        rank = Rank(comm, path, kept="fp8", dtype=dtype)
        assert max(rank.step(*step) for step in STEPS) < 1e-4
        assert sorted(rank.graphs._captured) == [(1, 1), (2, 1), (3, 1)]

    threads.run(run, 1)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "name", test_architectures.of_short(RECORDED, test_architectures.first_of_each_class(RECORDED))
)
def test_every_architecture_is_recorded(tmp_path, name):
    """With its head. Operations that cannot be recorded yet belong into C++, or their model into EAGER."""
    path = test_architectures.write(tmp_path, **test_architectures.MODELS[name])

    def run(comm):
        rank = Rank(comm, path)
        assert max(rank.step(*step) for step in STEPS) < 1e-4
        assert sorted(rank.graphs._captured) == [(1, 1), (2, 1), (3, 1)]
        assert all(captured.head is not None for captured in rank.graphs._captured.values())

    threads.run(run, 1)


@pytest.mark.parametrize("isq", test_architectures.of_short(["none", *IN_SITU], ["none", "q8_0", "q4k", "q6k", "fp8"]))
def test_bf16_and_quantised_weights(tmp_path, isq):
    path = make_checkpoint(tmp_path, tokenizer=False, hidden_size=256, intermediate_size=256)

    def run(comm):
        rank = Rank(comm, path, dtype="bf16", isq=isq)
        assert max(rank.step(*step) for step in STEPS) < 1e-3, "the same operations"
        assert sorted(rank.graphs._captured) == [(1, 1), (2, 1), (3, 1)]

    threads.run(run, 1)


def test_sums_that_others_make_are_not_recorded(tmp_path, caplog):
    """Ranks in threads add up by torch: such steps stay as they are, and it is said once."""
    path = make_checkpoint(tmp_path, tokenizer=False)

    def run(comm):
        rank = Rank(comm, path)
        ones = np.ones(1, np.int64)
        work = ScheduledBatch(ones, ones, ones, ones.astype(bool), ones)
        assert rank.graphs.supports(work)
        rank.graphs.replay(work)
        assert not rank.graphs.supports(work) and not rank.graphs._captured

    with caplog.at_level("DEBUG", "phalanx"):
        threads.run(run, 2)
    assert len([said for said in caplog.messages if "not recorded" in said]) == 2  # ranks


def test_what_is_supported(tmp_path):
    graphs = CpuDecodeGraphs.__new__(CpuDecodeGraphs)
    graphs._able, graphs.most = True, 2

    def work(counts, samples):
        n = len(counts)
        return ScheduledBatch(np.arange(n), np.zeros(n, int), np.array(counts), np.array(samples, bool), np.ones(n))

    assert graphs.supports(work([1], [1])) and graphs.supports(work([1, 1], [1, 1]))
    assert not graphs.supports(work([1, 2], [1, 1])) and not graphs.supports(work([1, 1], [1, 0]))
    assert not graphs.supports(work([1] * 3, [1] * 3)) and not graphs.supports(work([], []))
    assert MAX_ROWS == 64
