"""Mixtures of experts in the forms that models are written in, and a network around them; all in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["EXPERTS", "FORMS", "Mixture"]

EXPERTS, WIDTH, INNER, CHOSEN = 4, 6, 8, 2


class Experts(nn.Module):
    """Gated experts: `up` makes gate and value, `down` goes back; each token goes to a few of them.

    Args:
        form: "grouped" (rows sorted for `grouped_mm`, and sorted back), "added" (rows sorted, and added up by token),
            "gathered" (a matrix for each row), "dense" (every expert sees every token, weighed with zeros).
        biased: with a bias for each expert, and an activation that is not zero at zero.
    """

    def __init__(self, form: str, biased: bool) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.empty(EXPERTS, WIDTH, 2 * INNER)),
            nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH)),
        )
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER)) if biased else None
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH)) if biased else None
        self.act = nn.SiLU()
        self.form = form
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=0.5)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighed sum of the chosen experts' results: [tokens, width], [tokens, chosen] twice -> as tokens."""
        if self.form == "dense":
            return self._dense(tokens, chosen, weights)
        experts, times = chosen.reshape(-1), chosen.shape[-1]
        if self.form == "gathered":
            rows = tokens.repeat_interleave(times, 0)
            inner = self._gated(self._times(rows, self.up[experts], self.up_bias, experts))
            found = self._times(inner, self.down[experts], self.down_bias, experts) * weights.reshape(-1, 1)
            return found.view(*chosen.shape, -1).sum(1)
        ordered, order = torch.sort(experts)
        ends = torch.histc(ordered.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        rows = tokens[order // times]
        inner = self._gated(self._grouped(rows, self.up, ends, self.up_bias, ordered))
        found = self._grouped(inner, self.down, ends, self.down_bias, ordered) * weights.reshape(-1)[order, None]
        if self.form == "added":
            return torch.zeros_like(tokens).index_add_(0, order // times, found)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return found[back].view(*chosen.shape, -1).sum(1).to(tokens.dtype)

    def _dense(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        each = tokens.new_zeros(len(tokens), EXPERTS).scatter(1, chosen, weights).t().reshape(EXPERTS, -1, 1)
        rows = tokens.expand(EXPERTS, *tokens.shape)
        up_bias, down_bias = (0 if bias is None else bias.unsqueeze(1) for bias in (self.up_bias, self.down_bias))
        inner = self._gated(torch.bmm(rows, self.up) + up_bias)
        return ((torch.bmm(inner, self.down) + down_bias) * each).sum(0)

    def _times(self, rows: Tensor, matrices: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
        found = torch.bmm(rows.unsqueeze(1), matrices).squeeze(1)
        return found if bias is None else found + bias[experts]

    def _grouped(self, rows: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
        found = functional.grouped_mm(rows.to(weight.dtype), weight, offs=ends)
        return found if bias is None else found.add_(bias[experts])

    def _gated(self, inner: Tensor) -> Tensor:
        gate, value = inner.chunk(2, -1)
        inner = self.act(gate) * (value if self.up_bias is None else value + 1)
        return inner


FORMS = ("grouped", "added", "gathered", "dense")


class Mixture(nn.Module):
    """A router that chooses two experts for every token, beside what all tokens go through: [n, t, width] to the same.

    Args:
        lonely: expert that the router never chooses.
    """

    def __init__(self, form: str, biased: bool = False, lonely: int | None = None) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts, self.last = Experts(form, biased), nn.Linear(WIDTH, WIDTH)
        if lonely is not None:
            nn.init.constant_(self.router.bias, 0.0)
            self.router.bias.data[lonely] = -1e3
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Every token through its experts, and past them."""
        tokens = torch.tanh(self.first(x)).reshape(-1, WIDTH)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        mixed = self.experts(tokens, chosen, weights).reshape(x.shape)
        found: Tensor = self.last(mixed) + x
        return found
