"""Heads for multi-token prediction: their logits equal those of the published definition, however they are cut."""

import contextlib
import functools
import importlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from phalanx.comm import mesh, threads
from phalanx.errors import USAGE, FatalError
from phalanx.rank.model.config import read_config
from phalanx.rank.model.drafts import find, mtp
from phalanx.rank.model.load import load
from safetensors.torch import load_file, save_file
from torch import Tensor

from ....gguf_files import write as write_gguf
from ..harness import BLOCK, auto_model, distance, make_batch, nan_caches, reference, tokens
from ..shapes import DEEPSEEK_YARN, MODELS
from ..test_architectures import options_of, write

TOLERANCE = 1e-4
# Models and what the config of a model of one layer has in place of theirs, of which the head's layer is.
CASES = {
    "deepseek_v3": dict(first_k_dense_replace=0),
    "deepseek_v32": dict(first_k_dense_replace=0),
    "glm4_moe": dict(first_k_dense_replace=0),
    "glm4_moe_lite": dict(mlp_layer_types=["sparse"]),
    "glm_moe_dsa": dict(mlp_layer_types=["sparse"], indexer_types=["full"]),
    "bailing_hybrid": dict(layer_types=["full_attention"], mlp_layer_types=["sparse"]),
    "qwen3_next": dict(layer_types=["full_attention"]),
    "qwen3_5": dict(layer_types=["full_attention"]),
    "qwen3_5_moe_text": dict(layer_types=["full_attention"]),
    "mimo": {},
    "qwen3": {},
    "step3p7": dict(
        model_type="step3p5",
        layer_types=["sliding_attention"],
        mlp_layer_types=["dense"],
        swiglu_limits=None,
        swiglu_limits_shared=None,
    ),
    "deepseek_v4": dict(layer_types=["sliding_attention"], mlp_layer_types=["moe"]),
}
# Among mtp.spellings; the others' are Qwen's.
SPELLED = dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"), 1)
SPELLED |= {"mimo": 2, "bailing_hybrid": 3, "step3p7": 4, "deepseek_v4": 5}
OPTIONS = MODELS | {
    "deepseek_v3": MODELS["deepseek_v3"] | dict(rope_parameters=DEEPSEEK_YARN | dict(mscale=0.7)),  # as GGUF files say
    "qwen3": dict(model_type="qwen3"), "mimo": dict(model_type="qwen2"),
}  # fmt: skip


