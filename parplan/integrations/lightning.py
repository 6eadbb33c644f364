"""A strategy of Lightning that runs a LightningModule, or one part of it, by a plan.

    trainer = Trainer(strategy=ParplanStrategy(), devices=2)  # was: strategy="ddp"

What `training_step` calls is planned: the module's own forward where it has one, else its only child with parameters.
"""

from __future__ import annotations

from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from parplan.api import compile
from parplan.errors import RuntimeFailure
from parplan.integrations import library
from parplan.runtime.module.compiled import Compiled

lightning = library("lightning.pytorch", "lightning")
Base: Any = lightning.strategies.DDPStrategy

__all__ = ["ParplanStrategy"]

# Of the models that strategies have compiled: a module that meets the next trainer keeps its plan.
_OPTIONS: WeakKeyDictionary[Compiled, dict[str, Any]] = WeakKeyDictionary()


class ParplanStrategy(Base):  # type: ignore[misc]
    """Lightning's processes, samplers and checkpoints, with a compiled model in place of DistributedDataParallel.

    Args:
        part: the name of the child that is planned; default: see above. One that is compiled already stays.
        options: of `parplan.compile`; those of DDPStrategy that concern processes (`timeout`) go there.

    Attributes:
        compiled: the compiled model, since setup.

    Raises:
        RuntimeFailure: (in `fit`) it is not told which part to plan, or parameters are trained outside of it.
    """

    def __init__(self, part: str = "", **options: Any) -> None:
        ours = ("process_group_backend", "timeout", "start_method", "cluster_environment", "checkpoint_io")
        super().__init__(**{name: options.pop(name) for name in ours if name in options})
        self._part, self._options = part, options
        self.compiled: Compiled | None = None
        self._owner: nn.Module | None = None

    def setup(self, trainer: Any) -> None:
        """Compile on the module's device, before optimizers are made."""
        if self._layer_sync is not None and self._options.get("batch_norm", "global") != "global":
            raise RuntimeFailure('sync_batchnorm=True and batch_norm="local" contradict each other; take one out')
        super(Base, self).setup(trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        if self._owner is not model:
            self._owner, self.compiled = model, self._planned(model)
        return model

    def _planned(self, model: nn.Module) -> Compiled:
        earlier = getattr(vars(model).get("forward"), "compiled", None)
        if earlier is not None:
            return self._kept(earlier)
        children = {name: child for name, child in model.named_children() if any(True for _ in child.parameters())}
        direct = {name: child for name, child in model._modules.items() if isinstance(child, Compiled)}
        if not self._part and not direct and type(model).forward is not lightning.LightningModule.forward:
            compiled = self._made(_planned_view(model))

            def forward(*args: Any, **kwargs: Any) -> Any:
                return compiled(*args, **kwargs)

            forward.compiled = compiled  # type: ignore[attr-defined]
            model.forward = forward
            return compiled
        name = self._part or next(iter(direct or children), "")
        if name not in children or (not self._part and len(direct or children) > 1):
            raise RuntimeFailure(
                f"{type(model).__name__} has no forward of its own, and its parts are {', '.join(children)}: name the "
                f'one that training_step calls, ParplanStrategy(part="{next(iter(children), "net")}"), or define '
                "forward() over all of them"
            )
        compiled = self._kept(direct[name]) if name in direct else self._made(children[name])
        if (compiled._transport.processes > 1) != (self.world_size > 1):
            raise RuntimeFailure(
                f"{name} was compiled before Lightning joined {self.world_size} processes; leave that to the strategy"
            )
        setattr(model, name, compiled)
        return compiled

    def _made(self, part: nn.Module) -> Compiled:
        compiled = compile(part, **self._options)
        _OPTIONS[compiled] = self._options
        return compiled

    def _kept(self, compiled: Compiled) -> Compiled:
        """A model that an earlier trainer's strategy, or the user, has compiled."""
        if self._options not in ({}, _OPTIONS.get(compiled, {})):
            raise RuntimeFailure(
                f"the module is compiled already, with other options than {', '.join(self._options)} of this strategy; "
                "give none, or take a new module and load its state"
            )
        return compiled

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The module's training step.

        Raises:
            RuntimeFailure: it did not call the part that is planned, or parameters outside of it are trained.
        """
        compiled: Any = self.compiled
        inside = {id(parameter) for parameter in compiled.parameters()}
        for name, parameter in self.lightning_module.named_parameters():
            if parameter.requires_grad and id(parameter) not in inside:
                raise RuntimeFailure(
                    f"{name} is trained outside of the part that parplan plans, and its gradient would stay each "
                    "process's own; define forward() over all parts, or freeze it"
                )
        compiled.program = None  # until it is called
        result = super().training_step(*args, **kwargs)
        skipped = result is None and self.lightning_module.automatic_optimization
        if compiled.program is None and not skipped:
            raise RuntimeFailure(
                "training_step never called the part that parplan plans (the module's forward, or the part= of the "
                'strategy), whose gradients would stay each process\'s own; call self(...), or name a part="..."'
            )
        return result

    @property
    def _whole(self) -> Any:
        """The module that gives and takes the state: the compiled one, where that is all of the module."""
        return self.compiled if "forward" in vars(self.lightning_module) else self.lightning_module

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors under the plain module's names; every process gathers them."""
        found: dict[str, Any] = self._whole.state_dict()
        return found

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        """Load a plain module's state; each process keeps its blocks."""
        self._whole.load_state_dict(checkpoint["state_dict"], strict=strict)


def _planned_view(model: nn.Module) -> nn.Module:
    """The same module, all of its attributes included, whose forward is its class's: the one that is planned."""
    kind = type(model)
    forward = property(lambda self: MethodType(kind.forward, self))  # goes before the attribute of the instance
    view: nn.Module = object.__new__(type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__}))
    object.__setattr__(view, "__dict__", model.__dict__)
    return view
