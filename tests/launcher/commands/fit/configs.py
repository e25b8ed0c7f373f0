"""config.json of well-known models, their shapes, measured without another process, and what tests ask for."""

import json
import os
from pathlib import Path
from unittest import mock

import msgspec
from phalanx.launcher.commands.fit import measured
from phalanx.launcher.commands.fit.devices import DEVICES
from phalanx.launcher.commands.fit.measured import Question
from phalanx.launcher.commands.fit.memory import Workload
from phalanx.rank.model import measure

from ....kept import kept

RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))  # of all its workers

ASKED = Workload(context=8192, concurrency=64, length=4096)
# Round figures, so that what is measured on devices may change without these sums.
ROUND = {"runtime": 0.6e9, "group": 0.4e9}
GPU80 = msgspec.structs.replace(DEVICES["H100"], memory=85e9, **ROUND)
GPU141 = msgspec.structs.replace(DEVICES["H200"], memory=150e9, **ROUND)

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "torch_dtype": "bfloat16",
}
CONFIGS = {
    "Llama-3.1-8B": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "Llama-3.1-70B": LLAMA
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "Llama-3.1-405B": LLAMA
    | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "topk_method": "noaux_tc", "vocab_size": 129280,
        "max_position_embeddings": 163840, "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    },
}  # fmt: skip
WITH_WINDOWS = {
    "gemma-3-27b": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "torch_dtype": "bfloat16",
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}
CONFIGS["Qwen3-235B-A22B"] = CONFIGS["Qwen3-30B-A3B"] | {
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
    "num_attention_heads": 64,
}  # fmt: skip
CONFIGS["Qwen3-30B-A3B in FP8"] = CONFIGS["Qwen3-30B-A3B"] | {
    "quantization_config": CONFIGS["DeepSeek-V3"]["quantization_config"]
}
CONFIGS["Qwen2.5-VL-7B"] = {
    "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 128000,
    "torch_dtype": "bfloat16", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
}  # fmt: skip
CONFIGS["DeepSeek of 4 layers"] = CONFIGS["DeepSeek-V3"] | {"num_hidden_layers": 4}


def write(directory, config):
    """A model directory that holds config.json alone."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def ask(question):
    """Asks like measured.ask, without the seconds that a process takes to import torch.

    Of a directory that holds config.json alone what was answered before in this run of the tests, to whichever of its
    workers, is answered again, wherever the directory lies. The context bounds images alone.
    """
    path = Path(question.model)
    if path.is_dir() and [one.name for one in path.iterdir()] == ["config.json"]:
        text = (path / "config.json").read_text()
        context = question.context if "vision_config" in text else 0
        key = text, msgspec.structs.replace(question, model="", context=context)
        if key not in _answers:
            _answers[key] = kept(lambda file: file.write_bytes(_measure(question)), RUN, *map(str, key)).read_bytes()
        return _answers[key]
    return _measure(question)


_answers: dict = {}


def _measure(question):
    return json.dumps(measure.measure(msgspec.structs.asdict(question))).encode()


def read(path, dtype="bf16", device="cuda", most=16, isq="none", **options):
    """The shape of a model directory."""
    with mock.patch.object(measured, "ask", ask):
        return measured.read(Question(str(path), device, dtype, isq=isq, most=most, **options), path.name)
