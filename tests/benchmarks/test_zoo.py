"""The benchmark of libraries' models: what counts as cut, and the table of its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parplan
from benchmarks.zoo import _size_word, forward_error, products, verified
from benchmarks.zoo_configurations import first_layers
from benchmarks.zoo_table import counts, remark, table
from parplan.graph.capture.capture import capture


class Block(nn.Module):
    """A router, a product that 4 cuts, one of an odd size, and two whose sums are needed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.odd = nn.Linear(8, 4), nn.Linear(8, 16), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """(N, 8) to scores of the best experts and results."""
        return self.router(x).softmax(-1).topk(2)[0], self.up(x), self.odd(x[:, :7])


def test_products_are_counted_by_whether_4_devices_may_cut_them() -> None:
    found = products(capture(Block(), (torch.randn(12, 8),), {}), experts=4)
    assert found["products"] == 3
    assert found["uncut"] == []
    assert found["kept_whole"].get("sizes") == 1
    assert found["experts_cut"] == 0


class Chosen(nn.Module):
    """Scores that a module normalises before the best are chosen, and the rows of experts that these are."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.gate, self.norm, self.experts = nn.Linear(12, 4), nn.LayerNorm(4), nn.Embedding(4, 12)
        self.scale, self.heads = nn.Parameter(torch.ones(())), heads

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, 12) to the same."""
        scores = nn.functional.linear(x, self.gate.weight * self.scale).softmax(-1)
        best = self.norm(scores).topk(2)[1]
        y = self.experts(best).sum(2) + x
        q = y.view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q * 2, q * 3)


@pytest.mark.parametrize(("heads", "sizes"), [(3, 1), (1, 1), (4, 0)])
def test_heads_that_4_does_not_divide_and_routers_are_kept_whole(heads: int, sizes: int) -> None:
    found = products(capture(Chosen(heads), (torch.randn(8, 4, 12),), {}), experts=4)
    assert found["products"] == 3
    assert found["uncut"] == []
    assert found["kept_whole"] == {"routers": 1} | ({"sizes": sizes} if sizes else {})
    assert found["experts_cut"] == 1


ROWS: dict[str, dict[str, Any]] = {
    "transformers:a": {
        "status": "planned", "parameters": 1000, "products": 5, "uncut": ["h.0 (attention): matmul [8, 4] x [4, 8]"],
        "kept_whole": {"routers": 1}, "whole": ["loss (reduce)"], "unknown": {}, "experts": 4, "experts_cut": 2,
        "verified": {"solver": {"passed": True}},
    },
    "transformers:b": {"status": "refused", "detail": "B cannot be captured: branch at /somewhere/b.py:3: if x"},
    "transformers:c": {"status": "not built", "detail": "no attribute pad_token_id"},
    "timm:d": {
        "status": "WRONG", "parameters": 10, "products": 2, "uncut": [], "kept_whole": {}, "whole": ["h (conv)"],
        "unknown": {"aten.roll": 1}, "verified": {"solver": {"passed": False, "detail": "gradients, w"}},
    },
}  # fmt: skip


def test_figures_of_a_group() -> None:
    found = counts({name: row for name, row in ROWS.items() if name != "timm:d"})
    assert found == {
        "run": "3", "built": "2", "planned": "1", "all products cut": "0", "experts cut": "1 of 1", "verified": "1",
        "wrong": "0", "refused": "1", "crashed or ended": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("transformers:a", "1 routers whole; 1 matmul not cut in 4"),
        ("transformers:b", "B cannot be captured: branch"),
        ("timm:d", "no replicas of 1 layers, such as h (conv); no row for aten.roll; solver: gradients, w"),
    ],
)
def test_a_row_says_what_stays_whole_and_why(target: str, words: str) -> None:
    assert remark(ROWS[target]) == words


def test_the_table_has_figures_of_each_group_and_a_line_for_each_model() -> None:
    text = table(ROWS, dict.fromkeys(ROWS, "causal") | {"timm:d": "timm"})
    assert "| timm | 1 | 1 | 1 | 1 | 0 of 0 | 0 | 1 | 0 | 0 |" in text
    assert "| a | 1,000 | 3 of 5 | yes | 1 routers whole; 1 matmul not cut in 4 |" in text
    assert "| b | - | refused | - | B cannot be captured: branch |" in text
    assert (
        text.index("## causal") < text.index("| a |") < text.index("## timm") < text.index("| d | 10 | 2 of 2 | NO |")
    )


class Calls(nn.Module):
    """Fails on tensors of other widths than 8, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.count = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8) to the same."""
        self.count += 1
        result: Tensor = self.fc(x)
        return result


def test_a_model_whose_own_forward_fails_is_told_apart_and_a_call_leaves_the_model_alone() -> None:
    model = Calls()
    assert forward_error(model, (torch.randn(2, 8),), {}) == ""
    assert "cannot be multiplied" in forward_error(model, (torch.randn(2, 7),), {})
    assert model.count == 0


class Undefined(nn.Module):
    """Its gradient is NaN at its first element."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 8) to the same."""
        result: Tensor = self.fc(x)
        return torch.where(torch.arange(8) > 0, result, (result - result.detach()).sqrt() * 0)


@pytest.mark.full
def test_a_plain_model_without_numbers_is_not_compared() -> None:
    x = torch.randn(8, 8)
    plan = parplan.analyze(Undefined(), x, gpus=2, gpu="k20", time_limit_s=1).plan
    assert "plain model gives NaN (gradients, fc." in verified(Undefined(), (x,), {}, plan)["detail"]
    plan = parplan.analyze(nn.Linear(8, 8), x, gpus=2, gpu="k20", time_limit_s=1).plan
    assert verified(nn.Linear(8, 8), (x,), {}, plan)["passed"]


def test_the_smallest_member_of_a_family_is_found_by_its_name() -> None:
    assert min(["convnext_base", "convnext_atto", "convnext_tiny"], key=_size_word) == "convnext_atto"
    assert min(["resnet50", "resnet18"], key=_size_word) == "resnet18"


def test_fields_of_layers_that_a_small_configuration_lacks_are_left_out() -> None:
    fields = {"text": {"num_hidden_layers": 2, "per_layer_config": {"1": {"head_dim": 8}, "5": {"head_dim": 16}}}}
    assert first_layers(fields)["text"]["per_layer_config"] == {"1": {"head_dim": 8}}
