"""Engines with draft models: what the ranks draft of each sequence after a step is what it gets alone."""

import functools
import itertools

import msgspec
import pytest
import torch
from phalanx.benchmarks.builtin_model import heldout
from phalanx.comm import mesh, threads
from phalanx.comm.broadcast import ThreadPlanBroadcast
from phalanx.comm.watchdog import LocalWatchdog
from phalanx.launcher.builtin_model import DIRECTORY
from phalanx.rank import protocol
from phalanx.rank.model.drafts import find
from phalanx.rank.options import Options
from phalanx.rank.scheduler.speculation import CATCH_UP
from phalanx.rank.worker import batch_builder, piecewise_graphs
from phalanx.rank.worker.engine import Engine, RankContext
from phalanx.rank.worker.executor import LocalExecutor, follow

from ..checkpoints import write_tokenizer
from .model.drafts.test_eagle3 import make_head
from .model.drafts.test_mtp import Published
from .model.harness import tokens
from .model.test_architectures import write
from .speculating import Drafts, Hasty, Server, check
from .worker.test_drafting import GREEDY, Definition
from .worker.test_piecewise_graphs import always, on_cpu  # noqa: F401

PROMPTS, MOST, WANTED = (3, 40, 17, 25), 6, 2
RESTS = 40  # steps before the first draft
STEP = dict(vocab=520)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> the target's checkpoint, and options by which its draft model is found."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        if name == "eagle3":
            path = write(folder / "target", model_type="llama", num_hidden_layers=8)
            return path, {"speculate": "eagle3", "draft_model": str(make_head(folder / "head")[0])}
        if name.startswith("draft"):
            path, more = write(folder / "target", model_type="llama"), {}
            if name != "draft":  # with heads that two ranks cannot share
                more = dict(num_attention_heads=3, num_key_value_heads=1, head_dim=16)
            draft = write(folder / "draft", model_type="qwen3", num_hidden_layers=2, **more)
            alone = {"draft_tensor_parallel_size": 1} if more else {}
            return path, {"speculate": "auto", "draft_model": str(draft)} | alone
        return Published(folder, name).path, {"speculate": "mtp"}

    return make


class Asking(LocalExecutor):
    """Has each step's plan want drafts."""

    def start(self, plan):
        return super().start(plan if plan.stop >= 0 else msgspec.structs.replace(plan, wanted=WANTED))


class Resting(Drafts):
    """Has the model that drafts rest first, then read on for some steps, then draft. Nothing is verified."""

    def __init__(self, rests, follows, reads_prompts):
        super().__init__({}, 0, [1])
        self.rests, self.follows, self.firsts, self.lookahead = rests, follows, [], WANTED
        self.reads_prompts = reads_prompts

    def choose(self, sequences):
        self.rests -= 1
        self.model_follows, self.model_drafts = self.rests < 0, WANTED * (self.rests < -self.follows)
        return 1, {}

    def made(self, sequence, drafts):
        self.firsts.append((sequence.id, len(sequence.tokens) - sequence.prompt_len, drafts[0]))


def drafted(path, options, tp, pp, budget, prepare=lambda runner: None):
    """The tokens of each request, and the drafts behind each of them. prepare: gets each rank's runner."""
    texts = [tokens(count, seed=count) for count in PROMPTS]
    found = []

    def rank(world):
        torch.set_grad_enabled(False)
        place = RankContext(
            world, ["here"] * world.size, mesh.build(world, tp, pp), torch.device("cpu"), LocalWatchdog(world.rank)
        )
        engine = Engine(
            Options(
                model=str(path), dtype="f32", max_num_seqs=4, max_model_len=64, mem=2, max_num_batched_tokens=budget,
                block_size=4, **options,
            ), place,
        )  # fmt: skip
        limits = engine.load()
        assert limits.draft_model in ("mtp", "eagle3", "draft")
        prepare(engine.runner)
        control = ThreadPlanBroadcast(world)
        if world.rank:
            follow(engine.runner, control, None)
        else:
            executor = Asking(control, engine.runner)
            server, drafts = Server(limits, executor, pp, Drafts({}, WANTED, [1])), {}
            update = server.scheduler.update

            def seen(done, output):
                rows = protocol.unpack_u32(output.drafts).tolist()
                for i, one in enumerate(done.sampled):
                    drafts.setdefault(one.id, []).append(rows[i * WANTED : (i + 1) * WANTED])
                return update(done, output)

            server.scheduler.update = seen
            for i, ids in enumerate(texts):
                sampling = protocol.SamplingParams(max_tokens=MOST, temperature=0)
                server.scheduler.add(protocol.Request(str(i), protocol.pack_u32(ids), sampling))
            for _ in range(1000):
                if not server.replica.idle:
                    server.turn()
            executor.start(protocol.Plan(step=-1, stop=0))
            found.extend((server.results[str(i)]["tokens"], drafts[str(i)]) for i in range(len(texts)))
        engine.unload()

    torch.set_num_threads(1)
    threads.run(rank, tp * pp)
    return list(zip(texts, found, strict=True))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name, tp, pp", [
    ("qwen3", 1, 1), ("qwen3", 2, 1), ("deepseek_v3", 1, 2), ("qwen3_5_moe_text", 1, 1), ("eagle3", 2, 1),
    ("eagle3", 1, 2), ("draft", 1, 1), ("draft", 1, 2), ("draft of one rank", 2, 1), ("deepseek_v4", 1, 2),
    ("step3p7", 2, 1),
])  # fmt: skip
def test_drafts_come_with_each_steps_tokens(made, name, tp, pp):
    """Prompts in chunks beside others that decode, replayed steps and eager ones, and blocks of earlier requests."""
    compare(*made(name), tp, pp, 16)


