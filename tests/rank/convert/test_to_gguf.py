"""GGUF files that are written here compute as the checkpoints that they were made of, and gguf-py reads them."""

import contextlib

import gguf
import numpy as np
import pytest
import torch
from phalanx.errors import FatalError
from phalanx.rank.convert import to_gguf
from phalanx.rank.gguf.architectures import llama, olmo2
from phalanx.rank.model.config import read_config
from safetensors.torch import load_file, save_file

from ... import gguf_files
from ..model import test_chatglm as test_chatglm_models
from ..model.harness import distance, run_steps, tokens
from ..model.shapes import DEEPSEEK_YARN
from ..model.shapes import MODELS as ALL
from ..model.test_architectures import write

LLAMA3 = dict(
    rope_theta=5e5, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
MODELS = {
    "llama": dict(model_type="llama", rope_parameters=LLAMA3),
    "mistral": dict(model_type="mistral", sliding_window=None),
    "ministral": ALL["ministral"] | dict(sliding_window=None, layer_types=["full_attention"] * 4),
    "mixtral": dict(model_type="mixtral", num_local_experts=6, num_experts_per_tok=2),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=True),
    "qwen3": dict(model_type="qwen3", head_dim=16),
    "qwen3_moe": ALL["qwen3_moe"] | dict(decoder_sparse_step=1),
    "gemma": ALL["gemma"],
    "gemma2": ALL["gemma2"] | dict(query_pre_attn_scalar=16),
    "gemma3_text": ALL["gemma3_text"] | dict(query_pre_attn_scalar=16),
    "gemma3": ALL["gemma3"] | dict(text_config=ALL["gemma3_text"] | dict(query_pre_attn_scalar=16)),
    "ernie4_5": ALL["ernie4_5"],
    "arcee biased": ALL["arcee biased"],
    "seed_oss": ALL["seed_oss"],
    "phi3": ALL["phi3"],
    "olmo2": ALL["olmo2"],
    "olmo3": ALL["olmo3"] | dict(max_position_embeddings=256),
    "olmo3 of another pattern": ALL["olmo3"] | dict(max_position_embeddings=256, layer_types=[SLIDING, FULL] * 2),
    "phi": ALL["phi"],
    "stablelm": ALL["stablelm"],
    "stablelm parallel": ALL["stablelm parallel"],
    "gpt_bigcode": ALL["gpt_bigcode"] | dict(activation_function="gelu_pytorch_tanh"),
    "minimax_m2": ALL["minimax_m2"],
    "glm": ALL["glm"],
    "ministral3": ALL["ministral3"],
    "mistral3": ALL["mistral3 of ministral3"],
    "apertus": dict(model_type="apertus", rope_parameters=LLAMA3),
    "qwen3_5_text": ALL["qwen3_5_text"],
    "qwen3_5_moe": ALL["qwen3_5_moe"],
    "qwen3_next": ALL["qwen3_next"],
    "qwen2_moe": ALL["qwen2_moe"] | dict(use_sliding_window=False, mlp_only_layers=[], max_window_layers=28),
    "glm4_moe": ALL["glm4_moe"] | dict(num_nextn_predict_layers=0),
    "granite": ALL["granite"],
    "deepseek_v2": ALL["deepseek_v2"] | dict(rope_parameters=DEEPSEEK_YARN | dict(mscale=0.7)),
    "deepseek_v3": ALL["deepseek_v3"] | dict(rope_parameters=DEEPSEEK_YARN | dict(mscale=0.7)),
    "glm4": ALL["glm4"],
    "smollm3": ALL["smollm3"],
    "starcoder2": dict(model_type="starcoder2", sliding_window=None),
    "cohere2": ALL["cohere2"],
    "gpt_oss": ALL["gpt_oss"] | dict(max_position_embeddings=128, head_dim=16),
}


class Bar(contextlib.nullcontext):
    """Counts as a progress bar does."""

    def __init__(self, total):
        super().__init__(self)
        self.total, self.done = total, 0

    def update(self, count):
        self.done += count


def convert(path, file, to, keys=None):
    bars = []
    to_gguf.write(path, file, to, keys or {}, "cpu", lambda total: bars.append(Bar(total)) or bars[0])
    assert [one.done for one in bars] == [bars[0].total] and bars[0].total > 0
    return file


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", MODELS)
def test_each_architecture(tmp_path, name):
    path = write(tmp_path / "plain", **MODELS[name])
    file, ids = convert(path, tmp_path / "x.gguf", "f32"), tokens(40)
    one, other = (run_steps(where, [ids], max_model_len=512)[0] for where in (path, file))
    assert distance(one, other) < 1e-5
    assert to_gguf.differences(path, file) == []


@pytest.mark.parametrize("name", ["glm4", "chatglm2 long"])
def test_chatglm(tmp_path, name):
    test_chatglm_models.make(tmp_path, **test_chatglm_models.MODELS[name])
    file, ids = convert(tmp_path, tmp_path / "x.gguf", "f32"), tokens(40)
    one, other = (run_steps(where, [ids])[0] for where in (tmp_path, file))
    assert distance(one, other) < 1e-5
    assert to_gguf.differences(tmp_path, file) == []


