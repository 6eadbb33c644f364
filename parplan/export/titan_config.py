"""A plan as a configuration of torchtitan: the degrees of its parallelism that are nearest to the plan's.

torchtitan has models and rules of its own: one degree of each kind for the whole model, where a plan has a strategy per
layer. What most of the plan's work has is taken over, and the rest is said.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from parplan.errors import PlanError
from parplan.export.pipeline_stages import schedule_class
from parplan.export.torch_program import products
from parplan.graph.layer_graph import Layer, LayerGraph
from parplan.lowering.pipeline.stages import stage_numbers
from parplan.plan import SAVED, SCHEDULES, STATES, Plan, Scheme
from parplan.planner.search_space.verifier import check

__all__ = ["TitanConfig", "titan_config"]

NAMES_OF = "August 2026"
"""When torchtitan had these names."""

_LINE = 100
_FULL, _SELECTIVE = 0.9, 0.1  # shares of the replayable work from which all blocks, or some ops, are replayed


@dataclass(frozen=True)
class TitanConfig:
    """A configuration.

    Args:
        plan: what it is of, in words.
        fields: of the `Trainer.Config`, by dotted name.
        checkpoint: torchtitan's class of activation checkpointing; empty: none.
        otherwise: what runs otherwise than in the plan, in sentences.
    """

    plan: str
    fields: Mapping[str, object]
    checkpoint: str
    otherwise: tuple[str, ...]

    def text(self) -> str:
        """A Python module with a function that sets the fields."""
        use = (
            f"The plan of parplan for {self.plan}, for torchtitan (names of {NAMES_OF}): a function of your own in a "
            "module that `--module` names calls `planned(config)` with a Trainer.Config of the same model."
        )
        lines = [*textwrap.wrap(f'"""{use}', _LINE), "", "Otherwise than in the plan:"]
        for sentence in self.otherwise:
            lines += textwrap.wrap(sentence, _LINE, initial_indent="- ", subsequent_indent="  ")
        lines += ['"""', "", ""]
        if self.checkpoint:
            lines[-1:] = [f"from torchtitan.distributed.activation_checkpoint import {self.checkpoint}", "", ""]
        lines += ["def planned(config):", '    """The configuration with the parallelism of the plan."""']
        lines += [
            f"    config.{name} = {json.dumps(v) if isinstance(v, str) else v}" for name, v in self.fields.items()
        ]
        made = f"{self.checkpoint}.Config()" if self.checkpoint else "None"
        return "\n".join([*lines, f"    config.activation_checkpoint = {made}", "    return config"]) + "\n"


def titan_config(graph: LayerGraph, plan: Plan) -> TitanConfig:
    """The configuration that is nearest to a plan.

    Raises:
        PlanError: the plan is for another model or breaks a rule, or the model takes no tokens.
    """
    check(plan, graph)
    layers, said = plan.layers, ["torchtitan cuts its own models by its own rules: degrees alone are the plan's"]
    numbers = stage_numbers(graph, layers)
    groups = len(numbers.groups) if plan.schedule != SCHEDULES[0] else 1
    per_group = plan.devices // groups
    tensor = _most(graph, lambda layer: layers[layer.name].shards, products)
    if per_group % tensor:
        raise PlanError(
            f"{tensor} shards do not divide the {per_group} devices of a stage; torchtitan has one degree for all"
        )
    data = per_group // tensor
    tokens = _tokens(graph)
    state = _most(graph, lambda layer: STATES.index(layers[layer.name].state), _weights) if data > 1 else 0
    sequence = any(own.axis == "sequence" and own.shards > 1 for own in layers.values())
    fields: dict[str, object] = {
        "parallelism.data_parallel_replicate_degree": 1 if state else data,
        "parallelism.data_parallel_shard_degree": data if state else 1,
        "parallelism.fsdp_reshard_after_forward": "always" if STATES[state] == "gathered" else "never",
        "parallelism.tensor_parallel_degree": tensor,
        "parallelism.enable_sequence_parallel": sequence,
        "parallelism.pipeline_parallel_degree": groups,
    }
    if groups > 1:
        fields["parallelism.pipeline_parallel_schedule"] = schedule_class(plan, numbers).removeprefix("Schedule")
        fields["parallelism.num_pp_microbatches"] = plan.micro_batches
        firsts = {stage: name for name, stage in reversed([*numbers.of.items()])}
        begins = ", ".join(f"stage {stage} at {name}" for stage, name in sorted(firsts.items()) if stage)
        said.append(f"stages begin where torchtitan counts equal blocks; in the plan {begins}")
    fields["training.max_context_length"] = tokens
    fields["training.num_tokens_per_microbatch_per_dp_rank"] = plan.batch * tokens // data // plan.micro_batches
    fields["training.num_tokens_per_train_step"] = plan.batch * tokens
    said += _others(graph, plan, tensor, data, state if data > 1 else None)
    replayed = _share(graph, lambda layer: layers[layer.name].saved == SAVED[1])
    checkpoint = "FullAC" if replayed >= _FULL else "SelectiveAC" if replayed >= _SELECTIVE else ""
    if 0 < replayed < 1:
        said.append(
            f"layers with {replayed:.0%} of the work are replayed in the plan; {checkpoint or 'none'} is nearest"
        )
    return TitanConfig(f"{plan.model} on {plan.devices} devices", fields, checkpoint, tuple(said))