@pytest.mark.parametrize("name, tp, pp", [("deepseek_v3", 2, 1), ("eagle3", 1, 1), ("eagle3", 1, 2)])
def test_drafts_of_steps_that_are_cut_into_microbatches(made, name, tp, pp, monkeypatch):
    monkeypatch.setattr(batch_builder, "TILE", 4)
    split, cuts = batch_builder.microbatch_split, []
    monkeypatch.setattr(batch_builder, "microbatch_split", lambda *of: cuts.append(split(*of)) or cuts[-1])

    def prepare(runner):
        runner._limits = runner._limits._replace(microbatch_tokens=4)

    compare(*made(name), tp, pp, 16, prepare)
    assert sum(at > 0 for at in cuts) >= 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="replays of a CPU")
@pytest.mark.parametrize("name", ["qwen3", "eagle3", "draft"])
@pytest.mark.usefixtures("on_cpu", "always")
def test_drafts_of_steps_with_prompts_that_are_replayed(made, name, monkeypatch):
    replay, count = piecewise_graphs.PiecewiseGraphs.replay, []
    monkeypatch.setattr(piecewise_graphs.PiecewiseGraphs, "replay", lambda *of: count.append(1) or replay(*of))

    def prepare(runner):
        with torch.no_grad():
            of = runner.model, runner.state, runner._last, runner.caches, runner._upload
            runner._piecewise = piecewise_graphs.PiecewiseGraphs(*of, 64, 0)
            runner._piecewise.capture(runner.mesh.tensor, lambda done: None)

    compare(*made(name), 1, 1, 16, prepare)
    assert len(count) >= 4


def compare(path, options, *how):
    """Each step's drafts are those of its sequences alone."""
    wanted = find.Wanted(options["speculate"], options.get("draft_model", ""), dtype="f32")
    definition = Definition(path, wanted)
    checked = 0
    for prompt, (sampled, drafts) in drafted(path, options, *how):
        assert len(drafts) >= len(sampled) == MOST
        for i, found in enumerate(drafts[:MOST]):
            ids = prompt + sampled[: i + 1]
            assert found == definition.drafts(ids, len(prompt), GREEDY, WANTED), i
            checked += 1
    assert checked == len(PROMPTS) * MOST


@pytest.mark.sample(2)
@pytest.mark.parametrize("name, how", [
    ("qwen3", dict(sequences=12, blocks=60)), ("eagle3", {}), ("draft", {}),
    ("draft", dict(pp=2)), ("eagle3", dict(pp=2)), ("deepseek_v4", {}), ("step3p7", STEP),
    ("draft of one rank", dict(tp=2)),
    pytest.param("deepseek_v3", dict(tp=2), marks=pytest.mark.long),
])  # fmt: skip
def test_random_requests_get_the_same_tokens(made, name, how):
    """A model of random weights drafts, with all fields, grammars, aborts and preemptions."""
    path, options = made(name)
    write_tokenizer(path)
    found = check(path, requests=12, seed=5, real=True, mem=8, **options, **how)
    assert found.steps > 0


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name, how", [
    ("qwen3", dict(sequences=12, blocks=60, tp=2)), ("deepseek_v3", {}), ("qwen3_5_moe_text", {}),
    ("qwen3", dict(sequences=12, blocks=60, pp=2)), ("deepseek_v3", dict(tp=2, pp=2)),
    ("qwen3_5_moe_text", dict(pp=2)), ("eagle3", dict(tp=2)), ("draft", dict(sequences=12, blocks=60)),
    ("deepseek_v4", dict(tp=2)), ("deepseek_v4", dict(pp=2)), ("step3p7", STEP | dict(tp=2)),
    ("step3p7", STEP | dict(pp=2)), ("eagle3", dict(tp=2, pp=2)),
    ("draft", dict(sequences=12, blocks=60, pp=2)), ("draft", dict(tp=2, pp=2)),
])  # fmt: skip
def test_many_requests_get_the_same_tokens(made, name, how):
    path, options = made(name)
    write_tokenizer(path)
    found = check(path, requests=100, seed=7, real=True, mem=8, **options, **how)
    assert bool(found.preemptions) or "blocks" not in how


def heldout_prompts(count, answered):
    """Prompts of conversations with answers of so many tokens or more."""
    documents = [(ids[: learn.index(True)], sum(learn)) for ids, learn in heldout.documents(count)]
    return [ids for ids, answer in documents if 20 < len(ids) < 200 and answer >= answered]


