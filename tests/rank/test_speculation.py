"""Speculation changes no token, whatever the drafts: random requests get what they get without.

A table of ways to run: a model, how it is cut, and what makes room scarce.
"""

import functools
import json
import random

import pytest
from phalanx.launcher.builtin_model import DIRECTORY
from phalanx.rank import protocol

from .. import retries
from ..checkpoints import make_checkpoint, write_tokenizer
from .model.hybrids import HYBRIDS
from .model.test_architectures import MODELS, write
from .speculating import KINDS, check, random_request

WAYS = {
    "eager": ("llama", dict(replays=False)),
    "preemption": ("llama", dict(sequences=12, blocks=44)),
    "host memory": ("llama", dict(sequences=12, blocks=50, host=1)),
    "two ranks": ("llama", dict(tp=2)),
    "two stages": ("llama", dict(pp=2)),
    "two stages, preemption": ("llama", dict(pp=2, blocks=44)),
    "four ranks": ("llama", dict(tp=2, pp=2)),
}
# Models whose layers keep different things of a sequence, or compute it otherwise.
MIXERS = {
    "latent attention": "deepseek_v2",
    "latent attention with an indexer": "deepseek_v32",
    "chosen blocks": "minimax_m3_vl_text",
    "entries of windows": "deepseek_v4",
    "windows": "gemma3_text",
    "sinks": "gpt_oss",
    "chunks": "llama4_text",
    "experts": "qwen3_moe",
    "gated delta nets": "qwen3_next",
    "Kimi delta attention": "kimi_linear",
    "delta attention of bounded decays": "bailing_hybrid",
    "Mamba-2": "nemotron_h",
    "Mamba-2 beside attention": "falcon_h1",
    "short convolutions": "lfm2",
}
CUTS = {"one rank": {}, "two ranks": dict(tp=2), "two stages": dict(pp=2)}
WAYS |= {f"{kind}, {cut}": (name, dict(mem=2, **how)) for kind, name in MIXERS.items() for cut, how in CUTS.items()}
MANY = 2000 // len(WAYS)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> its checkpoint, made once."""

    def make(name):
        path = tmp_path_factory.mktemp("model")
        if name == "llama":
            return make_checkpoint(path)
        write(path, **(MODELS | HYBRIDS)[name])
        write_tokenizer(path)
        return path

    return functools.cache(make)


def test_random_requests_have_every_field():
    """But the heads of models that answer with places in images."""
    draw, defaults = random.Random(0), protocol.SamplingParams(max_tokens=0)
    made = [random_request(draw, i)[0] for i in range(400)]
    names = protocol.SamplingParams.__struct_fields__
    drawn = {name for name in names if any(getattr(one.sampling, name) != getattr(defaults, name) for one in made)}
    assert drawn == {*names} - {"heads"} and any(one.grammar for one in made) and any(one.priority for one in made)


def test_random_requests(made):
    """The way that most jobs go: replayed steps of one rank, and a pool that is too small now and then."""
    told = check(made("llama"), requests=50, seed=1, sequences=12, blocks=44)
    assert set(told.verified) == set(KINDS) and min(told.verified.values()) > 10 and told.constrained > 10
    assert told.preemptions and told.steps < told.plain_steps


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["gated delta nets, one rank", "two stages"])
def test_some_ways(made, name):
    model, how = WAYS[name]
    assert check(made(model), requests=20, seed=2, **how).verified["right"]


def test_drafts_of_what_was_answered_before_and_what_clients_predict(made):
    verified = check(made("llama"), requests=40, seed=4, real=True).verified
    assert verified["answers"] > 100 and verified["prediction"] > 20


def test_forced_texts_of_grammars_are_drafted_whatever_is_asked_for(made):
    told = check(made("llama"), requests=40, seed=6, real=True, speculate="auto")
    assert told.verified["grammar"] > 5


def test_forced_texts_of_a_trained_model():
    """It spells them as they are drafted."""
    names = {name: {"enum": [1, 2]} for name in ("temperature_of_the_room", "number_of_people")}
    schema = {"type": "object", "properties": names, "required": [*names], "additionalProperties": False}
    grammar = json.dumps({"grammars": [{"json_schema": schema | {"x-guidance": {"whitespace_flexible": False}}}]})
    sampling = protocol.SamplingParams(max_tokens=100, temperature=0.0, stop_token_ids=(2,))
    texts = [(protocol.Request(str(i), protocol.pack_u32([5, 6 + i]), sampling, grammar=grammar), "g") for i in (1, 2)]
    told = check(DIRECTORY, texts=texts, vocab=4032, real=True, speculate="auto", mem=8)
    assert told.verified["grammar"] > 5 and told.steps < 0.8 * told.plain_steps


@pytest.mark.long
@pytest.mark.timeout(300)
@retries.CLOCKS  # sequences with a grammar get no drafts for a while after a mask was late
@pytest.mark.parametrize("name", WAYS)
def test_many_requests(made, name):
    model, how = WAYS[name]
    told = check(made(model), requests=MANY, seed=3, **how)
    assert min(told.verified.values()) > 10 and told.constrained > 10
    assert bool(told.preemptions) or "blocks" not in how
