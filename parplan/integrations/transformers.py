"""A Trainer of transformers whose model runs by a plan: columns, losses, checkpoints and evaluation as with any model.

    from parplan.integrations.transformers import Trainer  # was: from transformers import Trainer

A plain model is compiled with parplan's defaults; a compiled one is taken with its own. For another Trainer:
`class MyTrainer(TrainerMixin, Seq2SeqTrainer)`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from parplan.api import compile
from parplan.errors import RuntimeFailure
from parplan.integrations import library
from parplan.integrations.accelerate import adopt
from parplan.runtime.module.compiled import Compiled

transformers = library("transformers", "zoo")
Base: Any = transformers.Trainer

__all__ = ["Trainer", "TrainerMixin"]


class TrainerMixin:
    """The methods of a Trainer that concern its model; stands in front of the Trainer's class.

    Every process gives its own loss, as under DistributedDataParallel: the Trainer scales it by the tokens of all.

    Raises:
        RuntimeFailure: a model compiled otherwise, or for other processes than the Trainer's.
    """

    model: Any
    args: Any
    accelerator: Any
    optimizer: Any

    def __init__(self, model: nn.Module | None = None, args: Any = None, **options: Any) -> None:
        args = transformers.TrainingArguments() if args is None else args
        processes = args.world_size  # joins them
        args._n_gpu = min(1, args.n_gpu)  # a compiled model has all GPUs of one process; DataParallel would copy it
        if options.get("model_init") is not None:
            raise RuntimeFailure("model_init makes models one after another; give the Trainer one model=")
        if isinstance(model, nn.Module) and not isinstance(model, Compiled):
            model = compile(model, scalars="whole" if processes == 1 else "per_replica")
        if isinstance(model, Compiled):
            own = model._given["scalars"] == "per_replica"
            if own != (processes > 1) or (model._transport.processes > 1) != (processes > 1):
                raise RuntimeFailure(
                    f"the Trainer runs {processes} processes and scales each one's own loss; compile the model after "
                    f'TrainingArguments, with scalars="{"whole" if processes == 1 else "per_replica"}"'
                )
        super().__init__(model=model, args=args, **options)  # type: ignore[call-arg]

    def _wrap_model(self, model: Any, *args: Any, **options: Any) -> Any:
        adopt(self.accelerator, model)
        return model

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Every process gathers the weights, and one writes them as the plain model's."""
        compiled = self.model
        state = compiled.state_dict() if state_dict is None else state_dict
        config = vars(compiled.module).get("config")
        before = dict(vars(config)) if config is not None else {}
        self.model = compiled.module
        try:
            super()._save(output_dir, state)  # type: ignore[misc]
        finally:
            self.model = compiled
            if config is not None:  # one process has written to it what it saved: the next forward would differ
                vars(config).clear()
                vars(config).update(before)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Every process gathers the optimizer's state, and one writes it."""
        optimizer, state = self.optimizer, self.optimizer.state_dict()
        self.optimizer = _Gathered(state)
        try:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        finally:
            self.optimizer = optimizer


class _Gathered:
    """The state of an optimizer, for a method that asks for nothing else."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return self._state


class Trainer(TrainerMixin, Base):  # type: ignore[misc]
    """transformers' Trainer, for a model that runs by a plan."""
