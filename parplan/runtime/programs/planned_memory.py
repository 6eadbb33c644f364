"""Comparison of a call's graph with the planned one: memory was checked for the shapes that the plan was made with.

Another shape (longer sequences, larger images) is another capture, which runs by the same plan and is not priced. So
the bytes of all tensors in the two graphs are compared: parameters, buffers, inputs and results, each whole and once,
views like any other. The sum is no peak, but grows as the activations that a peak consists of. Samples count: half as
many of twice the length are no reason to warn, and neither are more samples of the planned shape.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from parplan.errors import PlannedMemoryWarning
from parplan.fields import size_text
from parplan.graph.layer_graph import LayerGraph
from parplan.runtime.calls import ModelCall

__all__ = ["GraphBytes", "PlannedMemory"]

# So many times the bytes, of those planned or of those already warned of, are clearly more.
CLEARLY_MORE = 1.25


@dataclass(frozen=True)
class GraphBytes:
    """Bytes of all tensors in a graph: those that grow with the samples, for each of them, and the others."""

    per_sample: float
    others: int

    @staticmethod
    def of(graph: LayerGraph) -> GraphBytes:
        """Of a captured graph."""
        growing = {*graph.batch_dims, *(graph.grown or ())}
        sizes = {name: spec.nbytes for name, spec in graph.values.items()}
        grown = sum(size for name, size in sizes.items() if name in growing)
        return GraphBytes(grown / (graph.batch or 1), sum(sizes.values()) - grown)

    def at(self, samples: int | None) -> float:
        """With `samples` samples."""
        return self.per_sample * (samples or 1) + self.others


@dataclass
class PlannedMemory:
    """The shapes and bytes that a plan was made for.

    Args:
        shapes: of the inputs, as text, by the names of their values in the graph.
        size: bytes of the graph.
        samples: over all processes, that memory was planned for; None without any.
        said: bytes of the largest step that was warned of.
    """

    shapes: Mapping[str, str]
    size: GraphBytes
    samples: int | None
    said: float = 0.0

    @staticmethod
    def of(call: ModelCall, graph: LayerGraph, samples: int | None) -> PlannedMemory:
        """The facts of a plan that was made for `graph`, which `call` gave."""
        return PlannedMemory(_shapes(call, graph), GraphBytes.of(graph), samples)

    def compare(self, call: ModelCall, graph: LayerGraph, size: GraphBytes, samples: int | None) -> None:
        """Warn of inputs of other shapes whose step needs clearly more than was planned, or than was warned of before.

        Args:
            graph, size: the call's graph and its bytes.
            samples: those of the step, over all processes.
        """
        planned, needed = self.size.at(self.samples), size.at(samples)
        if size.at(self.samples) <= CLEARLY_MORE * planned or needed <= CLEARLY_MORE * max(planned, self.said):
            return
        differing = [
            f"{name} is {shape}, and was planned as {self.shapes.get(name, 'no tensor')}"
            for name, shape in _shapes(call, graph).items()
            if shape != self.shapes.get(name)
        ]
        if not differing:
            return
        self.said = needed
        now, then = (
            size_text(nbytes) + (f" for {count} samples" if count is not None else "")
            for nbytes, count in ((needed, samples), (planned, self.samples))
        )
        warnings.warn(
            f"{graph.model}: this step may need more memory than its plan was checked for: "
            f"{'; '.join(differing[:_SHOWN])}. All tensors of its graph, uncut, add up to {now}, in the planned one to "
            f"{then}. Compile with the largest shapes as the example (then memory is planned for them), or see with "
            "parplan.analyze(plain model, these inputs, plan=model.plan) whether they fit",
            PlannedMemoryWarning,
            stacklevel=4,
        )


_SHOWN = 3


def _shapes(call: ModelCall, graph: LayerGraph) -> dict[str, str]:
    """Shapes of the inputs by name, without the number of samples."""
    found = {}
    for name, tensor in call.named(graph.user_inputs).items():
        sampled = call.has_samples(tensor)
        sizes = ("samples" if sampled and dim == call.dim else str(size) for dim, size in enumerate(tensor.shape))
        found[name] = f"[{', '.join(sizes)}]"
    return found


def warn_of_whole_batch(micro_batches: int) -> None:
    """Say that a plain call of a plan in micro-batches keeps the activations of the whole batch."""
    warnings.warn(
        f"the plan has {micro_batches} micro-batches, and this call keeps the activations of the whole batch for a "
        "loss outside of the model; train with train_step(inputs, targets, loss_fn, optimizer), or compile with "
        "loss=fn, so that each goes back before the next one",
        PlannedMemoryWarning,
        stacklevel=8,  # where the caller calls the module, through torch's own frames
    )
