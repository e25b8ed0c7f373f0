"""GPUs produce the CPU's tokens in f32, however many they are and however the model is cut; and end as CPUs do."""

import functools
import os
import signal
import socket
from pathlib import Path

import pytest
from phalanx.launcher import builtin_model
from phalanx.launcher.job import mpi_env
from phalanx.rank import protocol

from ..checkpoints import make_checkpoint
from ..engine import Engine, greedy
from ..processes import gone
from .model.test_architectures import MODELS, write
from .reference import Reference
from .test_generation import prompt

SHAPES = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 1, 2), (1, 1, 4)]  # tp, pp, dp
COUNT = 120
SEEDS = {"llama": 5, "qwen3": 3}
GEMMA2 = "gemma2"  # soft caps, sliding windows, norms after sublayers
# A head of its own, as with a tied one the model repeats a token; and a cap that leaves gaps between logits.
CAPPED = MODELS[GEMMA2] | dict(tie_word_embeddings=False, final_logit_softcapping=6.0)

pytestmark = [
    pytest.mark.skipif(not mpi_env.gpus(), reason="needs GPUs"),
    pytest.mark.timeout(400),  # the first ranks compile kernels
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A model that cuts into 4."""

    def make(kind):
        heads = dict(hidden_size=64, num_attention_heads=16, num_key_value_heads=8, intermediate_size=128)
        directory = tmp_path_factory.mktemp(kind) / "ckpt"
        if kind == GEMMA2:
            return write(directory, **CAPPED | heads)
        return make_checkpoint(directory, kind, seed=SEEDS[kind], tokenizer=False, **heads)

    return functools.cache(make)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Four prompts, and transformers' continuations of them on the CPU."""

    def want(kind):
        reference = Reference(checkpoint(kind))
        chosen = [prompt(i) for i in reference.fair(map(prompt, range(60)), 4, COUNT)]
        return [(tokens, reference.yardstick(tokens, COUNT)) for tokens in chosen]

    return functools.cache(want)


def start(checkpoint, ranks: int, **options) -> Engine:
    if ranks > mpi_env.gpus():
        pytest.skip(f"needs {ranks} GPUs")
    return Engine(checkpoint, ranks, **{"device": "cuda", "wait": 200, "timeout": 60.0, **options})


@pytest.mark.parametrize("tp, pp, dp", SHAPES)
@pytest.mark.parametrize("kind", [*SEEDS, GEMMA2])
def test_tokens(checkpoint, expected, kind, tp, pp, dp):
    """Alone, all at once, and with chunks of prompts, draws and an embedding beside sequences that decode."""
    with start(checkpoint(kind), tp * pp * dp, tp=tp, pp=pp, dp=dp, max_num_batched_tokens=48) as engine:
        wanted = expected(kind)
        alone = engine.generate({"alone": (wanted[0][0], greedy(COUNT))})["alone"]
        assert alone.tokens == wanted[0][1]
        requests = {str(i): (tokens, greedy(COUNT)) for i, (tokens, _) in enumerate(wanted)}
        others = {f"other-{i}": (prompt(1000 + i, 10 + i), greedy(20 + i)) for i in range(12)}
        drawn = protocol.SamplingParams(max_tokens=30, temperature=0.9, top_p=0.9, seed=3, logprobs=2)
        others |= {
            "drawn": (prompt(7), drawn),
            "pooled": (prompt(8), protocol.SamplingParams(max_tokens=1, pooling="mean")),
        }
        outputs = engine.generate(requests | others)
        assert [outputs[name].tokens for name in requests] == [tokens for _, tokens in wanted]
        assert engine.rest().chunks > 0
        assert ("captured CUDA graphs of" in engine.log()) == (pp == 1)
        assert "NCCL alone" not in engine.log()
        assert engine.drain(60) == 0
        assert gone(engine.ready.pids)


@pytest.mark.parametrize("sums", ["kernels", "nccl"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", ["llama", GEMMA2])
def test_cut_steps_change_no_token(checkpoint, expected, kind, tp, sums, monkeypatch):
    """Over NCCL sums and the norms that follow run beside the other part's GEMMs, unless a sublayer's own norm reads
    the sum."""
    monkeypatch.setenv("ALL_REDUCE", sums)
    program = (str(Path(__file__).parent / "cutting.py"),)
    with start(checkpoint(kind), tp, tp=tp, max_num_batched_tokens=50, program=program) as engine:
        wanted = expected(kind)
        outputs = engine.generate({str(i): (tokens, greedy(COUNT)) for i, (tokens, _) in enumerate(wanted)})
        assert engine.log().count("a step is cut") >= 4 * tp
        assert [outputs[str(i)].tokens for i in range(len(wanted))] == [tokens for _, tokens in wanted]
        assert engine.drain(60) == 0


@pytest.mark.parametrize("tp", [2, 4])
def test_seeded_draws_do_not_depend_on_the_gpus(checkpoint, tp):
    request = {"a": (prompt(1), protocol.SamplingParams(max_tokens=60, temperature=1.0, seed=11))}
    found = []
    for ranks in (1, tp):
        with start(checkpoint("llama"), ranks, tp=ranks) as engine:
            found.append(engine.generate(request)["a"].tokens)
    assert found[0] == found[1]


@pytest.mark.parametrize("tp, pp", [(2, 1), (1, 2)])
@pytest.mark.parametrize("drafts", ["ngram", "mtp"])
def test_drafts_change_no_token(tp, pp, drafts):
    """Texts of the built-in model, whose head drafts, greedy and drawn, of prompts that repeat themselves."""
    requests = {
        f"{i} at {heat}": (prompt(i, 8) * 8, protocol.SamplingParams(max_tokens=60, temperature=heat, seed=i))
        for i in range(4)
        for heat in (0.0, 1.0)
    }
    found = []
    for speculate in ("none", drafts):
        options = dict(tp=tp, pp=pp, speculate=speculate, dtype="f32", max_model_len=512)
        with start(builtin_model.DIRECTORY, tp * pp, **options) as engine:
            outputs = engine.generate(requests)
            found.append({name: outputs[name].tokens for name in requests})
            if speculate != "ngram":  # whether these pay depends on the clock; a head tries
                assert bool(engine.rest().speculation) == (speculate != "none")
            assert engine.drain(60) == 0
    assert found[0] == found[1]


def under_load(engine: Engine) -> None:
    """Long sequences decode, in replays of graphs."""
    engine.send(*(protocol.Request(str(i), protocol.pack_u32([5, 6, 7 + i]), greedy(400)) for i in range(4)))
    seen = 0
    for message in engine.messages():
        seen += isinstance(message, protocol.Deltas)
        if seen > 20:
            return


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("who", [0, 1])
def test_sigkill_of_a_rank_that_others_wait_for_on_the_device(checkpoint, ranks, who):
    with start(checkpoint("llama"), ranks, tp=ranks) as engine:
        under_load(engine)
        os.kill(engine.ready.pids[who], signal.SIGKILL)
        assert engine.wait(30) == 137
        assert not who or f"{socket.gethostname()} has died" in engine.fatal.message
        assert gone(engine.ready.pids, 20)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_stopped_rank_is_named_while_others_wait_on_the_device(checkpoint, ranks):
    with start(checkpoint("llama"), ranks, tp=ranks, timeout=8) as engine:
        under_load(engine)
        os.kill(engine.ready.pids[1], signal.SIGSTOP)
        assert engine.wait(40) == 71
        assert f"rank 1 on {socket.gethostname()}" in engine.fatal.message
        assert gone(engine.ready.pids, 20)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_drain_under_load_finishes_what_runs(checkpoint, ranks):
    with start(checkpoint("llama"), ranks, tp=ranks) as engine:
        under_load(engine)
        assert engine.drain(60) == 0
        assert gone(engine.ready.pids, 20)
