"""Quantised checkpoints, written from the published layouts with numpy: nothing is taken from what loads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Pack = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]  # weight [O, I] → tensors by field, and what they mean
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def quantise(directory: Path, to: Path, pack: Pack, settings: dict[str, Any], plain: tuple[str, ...] = ()) -> None:
    """Write `to`/quantised, and `to`/plain of what that means in f32. plain: parts of names left as they are."""
    for folder in ("quantised", "plain"):
        shutil.copytree(directory, to / folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file, state = "model.safetensors", load_file(directory / "model.safetensors")
    stored, meant = dict(state), dict(state)
    for name, weight in state.items():
        if weight.dim() == 2 and ".layers." in name and not any(part in name for part in plain):
            tensors, meant[name] = pack(weight)
            del stored[name]
            stored |= {f"{name.removesuffix('.weight')}.{field}": tensor for field, tensor in tensors.items()}
    save_file(stored, to / "quantised" / file)
    save_file(meant, to / "plain" / file, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = settings
    (to / "quantised" / "config.json").write_text(json.dumps(config))


def groups_of(inputs: int, group: int) -> np.ndarray:
    """Which group each input is of."""
    return np.arange(inputs) // (group if group > 0 else inputs)


def round_to_groups(weight: Tensor, of: np.ndarray, bits: int, symmetric: bool) -> tuple[np.ndarray, ...]:
    """codes [I, O], scales f16 [G, O] and zeros [G, O] of a weight [O, I]; `of` [I] is each input's group."""
    w, top = weight.T.double().numpy(), 2**bits - 1
    scales, zeros = [], []
    for group in range(of.max() + 1):
        part = w[of == group] if (of == group).any() else np.zeros((1, w.shape[1]))
        if symmetric:
            scales.append(np.abs(part).max(0) * 2 / top + 1e-6)
            zeros.append(np.full(w.shape[1], (top + 1) // 2))
        else:
            low, high = np.minimum(part.min(0), 0), np.maximum(part.max(0), 0)
            scales.append((high - low) / top + 1e-6)
            zeros.append(np.round(-low / scales[-1]))
    by, at = np.stack(scales).astype(np.float16), np.stack(zeros).astype(np.int64)
    codes = np.clip(np.round(w / by.astype(np.float64)[of]) + at[of], 0, top).astype(np.int64)
    return codes, by, at


def meaning(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, of: np.ndarray) -> Tensor:
    """The weight [O, I] in f32."""
    return torch.from_numpy(((codes - zeros[of]) * scales.astype(np.float32)[of]).astype(np.float32).T.copy())


def pack_rows(values: np.ndarray, bits: int) -> Tensor:
    """int32 [N * bits / 32, M] of values [N, M]: neighbours of the first axis, the first in the lowest bits."""
    each = 32 // bits
    parts = values.reshape(-1, each, values.shape[1])
    words = sum(parts[:, i] << (bits * i) for i in range(each))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def gptq(
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
    v2: bool = False,
    ordered: bool = False,
) -> Pack:
    """ordered: as desc_act has it, inputs fall into groups in any order, the same in each tensor."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        of = groups_of(weight.shape[1], group)
        if ordered:
            of = of[np.random.default_rng(0).permutation(len(of))]
        codes, scales, zeros = round_to_groups(weight, of, bits, symmetric)
        stored = zeros if v2 else np.maximum(zeros - 1, 0)
        zeros = stored if v2 else stored + 1
        tensors = {
            "qweight": pack_rows(codes, bits),
            "qzeros": pack_rows(stored.T, bits).T.contiguous(),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.from_numpy(of.astype(np.int32)),
        }
        return tensors, meaning(codes, scales, zeros, of)

    return pack


def marlin(group: int = 128) -> Pack:
    """Packs by the threads that read it: of four tiles of 16 x 16, thread t has column t // 4 and the one eight behind
    it."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        of = groups_of(weight.shape[1], group)
        codes, scales, zeros = round_to_groups(weight, of, 4, symmetric=True)
        inputs, outputs = codes.shape
        words = np.zeros((inputs // 16, outputs * 2), np.int64)
        for at in range(0, outputs, 64):
            for thread in range(32):
                for tile in range(4):
                    for slot, code in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                        row = (0, 1, 8, 9)[code % 4] + 2 * (thread % 4)
                        column = at + 16 * tile + thread // 4 + 8 * (code // 4)
                        words[:, at * 2 + thread * 4 + tile] |= codes[row::16, column] << (4 * slot)
        if group in (-1, inputs):
            order = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
        else:
            order = [i + 8 * j for i in range(8) for j in range(8)]
        places = np.concatenate([first + np.array(order) for first in range(0, outputs, len(order))])
        tensors = {
            "B": torch.from_numpy(words.astype(np.uint32).view(np.int32).copy()),
            "s": torch.from_numpy(scales[:, places].copy()),
            "workspace": torch.zeros(outputs // 128 * 16, dtype=torch.int32),
        }
        return tensors, meaning(codes, scales, zeros, of)

    return pack


def awq(group: int = 128) -> Pack:
    def interleaved(values: np.ndarray) -> Tensor:
        parts = values.reshape(len(values), -1, 8)
        words = sum(parts[:, :, output] << (4 * place) for place, output in enumerate(AWQ_ORDER))
        return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        of = groups_of(weight.shape[1], group)
        codes, scales, zeros = round_to_groups(weight, of, 4, symmetric=False)
        tensors = {
            "qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": torch.from_numpy(scales)
        }  # fmt: skip
        return tensors, meaning(codes, scales, zeros, of)

    return pack


def fp8(block: tuple[int, int] | None = (128, 128), scale: str = "weight_scale_inv") -> Pack:
    """e4m3. block: outputs and inputs of a scale, of all that is there where it is 0; None: one scale, a scalar."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        (outputs, inputs), (o, i) = weight.shape, block or (0, 0)
        o, i = o or outputs, i or inputs
        scales, codes, meant = torch.zeros(-(-outputs // o), -(-inputs // i)), weight.clone(), weight.clone()
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                at = slice(row * o, (row + 1) * o), slice(column * i, (column + 1) * i)
                scales[row, column] = weight[at].abs().max() / 448
                codes[at] = weight[at] / scales[row, column]
                meant[at] = codes[at].to(torch.float8_e4m3fn).float() * scales[row, column]
        stored = scales if block else scales.reshape(())
        return {"weight": codes.to(torch.float8_e4m3fn), scale: stored, "input_scale": torch.ones(())}, meant

    return pack


def compressed_ints(bits: int = 4, group: int = 128, symmetric: bool = True, packed: bool = True) -> Pack:
    """group: 0 for whole channels."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        of = groups_of(weight.shape[1], group)
        codes, scales, zeros = round_to_groups(weight, of, bits, symmetric)
        tensors = {"weight_scale": torch.from_numpy(scales.T.copy())}
        if packed:
            tensors["weight_packed"] = pack_rows(codes, bits).T.contiguous()
            tensors["weight_shape"] = torch.tensor(weight.shape)
        else:
            tensors["weight"] = torch.from_numpy((codes.T - 128).astype(np.int8).copy())
        if not symmetric:
            point = torch.from_numpy((zeros.T - 128).astype(np.int8).copy())
            tensors["weight_zero_point"] = pack_rows(zeros.T, bits) if packed else point
        return tensors, meaning(codes, scales, zeros, of)

    return pack
