"""The built-in model's network in plain torch, for training: Qwen3 on documents packed into one row of tokens."""

from __future__ import annotations

import inspect
import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.varlen import varlen_attn

from ...launcher.builtin_model import DIRECTORY

# The keyword that makes it causal changed between releases of torch.
_CAUSAL = {"is_causal": True} if "is_causal" in inspect.signature(varlen_attn).parameters else {"window_size": (-1, 0)}


def attend(q, k, v, bounds, longest: int):
    """Causal attention inside each document; `bounds` are where they begin, and the end. [tokens, heads, head]"""
    if q.is_cuda:
        return varlen_attn(q, k, v, bounds, bounds, longest, longest, **_CAUSAL)
    out = torch.empty_like(q)
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if end > start:
            query, key, value = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            out[start:end] = F.scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1)
    return out


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-6)


def linear(rows: int, columns: int, scale: float) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    nn.init.normal_(layer.weight, std=scale)
    return layer


class Attention(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        hidden, self.head = config["hidden_size"], config["head_dim"]
        width = config["num_attention_heads"] * self.head
        depth = config["num_hidden_layers"]
        self.q_proj, self.k_proj, self.v_proj = (linear(width, hidden, hidden**-0.5) for _ in range(3))
        self.o_proj = linear(hidden, width, width**-0.5 / depth)
        self.q_norm, self.k_norm = Norm(self.head), Norm(self.head)

    def forward(self, x, rope, bounds, longest):
        q, k, v = (p(x).view(x.shape[0], -1, self.head) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (rotate(norm(y), rope).to(v.dtype) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        return self.o_proj(attend(q, k, v, bounds, longest).flatten(1))


def rotate(x, rope):
    """Rotary embedding; the halves of a head are the two coordinates."""
    cos, sin = rope
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Mlp(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = (linear(inner, hidden, hidden**-0.5) for _ in range(2))
        self.down_proj = linear(hidden, inner, inner**-0.5 / config["num_hidden_layers"])

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(config["hidden_size"]), Attention(config)
        self.post_attention_layernorm, self.mlp = Norm(config["hidden_size"]), Mlp(config)

    def forward(self, x, rope, bounds, longest):
        x = x + self.self_attn(self.input_layernorm(x), rope, bounds, longest)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Attribute names are the checkpoint's, below `model.`."""

    def __init__(self, config: dict):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = Norm(config["hidden_size"])

    def forward(self, ids, bounds, longest: int):
        """Last hidden states [tokens, hidden]."""
        places = torch.arange(ids.shape[0], device=ids.device)
        starts = bounds[torch.searchsorted(bounds, places, right=True) - 1]
        half = self.config["head_dim"] // 2
        steps = torch.arange(half, device=ids.device, dtype=torch.float32) / half
        angles = (places - starts).float()[:, None, None] * self.config["rope_theta"] ** -steps
        rope = angles.cos(), angles.sin()
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        for layer in self.layers:
            x = layer(x, rope, bounds, longest)
        return self.norm(x)

    def logits(self, hidden):
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype))

    def losses(self, ids, bounds, longest: int):
        """Cross entropy of each token's successor [tokens]; at a document's end it means nothing."""
        logits = self.logits(self(ids, bounds, longest)).float()
        return F.cross_entropy(logits, ids.roll(-1), reduction="none")

    def tensors(self) -> dict[str, torch.Tensor]:
        """The checkpoint in bf16, by Hugging Face's names."""
        return {
            "model." + name: value.detach().to("cpu", torch.bfloat16).contiguous()
            for name, value in self.state_dict().items()
        }


def build() -> Model:
    """The model of config.json, with fresh weights."""
    return Model(json.loads((DIRECTORY / "config.json").read_text(encoding="utf-8")))
