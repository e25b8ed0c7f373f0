"""Tables of rotary embeddings for all rope types. They are computed in f32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import MODEL, FatalError
from ....kernels.embedding.embedding import embedding
from ....kernels.rope.rope import CosSin, cos_sin

Parameters = dict[str, Any]
# The rope type of layers without positions (NoPE: Kazemnejad et al. 2023, arXiv 2305.19466): nothing is rotated.
NONE: Parameters = {"rope_type": None}  # no config.json's: a null there counts as absent


class RotaryEmbeddings(nn.Module):
    """The rotary embeddings of all layers: one table for those of equal parameters."""

    def __init__(self, layers: Sequence[Parameters], head_dim: int, max_positions: int, max_model_len: int):
        """layers: each layer's rope parameters, with a stride where it asks for rotations of windows of so many tokens,
        too."""
        super().__init__()
        plain = [{name: value for name, value in one.items() if name != "stride"} for one in layers]
        kinds = [one for i, one in enumerate(plain) if one not in plain[:i]]
        self.kinds = nn.ModuleList(RotaryEmbedding(one, head_dim, max_positions, max_model_len) for one in kinds)
        self.of = [kinds.index(one) for one in plain]
        self.strides = [one.get("stride", 0) for one in layers]

    def forward(self, positions: Tensor) -> list[CosSin]:
        """Each layer's cosines and sines of positions [T] or [axes, T] int64."""
        made = [kind(positions) for kind in self.kinds]
        windows = {
            (i, stride): self.kinds[i](positions // stride * stride)
            for i, stride in set(zip(self.of, self.strides, strict=True))
            if stride
        }
        each = zip(self.of, self.strides, strict=True)
        return [made[i]._replace(of_window=windows[i, n]) if n else made[i] for i, n in each]

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    @property
    def nbytes(self) -> int:
        """Bytes of the cosines and sines, as many for each position; a temperature's four bytes after them do not
        count."""
        return sum(one.nbytes for name, one in self.named_buffers() if name.endswith("table"))


class RotaryEmbedding(nn.Module):
    """A table of cosines and sines for all positions below max_model_len. A token's rotation depends on its position
    alone.

    Dynamic NTK scaling (bloc97 and emozilla, 2023) makes frequencies depend on the sequence's length. Here the token at
    position p gets the frequencies of a sequence of p + 1 tokens. transformers computes the same when it decodes token
    by token, and for any sequence of up to max_position_embeddings. For longer prompts it differs: it gives all tokens
    of a forward pass the frequencies of the whole prompt, so its result depends on how the prompt is chunked. A KV
    cache whose blocks sequences of different lengths share cannot do that.
    """

    def __init__(self, parameters: Parameters, head_dim: int, max_positions: int, max_model_len: int):
        """`parameters` is config.json's rope_parameters, or a layer's part of it; max_positions its
        max_position_embeddings. Raises FatalError for parameters that are not supported."""
        super().__init__()
        kind = parameters["rope_type"]
        if kind not in KINDS and kind is not None:
            raise FatalError(f"rope type {kind!r} is not supported; supported are {', '.join(KINDS)}", MODEL)
        head_dim = parameters.get("head_dim", head_dim)  # a layer's, where layers differ
        rotated = 1.0 if kind == "proportional" else parameters.get("partial_rotary_factor", 1.0)
        dim = int(head_dim * rotated)
        if dim % 2:
            raise FatalError(
                f"config.json: rope needs an even number of dimensions, but it gets {dim} of a head's {head_dim}", MODEL
            )
        try:
            frequencies, scale = KINDS.get(kind, _none)(parameters, dim, max_positions, max_model_len)
        except KeyError as missing:
            raise FatalError(f"config.json: rope type {kind!r} needs {missing.args[0]!r}", MODEL) from None
        except (ArithmeticError, ValueError) as error:  # such as a theta of 1, whose logarithm yarn divides by
            raise FatalError(f"config.json: rope type {kind!r} cannot have {parameters}: {error}", MODEL) from None
        # Plain arithmetic in f32, the order of transformers: positions times frequencies, then cos.
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * frequencies
        table = torch.stack((angles.cos(), angles.sin()), dim=1)
        self.table: Tensor  # [max_model_len, 2, dim / 2] f32
        self.register_buffer("table", table.mul_(scale) if scale != 1.0 else table, persistent=False)
        self.interleaved = bool(parameters.get("interleaved"))
        self.temperature: Tensor | None  # [max_model_len, 1] f32
        self.register_buffer("temperature", _temperature(parameters, max_model_len), persistent=False)
        self.axes: Tensor | None  # [dim] int64: by which axis of a position each dimension turns; None: there is one
        self.register_buffer("axes", _axes(parameters, dim), persistent=False)

    def forward(self, positions: Tensor) -> CosSin:
        """The cosines and sines of positions [T] int64, or [axes, T] where the parameters tell axes apart."""
        q_scale = None
        if self.temperature is not None:
            q_scale = embedding(positions if positions.dim() == 1 else positions[0], self.temperature)[:, :, None]
        if positions.dim() == 1:
            turned = cos_sin(self.table, positions)
        else:
            assert self.axes is not None, "these rotary embeddings have one axis"
            made = [cos_sin(self.table, axis) for axis in positions]
            choice = self.axes.expand(1, *made[0].cos.shape)
            cos, sin = torch.stack([one.cos for one in made]), torch.stack([one.sin for one in made])
            turned = CosSin(cos.gather(0, choice)[0], sin.gather(0, choice)[0])
        return turned._replace(interleaved=self.interleaved, q_scale=q_scale)


# Each returns the frequencies, [dim / 2] or [max_model_len, dim / 2], and a factor on cosines and sines.


def _default(p: Parameters, dim: int, max_positions: int, length: int) -> tuple[Tensor, float]:
    return 1.0 / _wavelengths(p["rope_theta"], dim), 1.0


def _none(p: Parameters, dim: int, max_positions: int, length: int) -> tuple[Tensor, float]:
    """A rotation by no angle, which the fast kernels take as any other."""
    return torch.zeros(dim // 2), 1.0


def _proportional(p: Parameters, dim: int, max_positions: int, length: int) -> tuple[Tensor, float]:
    """Gemma 4's: the wavelengths of the whole head, of which the shortest part is used."""
    frequencies = 1.0 / _wavelengths(p["rope_theta"], dim)
    frequencies[int(p.get("partial_rotary_factor", 1.0) * dim // 2) :] = 0
    return frequencies / p.get("factor", 1.0), 1.0


def _linear(p: Parameters, dim: int, max_positions: int, length: int) -> tuple[Tensor, float]:
    """Positions divided by a factor (kaiokendev 2023; Chen et al. 2023, arXiv 2306.15595)."""
    return 1.0 / _wavelengths(p["rope_theta"], dim) / p["factor"], 1.0


def _dynamic(p: Parameters, dim: int, max_positions: int, length: int) -> tuple[Tensor, float]:
    factor = p["factor"]
    lengths = torch.arange(1, length + 1).clamp(min=max_positions)
    stretch = (factor * lengths / max_positions) - (factor - 1)  # 1 up to max_positions
    base = p["rope_theta"] * stretch ** (dim / (dim - 2))
    return 1.0 / _wavelengths(base[:, None], dim), 1.0


def _llama3(p: Parameters, dim: int, max_positions: int, length: int) -> tuple[Tensor, float]:
    """Llama 3.1 (arXiv 2407.21783): low frequencies are divided by `factor`, high ones kept, others interpolated."""
    frequencies = 1.0 / _wavelengths(p["rope_theta"], dim)
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    original = p["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    slowed = torch.where(wavelengths > original / low, frequencies / factor, between)
    return torch.where(wavelengths < original / high, frequencies, slowed), 1.0


def _yarn(p: Parameters, dim: int, max_positions: int, length: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): NTK-by-parts; its attention temperature scales cosines and sines."""
    base, original = p["rope_theta"], p["original_max_position_embeddings"]
    factor = p.get("factor") or max_positions / original

    def dimension(rotations: float) -> float:
        """The dimension whose wave makes so many rotations within the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = _wavelengths(base, dim)
    frequencies = 1.0 / (factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep
    return frequencies, _yarn_temperature(p, factor)


def _longrope(p: Parameters, dim: int, max_positions: int, length: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a factor per frequency, of two lists.

    The long list is for contexts beyond the original one. A cache with shared blocks cannot switch lists as a sequence
    grows, so the longest sequence that is served decides (--max-model-len).
    """
    original = p["original_max_position_embeddings"]
    factors = torch.tensor(p["long_factor" if length > original else "short_factor"], dtype=torch.float32)
    if len(factors) != dim // 2:
        raise FatalError(f"config.json: longrope has {len(factors)} factors for {dim // 2} frequencies", MODEL)
    scale = p.get("attention_factor")
    if scale is None:
        stretch = p.get("factor") or max_positions / original
        scale = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return 1.0 / (factors * _wavelengths(p["rope_theta"], dim)), scale


def _yarn_temperature(p: Parameters, factor: float) -> float:
    if p.get("attention_factor") is not None:
        return p["attention_factor"]
    if p.get("mscale") and p.get("mscale_all_dim"):
        return yarn_mscale(factor, p["mscale"]) / yarn_mscale(factor, p["mscale_all_dim"])
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """The factor by which YaRN raises queries and keys, each, where it stretches the context by a factor."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _axes(p: Parameters, dim: int) -> Tensor | None:
    """M-RoPE (Qwen2-VL, arXiv 2409.12191): positions in time, height and width, each of which rotates as many
    frequencies as its section has; one section after the other, or interleaved (Qwen3-VL)."""
    half = dim // 2
    if p["rope_type"] is None:
        return torch.zeros(dim, dtype=torch.int64)
    if not (sections := p.get("mrope_section")):
        return None
    axes = torch.zeros(half, dtype=torch.int64)
    start = 0
    for axis, size in enumerate(sections):
        chosen = slice(axis, 3 * size, 3) if p.get("mrope_interleaved") else slice(start, start + size)
        if axis:  # time has what the others leave
            axes[chosen] = axis
        start += size
    return axes.repeat(2)


def _temperature(p: Parameters, length: int) -> Tensor | None:
    """Llama 4's attention temperature: factors on queries, [length, 1], that grow with the logarithm of how many
    times the original context a position is away from the first, or from temperature_start. None: all are 1.
    """
    beta, original = p.get("llama_4_scaling_beta"), p.get("original_max_position_embeddings")
    away = torch.arange(length) - p.get("temperature_start", 0)
    if not beta or not original or away[-1] < original:
        return None
    return (1 + beta * torch.log1p(away // original))[:, None]


def _wavelengths(base: float | Tensor, dim: int) -> Tensor:
    """base ** (2i / dim): the wavelengths divided by 2 pi."""
    return base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


KINDS: dict[str, Callable[[Parameters, int, int, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
    "proportional": _proportional,
}
