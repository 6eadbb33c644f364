"""Training loops drawn by the fuzzer: an optimizer, and actions that happen at certain moments of each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz_models import HEADS, Drawn, Knob, Reversed, Stored, sample
from benchmarks.training import Run

__all__ = ["ACTIONS", "OPTIMIZERS", "Loop", "train"]

STEPS = 4
BATCH = 8

# No optimizer may make much of rounding in gradients that are zero (of a bias in front of a norm).
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01, eps=(1e-6, 1e-3)),
}


@dataclass
class Loop:
    """One training run, handed to every action.

    Attributes:
        again: makes a new model with other weights, as a resumed script does.
    """

    run: Run
    model: Any
    optimizer: torch.optim.Optimizer
    again: Callable[[], tuple[Any, torch.optim.Optimizer]]
    step: int = 0
    average: Any = None
    handles: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Action:
    """What happens in each step, at four moments."""

    before: Callable[[Loop], None] = lambda loop: None
    extra_loss: Callable[[Loop], Tensor | None] = lambda loop: None
    after_backward: Callable[[Loop], None] = lambda loop: None
    after: Callable[[Loop], None] = lambda loop: None


def _at(step: int, act: Callable[[Loop], None]) -> Callable[[Loop], None]:
    def acting(loop: Loop) -> None:
        if loop.step == step:
            act(loop)

    return acting


def _grads(loop: Loop) -> list[Tensor]:
    return [p.grad for p in loop.model.parameters() if p.grad is not None]


def _clip_norm(loop: Loop) -> None:
    loop.run.same("norm", nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1))


def _clip_value(loop: Loop) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)


def _noise(loop: Loop) -> None:
    for grad in _grads(loop):
        grad.add_(grad.norm() * 0.01)


def _centre(loop: Loop) -> None:
    for grad in _grads(loop):
        if grad.ndim > 1:
            grad.sub_(grad.mean(tuple(range(1, grad.ndim)), keepdim=True))


def _freeze(loop: Loop) -> None:
    for p in loop.model.stem.parameters():
        p.requires_grad_(loop.step != 1)
        p.grad = None


def _evaluate(loop: Loop) -> None:
    loop.model.eval()
    with torch.no_grad() if loop.step % 2 else torch.inference_mode():
        result = loop.model(*_inputs(loop)[:1])
    loop.run.rows("evaluated", result["scores"] if isinstance(result, dict) else result)
    loop.model.train()


def _anneal(loop: Loop) -> None:
    for module in loop.model.modules():
        if isinstance(module, Knob):
            module.temperature = 1.0 + 0.5 * loop.step
        if isinstance(module, Reversed):
            module.alpha = 0.2 * loop.step


def _switch(loop: Loop) -> None:
    for module in loop.model.modules():
        if isinstance(module, Knob):
            module.linear = loop.step in (1, 2)
            module.scales[0] = 1.0 + (loop.step > 1)
            module.config["shift"] = 0.1 * (loop.step > 0)


def _schedule(loop: Loop) -> None:
    for group in loop.optimizer.param_groups:
        group["lr"] *= 0.7


def _resume(loop: Loop) -> None:
    weights, state = loop.model.state_dict(), loop.optimizer.state_dict()
    saved = loop.run.from_first(lambda: (weights, state))
    loop.model, loop.optimizer = loop.again()
    loop.model.load_state_dict(saved[0])
    loop.optimizer.load_state_dict(saved[1])


def _back(loop: Loop) -> None:
    """The weights of two steps ago, in place."""
    if loop.step == 0:
        loop.average = copy.deepcopy(loop.model.state_dict())
    if loop.step == 2:
        loop.model.load_state_dict(loop.average)


def _edit(loop: Loop) -> None:
    with torch.no_grad():
        for p in loop.model.parameters():
            p.mul_(0.9)
        weight = loop.model.head.weight
        weight.div_(weight.norm(dim=1, keepdim=True))


def _clamp(loop: Loop) -> None:
    for p in loop.model.parameters():
        p.data.clamp_(-0.2, 0.2)


def _penalty(loop: Loop) -> Tensor:
    return sum((p.square().sum() for p in loop.model.parameters()), torch.zeros(())) * 0.01


def _hook(loop: Loop) -> None:
    if loop.step == 1:
        loop.handles.append(loop.model.head.register_forward_hook(lambda module, args, out: out * 2))
    if loop.step == 3:
        loop.handles.pop().remove()


def _parameter_hook(loop: Loop) -> None:
    loop.model.head.weight.register_hook(lambda grad: grad * 0.5)


def _replace(loop: Loop) -> None:
    torch.manual_seed(5)
    loop.model.head = nn.Linear(8, 4)
    loop.optimizer.add_param_group({"params": list(loop.model.head.parameters())})


def _reset(loop: Loop) -> None:
    for buffer in loop.model.buffers():
        buffer.data.mul_(0.5) if buffer.is_floating_point() else buffer.zero_()


def _inner(loop: Loop) -> None:
    """The gradient of an input, beside the step's own."""
    x, *rest = _inputs(loop)
    reentrant = any(getattr(module, "reentrant", False) for module in loop.model.modules())
    if not x.is_floating_point() or reentrant:  # torch refuses `grad` behind a reentrant checkpoint
        return
    x.requires_grad_()
    loss = HEADS[loop.model.kind].loss(loop.model(x, *rest), rest[0], loop.step)
    (gradient,) = torch.autograd.grad(loss, x)
    loop.run.rows("input gradient", gradient / loop.run.ranks)