def _tokens(graph: LayerGraph) -> int:
    """Tokens of a sample."""
    for name in graph.user_inputs:
        if name is not None and graph.batch_dims.get(name) == 0:
            value = graph.values[name]
            if len(value.shape) == 2 and not value.dtype.is_floating_point:
                return value.shape[1]
    raise PlanError(
        f"{graph.model} takes no whole numbers of shape (samples, tokens); torchtitan trains language models: export "
        "with --to torch"
    )


def _most(graph: LayerGraph, kind: Callable[[Layer], int], size: Callable[[LayerGraph, Layer], int]) -> int:
    """The kind of layer that has most of a size; of equally much the largest kind."""
    found: Counter[int] = Counter()
    for layer in graph.layers.values():
        found[kind(layer)] += size(graph, layer)
    return max(found, key=lambda one: (found[one], one))


def _weights(graph: LayerGraph, layer: Layer) -> int:
    return sum(graph.values[name].elements for name in layer.parameters)


def _share(graph: LayerGraph, chosen: Callable[[Layer], bool]) -> float:
    """The share of the work in chosen layers."""
    work = {name: products(graph, layer) for name, layer in graph.layers.items()}
    own = sum(work[name] for name, layer in graph.layers.items() if chosen(layer))
    return own / max(1, sum(work.values()))


def _others(graph: LayerGraph, plan: Plan, tensor: int, data: int, state: int | None) -> Iterable[str]:
    """Sentences on layers with matrices, tables of embeddings too, that have something else in the plan."""
    matrices = {
        name: plan.layers[name]
        for name, layer in graph.layers.items()
        if any(len(graph.values[parameter].shape) > 1 for parameter in layer.parameters)
    }

    def differing(what: str, wanted: object, found: Iterable[object]) -> Iterable[str]:
        if count := sum(one != wanted for one in found):
            yield f"{count} of {len(matrices)} layers with matrices have other {what} in the plan than {wanted}"

    yield from differing("shards", tensor, (own.shards for own in matrices.values()))
    spread = (own.replicas for name, own in matrices.items() if graph.layers[name].batch is not None)
    yield from differing("replicas", data, spread)
    if state is not None:
        yield from differing("state", STATES[state], (own.state for own in matrices.values()))
    if along := sum(own.axis == "sequence" and own.shards > 1 for own in matrices.values()):
        yield f"{along} of {len(matrices)} layers with matrices are cut along the sequence in the plan, here by weights"
    if plan.scheme is not Scheme.GATHER:
        yield f"scheme {plan.scheme.value} in the plan, here all samples go through every layer at once"
    if periods := sum(own.update_period is not None for own in plan.layers.values()):
        yield f"{periods} layers are updated between passes in the plan, here once per step"
