"""Write a random model.safetensors of the shape in config.json, until the trained one is in place.

    python launcher/demo/random_weights.py [DIRECTORY]

Needs numpy only. The scales keep the logits' standard deviation well above 1 and the layers' share of the last
hidden state above the token's own embedding, so that greedy text does not repeat one token.
"""

import json
import sys
from pathlib import Path

import numpy as np


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Every tensor of a dense Qwen3 checkpoint with tied embeddings, by name."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        found |= {
            name + "input_layernorm.weight": (hidden,),
            name + "self_attn.q_proj.weight": (queries, hidden),
            name + "self_attn.k_proj.weight": (keys, hidden),
            name + "self_attn.v_proj.weight": (keys, hidden),
            name + "self_attn.o_proj.weight": (hidden, queries),
            name + "self_attn.q_norm.weight": (head,),
            name + "self_attn.k_norm.weight": (head,),
            name + "post_attention_layernorm.weight": (hidden,),
            name + "mlp.gate_proj.weight": (inner, hidden),
            name + "mlp.up_proj.weight": (inner, hidden),
            name + "mlp.down_proj.weight": (hidden, inner),
        }
    return found


def bfloat16(values: np.ndarray) -> bytes:
    """Round float32 to bfloat16, to nearest even, as little-endian bytes."""
    bits = values.astype("<f4").view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write(directory: Path, seed: int = 0) -> Path:
    """Write DIRECTORY/model.safetensors from DIRECTORY/config.json."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    rng = np.random.default_rng(seed)
    header: dict = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            values = np.ones(shape, np.float32)
        else:
            scale = 0.1 if "embed_tokens" in name else 1.5 / shape[1] ** 0.5
            values = rng.standard_normal(shape, np.float32) * np.float32(scale)
        blobs.append(bfloat16(values))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + len(blobs[-1])]}
        offset += len(blobs[-1])
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path = directory / "model.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(blobs))
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent))
