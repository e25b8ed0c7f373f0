"""transformers' greedy continuation, and a check that it is a fair yardstick."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import pytest
import torch
from transformers import AutoModelForCausalLM

GAP = 1e-3  # between the two likeliest tokens' logits: far above what the order of additions changes


def through_gguf(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """A weight [O, I] as gguf-py makes it of its own codes: f32."""
    gguf = pytest.importorskip("gguf")  # here, as GPU machines may lack it and run the tests of plain weights

    number = gguf.GGMLQuantizationType[kind.upper()]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.float().numpy(), number), number))


class Reference:
    def __init__(self, path, isq="none"):
        """isq: the format whose dequantised weights it has, gguf-py's: in all linears, the head too."""
        # Eager attention: transformers 5.17's other kind leaves out Gemma 2's soft caps.
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        for module in self.model.modules():
            if isq != "none" and isinstance(module, torch.nn.Linear):
                module.weight = torch.nn.Parameter(through_gguf(module.weight.detach(), isq))

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab]."""
        return self.model(torch.tensor([tokens])).logits[0]

    @torch.no_grad()
    def greedy(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """`count` tokens and the smallest gap between the best and the second-best logit on the way."""
        cache, tokens, gap = None, list(prompt), float("inf")
        for _ in range(count):
            fresh = tokens if cache is None else tokens[-1:]
            out = self.model(torch.tensor([fresh]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            best = out.logits[0, -1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
        return tokens[len(prompt) :], gap

    def fair(self, prompts: Iterable[list[int]], count: int, length: int) -> list[int]:
        """The indices of the first `count` prompts that are a yardstick."""
        found: list[int] = []
        for i, prompt in enumerate(prompts):
            with contextlib.suppress(AssertionError):
                self.yardstick(prompt, length)
                found.append(i)
            if len(found) == count:
                return found
        raise AssertionError(f"only the prompts {found} are a yardstick")

    def yardstick(self, prompt: list[int], count: int) -> list[int]:
        """greedy(), after making sure that equal tokens mean something."""
        assert self.logits(prompt).std() >= 1
        tokens, gap = self.greedy(prompt, count)
        assert gap > GAP, f"tokens only {gap} apart"
        assert len(set(tokens)) >= count // 4, f"only {len(set(tokens))} different tokens"
        return tokens
