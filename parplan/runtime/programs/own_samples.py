"""Checks that processes may bring samples of their own: refuses models whose results then belong to no process.

The captured graph runs on the samples of all processes, one process's behind the other's. An input that holds positions
along samples counts within one process, and a result whose samples lie along no known dimension cannot be handed out.
"""

from __future__ import annotations

from parplan.errors import CaptureError
from parplan.graph.layer_graph import LayerGraph

__all__ = ["check_own_samples"]


def check_own_samples(graph: LayerGraph) -> None:
    """Refuse a model for which every process would bring its own samples.

    Raises:
        CaptureError: an input indexes samples, or a result has no dimension of samples.
    """
    found = [str(use) for use in graph.sample_indices[:_SHOWN]]
    if found:
        raise CaptureError(
            f"{graph.model}: {'; '.join(found)}. Under torchrun each process counts its own samples from 0, and the "
            "model sees those of all processes, so these positions would point at another process's samples. Let all "
            'processes bring the same batch (inputs="group" with a plan whose first layer has 1 replica), run the plan '
            "in one process, or let the model compute the positions itself (torch.arange, a padded [samples, length] "
            "input instead of offsets)"
        )
    for result in graph.unplaced:
        why, remedy = "samples are sorted, flipped, compared or merged", "return it before that op"
        if result.unknown:
            why = f"parplan does not know how {' and '.join(result.unknown[:_SHOWN])} treats samples"
            remedy = "describe the op with parplan.graph.axes.table.register_row"
        raise CaptureError(
            f"{graph.model}: result {result.result}, made by {result.layer}, grows with the batch, but no dimension of "
            f"it is known to hold the samples ({why}), so no process can be given its own; {remedy}, reduce it inside "
            'the model (a loss), let all processes bring the same batch (inputs="group" with a plan whose first layer '
            "has 1 replica), or run the plan in one process"
        )


_SHOWN = 3
