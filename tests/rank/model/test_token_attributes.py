"""Attributes of tokens besides an id: an embedding of their own, and positions of several axes."""

from dataclasses import replace

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.kernels.rope.rope import apply_rotary
from phalanx.rank.model.batch import EmbeddingOverride
from phalanx.rank.model.layers.rope import NONE, RotaryEmbedding
from phalanx.rank.model.load import load

from . import harness
from .harness import BLOCK, distance, forward, make_batch, nan_caches, tokens
from .hybrids import HYBRIDS
from .test_architectures import TOLERANCE, write


def logits_of(path, ids, tp, **attributes):
    """Logits of one step of all tokens [tokens, vocab], with these attributes of the batch."""

    def run(comm):
        grid = mesh.build(comm, tp, 1)
        model = load(path, grid)
        blocks = -(-len(ids) // BLOCK)
        batch = make_batch([(ids, 0, range(blocks))], BLOCK, nan_caches(model, blocks, 1))
        return forward(model, grid, replace(batch, **attributes))

    return threads.run(run, tp)[0]


def reference_logits(path, **given):
    with torch.no_grad():
        return harness.reference(path)(**given).logits[0]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_embeddings_that_are_not_looked_up(checkpoint, tmp_path, name, tp):
    """They enter the first layer as they are given, also where a model scales what it looks up."""
    path = checkpoint() if name == "llama" else write(tmp_path, model_type=name, head_dim=16, sliding_window=11)
    ids, at = tokens(20), torch.tensor([3, 4, 11])
    model = harness.reference(path)
    embedded = model.get_input_embeddings()(torch.tensor([ids])).detach().clone()
    values = torch.randn(3, embedded.shape[2], generator=torch.Generator().manual_seed(1)) * embedded.std()
    embedded[0, at] = values
    want = reference_logits(path, inputs_embeds=embedded)
    got = logits_of(path, ids, tp, embeddings=EmbeddingOverride(at, values))
    assert distance(got, want) < TOLERANCE < distance(logits_of(path, ids, tp), want)


def positions_of_an_image():
    """Text, 2 x 3 patches of one moment, and text again: [3, 20]."""
    text, rest = torch.arange(5).expand(3, -1), torch.arange(8, 17).expand(3, -1)
    patches = torch.tensor([[5] * 6, [5, 5, 5, 6, 6, 6], [5, 6, 7, 5, 6, 7]])
    return torch.cat((text, patches, rest), 1)


@pytest.mark.parametrize("tp", [1, 2])
def test_positions_of_three_axes(tmp_path, tp):
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=1.0, mrope_section=[3, 3, 2])
    options = HYBRIDS["qwen3_5_text"] | dict(rope_parameters=rope | {"mrope_interleaved": True})
    path = write(tmp_path, **options)
    positions, ids = positions_of_an_image(), tokens(20)
    want = reference_logits(path, input_ids=torch.tensor([ids]), position_ids=positions[:, None])
    got = logits_of(path, ids, tp, positions=positions)
    assert distance(got, want) < TOLERANCE < distance(logits_of(path, ids, tp), want)


def test_sections_one_after_the_other():
    """Qwen2-VL's layout: each pair of dimensions is a complex number, which an axis turns. Layers without positions are
    turned by no axis."""
    positions = positions_of_an_image()
    rope = RotaryEmbedding(dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3]), 16, 64, 64)
    q = torch.randn(20, 4, 16)
    of_frequency = positions[[0, 0, 1, 1, 1, 2, 2, 2]].T  # [20, 8]
    angles = (of_frequency * 1e4 ** (-torch.arange(8) / 8))[:, None]
    turned = torch.complex(*q.chunk(2, 2)) * torch.polar(torch.ones_like(angles), angles)
    want = torch.cat((turned.real, turned.imag), 2)
    torch.testing.assert_close(apply_rotary(q.clone(), rope(positions)), want, atol=1e-5, rtol=1e-5)
    same = torch.arange(20)
    for one, other in zip(rope(same)[:2], rope(same.expand(3, -1))[:2], strict=True):
        assert torch.equal(one, other)
    unturned = RotaryEmbedding(NONE, 16, 64, 64)(positions)
    assert (unturned.cos == 1).all() and not unturned.sin.any()
    with pytest.raises(AssertionError, match="one axis"):
        RotaryEmbedding(dict(rope_type="default", rope_theta=1e4), 16, 64, 64)(positions)
