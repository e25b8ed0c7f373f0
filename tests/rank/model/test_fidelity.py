"""f32 logits equal transformers' within 1e-4, however the model is written, cut and fed."""

import json

import pytest
import torch
from phalanx.errors import FatalError
from phalanx.launcher.builtin_model import DIRECTORY

from ...ranks import run_ranks
from . import harness
from .harness import MIXED_LENGTHS, MIXED_STEPS, distance, reference, run_steps, tokens

TOLERANCE = 1e-4
GRIDS = [(1, 1), (2, 1), (3, 1), (6, 1), (12, 1), (1, 2), (1, 3), (2, 2)]


@pytest.mark.parametrize("tp, pp", GRIDS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_every_grid(checkpoint, expected, model_type, tp, pp):
    path = checkpoint(model_type)
    ids = tokens(70)
    (logits,) = run_steps(path, [ids], tp=tp, pp=pp)
    assert distance(logits, expected(path, ids)) < TOLERANCE


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)])
def test_the_built_in_model(expected, tp, pp):
    ids = tokens(70)
    (logits,) = run_steps(DIRECTORY, [ids], tp=tp, pp=pp)
    assert distance(logits, expected(DIRECTORY, ids)) < TOLERANCE


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("tp, pp", [(1, 1), (3, 1), (2, 2)])
def test_biases_odd_sizes_and_tied_embeddings(checkpoint, expected, model_type, tp, pp):
    """Intermediate size and vocabulary that do not divide by any degree, and a head_dim that is no power of two."""
    options = dict(attention_bias=True, tie_word_embeddings=True, intermediate_size=101, vocab_size=509, head_dim=10)
    if model_type == "llama":
        options["mlp_bias"] = True
    path = checkpoint(model_type, num_hidden_layers=3, **options)
    ids = tokens(40, vocab=509)
    (logits,) = run_steps(path, [ids], tp=tp, pp=pp)
    assert distance(logits, expected(path, ids)) < TOLERANCE


def test_more_ranks_than_entries_leave_some_with_padding_alone(checkpoint, expected):
    path = checkpoint(intermediate_size=5, vocab_size=17, num_hidden_layers=1)
    ids = tokens(20, vocab=17)
    (logits,) = run_steps(path, [ids], tp=12)
    assert distance(logits, expected(path, ids)) < TOLERANCE


@pytest.mark.parametrize("kv_heads", [1, 3, 4, 12])
@pytest.mark.parametrize("tp", [1, 3, 12])
def test_shared_and_replicated_key_heads(checkpoint, expected, kv_heads, tp):
    path = checkpoint(num_key_value_heads=kv_heads, num_hidden_layers=2)
    if kv_heads == 4 and tp == 3:
        with pytest.raises(FatalError):
            run_steps(path, [tokens(5)], tp=tp)
        return
    ids = tokens(30)
    (logits,) = run_steps(path, [ids], tp=tp)
    assert distance(logits, expected(path, ids)) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shards, old_style", [(1, True), (3, False)])
def test_checkpoint_dtypes_shards_and_config_styles(checkpoint, expected, dtype, shards, old_style):
    path = checkpoint(dtype=dtype, shards=shards, old_style=old_style, num_hidden_layers=2)
    ids = tokens(30)
    (logits,) = run_steps(path, [ids], tp=2)
    assert distance(logits, expected(path, ids)) < TOLERANCE


