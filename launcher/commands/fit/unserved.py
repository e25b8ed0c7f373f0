"""config.json → ModelShape by arithmetic, for models that Phalanx does not serve yet, or not as their weights are
quantised: what it would take.

A model that is served is measured by its own code (measured.py) and needs nothing here. Sources: DeepSeek-V2
and its multi-head latent attention (arXiv 2405.04434), DeepSeek-V3 (2412.19437); names of keys as Hugging Face's
config.json has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ....errors import MODEL, FatalError
from .shape import WIDTHS, Layer, ModelShape, RankShape, Weights, split

# One file per architecture, named as config.json's model_type, and one per quant_method: the registries, by file.
SERVED = Path(__file__).resolve().parents[3] / "rank" / "model" / "architectures"
FORMATS = SERVED.with_name("stored_formats")
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
ATTENTION, MLP, EXPERTS, NORM, EMBEDDING, HEAD = "attn", "mlp", "mlp.experts.", "norm", "embed_tokens", "lm_head"


@dataclass(frozen=True)
class Part:
    """Weights that are computed with at once: [outputs * unit, inputs], or a vector where inputs is 0."""

    name: str
    outputs: int
    inputs: int = 0
    cut: str = "whole"  # over a tensor group: columns (outputs), rows (inputs)
    unit: int = 1  # what is not cut: a head's dimensions
    bias: bool = False
    copies: int = 1  # experts: so many of them in a layer
    fused: bool = False  # one product together with the part before
    packs: bool = True  # quantised formats store it narrow

    def one(self, tp: int) -> int:
        """Elements that a rank of a tensor group of `tp` holds of one copy."""
        outputs, inputs = self.outputs, self.inputs
        if self.cut == "columns":
            outputs = split(outputs, tp)
        elif self.cut == "rows":
            inputs = split(inputs, tp)
        width = outputs * self.unit
        return width * (inputs or 1) + (width if self.bias else 0)


Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Family:
    """A model as arithmetic."""

    layers: tuple[Parts, ...]
    heads: int
    kv_width: int  # elements of a token's latent, which every rank holds whole
    rope_width: int  # dimensions that are turned
    score_width: int  # multiply-adds of one query head with one token of the context when a prompt is computed
    chosen: int = 0  # experts that a token visits
    notes: tuple[str, ...] = ()

    def tensor_degrees(self) -> tuple[int, ...]:
        """Those that fit: whole query heads per rank."""
        return tuple(n for n in range(1, self.heads + 1) if self.heads % n == 0)


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


def knows(path: Path) -> bool:
    """Whether the model is of a family that is here, and is not served; what is wrong with a config others say."""
    try:
        return bool(_lacking(json.loads((path / "config.json").read_text(encoding="utf-8"))))
    except (OSError, ValueError):
        return False


def _lacking(raw: Any) -> str:
    """What is not served of a model of these families; empty: all is, or it is of none."""
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if kind not in FAMILIES:
        return ""
    if not (SERVED / f"{kind}.py").is_file():
        return f"model type {kind} is not served yet"
    given = raw.get("quantization_config")
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method and not (FORMATS / f"{method}.py").is_file():
        return f"weights in {method} are not served yet"
    return ""


def read(path: Path, name: str, dtype: str, device: str, most: int) -> ModelShape:
    """The shape of a model that `knows`. most: ranks of the largest tensor group. Raises FatalError in words."""
    keys = ConfigReader(path, json.loads((path / "config.json").read_text(encoding="utf-8")))
    kind = str(keys.raw["model_type"])
    family = FAMILIES[kind](keys)
    hidden, vocab, tied = keys.size("hidden_size"), keys.size("vocab_size"), keys.on("tie_word_embeddings")
    checkpoint = _dtype(keys)
    usual = "f32" if device == "cpu" else "bf16" if checkpoint == "f32" else checkpoint
    narrow, degrees, count = _narrow(keys.raw), family.tensor_degrees(), len(family.layers)
    parts = [part for layer in family.layers for part in layer]
    parts += [Part(NORM, hidden, packs=False)] + [Part(EMBEDDING, vocab, hidden, packs=False)] * (1 if tied else 2)
    width = WIDTHS[usual if dtype == "auto" else dtype]
    return ModelShape(
        name=name,
        model_type=kind,
        hidden=hidden,
        vocab=vocab,
        max_positions=_positions(keys),
        checkpoint_dtype=checkpoint,
        usual_dtype=usual,
        parameters=sum(part.copies * part.one(1) for part in parts),
        checkpoint_bytes=sum(_weights(part, 1, WIDTHS[checkpoint], narrow).bytes * part.copies for part in parts),
        degrees=degrees,
        stages=tuple(tuple(_even(count, stages)) for stages in range(1, count + 1)),
        ranks={tp: _rank(family, (hidden, vocab), tp, width, narrow, tied) for tp in degrees if tp <= most},
        unserved=_lacking(keys.raw),
        chosen=family.chosen,
        notes=family.notes,
    )


def _rank(family: Family, sizes: tuple[int, int], tp: int, width: int, narrow: float, tied: bool) -> RankShape:
    """sizes: of a token's vector and of the vocabulary. narrow: bytes of an element of a quantised matrix."""
    hidden, vocab = sizes
    kinds = list(dict.fromkeys(family.layers))
    made = [
        Layer(
            weights=_joined(parts, tp, width, narrow),
            kv=family.kv_width * width,
            inner=_inner(parts, tp, family.chosen),
            scores=split(family.heads, tp) * family.score_width,
        )
        for parts in kinds
    ]
    table = Part(EMBEDDING, vocab, hidden, "columns")
    norm, elements = _weights(Part(NORM, hidden), tp, width, 0), table.one(tp)
    embedding = Weights(EMBEDDING, elements, elements * width, matrix=False)
    head = Weights(HEAD, elements, elements * width, matrix=True)
    shared = msgspec.structs.replace(head, shared=tied)
    ends = {"whole": (embedding, norm, shared), "first": (embedding,), "middle": (), "last": (norm, head)}
    layers = tuple(kinds.index(parts) for parts in family.layers)
    return RankShape(tuple(made), layers, ends, family.rope_width * 4)


