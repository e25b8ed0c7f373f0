"""Draft models beside a target's steps: they draft what their own logits say, whatever steps came before."""

import functools

import numpy as np
import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.rank import protocol
from phalanx.rank.cache_groups import CacheGroup
from phalanx.rank.model.drafts import find
from phalanx.rank.model.load import load
from phalanx.rank.worker import kv_cache, profile_run
from phalanx.rank.worker.batch_builder import build_batches
from phalanx.rank.worker.drafting import Drafting, DraftStep
from phalanx.rank.worker.sampler import Sampler, gumbel
from phalanx.rank.worker.state import BatchState, ScheduledBatch
from phalanx.rank.worker.upload import Upload

from ..model.drafts.test_eagle3 import make_head
from ..model.drafts.test_mtp import Published
from ..model.harness import BLOCK, make_batch, tokens
from ..model.test_architectures import write

LENGTH, VOCAB, WANTED = 64, 512, 3
PROMPTS = [17, 5, 30]
SAMPLED = protocol.SamplingParams(max_tokens=40, temperature=0.8, seed=11, top_k=50)
GREEDY = protocol.SamplingParams(max_tokens=40, temperature=0)
NAMES = ["deepseek_v3", "qwen3_next", "eagle3", "draft", "windows"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> the target's checkpoint, and the options that find its draft model."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        if name in ("deepseek_v3", "qwen3_next"):
            return Published(folder, name).path, find.Wanted("mtp", "", dtype="f32")
        if name == "eagle3":
            path = write(folder / "target", model_type="llama", num_hidden_layers=8)
            return path, find.Wanted("auto", str(make_head(folder / "head")[0]), dtype="f32")
        more = dict(model_type="gemma3_text", num_hidden_layers=6, head_dim=16, sliding_window=11, vocab_size=VOCAB)
        path = write(folder / "target", **more if name == "windows" else dict(model_type="llama"))
        draft = write(folder / "draft", model_type="qwen3", num_hidden_layers=2)
        return path, find.Wanted("draft", str(draft), dtype="f32")

    return make


class Rank:
    """A rank's target and draft model, and sequences whose tokens are given: what is sampled is the next of them."""

    graphs = None  # what replays steps of rows that decode

    def __init__(self, grid, path, wanted, sampling, blocks=LENGTH // BLOCK, device="cpu"):
        torch.set_grad_enabled(False)
        self.device, count = torch.device(device), len(PROMPTS)
        device = self.device
        self.model = load(path, grid, device, max_model_len=LENGTH, dtype="f32")
        self.source = find.find(wanted, path, self.model, grid, device)
        own = self.source.cache_specs()
        specs = [*self.model.cache_specs(), *own]
        self.windows = sorted({spec.window for spec in specs})
        groups = tuple(CacheGroup(window) for window in self.windows)
        of = [self.windows.index(spec.window) for spec in specs]
        self.state = BatchState(count, LENGTH, BLOCK, groups, of if len(groups) > 1 else ())
        self.state.table[:] = (
            np.random.default_rng(0).permutation(self.state.table.size).reshape(len(self.state.table), -1)
        )
        self.state.num_blocks[:] = blocks
        self.ids = [tokens(LENGTH + 1, seed=20 + row) for row in range(count)]
        self.state.tokens, self.state.known[:] = [np.array(one) for one in self.ids], LENGTH + 1
        self.state.prompt_len[:] = PROMPTS
        caches = kv_cache.allocate(specs, self.state.table.size, BLOCK, torch.float32, device, count, 1 + WANTED)
        for tensor in (tensor for layer in caches for tensor in layer):
            tensor.fill_(float("nan"))
        self.caches, self.sampler, self.upload = caches[: -len(own)], Sampler(count, VOCAB, device), Upload(device)
        self.greedy = np.array([one.temperature == 0 for one in sampling])
        for row, one in enumerate(sampling):
            self.sampler.enter(protocol.NewSequence(row, b"", 0, 0, b"", one))
        self.drafting = Drafting(
            self.source, self.state, caches[-len(own) :], self.upload, grid.tensor, self.sampler, self.greedy
        )
        self.last = torch.zeros(count, 1, dtype=torch.int64, device=device)

    def step(self, work, kept=None, query_len=1, wanted=WANTED):
        """The drafts of a step, by row. work: (row, start, count). kept: of each verified row how many tokens stand."""
        rows, starts, counts = (np.array(one, np.int64) for one in zip(*work, strict=True))
        prompts = np.array(PROMPTS)[rows]
        samples = starts + counts >= prompts
        scheduled = ScheduledBatch(rows, starts, counts, samples, np.maximum(starts + 1 - prompts, 0), query_len)
        replayed = self.graphs is not None and self.graphs.supports(scheduled)
        if replayed:
            hidden, _ = self.graphs.replay(scheduled)
            batches = [self.graphs.batch(scheduled)]
        else:
            batches, _ = build_batches(self.state, scheduled, self.last, self.caches, self.upload)
            hidden = self.model.forward(batches)
        following = [self.ids[row][start + 1 : start + count + 1] for row, start, count in work]
        ends, newest, lengths = np.cumsum(counts), [], []
        for i in np.flatnonzero(samples):
            rejected = query_len - kept[i] if query_len > 1 and counts[i] == query_len else 0
            newest.append(ends[i] - 1 - rejected)
            lengths.append(starts[i] + counts[i] + 1 - rejected)
        made = self.drafting.step(
            DraftStep(
                batches,
                scheduled,
                hidden,
                torch.tensor(sum(following, []), device=self.device),
                torch.tensor(newest, dtype=torch.int64, device=self.device),
                torch.from_numpy(rows[samples]).to(self.device),
                torch.tensor(lengths, dtype=torch.int64, device=self.device),
                wanted,
                replayed,
            )
        )
        return made if made is None else dict(zip(rows[samples].tolist(), made.tolist(), strict=True))


class Definition:
    """Drafts of one sequence from nothing: the target over all its tokens at once, the draft model after it."""

    def __init__(self, path, wanted):
        grid = threads.run(lambda comm: mesh.build(comm, 1, 1, ep=1), 1)[0]
        self.model = load(path, grid, max_model_len=LENGTH, dtype="f32")
        self.source = find.find(wanted, path, self.model, grid, torch.device("cpu"))

    def drafts(self, ids, prompt, sampling, count=WANTED):
        """ids: of a sequence with its newest token."""
        blocks = list(range(-(-(LENGTH + 8) // BLOCK)))
        fresh = [
            kv_cache.allocate(one.cache_specs(), len(blocks), BLOCK, torch.float32, torch.device("cpu"), 1, 8)
            for one in (self.model, self.source)
        ]
        out = None
        if self.source.FOLLOWS:
            hidden = self.model.forward([make_batch([(ids[:-1], 0, blocks)], BLOCK, fresh[0])])
            batch = make_batch([(ids[1:], 0, blocks)], BLOCK, fresh[1])
            out = self.source.forward(batch, self.source.read(hidden))[-1:]
            at = len(ids) - 1
        else:
            out = self.source.forward(make_batch([(ids, 0, blocks)], BLOCK, fresh[1]), None)[-1:]
            at = len(ids)
        found = []
        for number in range(count):
            logits = self.source.logits(out).float()
            known = self.source.vocabulary
            each = torch.arange(logits.shape[1]) if known is None else known
            if sampling.temperature:
                worst = logits.topk(sampling.top_k).values[:, -1:]
                noise = gumbel(torch.tensor([sampling.seed]), torch.tensor([len(ids) - prompt + number]), each[None])
                logits = (logits / sampling.temperature + noise).masked_fill(logits < worst, -torch.inf)
            found.append(int(each[logits.argmax()]))
            out = self.source.forward(make_batch([([found[-1]], at + number, blocks)], BLOCK, fresh[1]), out)
        return found


STEPS = [
    dict(work=[(1, 0, 5)]),
    dict(work=[(1, 5, 1), (0, 0, 11)]),
    dict(work=[(1, 6, 1), (0, 11, 6), (2, 0, 16)]),
    dict(work=[(1, 7, 3), (0, 17, 3), (2, 16, 14)], query_len=3, kept=[1, 3]),
    dict(work=[(1, 8, 3), (0, 20, 3), (2, 30, 3)], query_len=3, kept=[3, 2, 1]),
    dict(work=[(0, 22, 1), (1, 11, 1), (2, 31, 1)]),
]
STANDING = [{1: 6}, {1: 7}, {1: 8, 0: 18}, {1: 9, 0: 21, 2: 31}, {1: 12, 0: 23, 2: 32}, {0: 24, 1: 13, 2: 33}]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tp", [1, 2])
def test_drafts_are_those_of_the_sequence_alone(made, name, tp):
    """Prompts in chunks beside rows that decode, and rows of which some drafts were rejected; at a temperature, too."""
    path, wanted = made(name)
    sampling = [GREEDY, SAMPLED, GREEDY]

    def work(comm):
        rank = Rank(mesh.build(comm, tp, 1, ep=1), path, wanted, sampling)
        return [rank.step(**step) for step in STEPS]

    found = threads.run(work, tp)
    assert all(one == found[0] for one in found)
    definition = Definition(path, wanted)
    ids = [tokens(LENGTH + 1, seed=20 + row) for row in range(len(PROMPTS))]
    checked = 0
    for drafts, standing in zip(found[0], STANDING, strict=True):
        assert (drafts or {}).keys() == standing.keys()
        for row, length in standing.items():
            want = definition.drafts(ids[row][:length], PROMPTS[row], sampling[row])
            assert drafts[row] == want, (row, length)
            checked += 1
    assert checked == 13


@pytest.mark.parametrize("name", ["deepseek_v3", "draft"])
def test_a_row_without_blocks_for_its_drafts_writes_nobody_elses(made, name):
    path, wanted = made(name)

    def work(comm):
        rank = Rank(mesh.build(comm, 1, 1, ep=1), path, wanted, [GREEDY] * 3, blocks=4)
        before = [[tensor.clone() for tensor in layer] for layer in rank.drafting.caches]
        drafts = rank.step([(1, 0, 5), (0, 0, 16)], wanted=WANTED)
        own = rank.state.table[:2, :4].ravel()
        for old, new in zip(before, rank.drafting.caches, strict=True):
            for was, now in zip(old, new, strict=True):
                others = np.setdiff1d(np.arange(len(was)), own)
                assert torch.equal(was[others].nan_to_num(7), now[others].nan_to_num(7))
        return drafts

    (drafts,) = threads.run(work, 1)
    assert drafts[1] and all(0 <= token < VOCAB for token in drafts[1])


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "eagle3", "draft"])
def test_the_steps_of_the_start(made, name):
    """They run, with several tokens of a sequence, and a draft model reads the largest."""
    torch.set_grad_enabled(False)
    path, wanted = made(name)
    grid = threads.run(lambda comm: mesh.build(comm, 1, 1, ep=1), 1)[0]
    model, cpu = load(path, grid, max_model_len=LENGTH, dtype="f32"), torch.device("cpu")
    source, upload = find.find(wanted, path, model, grid, cpu), Upload(cpu)
    hidden = model.forward([profile_run.prompts(model, 50, BLOCK, upload)])
    profile_run.draft(source, hidden, 3, profile_run.prompts(source, 50, BLOCK, upload, torch.float32))
    steps = [*profile_run.small_steps(model, 50, BLOCK, upload, None, (1, 1 + WANTED))]
    assert [1 + WANTED] in [step.query_lens for step in steps if step.query_len == 1 + WANTED]
    for step in steps:
        if step.kv_lens == step.lengths.tolist():  # else they choose a kernel alone
            assert model.forward([step]).isfinite().all()
