"""Which object of a file is the model: the one asked for, `model`, `build()`, or the only one that could be."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from parplan.errors import TargetError
from parplan.target.inputs import Inputs, from_example
from parplan.target.trouble import guarded

__all__ = ["Candidate", "build", "choose"]

CONVENTION = ("model", "build")


@dataclass(frozen=True)
class Candidate:
    """A name that leads to a model; `label` is the target that names it."""

    name: str
    value: Any
    label: str

    @property
    def words(self) -> str:
        """`Net()` for what has to be called, else `net`."""
        return self.name if isinstance(self.value, nn.Module) else f"{self.name}()"

    @property
    def kind(self) -> str:
        """Kind of object, for a list."""
        if isinstance(self.value, nn.Module):
            return f"an instance of {type(self.value).__name__}"
        return "a class" if inspect.isclass(self.value) else "a function"

    @property
    def required(self) -> list[str]:
        """Arguments it cannot be called without."""
        try:
            parameters = inspect.signature(self.value).parameters.values()
        except (TypeError, ValueError):
            return []
        return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def choose(source: ModuleType, target: str, name: str = "") -> Candidate:
    """The candidate called `name`; without one `model`, `build`, or the only other that needs no arguments.

    Raises:
        TargetError: nothing there, nothing of that name, or several.
    """
    if name:
        if not hasattr(source, name):
            head = target.removesuffix(f":{name}")
            usual = [usual for usual in CONVENTION if hasattr(source, usual)]
            names = [*(each.name for each in _search(source, head)), *usual]
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; it has {', '.join(names)}" if names else ""
            raise TargetError(f"{head} has no {name}{hint}")
        value = getattr(source, name)
        if not _leads_to_a_model(value) and not callable(value):
            raise TargetError(f"{target} is {_a(type(value).__name__)}; a torch.nn.Module, a class of one, or a "
                              "function that returns one is needed")  # fmt: skip
        return Candidate(name, value, target)
    for name in CONVENTION:
        value = vars(source).get(name)
        if _leads_to_a_model(value):
            return Candidate(name, value, f"{target}:{name}")
    found = _search(source, target)
    ready = [each for each in found if isinstance(each.value, nn.Module) or not each.required]
    if len(ready) == 1:
        return ready[0]
    if ready:
        listed = "".join(f"\n  {each.label}  ({each.kind})" for each in ready)
        raise TargetError(f"{target} has {len(ready)} models and neither `model` nor `build()`; name one:{listed}")
    if found:
        listed = ", ".join(f"{each.name} (needs {', '.join(each.required)})" for each in found)
        raise TargetError(f"{target} has no model that can be made without arguments: {listed}; add a function "
                          "build() that makes it")  # fmt: skip
    raise TargetError(f"{target} has no model; define `model`, a function build() that returns one, or a class of "
                      "torch.nn.Module")  # fmt: skip


def build(candidate: Candidate, what: str, folder: Path) -> tuple[nn.Module, Inputs | None]:
    """The candidate's model; `what` and `folder` tell of exceptions in somebody's code, as `guarded` says.

    A function may return the model alone, or the model and its example inputs.

    Raises:
        TargetError: it needs arguments, fails, or returns no model.
    """
    value = candidate.value
    if isinstance(value, nn.Module):
        return value, None
    if candidate.required:
        raise TargetError(f"{candidate.label} needs arguments ({', '.join(candidate.required)}); add a function "
                          "build() that makes the model, or give them defaults")  # fmt: skip
    made = guarded(value, what, folder)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made[0], from_example(made[1], f"{candidate.label}()")
    if not isinstance(made, nn.Module):
        raise TargetError(f"{candidate.label}() returned {_a(type(made).__name__)}; it must return a torch.nn.Module")
    return made, None


def _a(name: str) -> str:
    return "None" if name == "NoneType" else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _leads_to_a_model(value: Any) -> bool:
    if inspect.isclass(value):
        return issubclass(value, nn.Module)
    return isinstance(value, nn.Module) or inspect.isroutine(value)


def _search(source: ModuleType, target: str) -> list[Candidate]:
    """Models, classes of models and build_* functions that the file itself defines, in its order."""
    instances: dict[int, tuple[str, nn.Module]] = {}
    for name, value in vars(source).items():
        if isinstance(value, nn.Module):
            instances.setdefault(id(value), (name, value))
    made = {type(value) for _, value in instances.values()}
    found: list[Candidate] = [Candidate(name, value, f"{target}:{name}") for name, value in instances.values()]
    for name, value in vars(source).items():
        own = getattr(value, "__module__", None) == source.__name__ and getattr(value, "__name__", "") == name
        is_class = inspect.isclass(value) and issubclass(value, nn.Module) and value not in made
        if own and (is_class or (inspect.isfunction(value) and name.startswith("build_"))):
            found.append(Candidate(name, value, f"{target}:{name}"))
    return found
