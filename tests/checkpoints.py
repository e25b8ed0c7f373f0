"""Small random checkpoints with a tokenizer, made without transformers, which loads the same directory as reference."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Two words of each kind that tests look for: code, other scripts, emoji, numbers. The merges come from here.
CORPUS = """
The quick brown fox jumps over the lazy dog, and then the other foxes say that this was the best of all jumps.
When a process waits for a message it should not burn the processor; it polls, sleeps a little, and polls again.
Supercomputers run jobs, and jobs run on nodes; nodes have processors, and processors have memory of their own.
def main(arguments): return [argument for argument in arguments if argument is not None]
{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}} 0123456789 3.14159 2026-11-20
Größe, naïve, Привет, мир! 你好，世界 こんにちは 🙂🚀 a b c d e f g h i j k l m n o p q r s t u v w x y z
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_checkpoint(
    directory: str | Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    gain: float = 1.0,
    shards: int = 1,
    old_style: bool = False,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of `model_type` to `directory` and return it; the same arguments make the same bytes.

    `overrides` replace entries of config.json: hidden_size, num_key_value_heads, attention_bias, rope_parameters,
    dtype, ... The default has 4 layers, 12 heads, 6 key heads and 512 tokens, so that it cuts into 2, 3 or 6 ranks.
    Logits have a standard deviation of about 2, and `gain` scales how much each layer adds. `shards` > 1 writes that
    many files and an index; `old_style` writes rope_theta, rope_scaling and torch_dtype.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = make_config(model_type, **overrides)
    weights = make_weights(config, seed, gain)
    _write_weights(directory, weights, shards)
    written = to_old_style(config) if old_style else config
    (directory / "config.json").write_text(json.dumps(written, indent=1))
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    if tokenizer:
        write_tokenizer(directory)
    return directory


def make_config(model_type: str, **overrides: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 4,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 16 if model_type == "qwen3" else 8,
        "vocab_size": 512,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    if model_type == "llama":
        config["mlp_bias"] = False
    return config | overrides


def to_old_style(config: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4 wrote it."""
    old = dict(config)
    rope = dict(old.pop("rope_parameters"))
    old["torch_dtype"] = old.pop("dtype")
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = None if rope["rope_type"] == "default" else {**rope}
    return old


def make_weights(config: dict[str, Any], seed: int, gain: float) -> dict[str, torch.Tensor]:
    """Matrices of standard deviation gain / sqrt(inputs), a head of 2 / sqrt(inputs), norms around 1."""
    generator = torch.Generator().manual_seed(seed)
    dtype = TORCH_DTYPES[config["dtype"]]
    weights: dict[str, torch.Tensor] = {}

    def matrix(name: str, outputs: int, inputs: int, scale: float = gain, bias: bool = False) -> None:
        weights[f"{name}.weight"] = torch.randn(outputs, inputs, generator=generator) * scale / math.sqrt(inputs)
        if bias:
            weights[f"{name}.bias"] = torch.randn(outputs, generator=generator) * 0.5

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = 1 + 0.2 * torch.randn(size, generator=generator)

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    bias, mlp_bias = config["attention_bias"], config.get("mlp_bias", False)
    matrix("model.embed_tokens", config["vocab_size"], hidden, 2.0)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        # Sharper queries: attention that looks at few tokens shows a wrong cache better than an average over all.
        matrix(f"{layer}.self_attn.q_proj", heads * dim, hidden, 1.5 * gain, bias)
        matrix(f"{layer}.self_attn.k_proj", kv_heads * dim, hidden, 1.5 * gain, bias)
        matrix(f"{layer}.self_attn.v_proj", kv_heads * dim, hidden, gain, bias)
        matrix(f"{layer}.self_attn.o_proj", hidden, heads * dim, gain, bias)
        if config["model_type"] == "qwen3":
            norm(f"{layer}.self_attn.q_norm", dim)
            norm(f"{layer}.self_attn.k_norm", dim)
        matrix(f"{layer}.mlp.gate_proj", inner, hidden, gain, mlp_bias)
        matrix(f"{layer}.mlp.up_proj", inner, hidden, gain, mlp_bias)
        matrix(f"{layer}.mlp.down_proj", hidden, inner, gain, mlp_bias)
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], hidden, 2.0)
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def _write_weights(directory: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    files: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = list(weights)[shard::shards]
        save_file({name: weights[name] for name in names}, directory / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    size = sum(tensor.nbytes for tensor in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja: byte-level BPE, at most 512 tokens."""
    (directory / "tokenizer.json").write_text(_tokenizer())
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


@functools.cache
def _tokenizer() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=list(SPECIAL),  # ids 0, 1, 2
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    return tokenizer.to_str()