def test_experts_that_one_tensor_holds(tmp_path):
    """Qwen3.5's own checkpoints have such experts."""
    path, ids = write(tmp_path / "plain", **ALL["qwen3_5_moe_text"]), tokens(40)
    (expected,) = run_steps(path, [ids])
    tensors = load_file(path / "model.safetensors")
    for stem in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        count = ALL["qwen3_5_moe_text"]["num_experts"]
        gate, up, down = (
            torch.stack([tensors.pop(f"{stem}.experts.{i}.{part}_proj.weight") for i in range(count)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{stem}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{stem}.experts.down_proj": down}
    save_file(tensors, path / "model.safetensors")
    (found,) = run_steps(convert(path, tmp_path / "x.gguf", "f32"), [ids], tp=2)
    assert distance(found, expected) < 1e-5


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5_text",
        "minimax_m2",
        "ministral3",
        "glm4_moe",
        "granite",
        "gpt_oss",
        "glm4",
        "cohere2",
        "deepseek_v2",
        "phi",
        "stablelm",
        "stablelm parallel",
        "gpt_bigcode",
        "olmo3",
        "ernie4_5",
        "arcee biased",
        "seed_oss",
    ],
)
def test_files_are_those_of_another_writer(tmp_path, name):
    path = write(tmp_path / "plain", **MODELS[name])
    ours, theirs = (gguf.GGUFReader(file) for file in (
        convert(path, tmp_path / "x.gguf", "f32"), gguf_files.write(path, tmp_path / "y.gguf"),
    ))  # fmt: skip
    data, other = ({one.name: one.data for one in reader.tensors} for reader in (ours, theirs))
    assert data.keys() == other.keys()
    assert all(data[key].shape == other[key].shape for key in data)
    assert all(np.allclose(data[key], other[key], rtol=1e-6) for key in data)
    said, expected = ({key: one.contents() for key, one in reader.fields.items()} for reader in (ours, theirs))
    assert {key: said.get(key) for key in expected if "." in key and "GGUF." not in key} == {
        key: value for key, value in expected.items() if "." in key and "GGUF." not in key
    }


SIZES = dict(model_type="llama", hidden_size=256, intermediate_size=480, head_dim=64, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=509, num_hidden_layers=8)  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write(tmp_path_factory.mktemp("plain"), **SIZES)


@pytest.mark.parametrize("to, kind", [("q8_0", "Q8_0"), ("q4_0", "Q4_0"), ("q5_0", "Q5_0"), ("bf16", "BF16")])
def test_bytes_are_those_of_gguf_py(plain, tmp_path, to, kind):
    found = {one.name: one for one in gguf.GGUFReader(convert(plain, tmp_path / "x.gguf", to)).tensors}
    weights = load_file(plain / "model.safetensors")
    for theirs, ours in {"token_embd": "embed_tokens", "blk.3.ffn_up": "layers.3.mlp.up_proj"}.items():
        tensor = found[f"{theirs}.weight"]
        want = gguf.quants.quantize(weights[f"model.{ours}.weight"].float().numpy(), gguf.GGMLQuantizationType[kind])
        assert tensor.tensor_type.name == kind
        assert (tensor.data.reshape(-1).view("u1") == want.reshape(-1).view("u1")).all()


@pytest.mark.long
@pytest.mark.parametrize("to", ["iq4_nl", "iq4_xs"])
def test_codes_of_a_table(plain, tmp_path, to):
    """Squared errors are smaller than gguf-py's Q4_0 of the same weights, three times as far off as its Q5_0 of
    one bit more, and within 6 % of the best scale of each group."""
    found = {one.name: one for one in gguf.GGUFReader(convert(plain, tmp_path / "x.gguf", to)).tensors}
    weights, kinds = load_file(plain / "model.safetensors"), gguf.GGMLQuantizationType
    for theirs, kind, ours in (
        ("blk.3.ffn_up", to.upper(), "mlp.up_proj"), ("blk.3.ffn_down", "IQ4_NL", "mlp.down_proj")
    ):  # fmt: skip
        tensor, want = found[f"{theirs}.weight"], weights[f"model.layers.3.{ours}.weight"].float().numpy()
        got = gguf.quants.dequantize(tensor.data, kinds[kind])
        others = (gguf.quants.dequantize(gguf.quants.quantize(want, one), one) for one in (kinds.Q4_0, kinds.Q5_0))
        apart, four, five = (np.square(x - want).mean() for x in (got, *others))
        best = sum(_nearest(group) for group in want[:4].reshape(-1, 32))
        assert tensor.tensor_type.name == kind and apart < 0.8 * four and apart < 3.2 * five
        assert 0.999 * best < np.square(got - want)[:4].sum() < 1.06 * best
    assert len(run_steps(tmp_path / "x.gguf", [tokens(20, vocab=509)])[0]) == 20


def _nearest(group):
    """The least squared error of a group of 32 with any of many scales: each weight has the nearest entry of the
    table."""
    table = np.array(gguf.quants.IQ4_NL.kvalues, dtype=np.float64)
    most = np.abs(group).max()
    scales = np.linspace(-most, most, 2000)[:, None, None] / 64
    return np.square(scales * table - group[:, None]).min(-1).sum(-1).min()


def test_a_mix_and_its_metadata(plain, tmp_path):
    reader = gguf.GGUFReader(convert(plain, tmp_path / "x.gguf", "Q4_K_M".lower().replace("_", "")))
    kinds = {one.name: one.tensor_type.name for one in reader.tensors}
    assert kinds["output.weight"] == "Q6_K" and kinds["token_embd.weight"] == "Q4_K"
    assert [kinds[f"blk.{i}.attn_v.weight"][:2] for i in range(8)] == ["Q6", "Q4", "Q4", "Q6", "Q4", "Q4", "Q6", "Q6"]
    assert {kinds[f"blk.{i}.ffn_down.weight"] for i in range(8)} == {"Q5_0", "Q8_0"}, "480 inputs: no super-blocks"
    assert kinds["blk.0.attn_norm.weight"] == "F32" and kinds["blk.0.attn_q.weight"] == "Q4_K"
    fields = {name: one.contents() for name, one in reader.fields.items()}
    assert fields["general.architecture"] == "llama" and fields["general.file_type"] == 15
    assert fields["llama.attention.head_count_kv"] == 2 and fields["llama.attention.key_length"] == 64
    weights, tensors = load_file(plain / "model.safetensors"), {one.name: one for one in reader.tensors}
    for theirs, ours in {"output": "lm_head", "blk.3.ffn_up": "model.layers.3.mlp.up_proj"}.items():
        one, want = tensors[f"{theirs}.weight"], weights[f"{ours}.weight"].numpy()
        got = gguf.quants.dequantize(one.data, one.tensor_type)
        assert 0.001 < np.abs(got - want).mean() / np.abs(want).mean() < 0.1
    assert len(run_steps(tmp_path / "x.gguf", [tokens(20, vocab=509)], tp=2)[0]) == 20


def test_models_that_files_cannot_hold(plain, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(FatalError) as caught:
        patch.setattr(llama, "WRITES", ("mistral",))  # all models that there are can be written
        to_gguf.write(plain, tmp_path / "x.gguf", "q8_0", {}, "cpu", Bar)
    said, _, known = str(caught.value).partition("; of these they can: ")
    assert f"{plain}: GGUF files" in said
    assert {"mistral", "chatglm", "olmo3"} < set(known.split(", ")) and "llama" not in known.split(", ")
    test_chatglm_models.make(tmp_path, original_rope=False)
    with pytest.raises(FatalError, match="chatglm.*original_rope"):
        to_gguf.write(tmp_path, tmp_path / "x.gguf", "q8_0", {}, "cpu", Bar)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(layer_types=[FULL, SLIDING, SLIDING, FULL]), "layer_types has it in layers 0, 3 of 4"),
        (dict(rope_parameters={FULL: dict(rope_theta=1e4), SLIDING: dict(rope_theta=1e3)}), "a rope_theta of 10000.0"),
    ],
)
def test_windows_that_files_cannot_say(tmp_path, changes, words):
    path = write(tmp_path / "plain", **MODELS["olmo3"] | changes)
    with pytest.raises(FatalError, match=words):
        to_gguf.write(path, tmp_path / "x.gguf", "q8_0", {}, "cpu", Bar)


