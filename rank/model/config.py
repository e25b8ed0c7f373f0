"""Reads and checks a model directory's config.json, without torch. The metadata of a GGUF file become the same keys.

It reads both generations of Hugging Face's config.json. `raw` is converted to the newer one: `rope_parameters` instead
of rope_theta and rope_scaling, `dtype` instead of torch_dtype. Of a multimodal model it has the keys of the text model.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import MODEL, USAGE, FatalError
from .. import safetensors_header, untrusted_files
from ..checkpoint_files import config_file, is_gguf
from ..gguf import checkpoint
from ..gguf.metadata import MAX_LAYERS
from . import stored_formats
from .architectures import config_keys, supported

MOST = 1 << 31  # no size or count of a model is larger, and products of two fit into 64 bits
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# Rope types whose factor extends the context beyond max_position_embeddings. Of the others, max_position_embeddings
# is the extended length already (llama3), or they do not extend it.
STRETCHING = ("linear", "dynamic")
# Rope parameters that tables of embeddings are made with, which divide by them or take their logarithm.
ROPE_NUMBERS = (
    "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "beta_fast", "beta_slow",
)  # fmt: skip
# Upper limits; others have MOST. A factor that was computed, as from a GGUF file, may be an ulp above 1.
ROPE_LIMITS = {"rope_theta": 1e18, "partial_rotary_factor": 1 + 1e-9}
ROPE_LISTS = "short_factor", "long_factor", "mrope_section"
# The largest whole number under a key by a word in it; the first that fits. No model comes near: they keep a config of
# a stranger from building layers or tables without end.
LARGEST = (
    (re.compile("layers"), MAX_LAYERS),
    (re.compile("experts|heads|kernel|groups$"), 1 << 12),
    (re.compile("size|dim|rank"), 1 << 24),
    (re.compile(""), 1 << 40),
)
MAX_POSITIONS = 1 << 27
# The types of layers, as config.json's layer_types has them.
FULL, SLIDING, LINEAR, CONV = "full_attention", "sliding_attention", "linear_attention", "conv"
ROPE_TYPES = {"compress": FULL, "main": SLIDING}  # DeepSeek-V4's names of types of layers there
# Keys of a multimodal model that stand outside its text_config and hold for the text model.
SHARED = (
    "dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "vision_config",
)  # fmt: skip

# The files of older quantised checkpoints that have what is in config.json's quantization_config otherwise: their
# methods, and how names of tensors end that such checkpoints alone have.
QUANTIZATION_FILES = {
    "quantize_config.json": ("gptq", (".qweight", ".B")),
    "quant_config.json": ("awq", (".qweight",)),
    "hf_quant_config.json": ("modelopt", (".weight_scale",)),
}
QUANTIZED = "bits", "w_bit", "quant_algo"  # a key that such a file has


@dataclass(frozen=True)
class Config:
    path: Path
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int  # the longest sequence the model can take, rope scaling included
    dtype: str  # of the checkpoint: f32, bf16 or f16
    raw: dict[str, Any]  # config.json, converted to the newer form
    quantization: dict[str, Any]  # how the checkpoint's weights are quantised; empty: they are not
    original: dict[str, Any]  # config.json as it is
    ignored_file: str  # one of QUANTIZATION_FILES that is there though the tensors are not quantised; empty: none

    @property
    def file(self) -> Path:
        """The file that it was read from."""
        return config_file(self.path)


def read_config(path: str | Path) -> Config:
    """The config of a model directory. Raises FatalError, code MODEL, if it is missing, broken or not supported."""
    path = Path(path)
    if is_gguf(path):
        raw = checkpoint.config(path)
    elif path.is_dir():
        raw = _read_json(path / "config.json")
    else:
        raise FatalError(f"there is no model directory {path}", MODEL)
    model_type = raw.get("model_type")
    if model_type not in supported():
        raise FatalError(
            f"{path}: model type {model_type!r} is not supported; supported are {', '.join(supported())}", MODEL
        )
    original, raw = raw, _text_config(raw, path)
    for key, value in (original | raw).items():
        if key != "text_config":
            _check_sizes(key, value, spelled(key, raw["model_type"]), path)
    quantization, ignored = raw.get("quantization_config") or raw.get("quantization"), ""
    if not quantization:
        quantization, ignored = _quantization_beside(path)
    if quantization:
        stored_formats.method_of(quantization, path)
        if "expert_dtype" in raw:  # DeepSeek-V4
            quantization = {"expert_dtype": raw["expert_dtype"]} | quantization
    raw = {**raw, "rope_parameters": _rope_parameters(raw, path), "dtype": _dtype(raw, path)}
    heads = _integer(raw, "num_attention_heads", path)
    hidden = _integer(raw, "hidden_size", path)
    kv_heads = _integer(raw, "num_key_value_heads", path, default=heads)
    if heads % kv_heads:
        raise FatalError(
            f"{config_file(path)}: {heads} attention heads cannot share {kv_heads} key heads evenly", MODEL
        )
    if raw.get("head_dim") is None and hidden % heads:
        raise FatalError(f"{config_file(path)}: hidden_size {hidden} is not a multiple of its {heads} heads", MODEL)
    return Config(
        path=path,
        model_type=model_type,
        hidden_size=hidden,
        num_layers=_integer(raw, "num_hidden_layers", path) * config_keys(model_type).layer_parts,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_integer(raw, "head_dim", path, default=hidden // heads),
        vocab_size=_integer(raw, "vocab_size", path),
        max_positions=_max_positions(raw, path) + _beside(original, model_type),
        dtype=raw["dtype"],
        raw=raw,
        original=original,
        quantization=quantization,
        ignored_file=ignored,
    )


def tensor_degrees(heads: int, kv_heads: int) -> list[int]:
    """The possible tensor-parallel degrees: each rank has whole query heads, and whole or replicated key heads."""
    return [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def check_degrees(config: Config, tp: int, pp: int) -> None:
    """Raises FatalError, code USAGE, if the model cannot be sharded into tp x pp parts."""
    degrees = tensor_degrees(config.num_heads, config.num_kv_heads)
    if tp not in degrees:
        raise FatalError(
            f"--tp {tp} does not fit a model of {config.num_heads} attention heads and {config.num_kv_heads} "
            f"key heads; degrees that fit: {', '.join(map(str, degrees))}",
            USAGE,
        )
    if pp > config.num_layers:
        raise FatalError(f"--pp {pp} is more pipeline stages than the model has layers ({config.num_layers})", USAGE)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return untrusted_files.read_json(path.parent, path.name)
    except FileNotFoundError:
        raise FatalError(f"{path.parent} has no {path.name}: not a model directory", MODEL) from None
    except OSError as error:
        raise FatalError(f"{path} cannot be read: {error.strerror}", MODEL) from None
    except ValueError as error:
        raise FatalError(f"{path} {error}", MODEL) from None


def _quantization_beside(path: Path) -> tuple[dict[str, Any], str]:
    """How weights are quantised by a file next to config.json, where that leaves it open; and the name of such a file
    that is ignored, as a model that was dequantised may still have it."""
    ignored = ""
    for name, (method, ends) in QUANTIZATION_FILES.items():
        if not path.is_dir() or not (path / name).is_file():
            continue
        found = _read_json(path / name)
        found = found["quantization"] if isinstance(found.get("quantization"), dict) else found
        if any(found.get(key) for key in QUANTIZED):
            tensors = _tensor_names(path)
            if not tensors or any(tensor.endswith(ends) for tensor in tensors):
                return {"quant_method": method} | found, ignored
            ignored = name
    return {}, ignored


def _tensor_names(path: Path) -> Collection[str]:
    """Names of the checkpoint's tensors; none where weights are missing or damaged, of which loading tells."""
    try:
        files = safetensors_header.weight_files(path)
        return safetensors_header.read_header(path / files[""]) if "" in files else files
    except FatalError:
        return ()