def _weights(part: Part, tp: int, width: int, narrow: float) -> Weights:
    elements = part.one(tp)
    size = elements * (narrow if narrow and part.packs else width)
    return Weights(part.name, elements, size, part.inputs > 0, expert=part.copies > 1, copies=part.copies)


def _joined(parts: Parts, tp: int, width: int, narrow: float) -> tuple[Weights, ...]:
    """The parts of a layer, those of one product as one."""
    made: list[Weights] = []
    for part in parts:
        one = _weights(part, tp, width, narrow)
        if part.fused:
            before = made.pop()
            together = {"elements": before.elements + one.elements, "bytes": before.bytes + one.bytes}
            one = msgspec.structs.replace(before, **together)
        made.append(one)
    return tuple(made)


def _inner(parts: Parts, tp: int, chosen: int) -> int:
    """Gate, up and what they make of each other, of the experts that a token visits."""
    widths = (
        split(part.outputs, tp) * min(part.copies, chosen or 1)
        for part in parts
        if part.name in (MLP, EXPERTS) and part.cut == "columns"
    )
    return 3 * max(widths, default=0)


def _even(layers: int, stages: int) -> list[int]:
    each, more = divmod(layers, stages)
    return [each + (stage < more) for stage in range(stages)]


def _mlp(hidden: int, inner: int, name: str = MLP, copies: int = 1) -> Parts:
    """Gate and up, held as one, and down."""
    return (
        Part(name, inner, hidden, "columns", copies=copies),
        Part(name, inner, hidden, "columns", copies=copies, fused=True),
        Part(name, hidden, inner, "rows", copies=copies),
    )


def _router(hidden: int, experts: int, bias: bool = False) -> Part:
    return Part(EXPERTS, experts, hidden, bias=bias, packs=False)


def _latent(keys: ConfigReader) -> Family:
    """DeepSeek-V2 and V3: keys and values of all heads come from one latent, which is what the cache holds."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    rank, rope = keys.size("kv_lora_rank"), keys.size("qk_rope_head_dim")
    nope, value = keys.size("qk_nope_head_dim"), keys.size("v_head_dim")
    query = keys.number("q_lora_rank", default=0)
    normed = (hidden, hidden, rank, query) if query else (hidden, hidden, rank)
    parts = [Part(NORM, size, packs=False) for size in normed]
    if query:
        parts += [
            Part(ATTENTION, query, hidden),
            Part(ATTENTION, heads, query, "columns", unit=nope + rope),
        ]
    else:
        parts.append(Part(ATTENTION, heads, hidden, "columns", unit=nope + rope))
    parts += [
        Part(ATTENTION, rank + rope, hidden, fused=bool(query)),
        Part(ATTENTION, heads, rank, "columns", unit=nope + value),
        Part(ATTENTION, hidden, heads * value, "rows"),
    ]
    experts, inner = keys.size("n_routed_experts"), keys.size("moe_intermediate_size")
    corrected = keys.raw.get("topk_method") == "noaux_tc" or keys.raw.get("model_type") != "deepseek_v2"
    sparse = (_router(hidden, experts, bias=corrected), *_mlp(hidden, inner, name=EXPERTS, copies=experts))
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
    return Family(
        layers, heads, kv_width=rank + rope, rope_width=rope, score_width=nope + rope + value,
        chosen=keys.size("num_experts_per_tok"), notes=notes,
    )  # fmt: skip


def _dtype(keys: ConfigReader) -> str:
    dtype = str(keys.raw.get("dtype") or keys.raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise FatalError(
            f"{keys.path}/config.json: dtype {dtype} is not supported; supported are {', '.join(DTYPES)}", MODEL
        )
    return DTYPES[dtype]


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


def _narrow(raw: dict[str, Any]) -> float:
    """Bytes of an element of a quantised matrix with its share of the scales; 0: not quantised."""
    given = raw.get("quantization_config")
    if not isinstance(given, dict):
        return 0.0
    if given.get("quant_method") == "fp8":
        rows, columns = given.get("weight_block_size") or (1, 1 << 30)  # one f32 scale for each block
        return 1 + 4 / (rows * columns)
    bits = given.get("bits") or given.get("w_bit") or given.get("num_bits") or 8
    group = given.get("group_size") or given.get("q_group_size") or 128
    return bits / 8 + (2 + bits / 8) / max(1, group)  # an f16 scale and a zero point for each group


FAMILIES: dict[str, Callable[[ConfigReader], Family]] = {
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "kimi_k2": _latent,
}
