"""config.json → Shape, for the families whose arithmetic is well known, whether Phalanx serves them yet or not.

Sources: Llama (arXiv 2302.13971, 2407.21783), Mixtral (2401.04088), Qwen3 (2505.09388), DeepSeek-V2 and its multi-head
latent attention (2405.04434), DeepSeek-V3 (2412.19437); names of keys as Hugging Face's config.json has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ....errors import MODEL, FatalError
from .shape import Layer, ModelShape, Part

# One file per architecture, named as config.json's model_type: the registry of rank/model/architectures, by file.
SERVED = Path(__file__).resolve().parents[3] / "rank" / "model" / "architectures"
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


class Heads(NamedTuple):
    queries: int
    keys: int
    dim: int


class ConfigReader:
    """config.json's keys, with complaints that name the file."""

    def __init__(self, path: Path, raw: dict[str, Any]):
        self.path, self.raw = path, raw

    def number(self, *names: str, default: int | None = None) -> int:
        """The first of these keys that is there."""
        for name in names:
            value = self.raw.get(name)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                    raise FatalError(f"{self.path}/config.json: {name} is {value!r}, not a whole number", MODEL)
                return value
        if default is None:
            raise FatalError(f"{self.path}/config.json has no {names[0]}", MODEL)
        return default

    def size(self, *names: str, default: int | None = None) -> int:
        value = self.number(*names, default=default)
        if value < 1:
            raise FatalError(f"{self.path}/config.json: {names[0]} is {value}, not a positive number", MODEL)
        return value

    def on(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        return default if value is None else bool(value)


def read(directory: str | Path) -> ModelShape:
    """The shape of a model directory, of which config.json alone is read. Raises Stop in words."""
    path = Path(directory)
    keys = ConfigReader(path, read_json(path))
    kind = str(keys.raw.get("model_type"))
    if kind not in FAMILIES:
        raise FatalError(
            f"{path}: the arithmetic of model type {kind!r} is not known; known are {', '.join(sorted(FAMILIES))}",
            MODEL,
        )
    return FAMILIES[kind](keys)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FatalError(f"{path} has no config.json: not a model directory", MODEL) from None
    except (OSError, ValueError) as error:
        raise FatalError(f"{path}/config.json cannot be read: {error}", MODEL) from None
    if not isinstance(value, dict):
        raise FatalError(f"{path}/config.json holds a JSON {type(value).__name__}, not an object", MODEL)
    return value


def _grouped_attention(keys: ConfigReader, bias: bool, out_bias: bool, head_norms: bool) -> tuple[Layer, Heads]:
    """The parts of attention with key heads that query heads share."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    kv_heads = keys.size("num_key_value_heads", default=heads)
    dim = keys.size("head_dim", default=max(1, hidden // heads))
    parts = [
        Part("attention", heads, hidden, "columns", unit=dim, bias=bias),
        Part("attention", kv_heads, hidden, "keys", unit=2 * dim, bias=bias, fused=True),
        Part("attention", hidden, heads * dim, "rows", bias=out_bias),
        Part("norms", hidden, packs=False),
        Part("norms", hidden, packs=False),
    ]
    if head_norms:
        parts += [Part("norms", dim, packs=False)] * 2
    return tuple(parts), Heads(heads, kv_heads, dim)


def _mlp(hidden: int, inner: int, bias: bool = False, kind: str = "MLP", copies: int = 1) -> Layer:
    """Gate and up, held as one, and down."""
    return (
        Part(kind, inner, hidden, "columns", bias=bias, copies=copies),
        Part(kind, inner, hidden, "columns", bias=bias, copies=copies, fused=True),
        Part(kind, hidden, inner, "rows", bias=bias, copies=copies),
    )


def _router(hidden: int, experts: int, bias: bool = False) -> Part:
    return Part("experts", experts, hidden, bias=bias, packs=False)


def _dense(keys: ConfigReader, bias: bool | None = None, head_norms: bool = False) -> ModelShape:
    """Llama and what differs from it by biases and norms alone."""
    asked = keys.on("attention_bias")
    attention, heads = _grouped_attention(keys, asked if bias is None else bias, asked, head_norms)
    mlp = _mlp(keys.size("hidden_size"), keys.size("intermediate_size"), keys.on("mlp_bias"))
    layers = (attention + mlp,) * keys.size("num_hidden_layers")
    return _grouped_shape(keys, layers, heads)


def _post_normed(keys: ConfigReader) -> ModelShape:
    """Gemma 2: norms after the sublayers as well."""
    given = {"tie_word_embeddings": True, "head_dim": 256, **keys.raw}
    keys = ConfigReader(keys.path, given)
    attention, heads = _grouped_attention(keys, keys.on("attention_bias"), keys.on("attention_bias"), False)
    hidden = keys.size("hidden_size")
    more = (Part("norms", hidden, packs=False),) * 2
    layers = (attention + more + _mlp(hidden, keys.size("intermediate_size")),) * keys.size("num_hidden_layers")
    return _grouped_shape(keys, layers, heads)


def _mixture(keys: ConfigReader, inner: str, head_norms: bool) -> ModelShape:
    """Experts in place of the feed-forward layer, in all layers or in those that the config names."""
    attention, heads = _grouped_attention(keys, keys.on("attention_bias"), keys.on("attention_bias"), head_norms)
    hidden, experts = keys.size("hidden_size"), keys.size("num_experts", "num_local_experts")
    sparse = (_router(hidden, experts), *_mlp(hidden, keys.size(inner), kind="experts", copies=experts))
    plain = keys.raw.get("mlp_only_layers") or []
    step = keys.size("decoder_sparse_step", default=1)
    layers = tuple(
        attention + (sparse if (i + 1) % step == 0 and i not in plain else _mlp(hidden, keys.size("intermediate_size")))
        for i in range(keys.size("num_hidden_layers"))
    )
    return _grouped_shape(keys, layers, heads, chosen=keys.size("num_experts_per_tok"))


def _grouped_shape(keys: ConfigReader, layers: tuple[Layer, ...], heads: Heads, chosen: int = 0) -> ModelShape:
    queries, shared, dim = heads
    return _shape(
        keys, layers, chosen, heads=queries, kv_heads=shared, kv_width=2 * dim, rope_width=dim, score_width=2 * dim
    )


def _latent(keys: ConfigReader) -> ModelShape:
    """DeepSeek-V2 and V3: keys and values of all heads come from one latent, which is what the cache holds."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    rank, rope = keys.size("kv_lora_rank"), keys.size("qk_rope_head_dim")
    nope, value = keys.size("qk_nope_head_dim"), keys.size("v_head_dim")
    query = keys.number("q_lora_rank", default=0)
    normed = (hidden, hidden, rank, query) if query else (hidden, hidden, rank)
    parts = [Part("norms", size, packs=False) for size in normed]
    if query:
        parts += [
            Part("attention", query, hidden),
            Part("attention", heads, query, "columns", unit=nope + rope),
        ]
    else:
        parts.append(Part("attention", heads, hidden, "columns", unit=nope + rope))
    parts += [
        Part("attention", rank + rope, hidden, fused=bool(query)),
        Part("attention", heads, rank, "columns", unit=nope + value),
        Part("attention", hidden, heads * value, "rows"),
    ]
    experts, inner = keys.size("n_routed_experts"), keys.size("moe_intermediate_size")
    corrected = keys.raw.get("topk_method") == "noaux_tc" or keys.raw.get("model_type") == "deepseek_v3"
    sparse = (_router(hidden, experts, bias=corrected), *_mlp(hidden, inner, kind="experts", copies=experts))
    if shared := keys.number("n_shared_experts", default=0):
        sparse += _mlp(hidden, shared * inner)
    dense = _mlp(hidden, keys.size("intermediate_size"))
    first, every = keys.number("first_k_dense_replace", default=0), keys.size("moe_layer_freq", default=1)
    layers = tuple(
        tuple(parts) + (sparse if i >= first and i % every == 0 else dense)
        for i in range(keys.size("num_hidden_layers"))
    )
    guesses = keys.number("num_nextn_predict_layers", default=0)
    notes = ("the layer that predicts a second token (MTP) is left out",) if guesses else ()
    return _shape(
        keys, layers, keys.size("num_experts_per_tok"), heads=heads, kv_heads=0, kv_width=rank + rope, rope_width=rope,
        score_width=nope + rope + value, notes=notes,
    )  # fmt: skip


def _shape(keys: ConfigReader, layers: tuple[Layer, ...], chosen: int, **more: Any) -> ModelShape:
    raw = keys.raw
    kind = str(raw["model_type"])
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise FatalError(
            f"{keys.path}/config.json: dtype {dtype} is not supported; supported are {', '.join(DTYPES)}", MODEL
        )
    narrow, method = _quantised(raw)
    why = "" if (SERVED / f"{kind}.py").is_file() else f"model type {kind} is not served yet"
    if method and not why:
        why = f"quantised weights ({method}) are not served yet"
    return ModelShape(
        name=keys.path.resolve().name,
        model_type=kind,
        unserved=why,
        hidden=keys.size("hidden_size"),
        vocab=keys.size("vocab_size"),
        max_positions=_positions(keys),
        dtype=DTYPES[dtype],
        tied=keys.on("tie_word_embeddings"),
        layers=layers,
        chosen=chosen,
        narrow=narrow,
        **more,
    )


def _positions(keys: ConfigReader) -> int:
    """The longest sequence, as rank/model/config.py counts it."""
    given = keys.raw.get("rope_parameters") or keys.raw.get("rope_scaling")
    rope: dict[str, Any] = given if isinstance(given, dict) else {}
    kind = rope.get("rope_type") or rope.get("type")
    positions = keys.size("max_position_embeddings", default=2048)
    factor = rope.get("factor") or 1.0
    if kind in ("linear", "dynamic"):
        return int(positions * factor)
    if kind == "yarn":
        return max(positions, int((rope.get("original_max_position_embeddings") or positions) * factor))
    return positions


def _quantised(raw: dict[str, Any]) -> tuple[float, str]:
    """Bytes of an element of a quantised matrix with its share of the scales, and the method's name."""
    given = raw.get("quantization_config")
    if not isinstance(given, dict):
        return 0.0, ""
    method = str(given.get("quant_method", "unknown"))
    if method == "fp8":
        rows, columns = given.get("weight_block_size") or (1, 1 << 30)  # one f32 scale for each block
        return 1 + 4 / (rows * columns), method
    bits = given.get("bits") or given.get("w_bit") or given.get("num_bits") or 8
    group = given.get("group_size") or given.get("q_group_size") or 128
    return bits / 8 + (2 + bits / 8) / max(1, group), method  # an f16 scale and a zero point for each group


FAMILIES: dict[str, Callable[[ConfigReader], ModelShape]] = {
    "llama": _dense,
    "mistral": _dense,
    "qwen2": lambda keys: _dense(keys, bias=True),
    "phi3": _dense,
    "granite": _dense,
    "gemma2": _post_normed,
    "qwen3": lambda keys: _dense(keys, head_norms=True),
    "mixtral": lambda keys: _mixture(keys, "intermediate_size", head_norms=False),
    "qwen3_moe": lambda keys: _mixture(keys, "moe_intermediate_size", head_norms=True),
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
}