def _integer(raw: dict[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    name = spelled(key, raw["model_type"])
    if value is None:
        raise FatalError(f"{config_file(path)} has no {name}", MODEL)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise FatalError(f"{config_file(path)}: {name} is {value!r}, not a positive integer of at most {MOST}", MODEL)
    return value


def _check_sizes(key: str, value: Any, shown: str, path: Path) -> None:
    """Raises FatalError where a whole number is larger than any model's, also in lists and objects. shown: the key as
    the file has it."""
    if isinstance(value, dict):
        for inner, one in value.items():
            _check_sizes(inner, one, f"{shown}.{inner}", path)
    elif isinstance(value, list):
        for one in value:
            _check_sizes(key, one, shown, path)
    elif isinstance(value, int):
        limit = next(limit for words, limit in LARGEST if words.search(key))
        if value > limit:
            raise FatalError(f"{config_file(path)}: {shown} is {value}, more than the {limit} that it may be", MODEL)


def _text_config(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """The text model's keys by their usual names, with what checkpoints of its type leave out: by the file of that
    type, or by the multimodal model's where there is none."""
    text, outer = raw.get("text_config"), str(raw["model_type"])
    if text is not None:
        if not isinstance(text, dict):
            raise FatalError(f"{config_file(path)}: text_config is {text!r}, not an object", MODEL)
        raw = {"model_type": outer} | text | {key: raw[key] for key in SHARED if raw.get(key) is not None}
    model_type = str(raw["model_type"])
    model_type = config_keys(model_type).text_type or model_type
    keys = config_keys(model_type if model_type in supported() else outer)
    given = {key: value for key, value in raw.items() if value is not None}
    found = {ours: _nested(given, theirs) for theirs, ours in keys.names.items()}
    renamed = {ours: value for ours, value in found.items() if value is not None}
    if isinstance(types := renamed.get("layer_types"), list):  # of such models it may be all that tells how many
        renamed["num_hidden_layers"] = len(types)
    return dict.fromkeys(raw) | keys.defaults | given | renamed | {"model_type": model_type}


def _beside(original: dict[str, Any], model_type: str) -> int:
    """Tokens of an image, where images take none of the text's positions."""
    vision = original.get("vision_config")
    if not config_keys(model_type).images_beside or not isinstance(vision, dict):
        return 0
    size, patch = vision.get("image_size", 384), vision.get("patch_size", 16)
    return 1 + (size // patch) ** 2 if isinstance(size, int) and isinstance(patch, int) and 0 < patch <= size else 0


def _nested(raw: dict[str, Any], name: str) -> Any:
    """The value under a key, or under keys of objects with dots between them; None: there is none."""
    first, _, rest = name.partition(".")
    value = raw.get(first)
    return value if not rest else _nested(value, rest) if isinstance(value, dict) else None


def spelled(key: str, model_type: str) -> str:
    """A key as config.json of this model type has it, for messages."""
    return next((theirs for theirs, ours in config_keys(model_type).names.items() if ours == key), key)


def _rope_parameters(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """One dict with rope_type and rope_theta, or one for each type of layer, from either style."""
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise FatalError(f"{config_file(path)}: the rope parameters are {given!r}, not an object", MODEL)
    given = {ROPE_TYPES.get(key, key): value for key, value in given.items()}
    full, sliding = given, dict[str, Any]()
    nested = FULL in given or SLIDING in given
    if nested:
        full, sliding = given.get(FULL) or {}, given.get(SLIDING) or {}
        for name, one in ((FULL, full), (SLIDING, sliding)):
            if not isinstance(one, dict):
                raise FatalError(
                    f"{config_file(path)}: the rope parameters of {name} are {one!r}, not an object", MODEL
                )
    per_layer_type, theta = config_keys(raw["model_type"]).rope_per_layer_type, raw.get("rope_theta")
    if not nested and not per_layer_type:
        return _rope_of(given, raw, theta, path)
    if isinstance(theta, list):  # of each layer: for the architecture to read
        theta = None
    local = raw.get("rope_local_base_freq") or theta
    ropes = {FULL: _rope_of(full, raw, theta, path), SLIDING: _rope_of(sliding, raw, local, path)}
    if not per_layer_type:
        raise FatalError(
            f"{config_file(path)}: the rope parameters differ between {FULL} and {SLIDING} layers, which is not "
            "supported for this model type",
            MODEL,
        )
    return ropes


def _rope_of(given: dict[str, Any], raw: dict[str, Any], theta: float | None, path: Path) -> dict[str, Any]:
    """A null counts as absent. theta: where `given` has none."""
    rope = {key: value for key, value in given.items() if value is not None}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if rope["rope_type"] == "mrope":  # of older files: mrope_section says it
        rope["rope_type"] = "default"
    rope.setdefault("rope_theta", theta or 10000.0)
    if raw.get("partial_rotary_factor") is not None:
        rope.setdefault("partial_rotary_factor", raw["partial_rotary_factor"])
    if rope["rope_type"] in ("llama3", "yarn", "longrope", "su"):
        original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original or raw.get("max_position_embeddings")
    for key, value in rope.items():
        _check_rope(key, value, path)
    return rope


def _check_rope(key: str, value: Any, path: Path) -> None:
    """Raises FatalError for a value that no rope type takes."""
    if key == "rope_type":
        fits, expected = isinstance(value, str), "a name"
    elif key in ROPE_LISTS:
        fits, expected = isinstance(value, list) and all(_is_number(one, MOST) for one in value), "a list of numbers"
    else:
        most = ROPE_LIMITS.get(key, MOST)
        fits, expected = _is_number(value, most) or isinstance(value, bool), f"a number of at most {most:g}"
        if key in ROPE_NUMBERS:
            fits, expected = _is_number(value, most) and value > 0, f"a positive number of at most {most:g}"
    if not fits:
        raise FatalError(f"{config_file(path)}: rope parameter {key} is {value!r}, not {expected}", MODEL)


def _is_number(value: Any, most: float) -> bool:
    """Whether it is a number of at most this size; NaN and infinity are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -most <= value <= most


def _dtype(raw: dict[str, Any], path: Path) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise FatalError(
            f"{config_file(path)}: dtype {name} is not supported; supported are {', '.join(DTYPES)}", MODEL
        )
    return DTYPES[name]


def _max_positions(raw: dict[str, Any], path: Path) -> int:
    """The context length: linear and dynamic rope extend max_position_embeddings, yarn extends the original length."""
    positions = _integer(raw, "max_position_embeddings", path, default=2048)
    if FULL not in raw["rope_parameters"]:  # of models with both it is the extended length
        rope = raw["rope_parameters"]
        factor = float(rope.get("factor", 1.0))
        if rope["rope_type"] in STRETCHING:
            positions = int(positions * factor)
        elif rope["rope_type"] == "yarn":
            # max_position_embeddings is the extended length in some checkpoints, the original one in others.
            positions = max(positions, int(rope["original_max_position_embeddings"] * factor))
    if positions > MAX_POSITIONS:
        raise FatalError(
            f"{config_file(path)}: {positions} positions, with what rope's factor adds, are more than the "
            f"{MAX_POSITIONS} that a sequence may have",
            MODEL,
        )
    return positions