ROPES = {
    "theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn betas": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
    "yarn mscale": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 1.0,
        "mscale_all_dim": 0.6, "truncate": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("old_style", [False, True])
def test_every_kind_of_rope(checkpoint, expected, kind, old_style):
    rope = {"rope_theta": 10000.0, **ROPES[kind]}
    options = dict(head_dim=32, num_hidden_layers=2, max_position_embeddings=128, rope_parameters=rope)
    path = checkpoint(**options, old_style=old_style)
    ids = tokens(120)
    (logits,) = run_steps(path, [ids])
    assert distance(logits, expected(path, ids)) < TOLERANCE
    plain = checkpoint(**{**options, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    if kind != "dynamic":  # which differs only beyond max_position_embeddings
        assert distance(logits, run_steps(plain, [ids])[0]) > 0.1


def test_dynamic_rope_past_the_trained_length_decodes_like_transformers(checkpoint):
    """Token by token; a chunked prompt gives the same here, as a token's rotation depends on its position alone."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    path = checkpoint(head_dim=32, num_hidden_layers=2, max_position_embeddings=32, rope_parameters=rope)
    ids = tokens(100)
    model = reference(path)
    cache, want = None, []
    with torch.no_grad():
        for token in ids:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            want.append(out.logits[0])
    (stepwise,) = run_steps(path, [ids], [[(0, 1)]] * len(ids))
    (whole,) = run_steps(path, [ids])
    assert distance(stepwise, torch.cat(want)) < TOLERANCE
    assert distance(whole, stepwise) < TOLERANCE


@pytest.mark.parametrize("style", ["layer_types", "max_window_layers"])
def test_sliding_window_layers(checkpoint, expected, style):
    options = dict(use_sliding_window=True, sliding_window=7, num_hidden_layers=3)
    if style == "layer_types":
        options["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    else:
        options["max_window_layers"] = 1
    path = checkpoint("qwen3", **options)
    ids = tokens(50)
    want = expected(path, ids)
    assert distance(run_steps(path, [ids])[0], want) < TOLERANCE
    chunks = [[(0, 1)]] * 5 + [[(0, 11)], [(0, 1)], [(0, 20)], [(0, 13)]]
    assert distance(run_steps(path, [ids], chunks)[0], want) < TOLERANCE


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 2)])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_chunks_and_mixed_batches(checkpoint, expected, model_type, tp, pp):
    """Prompts in chunks beside decoding sequences of other lengths give what each sequence gives alone."""
    path = checkpoint(model_type)
    sequences = [tokens(n, seed=n) for n in MIXED_LENGTHS]
    found = run_steps(path, sequences, MIXED_STEPS, tp=tp, pp=pp)
    for ids, logits in zip(sequences, found, strict=True):
        assert distance(logits, expected(path, ids)) < TOLERANCE


@pytest.mark.long
def test_through_mpirun(checkpoint, expected, tmp_path):
    path, tp, pp = checkpoint("qwen3"), 2, 2
    sequences = [tokens(n, seed=n) for n in (40, 25)]
    steps = [[(0, 20)], [(0, 1), (1, 24)], [(0, 1), (1, 1)], [(0, 18)]]
    job = tmp_path / "job.json"
    job.write_text(json.dumps(dict(path=str(path), sequences=sequences, steps=steps, tp=tp, pp=pp)))
    done = run_ranks(tp * pp, harness.__file__, str(job))
    assert done.returncode == 0, done.stderr
    found = torch.load(job.with_suffix(".pt"))
    for ids, logits, threaded in zip(sequences, found, run_steps(path, sequences, steps, tp, pp), strict=True):
        assert distance(logits, expected(path, ids)) < TOLERANCE
        assert distance(logits, threaded) < TOLERANCE / 10


def test_long_prompts_span_several_chunks(checkpoint, expected, monkeypatch):
    from phalanx.kernels.attention import reference

    monkeypatch.setattr(reference, "QUERY_CHUNK", 16)
    path = checkpoint(num_hidden_layers=2)
    ids = tokens(100)
    want = expected(path, ids)
    for steps in ([[(0, 100)]], [[(0, 9)], [(0, 50)], [(0, 41)]]):
        assert distance(run_steps(path, [ids], steps)[0], want) < TOLERANCE


def test_large_batches_are_split_into_groups(checkpoint, expected, monkeypatch):
    from phalanx.kernels.attention import cpu_decode, reference

    monkeypatch.setattr(cpu_decode, "supports", lambda part: False)
    monkeypatch.setattr(reference, "GATHER_BYTES", 6 * 8 * 4 * 30)
    monkeypatch.setattr(reference, "SLACK", 0)
    path = checkpoint(num_hidden_layers=2)
    sequences = [tokens(n, seed=n) for n in (40, 3, 17, 2, 90, 18, 33)]
    steps = [[(i, len(s) - 1) for i, s in enumerate(sequences)], [(i, 1) for i in range(len(sequences))]]
    steps[0].sort(key=lambda part: part[1] > 1)
    for ids, logits in zip(sequences, run_steps(path, sequences, steps), strict=True):
        assert distance(logits, expected(path, ids)) < TOLERANCE


@pytest.mark.parametrize("dtype, bound", [("bf16", 0.5), ("f16", 0.06)])
def test_narrow_dtypes_stay_near(checkpoint, expected, dtype, bound):
    """Rounding differs by the cut, so the distance is to f32, and what matters is that nothing is plainly wrong."""
    path = checkpoint(num_hidden_layers=2)
    ids = tokens(40)
    whole = run_steps(path, [ids], dtype=dtype)[0]
    assert distance(whole, expected(path, ids)) < bound
    assert distance(run_steps(path, [ids], tp=3, dtype=dtype)[0], whole) < bound
    # A stage boundary passes on exactly what the next layer would have read.
    assert torch.equal(run_steps(path, [ids], pp=2, dtype=dtype)[0], whole)


@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights(checkpoint, expected, monkeypatch, tied):
    """The layout that large matrices are kept in, forced on small ones; from one to four rows, and many."""
    from phalanx.kernels.gemm import linear

    monkeypatch.setattr(linear, "PACK_FROM", 0)
    path = checkpoint(tie_word_embeddings=tied, attention_bias=True, intermediate_size=101)
    sequences = [tokens(n, seed=n) for n in (40, 12, 9)]
    steps = [[(0, 1)], [(0, 1), (1, 1)], [(0, 1), (1, 1), (2, 1)], [(0, 3)], [(1, 10), (2, 8), (0, 34)]]
    for tp in (1, 3):
        for ids, logits in zip(sequences, run_steps(path, sequences, steps, tp=tp), strict=True):
            assert distance(logits, expected(path, ids)) < TOLERANCE


def test_an_empty_step(checkpoint):
    path = checkpoint(num_hidden_layers=2)
    assert run_steps(path, [tokens(3)], [[], [(0, 3)], []])[0].shape == (3, 512)


def test_dummy_weights_do_not_depend_on_the_cut(checkpoint):
    path = checkpoint(vocab_size=511, intermediate_size=101)
    ids = tokens(30, vocab=511)
    whole = run_steps(path, [ids], load_format="dummy")[0]
    assert 0.3 < whole.std() < 3
    for tp, pp in [(2, 1), (3, 1), (2, 2)]:
        assert distance(run_steps(path, [ids], tp=tp, pp=pp, load_format="dummy")[0], whole) < TOLERANCE
    assert distance(run_steps(path, [ids])[0], whole) > 0.1
    assert distance(run_steps(path, [ids], load_format="dummy")[0], whole) == 0
