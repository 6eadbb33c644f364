"""Patterns of saving and resuming, and of activation checkpoints."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.training import Run
from tests.patterns.nets import BATCH, Mlp, steps
from tests.patterns.pattern import Section

SECTION = Section("Checkpoints")


def adam(model: nn.Module) -> torch.optim.Adam:
    """Adam, whose state resumed runs need."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


@SECTION("resumed: the first rank saves `model.state_dict()` and `optimizer.state_dict()`, every rank loads")
def resumed(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = adam(model)
    steps(run, model, optimizer, 2)
    weights, state = model.state_dict(), optimizer.state_dict()
    saved = run.from_first(lambda: {"model": weights, "optimizer": state})
    torch.manual_seed(9)
    model = run.compile(Mlp())
    optimizer = adam(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    steps(run, model, optimizer, 3)


@SECTION("resumed in place: state loaded back into the same model and optimizer after more steps")
def resumed_in_place(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = adam(model)
    steps(run, model, optimizer, 2)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    steps(run, model, optimizer, 2)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    steps(run, model, optimizer, 2)


@SECTION("a state changed by hand (a layer set to zero, another one scaled) and loaded back")
def changed_state(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = adam(model)
    steps(run, model, optimizer, 2)
    state = model.state_dict()
    state["head.bias"].zero_()
    state["body.weight"] *= 0.5
    model.load_state_dict(state)
    steps(run, model, optimizer, 2)


@SECTION("a plain model's weights and optimizer state, loaded into a compiled one")
def from_plain(run: Run) -> None:
    plain = Mlp()
    optimizer = adam(plain)
    for _ in range(2):
        optimizer.zero_grad()
        plain(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
    weights, state = plain.state_dict(), optimizer.state_dict()
    model = run.compile(Mlp(), torch.zeros(BATCH // run.ranks, 6))
    optimizer = adam(model)
    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(state))
    steps(run, model, optimizer, 3)


@SECTION("the same, loaded into an optimizer whose model has made steps")
def from_plain_later(run: Run) -> None:
    plain = Mlp()
    optimizer = adam(plain)
    plain(torch.ones(4, 6)).square().sum().backward()
    optimizer.step()
    weights, state = plain.state_dict(), optimizer.state_dict()
    model = run.compile(Mlp())
    optimizer = adam(model)
    steps(run, model, optimizer, 1)
    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(state))
    steps(run, model, optimizer, 3)


@SECTION("a compiled model's state, loaded into the plain model and its optimizer")
def to_plain(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = adam(model)
    steps(run, model, optimizer, 2)
    weights, state = model.state_dict(), optimizer.state_dict()
    saved = run.from_first(lambda: {"model": weights, "optimizer": state})
    plain = Mlp()
    optimizer = adam(plain)
    plain.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for _ in range(2):
        optimizer.zero_grad()
        plain(torch.ones(4, 6)).square().sum().backward()
        optimizer.step()
    run.state(plain, "plain ")


@SECTION("`torch.distributed.checkpoint.state_dict`: `get_state_dict` and `set_state_dict`")
def sharded_state(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = adam(model)
    steps(run, model, optimizer, 2)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=run.ranks > 1))
    weights, state = copy.deepcopy(weights), copy.deepcopy(state)
    steps(run, model, optimizer, 2)
    options = StateDictOptions(full_state_dict=run.ranks > 1)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=options)
    steps(run, model, optimizer, 2)


@SECTION("the state of a learning-rate scheduler and of random numbers, resumed")
def resumed_scheduler(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = adam(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    steps(run, model, optimizer, 1)
    scheduler.step()
    weights, state = model.state_dict(), scheduler.state_dict()
    saved = run.from_first(lambda: (weights, state))
    model.load_state_dict(saved[0])
    scheduler.load_state_dict(saved[1])
    steps(run, model, optimizer, 2)
    run.same("lr", optimizer.param_groups[0]["lr"])


class Checkpointed(nn.Module):
    """Recomputes its body in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.head, self.reentrant = nn.Linear(6, 8), nn.Linear(8, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Four scores a sample."""
        hidden = checkpoint(lambda h: torch.tanh(self.body(h)), x, use_reentrant=self.reentrant)
        scores: Tensor = self.head(hidden)
        return scores


@SECTION("`checkpoint(..., use_reentrant=False)` in the forward")
def checkpoint_inside(run: Run) -> None:
    model = run.compile(Checkpointed(False))
    steps(run, model, adam(model))


@SECTION("`checkpoint(..., use_reentrant=True)` in the forward, of a hidden value")
def reentrant_inside(run: Run) -> None:
    model = run.compile(nn.Sequential(nn.Linear(6, 6), Checkpointed(True)))
    steps(run, model, adam(model))


@SECTION("`checkpoint_sequential` in the forward")
def sequential_inside(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.head(checkpoint_sequential(self.body, 2, x, use_reentrant=False))
            return scores

    model = run.compile(Net())
    steps(run, model, adam(model))


@SECTION("`checkpoint` around the compiled model, both ways")
def checkpoint_around(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = adam(model)
    for reentrant in (False, True):
        for _ in range(2):
            x, classes = run.randn(BATCH, 6).requires_grad_(), run.randint(4, BATCH)
            optimizer.zero_grad()
            loss = F.cross_entropy(checkpoint(model, x, use_reentrant=reentrant), classes)
            loss.backward()
            optimizer.step()
            run.mean("loss", loss)
        run.state(model)
