"""Muon for the layers' matrices: momentum whose singular values are all made about one."""

from __future__ import annotations

import torch


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest matrices with equal singular values, by a quintic Newton-Schulz iteration. [many, rows, columns]

    The coefficients push small singular values up fast and leave all of them between about 0.7 and 1.2.
    """
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 5:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Muon:
    """Steps all matrices of equal shape together."""

    def __init__(self, parameters, rate: float, momentum: float = 0.95, decay: float = 0.01):
        self.rate, self.momentum, self.decay, self.scale = rate, momentum, decay, 1.0
        groups: dict[torch.Size, list] = {}
        for parameter in parameters:
            groups.setdefault(parameter.shape, []).append(parameter)
        self.groups = [
            (group, torch.zeros(len(group), *shape, device=group[0].device)) for shape, group in groups.items()
        ]

    @torch.no_grad()
    def step(self) -> None:
        """One update with the learning rate times `scale`."""
        rate = self.rate * self.scale
        for group, average in self.groups:
            gradient = torch.stack([parameter.grad for parameter in group]).float()
            average.lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp(average, self.momentum)).float()
            rows, columns = group[0].shape
            update *= max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(group, 1 - rate * self.decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-rate)
