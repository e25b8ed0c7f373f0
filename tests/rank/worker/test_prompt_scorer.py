"""Log-probabilities of prompts: those that sampling would give, however the prompt is cut into steps."""

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.comm.watchdog import LocalWatchdog
from phalanx.rank import protocol
from phalanx.rank.options import Options
from phalanx.rank.worker import prompt_scorer
from phalanx.rank.worker.engine import Engine, RankContext

from ...checkpoints import make_checkpoint

pytestmark = pytest.mark.timeout(120)
TOKENS = [5, 7, 11, 13, 17, 19, 23, 29, 31]


def step(runner, number, counts, new=()):
    """The output of a step in which row i computes counts[i] tokens."""
    rows = [row for row, count in sorted(counts.items(), key=lambda one: one[1] > 1)]
    longer = [counts[row] for row in rows if counts[row] > 1]
    plan = protocol.Plan(number, protocol.pack_u16(rows), protocol.pack_u32(longer), list(new))
    future = runner.start(plan)
    assert future.wait(60)
    return future.output()


def sequence(row, tokens, prompt_len=0, **sampling):
    blocks = protocol.pack_u32(range(row * 8, row * 8 + 8))
    sampling = protocol.SamplingParams(max_tokens=1, temperature=0.0, **sampling)
    return protocol.NewSequence(row, protocol.pack_u32(tokens), prompt_len or len(tokens), 0, blocks, sampling)


def score(world, path, tp):
    place = RankContext(world, ["here"] * world.size, mesh.build(world, tp, 1), torch.device("cpu"), LocalWatchdog())
    options = Options(model=str(path), load_format="dummy", max_num_seqs=4, max_model_len=128, mem=1)
    engine = Engine(options, place)
    engine.load()
    runner, found, expected = engine.runner, {}, []
    prompt = sequence(0, TOKENS, prompt_logprobs=2)
    found["whole"] = step(runner, 0, {0: 9, 1: 4}, [prompt, sequence(1, TOKENS[:4])]).prompt_logprobs
    begun = step(runner, 1, {0: 5}, [prompt]).prompt_logprobs
    middle = step(runner, 2, {0: 1, 1: 4}, [sequence(1, TOKENS[:4])]).prompt_logprobs
    found["chunks"] = {**begun, **middle, **step(runner, 3, {0: 3}).prompt_logprobs}
    decoded = step(runner, 4, {0: 1, 1: 1}).prompt_logprobs  # the prompt is behind it
    preempted = step(runner, 5, {0: 9}, [sequence(0, TOKENS, 7, prompt_logprobs=2)]).prompt_logprobs
    short = step(runner, 6, {0: 1}, [sequence(0, TOKENS[:1], prompt_logprobs=2)]).prompt_logprobs
    for i in range(1, len(TOKENS)):
        forced = sequence(0, TOKENS[:i], logprobs=2, logit_bias={TOKENS[i]: 100.0})
        expected.append(step(runner, 10 + i, {0: i}, [forced]).logprobs.get(0))
    runner.finish()
    engine.unload()
    return found, expected, [decoded, preempted, short]


@pytest.mark.parametrize("tp", [1, 2])
def test_prompts_are_scored_as_samples_are(tmp_path, monkeypatch, tp):
    monkeypatch.setattr(prompt_scorer, "CHUNK", 3)
    path = make_checkpoint(tmp_path, num_hidden_layers=2)
    results = threads.run(lambda world: score(world, path, tp), tp)
    found, expected, nothing = results[0]
    assert not any(nothing)
    assert tp == 1 or not any(results[1][0].values())  # one rank tells
    for listed in found.values():
        ((index, scored),) = listed.items()
        assert [entry.token for entry in scored] == TOKENS[1:] == [entry.token for entry in expected]
        for entry, sampled in zip(scored, expected, strict=True):
            assert entry.logprob == pytest.approx(sampled.logprob, abs=1e-3)
            assert [value for _, value in entry.top] == pytest.approx([value for _, value in sampled.top], abs=1e-3)
