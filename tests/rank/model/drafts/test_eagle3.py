"""EAGLE-3 heads: logits and hidden states equal those of the published definition, however they are cut."""

import json

import pytest
import torch
import torch.nn.functional as F
from phalanx.comm import mesh, threads
from phalanx.errors import USAGE, FatalError
from phalanx.rank.model.config import read_config
from phalanx.rank.model.drafts import eagle3, find
from phalanx.rank.model.load import load
from safetensors.torch import save_file

from ..harness import BLOCK, distance, make_batch, nan_caches, reference, tokens
from ..test_architectures import write

TOLERANCE = 1e-4
HIDDEN, HEADS, KEYS, DIM, INNER, VOCAB, DRAFT_VOCAB, EPS = 48, 6, 2, 16, 72, 512, 130, 1e-5
TARGETS = {
    "llama": dict(model_type="llama", num_hidden_layers=8),
    "qwen3": dict(model_type="qwen3", num_hidden_layers=7),
    "gpt_oss": dict(
        model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=8, head_dim=16,
        sliding_window=13,
    ),
}  # fmt: skip


def make_head(path, own_embedding=False, reduced=True, **config):
    """A head's directory of random weights, and its tensors."""
    path.mkdir()
    torch.manual_seed(3)
    vocab = DRAFT_VOCAB if reduced else VOCAB

    def matrix(rows, columns):
        return torch.randn(rows, columns) * columns**-0.5

    made = {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "midlayer.self_attn.q_proj.weight": matrix(HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(KEYS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(KEYS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        "lm_head.weight": 2 * matrix(vocab, HIDDEN),
    }
    norms = "midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"
    made |= {f"{name}.weight": 1 + 0.2 * torch.randn(HIDDEN) for name in norms}
    if reduced:
        known = torch.randperm(VOCAB)[:vocab].sort().values
        made |= {"d2t": known - torch.arange(vocab), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
        made["t2d"][known] = True
    if own_embedding:
        made["embed_tokens.weight"] = torch.randn(VOCAB, HIDDEN)
    save_file(made, path / "model.safetensors")
    keys = dict(
        architectures=["LlamaForCausalLMEagle3"], model_type="llama", hidden_size=HIDDEN, intermediate_size=INNER,
        num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=KEYS, head_dim=DIM, vocab_size=VOCAB,
        draft_vocab_size=vocab, rms_norm_eps=EPS, rope_theta=1e4, max_position_embeddings=64, hidden_act="silu",
    )  # fmt: skip
    (path / "config.json").write_text(json.dumps(keys | config))
    return path, made


def norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(x):
    """x [tokens, heads, dim] at positions from 0 on; the halves of a head are the two coordinates."""
    angles = torch.arange(len(x))[:, None] / 1e4 ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def published(w, embedded, before, norm_first=False):
    """Hidden states [tokens, hidden] and logits of a head with these weights: EAGLE's own definition."""
    layer = {name.removeprefix("midlayer."): x for name, x in w.items() if name.startswith("midlayer.")}
    normed = norm(before, layer["hidden_norm.weight"])
    stream = normed if norm_first else before
    x = torch.cat((norm(embedded, layer["input_layernorm.weight"]), normed), 1)
    q, k, v = (
        (x @ layer[f"self_attn.{one}_proj.weight"].T).unflatten(1, (-1, DIM)) for one in ("q", "k", "v")
    )  # fmt: skip
    q, k = rotated(q), rotated(k)
    k, v = (one.repeat_interleave(HEADS // KEYS, 1) for one in (k, v))
    read = F.scaled_dot_product_attention(*(one.transpose(0, 1)[None] for one in (q, k, v)), is_causal=True)
    stream = stream + read[0].transpose(0, 1).flatten(1) @ layer["self_attn.o_proj.weight"].T
    h = norm(stream, layer["post_attention_layernorm.weight"])
    h = F.silu(h @ layer["mlp.gate_proj.weight"].T) * (h @ layer["mlp.up_proj.weight"].T)
    stream = stream + h @ layer["mlp.down_proj.weight"].T
    return stream, norm(stream, w["norm.weight"]) @ w["lm_head.weight"].T


def drafted(target, head, ids, chunks, more, tp=1, pp=1):
    """The head's logits of a prompt in chunks, and of tokens that it goes on with; and its vocabulary."""

    def rank(comm):
        grid = mesh.build(comm, tp, pp, ep=1)
        model = load(target, grid)
        source = find.find(find.Wanted("eagle3", str(head), dtype="f32"), target, model, grid, torch.device("cpu"))
        own, caches, done, found = source and nan_caches(source, 20), nan_caches(model, 20), 0, []
        for count in chunks:
            hidden = None
            if not grid.first:
                hidden = torch.empty(count, model.received_size)
                grid.pipe.recv(hidden, grid.pipe.rank - 1)
            hidden = model([make_batch([(ids[done : done + count], done, range(20))], BLOCK, caches)], hidden)
            if not grid.last:
                grid.pipe.send(hidden, grid.pipe.rank + 1)
                done += count
                continue
            batch = make_batch([(ids[done + 1 : done + count + 1], done, range(20))], BLOCK, own)
            out = source.forward(batch, source.read(hidden))
            found.append(source.logits(out))
            done += count
        if not grid.last:
            return None
        for token in more:
            out = source.forward(make_batch([([token], done, range(20))], BLOCK, own), out[-1:])
            found.append(source.logits(out))
            done += 1
        shard = torch.cat(found)
        logits = grid.tensor.all_gather(shard).permute(1, 0, 2).flatten(1)[:, : source.vocab_size]
        return logits, source.vocabulary

    return threads.run(rank, tp * pp)[0]


def expected(path, head, w, ids, more, layers, norm_first):
    model = reference(path)
    end = []  # before the final norm, which the last of transformers' hidden states is behind
    model.model.norm.register_forward_pre_hook(lambda _, given: end.append(given[0]))
    with torch.no_grad():
        out = model(torch.tensor([ids[:-1]]), output_hidden_states=True, use_cache=False)
        states = [*out.hidden_states[:-1], *end]
        table = w.get("embed_tokens.weight", model.get_input_embeddings().weight)
        aux = torch.cat([states[layer][0] for layer in layers], 1)
        before, following = aux @ w["fc.weight"].T, ids[1:]
        hidden, want = published(w, table[following], before, norm_first)
        for token in more:
            before, following = torch.cat((before, hidden[-1:])), [*following, token]
            hidden, step = published(w, table[following], before, norm_first)
            want = torch.cat((want, step[-1:]))
    return want


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (1, 2), pytest.param(1, 4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", TARGETS)
def test_logits_equal_the_definition(tmp_path, name, tp, pp):
    path = write(tmp_path / "target", **TARGETS[name])
    head, w = make_head(tmp_path / "head", own_embedding=name == "qwen3", norm_before_residual=name == "gpt_oss")
    ids, more = tokens(30), tokens(3, seed=7)
    found, vocabulary = drafted(path, head, ids, [11, 1, 14, 1, 1, 1], more, tp, pp)
    layers = read_config(path).num_layers
    want = expected(path, head, w, ids, more, (2, layers // 2, layers - 3), name == "gpt_oss")
    assert want.std() > 0.5 and distance(found, want) < TOLERANCE
    assert torch.equal(vocabulary, w["d2t"] + torch.arange(DRAFT_VOCAB)) and vocabulary.max() < VOCAB


@pytest.mark.parametrize("pp", [1, 2])
def test_layers_of_a_config_and_a_whole_vocabulary(tmp_path, pp):
    path = write(tmp_path / "target", model_type="llama")
    head, w = make_head(
        tmp_path / "head", reduced=False, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
        attention_bias=False,
    )  # fmt: skip
    ids = tokens(20)
    found, vocabulary = drafted(path, head, ids, [19], [], pp=pp)
    assert vocabulary is None and distance(found, expected(path, head, w, ids, [], (1, 2, 4), False)) < TOLERANCE


@pytest.mark.parametrize("given", [[1, 2], [0, 1, 9], ["x", 1, 2]])
def test_layers_that_the_target_has_not(tmp_path, given):
    head, _ = make_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=given)
    with pytest.raises(FatalError, match="draft-model") as stop:
        eagle3.layers_read(read_config(head), 4)
    assert stop.value.code == USAGE


def test_the_kind_of_a_directory(tmp_path):
    head, _ = make_head(tmp_path / "head")
    target = write(tmp_path / "target", model_type="llama")

    def kind(speculate, draft):
        return find.kind_of(find.Wanted(speculate, str(draft)), torch.device("cpu"))

    assert kind("auto", head) == "eagle3" and kind("auto", target) == "draft"
    assert kind("auto", "") == kind("ngram", "") == kind("none", "") == ""
    for wrong in (("eagle3", ""), ("draft", ""), ("none", head), ("mtp", head)):
        with pytest.raises(FatalError, match="--draft-model") as stop:
            kind(*wrong)
        assert stop.value.code == USAGE
