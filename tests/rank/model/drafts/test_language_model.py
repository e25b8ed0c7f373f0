"""Smaller models that draft: their logits equal transformers', however they are cut, on the target's ranks."""

import json

import pytest
import torch
from phalanx.comm import mesh, threads
from phalanx.errors import USAGE, FatalError
from phalanx.rank.model.drafts import find
from phalanx.rank.model.drafts.language_model import TOKENIZER, check_tokenizers
from phalanx.rank.model.load import load

from ....checkpoints import write_tokenizer
from ..harness import BLOCK, distance, make_batch, nan_caches, reference, tokens
from ..test_architectures import write

TOLERANCE = 1e-4
DRAFTS = {
    "qwen3": dict(model_type="qwen3", num_hidden_layers=2),
    "llama": dict(model_type="llama", num_hidden_layers=2),
    "windows": dict(model_type="gemma3_text", num_hidden_layers=6, head_dim=16, sliding_window=11, vocab_size=512),
    "smaller vocabulary": dict(model_type="qwen3", num_hidden_layers=2, vocab_size=480),
}


def drafted(target, draft, ids, chunks, tp=1, pp=1):
    """The draft model's logits of a sequence in chunks."""

    def rank(comm):
        grid = mesh.build(comm, tp, pp, ep=1)
        model = load(target, grid)
        source = find.find(find.Wanted("draft", str(draft), dtype="f32"), target, model, grid, torch.device("cpu"))
        if not grid.last:
            assert source is None
            return None
        assert not source.FOLLOWS and source.vocabulary is None and source.max_model_len == model.max_model_len
        own, done, found = nan_caches(source.model, 20), 0, []
        for count in chunks:
            out = source.forward(make_batch([(ids[done : done + count], done, range(20))], BLOCK, own), None)
            found.append(source.logits(out))
            done += count
        shard = torch.cat(found)
        return grid.tensor.all_gather(shard).permute(1, 0, 2).flatten(1)[:, : source.model.vocab_size]

    return threads.run(rank, tp * pp)[0]


@pytest.mark.sample(3)
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", DRAFTS)
def test_logits_equal_transformers(tmp_path, name, tp, pp):
    target, draft = write(tmp_path / "target", model_type="llama"), write(tmp_path / "draft", **DRAFTS[name])
    model = reference(draft)
    ids = tokens(30, vocab=model.config.vocab_size)
    found = drafted(target, draft, ids, [11, 1, 14, 1, 1, 2], tp, pp)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert want.std() > 0.5 and distance(found, want) < TOLERANCE


def test_tokens_that_it_does_not_know_are_read_as_its_last(tmp_path):
    """The target's vocabulary may have more padding."""
    target = write(tmp_path / "target", model_type="llama")
    draft = write(tmp_path / "draft", **DRAFTS["smaller vocabulary"])
    ids = tokens(20, vocab=470)
    beyond, last = ([*ids[:9], token, *ids[10:]] for token in (500, 479))
    assert drafted(target, draft, beyond, [20]).equal(drafted(target, draft, last, [20]))


def test_another_tokenizer_is_refused(tmp_path):
    for name in ("target", "draft", "other"):
        (tmp_path / name).mkdir()
        write_tokenizer(tmp_path / name)
    check_tokenizers(tmp_path / "target", tmp_path / "draft")
    file = tmp_path / "other" / TOKENIZER
    told = json.loads(file.read_text())
    vocab = told["model"]["vocab"]
    first, second = list(vocab)[5:7]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(told))
    with pytest.raises(FatalError, match="draft-model") as stop:
        check_tokenizers(tmp_path / "target", tmp_path / "other")
    assert stop.value.code == USAGE
    file.unlink()
    check_tokenizers(tmp_path / "target", tmp_path / "other")  # nothing tells


@pytest.mark.parametrize("kind, size", [("draft", 3), ("mtp", 1), ("eagle3", 1), ("", 1)])
def test_ranks_that_a_draft_model_is_not_split_over(kind, size):
    with pytest.raises(FatalError, match=f"--draft-tensor-parallel-size {size}"):
        find.check_tensor_size(kind, size, 2)


@pytest.mark.parametrize("kind, size", [("draft", 0), ("draft", 1), ("draft", 2), ("mtp", 2)])
def test_ranks_that_it_is_split_over(kind, size):
    find.check_tensor_size(kind, size, 2)
