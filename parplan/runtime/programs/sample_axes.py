"""Sample dimensions of results, and a check that the samples of every result are known to lie along one.

Under torchrun the captured graph runs on the samples of all processes, one process's behind the other's. An input that
holds positions along samples counts within one process, and a result whose samples lie along no known dimension cannot
be handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from parplan.errors import CaptureError
from parplan.graph.layer_graph import LayerGraph
from parplan.layout import Range
from parplan.lowering.passes import local_ranges, take
from parplan.runtime.calls import ModelCall

__all__ = ["SampleAxis", "check_own_samples", "no_own_samples", "result_axis"]


@dataclass(frozen=True)
class SampleAxis:
    """A dimension along which a tensor has samples.

    Args:
        dim: of the tensor as the model returns it.
        per_sample: indices of each sample.
        outer, inner: sizes of the dimensions in front of the samples', and behind it, that are flattened with it.
    """

    dim: int
    per_sample: int
    outer: int = 1
    inner: int = 1

    def size(self, samples: int) -> int:
        """Length of the dimension for so many samples."""
        return self.outer * samples * self.per_sample * self.inner

    def of(self, tensor: Tensor, samples: int) -> bool:
        """Whether a tensor may have `samples` samples there."""
        return tensor.dim() > self.dim and tensor.shape[self.dim] == self.size(samples)

    def take(self, tensor: Tensor, ranges: Sequence[Range]) -> Tensor:
        """The samples in `ranges`."""
        spread = tensor.unflatten(self.dim, (self.outer, -1, self.inner))
        own = local_ranges(ranges, Range(0, spread.shape[self.dim + 1]), self.per_sample)
        return take(spread, self.dim + 1, own).flatten(self.dim, self.dim + 2)


def result_axis(graph: LayerGraph, value: str) -> SampleAxis | None:
    """The dimension that a result's samples lie along; None where there is none."""
    dim, shape, front = graph.batch_dims.get(value), graph.values[value].shape, graph.flattened.get(value)
    if dim is None or not graph.batch:
        return None
    each = shape[dim] // graph.batch
    if front is None or dim < front:
        return SampleAxis(dim, each)
    if dim > front + 1:
        return SampleAxis(dim - 1, each)
    return SampleAxis(front, each, inner=shape[front + 1]) if dim == front else SampleAxis(front, each, shape[front])


def check_own_samples(graph: LayerGraph) -> None:
    """Refuse a model for which every process would bring its own samples.

    Raises:
        CaptureError: an input indexes samples, or a result has no dimension of samples.
    """
    if graph.sample_indices:
        first, *more = graph.sample_indices
        raise CaptureError(
            f"{graph.model}: {first}{f', as {len(more)} more ops do' if more else ''}. {_OWN} and counts them from 0, "
            "and the model sees those of all processes, so these positions would point at another process's samples. "
            f"{_SAME}; {_ONE_BATCH}, run the plan in one process, or let the model compute the positions itself "
            "(torch.arange, a padded [samples, length] input instead of offsets)"
        )
    if graph.sized:
        raise CaptureError(
            f"{graph.model} returns, or leaves on a module, a number that depends on the number of samples "
            "(x.shape[0]). Under torchrun the model sees the samples of all processes, so each process would get their "
            "number and not its own; take the number from the inputs outside of the model"
        )
    for result in graph.unplaced:
        why, remedy = "samples are sorted, flipped, compared or merged", "return it before that op"
        if result.unknown:
            why = f"parplan does not know how {' and '.join(result.unknown[:_SHOWN])} treats samples"
            remedy = "describe the op with parplan.graph.axes.table.register_row"
        raise CaptureError(
            f"{graph.model}: result {result.result}, made by {result.layer}, grows with the batch, but no dimension of "
            f"it is known to hold the samples ({why}), so no process can be given its own; {remedy}, reduce it inside "
            f"the model (a loss), {_ONE_BATCH}, or run the plan in one process. {_SAME}"
        )


def no_own_samples(call: ModelCall, whole: int, text: str) -> CaptureError:
    """The error of a model that can be called with one process's inputs, and not with those of all.

    Args:
        whole: samples of all processes.
        text: the error of the capture with so many; behind its second line it doubts the example inputs.
    """
    where = "\n".join(text.splitlines()[:2])
    own = " and ".join(dict.fromkeys(str(list(leaf.shape)) for leaf in call.tensors if call.has_samples(leaf)))
    return CaptureError(
        f"{_OWN}: here {call.batch} of {whole} along dimension {call.dim}, of inputs of shape {own}. The model can be "
        f"called with these, and not with those of all processes together. {_SAME}; where samples lie along another "
        f"dimension, say which (dim=...), and bring all inputs with samples there.\n{where}"
    )


_OWN = "Under torchrun every process brings its own samples"
_SAME = (
    "Where these inputs are no samples (a whole graph, one state), let all processes bring the same ones and compile "
    'with inputs="same"'
)
_ONE_BATCH = 'let all bring the same batch (inputs="group" with a plan whose first layer has 1 replica)'
_SHOWN = 3