class Published:
    """A checkpoint with a head of random weights, and the head by its definition: transformers' layer and norm between
    a linear of two normed inputs and the model's own head."""

    def __init__(self, path, name):
        options = OPTIONS[name]
        self.path = write(path, **options)
        config = json.loads((path / "config.json").read_text())
        text = dict(options_of(**options).get("text_config", options_of(**options)))
        text |= {"num_hidden_layers": 1, "model_type": text.get("model_type", f"{options['model_type']}_text")}
        made = transformers.AutoConfig.for_model(**text | CASES[name])
        torch.manual_seed(1)
        kept = dict(dtype=torch.float32, attn_implementation="eager")
        if name == "step3p7":  # transformers has no class for its texts alone
            module = importlib.import_module("transformers.models.step3p7.modeling_step3p7")
            self.layer = module.Step3p7TextModel._from_config(made, **kept).eval()
        else:
            self.layer = auto_model(made).from_config(made, **kept).eval()
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.normal_(0, parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else parameter.add_(
                    0.2 * torch.randn(parameter.shape)
                )
            for key, buffer in self.layer.named_buffers():
                if key.endswith("correction_bias"):
                    buffer.normal_(0, 0.3)
        self.eps, self.offset = made.rms_norm_eps, float(name.startswith(("qwen3_next", "qwen3_5", "step3p7")))
        self.streams = getattr(made, "hc_mult", 0)
        hidden, layers = made.hidden_size, config.get("text_config", config)["num_hidden_layers"]
        self.names = mtp.spellings(layers)[SPELLED.get(name, 0)]
        self.norms = torch.randn(2, hidden) * 0.2 + 1 - self.offset
        self.projection = torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5
        self.model = reference(path)
        self._save(path, name)

    def _save(self, path, name):
        self.layer.save_pretrained(path / "head")
        found = load_file(path / "head" / "model.safetensors")
        shutil.rmtree(path / "head")
        ours = {"layers.0.": f"{self.names.layer}.", "norm.": f"{self.names.norm}."}
        if self.streams:
            ours["hc_head.hc_"] = f"{self.names.layer}.hc_head_"
        self.tensors = {
            theirs + key.removeprefix("model.").removeprefix(prefix): value
            for key, value in found.items() for prefix, theirs in ours.items()
            if key.removeprefix("model.").startswith(prefix)
        }  # fmt: skip
        self.tensors |= {
            f"{self.names.embedding_norm}.weight": self.norms[0].clone(),
            f"{self.names.hidden_norm}.weight": self.norms[1].clone(),
            f"{self.names.projection}.weight": self.projection,
        }
        if self.streams:
            both = (f"{self.names.projection}.weight", f"{self.names.layer}.h_proj.weight")
            self.tensors |= dict(zip(both, (x.contiguous() for x in self.projection.chunk(2, 1)), strict=True))
        whole = load_file(path / "model.safetensors")
        save_file(whole | self.tensors, path / "model.safetensors", {"format": "pt"})
        config = json.loads((path / "config.json").read_text())
        if SPELLED.get(name):
            config.get("text_config", config)["num_nextn_predict_layers"] = 1
        if name == "step3p7":
            of_drafts = {f"mtp_{key}": CASES[name][key] for key in ("layer_types", "mlp_layer_types")}
            config["text_config"] |= of_drafts
        if name == "mimo":
            config["model_type"] = name
        (path / "config.json").write_text(json.dumps(config))

    @functools.cached_property
    def text(self):
        found = self.model.model
        return getattr(found, "language_model", found)

    @torch.no_grad()
    def hidden(self, ids: list[int]) -> Tensor:
        """[tokens, hidden] of the model, behind its final norm; or all streams that its norm reads a sum of."""
        with seen(self.text.hc_head if self.streams else None) as streams:
            normed = self.text(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        return streams[0][0] if self.streams else normed

    @torch.no_grad()
    def run(self, following: list[int], before: Tensor) -> tuple[Tensor, Tensor]:
        """The head's hidden states and logits, of tokens and of the hidden states before them."""

        def normed(x, weight):
            return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (weight + self.offset)

        embedded, layer = self.text.get_input_embeddings()(torch.tensor(following)), self.layer
        halves = [normed(embedded, self.norms[0]), normed(before, self.norms[1])]
        if self.names.hidden_first:
            halves.reverse()
        if self.streams:
            halves[0] = halves[0][:, None].expand_as(halves[1])
        x, layer = torch.cat(halves, -1) @ self.projection.T, getattr(layer, "model", layer)
        if not self.streams:
            hidden = layer(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
            return hidden, self.model.lm_head(hidden)
        given = layer.layers[0].register_forward_pre_hook(lambda _, args: (x[None], *args[1:]))
        with seen(layer.hc_head) as streams:
            hidden = layer(inputs_embeds=x[None, :, 0], use_cache=False).last_hidden_state[0]
        given.remove()
        return streams[0][0], self.model.lm_head(hidden)


@contextlib.contextmanager
def seen(module):
    """Keeps the first thing that the module reads, of each call."""
    found = []
    hook = module and module.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    yield found
    if hook:
        hook.remove()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return functools.cache(lambda name: Published(tmp_path_factory.mktemp(name), name))


def drafted(path, runs, tp=1, pp=1, table=None, more=()):
    """The head's logits of each run, [tokens, vocab]. runs: (ids, computed before, tokens to compute) of a sequence, in
    chunks; several have their blocks by `table`. more: tokens that it goes on with, from its own hidden states."""
    table = table or [list(range(20))] * len(runs)

    def rank(comm):
        grid = mesh.build(comm, tp, pp, ep=1)
        model = load(path, grid)
        head = find.find(find.Wanted("mtp", "", dtype="f32"), path, model, grid, torch.device("cpu"))
        assert (head is not None) == grid.last
        own, caches = head and nan_caches(head, 40), nan_caches(model, 40, len(runs))
        found = []
        for row, ((ids, done, chunks), blocks) in enumerate(zip(runs, table, strict=True)):
            logits, out = [], None
            for count in chunks:
                batch = make_batch([(ids[done : done + count], done, blocks)], BLOCK, caches, [row])
                hidden = None
                if not grid.first:
                    hidden = torch.empty(count, model.received_size)
                    grid.pipe.recv(hidden, grid.pipe.rank - 1)
                hidden = model([batch], hidden)
                if not grid.last:
                    grid.pipe.send(hidden, grid.pipe.rank + 1)
                    done += count
                    continue
                following = make_batch([(ids[done + 1 : done + count + 1], done, blocks)], BLOCK, own, [row])
                out = head.forward(following, head.read(hidden))
                logits.append(whole(grid, model, head.logits(out)))
                done += count
            for token in more if grid.last else ():
                out = head.forward(make_batch([([token], done, blocks)], BLOCK, own, [row]), out[-1:])
                logits.append(whole(grid, model, head.logits(out)))
                done += 1
            found.append(torch.cat(logits) if logits else None)
        return found

    results = threads.run(rank, tp * pp)
    for other in results[1:tp]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    return results[0]


def whole(grid, model, shard):
    return grid.tensor.all_gather(shard).permute(1, 0, 2).flatten(1)[:, : model.vocab_size].float()


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (1, 2)])
def test_logits_equal_the_definition(made, name, tp, pp):
    """A prompt in chunks, token by token, and tokens that the head goes on with."""
    published, ids, more = made(name), tokens(31), tokens(3, seed=5)
    (found,) = drafted(published.path, [(ids, 0, [13, 1, 12, 1, 1, 1, 1])], tp, pp, more=more)
    before, following = published.hidden(ids[:-1]), ids[1:]
    out, want = published.run(following, before)
    assert want.std() > 0.5
    for token in more:
        before, following = torch.cat((before, out[-1:])), [*following, token]
        out, step = published.run(following, before)
        want = torch.cat((want, step[-1:]))
    assert distance(found, want) < TOLERANCE


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3"])
def test_blocks_of_another_sequence(made, name):
    """A sequence that begins with blocks of another one computes as if it had made them itself."""
    published, ids = made(name), tokens(30)
    other = ids[:17] + tokens(10, seed=9)
    table = [list(range(8)), [0, 1, 2, 3, 20, 21, 22, 23]]
    found = drafted(published.path, [(ids, 0, [15, 14]), (other, 16, [5, 5])], tp=2, table=table)
    _, want = published.run(other[1:], published.hidden(other[:-1]))
    assert distance(found[1], want[16:]) < TOLERANCE


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_moe_text"])
def test_gguf_files(made, tmp_path, name):
    """Files as llama.cpp's converter names and counts the tensors, with norms as it writes them."""
    published, ids = made(name), tokens(20)
    layers = read_config(published.path).num_layers
    behind = mtp.spellings(layers)[1]
    config = json.loads((published.path / "config.json").read_text())
    config = config | {"num_nextn_predict_layers": 1}
    kept = load_file(published.path / "model.safetensors")
    ours = dict(zip(published.names[:5], behind[:5], strict=True))
    ours = dict(sorted(ours.items(), key=lambda one: -len(one[0])))
    renamed = {}
    for key, value in kept.items():
        theirs = next((one for one in ours if key.startswith(one + ".")), None) if key in published.tensors else None
        renamed[key if theirs is None else ours[theirs] + key.removeprefix(theirs)] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(renamed, tmp_path / "model.safetensors")
    file = write_gguf(tmp_path, tmp_path / "x.gguf")
    (found,) = drafted(file, [(ids, 0, [19])], tp=2)
    _, want = published.run(ids[1:], published.hidden(ids[:-1]))
    assert distance(found, want) < TOLERANCE


def test_a_checkpoint_without_a_head_is_refused(made, tmp_path):
    path = write(tmp_path, **OPTIONS["qwen3"])
    with pytest.raises(FatalError, match="mtp") as stop:
        threads.run(lambda comm: load(path, mesh.build(comm, 1, 1, ep=1), draft=mtp.choose), 1)
    assert stop.value.code == USAGE


def test_config_decides_where_weights_are_dummies(made):
    published = made("deepseek_v3")
    config = read_config(published.path)
    assert mtp.find_names(config, frozenset()) == published.names
    assert mtp.find_names(read_config(made("qwen3").path), frozenset()) is None


def test_the_page_names_the_models_whose_heads_are_read():
    page = (Path(__file__).resolve().parents[4] / "docs/speculation.md").read_text()
    (row,) = re.findall(r"^\|(.*)\| `--speculate mtp`", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row)) == {name.removesuffix("_text") for name in CASES} | {"step3p5"}