@pytest.mark.parametrize(
    "told, types",
    [
        (None, [SLIDING, SLIDING, SLIDING, FULL]),
        (0, [SLIDING] * 4),
        (1, [FULL] * 4),
        ([True, False, False, True], [SLIDING, FULL, FULL, SLIDING]),
    ],
)
def test_windows_of_other_files(tmp_path, monkeypatch, told, types):
    """Either way of telling them; none: every fourth layer has none."""
    said = {"attention.sliding_window": 11} | ({} if told is None else {olmo2.PATTERN: told})
    monkeypatch.setattr(olmo2, "keys", lambda _: said)
    file = convert(write(tmp_path / "plain", **MODELS["olmo3"]), tmp_path / "x.gguf", "q8_0")
    assert read_config(file).raw["layer_types"] == types


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            dict(model_type="mistral", sliding_window=64),
            "layer 0 has a window of 64 tokens, in the file full attention, and so on in 4 layers",
        ),
        (
            MODELS["gemma2"] | dict(layer_types=[SLIDING, FULL, FULL, FULL]),
            "layer 2 has full attention, in the file a window of 11 tokens",
        ),
    ],
)
def test_what_a_file_does_not_say_is_told(tmp_path, changes, words):
    path = write(tmp_path / "plain", **changes)
    assert to_gguf.differences(path, convert(path, tmp_path / "x.gguf", "q8_0")) == [words]