def _log(loop: Loop) -> None:
    for name, p in loop.model.named_parameters():
        loop.run.same(f"norm of {name}", float(p.detach().norm()))


def _read(loop: Loop) -> None:
    for module in loop.model.modules():
        if isinstance(module, Stored):
            loop.run.rows("stored", module.last)


ACTIONS: Mapping[str, Action] = {
    "clip norm": Action(after_backward=_clip_norm),
    "clip value": Action(after_backward=_clip_value),
    "noise": Action(after_backward=_noise),
    "centre": Action(after_backward=_centre),
    "freeze": Action(before=_freeze),
    "evaluate": Action(after=_evaluate),
    "anneal": Action(before=_anneal),
    "switch": Action(before=_switch),
    "schedule": Action(after=_schedule),
    "resume": Action(after=_at(1, _resume)),
    "back": Action(after=_back),
    "edit": Action(after=_at(1, _edit)),
    "clamp": Action(after=_clamp),
    "penalty": Action(extra_loss=_penalty),
    "hook": Action(before=_hook),
    "parameter hook": Action(before=_at(1, _parameter_hook)),
    "replace": Action(before=_at(2, _replace)),
    "reset": Action(after=_at(1, _reset)),
    "input gradient": Action(after=_inner),
    "log": Action(after=_at(2, _log)),
    "read": Action(after_backward=_read),
    "accumulate": Action(),
    "last batch": Action(),
    "no none": Action(),
    "optimizer first": Action(),
    "siamese": Action(),
}


def _inputs(loop: Loop, batch: int = BATCH) -> tuple[Tensor, ...]:
    """A batch, and classes."""
    family, words = loop.model.family, isinstance(loop.model.stem, nn.Embedding)
    shape = sample(family, words, batch)
    x = loop.run.randint(10, *shape) if words else loop.run.randn(*shape)
    return x, loop.run.randint(4, batch)


def train(run: Run, make: Callable[[], Drawn], optimizer: str, actions: tuple[str, ...], prepare: bool) -> None:
    """Train for a few steps, with all actions."""

    def again() -> tuple[Any, torch.optim.Optimizer]:
        module = make()
        example = torch.zeros(sample(module.family, isinstance(module.stem, nn.Embedding), BATCH // run.ranks))
        given = [example.long() if isinstance(module.stem, nn.Embedding) else example] if prepare else []
        if "optimizer first" in actions:
            made = OPTIMIZERS[optimizer](module.parameters())
            return run.compile(module, *given), made
        model = run.compile(module, *given)
        return model, OPTIMIZERS[optimizer](model.parameters())

    loop = Loop(run, *again(), again)
    chosen = [ACTIONS[name] for name in actions]
    for loop.step in range(STEPS):
        for action in chosen:
            action.before(loop)
        if "accumulate" not in actions or loop.step % 2 == 0:
            loop.optimizer.zero_grad(set_to_none="no none" not in actions)
        batch = 4 if "last batch" in actions and loop.step == 2 else BATCH
        loss = _loss(loop, batch)
        if "siamese" in actions:
            loss = loss + 0.5 * _loss(loop, batch)
        run.mean("loss", loss)
        for action in chosen:
            more = action.extra_loss(loop)
            loss = loss if more is None else loss + more
        loss.backward()
        for action in chosen:
            action.after_backward(loop)
        loop.optimizer.step()
        for action in chosen:
            action.after(loop)
        run.state(loop.model)


def _loss(loop: Loop, batch: int) -> Tensor:
    x, classes = _inputs(loop, batch)
    head = loop.model.kind
    result = loop.model(x, classes) if head == "inside" else loop.model(x)
    return HEADS[head].loss(result, classes, loop.step)
