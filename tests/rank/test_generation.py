"""Live ranks produce transformers' tokens, however they are cut and whatever else happens on the way."""

import functools
import random
from pathlib import Path

import pytest
import torch
from phalanx.launcher.builtin_model import DIRECTORY
from phalanx.rank import protocol

from ..checkpoints import make_checkpoint
from ..engine import Engine, greedy
from ..processes import wait
from ..ranks import quick
from .reference import Reference

pytestmark = pytest.mark.timeout(400)  # the first test of a kind has transformers look for prompts

SEEDS = {"llama": 5, "qwen3": 3}  # checkpoints whose greedy text is varied and never close to a tie
COUNT = 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    def make(kind):
        if kind not in SEEDS:
            return DIRECTORY
        return make_checkpoint(tmp_path_factory.mktemp(kind) / "ckpt", kind, seed=SEEDS[kind], tokenizer=False)

    return functools.cache(make)


@pytest.fixture(scope="module")
def reference(checkpoint):
    return functools.cache(lambda kind: Reference(checkpoint(kind)))


@pytest.fixture(scope="module")
def prompts(reference):
    """Numbers of prompts whose greedy continuations are a fair yardstick, as `expected` makes sure."""

    def choose(kind):
        return range(3) if kind in SEEDS else reference(kind).fair(map(prompt, range(40)), 2, COUNT)

    return functools.cache(choose)


@pytest.fixture(scope="module")
def expected(reference, prompts):
    return functools.cache(lambda kind, i: reference(kind).yardstick(prompt(prompts(kind)[i]), COUNT))


@pytest.fixture(scope="module")
def logits(reference, prompts, expected):
    """transformers' log-probabilities [COUNT, vocab] at every step of the first greedy continuation."""

    def whole(kind):
        start = prompt(prompts(kind)[0])
        return reference(kind).logits(start + expected(kind, 0))[len(start) - 1 : -1].log_softmax(-1)

    return functools.cache(whole)


def prompt(i: int, length: int = 60) -> list[int]:
    r = random.Random(i)
    return [r.randrange(3, 512) for _ in range(length)]


@pytest.fixture(scope="module")
def drawn():
    """Tokens that a seeded request draws from each kind: the same whatever the ranks."""
    return {}


def check(engine: Engine, kind: str, prompts, expected, logits, drawn) -> None:
    shown = min(512, logits(kind).shape[-1])
    chosen = [prompt(i) for i in prompts(kind)[:2]]
    requests = {str(i): (p, greedy(COUNT, logprobs=shown if i == 0 else -1)) for i, p in enumerate(chosen)}
    outputs = engine.generate(requests)
    for i in range(2):
        assert outputs[str(i)].tokens == expected(kind, i)
        assert outputs[str(i)].finish == "length"
    assert len(outputs["0"].logprobs) == COUNT
    for entry, want in zip(outputs["0"].logprobs, logits(kind), strict=True):
        ids, values = zip(*entry.top, strict=True)
        assert len(ids) == shown
        assert (torch.tensor(values) - want[list(ids)]).abs().max() < 1e-4
    seeded = protocol.SamplingParams(max_tokens=60, temperature=1.0, seed=11, logprobs=2)
    tokens = engine.generate({"seeded": (prompt(1), seeded)})["seeded"].tokens
    assert tokens == drawn.setdefault(kind, tokens) and len(tokens) > 1
    assert engine.drain() == 0


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


# The short suite has both ways of cutting a model at once, as threads; the model path is the same under mpirun, where
# what is below and test_served.py cut tensors, and model/vision/test_blip.py layers.
@pytest.mark.parametrize("kind, tp, pp", [long("llama", 1, 1), long("llama", 3, 1), ("llama", 2, 2)])
def test_threads(checkpoint, prompts, expected, logits, drawn, kind, tp, pp):
    with Engine(checkpoint(kind), tp * pp, threads=True, tp=tp, pp=pp) as engine:
        check(engine, kind, prompts, expected, logits, drawn)


@pytest.mark.parametrize("kind, tp, pp", [long("llama", 1, 2), long("llama", 2, 2), long("built-in", 2, 2)])
def test_mpi(checkpoint, prompts, expected, logits, drawn, kind, tp, pp):
    with Engine(checkpoint(kind), tp * pp, tp=tp, pp=pp) as engine:
        assert len(set(engine.ready.pids)) == engine.ready.ranks == tp * pp
        check(engine, kind, prompts, expected, logits, drawn)