def test_a_head_that_has_missed_tokens_reads_some_before_it_drafts():
    """The built-in model's head is less often right behind tokens that it has not read, and nearly as often as ever
    where it has read the prompt and some of the newest."""
    found, prompts = [], heldout_prompts(60, RESTS + 20)
    assert len(prompts) >= 8

    def rank(world):
        torch.set_grad_enabled(False)
        place = RankContext(world, ["here"], mesh.build(world, 1, 1), torch.device("cpu"), LocalWatchdog(0))
        options = Options(model=str(DIRECTORY), max_num_seqs=8, max_model_len=512, mem=64, speculate="mtp")
        engine = Engine(options, place)
        limits = engine.load()._replace(prefix_cache=False)
        executor = LocalExecutor(ThreadPlanBroadcast(world), engine.runner)
        for rests, reads_prompts in ((RESTS, False), (RESTS - CATCH_UP, True), (0, True)):
            for tensor in itertools.chain(*engine.runner._drafting.caches):
                tensor.zero_()  # in place of what it misses is nothing of the same texts
            speculation = Resting(rests, RESTS - rests, reads_prompts)
            server = Server(limits, executor, 1, speculation)
            for i, ids in enumerate(prompts[:8]):
                sampling = protocol.SamplingParams(max_tokens=RESTS + 16, temperature=0)
                server.scheduler.add(protocol.Request(str(i), protocol.pack_u32(ids), sampling))
            while not server.replica.idle:
                server.turn()
            texts = {name: one["tokens"] for name, one in server.results.items()}
            firsts = speculation.firsts
            right = [texts[name][at] == draft for name, at, draft in firsts if at < len(texts[name])]
            found.append((sum(right) / len(right), len(right), texts))
        executor.start(protocol.Plan(step=-1, stop=0))
        engine.unload()

    torch.set_num_threads(1)
    threads.run(rank, 1)
    (rested, count, texts), (followed, _, one), (whole, _, other) = found
    assert texts == one == other and count >= 100
    assert rested < whole - 0.1 and followed > rested + 0.1 and followed > whole - 0.1


@pytest.mark.parametrize("kind, tp, pp", [
    ("mtp", 1, 1), *(pytest.param(*way, 2, marks=pytest.mark.long) for way in (("mtp", 1), ("mtp", 2), ("draft", 1))),
])  # fmt: skip
def test_the_built_in_models_drafts_are_often_right(kind, tp, pp):
    """Its head drafts, or the model itself: the texts are the same, in far fewer steps."""
    check_built_in(kind, tp, pp)


def check_built_in(kind, tp, pp, device="cpu"):
    prompts = heldout_prompts(20, 1)[:4]
    found, kept = [], 0

    def rank(world):
        nonlocal kept
        torch.set_grad_enabled(False)
        place = RankContext(
            world, ["here"] * world.size, mesh.build(world, tp, pp), torch.device(device), LocalWatchdog(world.rank)
        )
        options = Options(
            model=str(DIRECTORY), dtype="f32", max_num_seqs=4, max_model_len=512, mem=64, speculate=kind,
            device=device, draft_model=str(DIRECTORY) if kind == "draft" else "",
        )  # fmt: skip
        engine = Engine(options, place)
        limits = engine.load()
        assert limits.draft_model == kind
        if tp * pp == 1:
            assert [query_len for n, query_len, _ in limits.step_times if n == 1] == [*limits.query_lens]
            assert all(seconds > 0 for *_, seconds in limits.step_times)
        control = ThreadPlanBroadcast(world)
        if world.rank:
            follow(engine.runner, control, None)
            engine.unload()
            return
        executor = LocalExecutor(control, engine.runner)
        for speculation in (None, Hasty(limits.query_lens, 64, limits.draft_model)):
            server = Server(limits, executor, pp, speculation)
            for i, ids in enumerate(prompts):
                for temperature in (0.0, 1.0):
                    sampling = protocol.SamplingParams(
                        max_tokens=40, temperature=temperature, seed=i, stop_token_ids=(2,)
                    )
                    name = f"{i} at {temperature}"
                    server.scheduler.add(protocol.Request(name, protocol.pack_u32(ids), sampling))
            while not server.replica.idle:
                server.turn()
                kept += sum(step.plan.keeps for step, _ in server.replica._in_flight)
            found.append(({name: one["tokens"] for name, one in server.results.items()}, server.steps, speculation))
        executor.start(protocol.Plan(step=-1, stop=0))
        engine.unload()

    torch.set_num_threads(1)
    threads.run(rank, tp * pp)
    (plain, steps, _), (texts, fewer, speculation) = found
    assert texts == plain and fewer < 0.8 * steps and bool(kept) == (pp == 1)
    drafts, _, *accepted = speculation.counts[kind].listed()
    assert drafts > 30 and accepted[0] > (0.5 if kind == "mtp" else 0.95) * drafts