@pytest.mark.long
@pytest.mark.parametrize("threads", [True, False])
def test_replicas(checkpoint, prompts, expected, logits, drawn, threads):
    """Two copies of two ranks: each gets a half of the requests, and log-probabilities find their way as well."""
    with Engine(checkpoint("llama"), 4, threads=threads, dp=2, pp=2) as engine:
        assert engine.ready.kv_tokens == 2 * (engine.ready.kv_tokens // 32) * 16
        requests = {str(i): (prompt(i), greedy(COUNT)) for i in range(2)}
        outputs = engine.generate(requests)
        assert all(outputs[str(i)].tokens == expected("llama", i) for i in range(2))
        stats = engine.rest()
        assert stats.steps > 1.5 * COUNT  # one replica has done all of it
        check(engine, "llama", prompts, expected, logits, drawn)


@pytest.mark.parametrize(
    "tp, pp, dp",
    [(2, 1, 1), pytest.param(1, 2, 1, marks=pytest.mark.long), pytest.param(1, 1, 2, marks=pytest.mark.long)],
)
def test_embeddings(checkpoint, reference, tp, pp, dp):
    """Equal to transformers' hidden states, whatever else runs, in chunks of 16 tokens, with a known beginning."""
    prompts = {f"{how} {i}": prompt(i, 20 + 15 * i) for i in range(3) for how in ("mean", "last", "cls")}
    asked = {
        name: (ids, protocol.SamplingParams(max_tokens=1, pooling=name.split()[0])) for name, ids in prompts.items()
    }
    asked["again"] = ([*prompts["last 2"], 7], protocol.SamplingParams(max_tokens=1, pooling="last"))
    prompts["again"] = asked["again"][0]
    options = dict(tp=tp, pp=pp, dp=dp, max_num_seqs=8, max_num_batched_tokens=16)
    with Engine(checkpoint("llama"), 2, **options) as engine:
        again = asked.pop("again")
        outputs = engine.generate(asked | {"text": (prompt(9), greedy(20))})
        outputs |= engine.generate({"again": again})
        assert outputs["again"].cached >= 32
        assert outputs["mean 0"].cached == 0
        assert engine.rest().output_tokens == 20
    for name, ids in prompts.items():
        with torch.no_grad():
            states = reference("llama").model.model(torch.tensor([ids])).last_hidden_state[0]
        want = {"mean": states.mean(0), "cls": states[0]}.get(name.split()[0], states[-1])
        assert (torch.tensor(outputs[name].embedding) - want).abs().max() < 1e-4, name


@pytest.mark.long
def test_chunks_prefix_hits_and_preemption_change_no_token(checkpoint, expected):
    """A budget of 16 for prompts of 60 tokens, and a pool that holds half of what the sequences come to need."""
    want = {str(i): expected("llama", i) for i in range(3)}
    options = dict(mem=1, max_num_seqs=8, max_num_batched_tokens=16, max_model_len=400)
    with Engine(checkpoint("llama"), 2, pp=2, **options) as engine:
        assert engine.ready.kv_tokens < 3 * (60 + COUNT) + 5 * 260
        requests = {str(i): (prompt(i), greedy(COUNT)) for i in range(3)}
        others = {f"other-{i}": (prompt(100 + i), greedy(200)) for i in range(5)}
        outputs = engine.generate(others | requests)
        assert {i: outputs[i].tokens for i in want} == want
        stats = engine.rest()
        assert stats.chunks > 0 and stats.preemptions > 0
        again = engine.generate({"again": ([*prompt(0), *want["0"][:70]], greedy(50))})["again"]
        assert again.tokens == want["0"][70:]
        again = engine.generate({"more": ([*prompt(0), *want["0"][:70]], greedy(50))})["more"]
        assert again.tokens == want["0"][70:] and again.cached == 128
        stats = engine.rest()
        assert stats.cached_tokens >= 128 and stats.blocks_used == 0
        assert engine.drain() == 0


@pytest.mark.long
@pytest.mark.parametrize("tp, pp", [(2, 1), (2, 2)])
def test_cut_steps_change_no_token(checkpoint, expected, tp, pp):
    """Prompts divided between the parts of a step, beside sequences that decode; steps with an embedding stay whole."""
    program = quick(Path(__file__).parent / "cutting.py")
    options = dict(program=program, tp=tp, pp=pp, max_num_seqs=8, max_num_batched_tokens=50, device="cpu")
    with Engine(checkpoint("llama"), tp * pp, **options) as engine:
        requests = {str(i): (prompt(i), greedy(60)) for i in range(3)}
        outputs = engine.generate(requests)
        # mpirun hands on what ranks write when it comes to it.
        assert not wait(lambda: engine.log().count("a step is cut") < 4 * tp * pp, 20)
        assert {i: outputs[i].tokens for i in requests} == {i: expected("llama", int(i))[:60] for i in requests}
        requests = {f"again {i}": (prompt(i), greedy(60)) for i in range(3)}
        outputs = engine.generate(
            requests | {"pooled": (prompt(9), protocol.SamplingParams(max_tokens=1, pooling="mean"))}
        )
        assert all(outputs[f"again {i}"].tokens == expected("llama", i)[:60] for i in range(3))
        assert engine.drain() == 0


@pytest.mark.long
def test_64_requests_at_once_get_what_each_has_alone(checkpoint, expected):
    r = random.Random(7)
    requests = {}
    for i in range(64):
        tokens = prompt(1000 + i, r.randint(1, 80))
        kind = dict(temperature=0.0) if i % 2 else dict(temperature=0.8, top_p=0.9, top_k=r.choice([0, 40]), seed=i)
        requests[f"r{i}"] = (tokens, protocol.SamplingParams(max_tokens=r.randint(1, 40), **kind))
    with Engine(checkpoint("qwen3"), 2, max_num_batched_tokens=64) as engine:
        together = engine.generate(requests)
        engine.rest()
        assert engine.stats.chunks > 0
        assert engine.generate({"0": (prompt(0), greedy(COUNT))})["0"].tokens == expected("qwen3", 0)
        for name, request in list(requests.items())[::5]:  # of both kinds; all of them would say no more
            alone = engine.generate({"alone-" + name: request})["alone-" + name]
            assert alone.tokens == together[name].tokens, name
        assert engine.drain() == 0
