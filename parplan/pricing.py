"""A captured graph, priced and planned for given devices: what `analyze`, `compile` and `verify` have in common.

Costs are the best there are: measured now, kept from before, or estimated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from parplan.cluster import Cluster
from parplan.cost_models.costs import CostModel
from parplan.cost_models.devices.local_devices import this_cluster
from parplan.cost_models.known import known_costs
from parplan.cost_models.measurement.conditions import current_conditions
from parplan.cost_models.measurement.measure_parts import measure_parts
from parplan.cost_models.profile.store import ProfileStore
from parplan.cost_models.roofline import RooflineCosts, precision_notes
from parplan.errors import CaptureError
from parplan.fields import counted
from parplan.graph.layer_graph import LayerGraph
from parplan.graph.resized import at_batch
from parplan.lowering.micro_batches import equal_size
from parplan.plan import Plan
from parplan.planner.batch_size import best_batch
from parplan.planner.decide import decide, estimate
from parplan.planner.decision import Decision, Prediction, PricedGraph
from parplan.planner.request import Listener, PlanRequest
from parplan.predicted_vs_measured import PlanPrediction, predict_plan
from parplan.profiler.session import parts_by_devices

__all__ = ["Pricing"]

# Longest that measuring takes; what is left is interpolated, and the report says so.
MEASURE_S = 120.0


@dataclass(frozen=True)
class Pricing:
    """Prices and plans graphs for one cluster and one request.

    Args:
        device: one of the cluster's, where they are here.
        measure: time on it what is not known.
    """

    cluster: Cluster
    request: PlanRequest
    device: torch.device | None = None
    measure: bool = False
    progress: Listener | None = None

    @staticmethod
    def for_devices(count: int, device: torch.device, request: PlanRequest, home: int | None = None) -> Pricing:
        """For `count` devices like `device`, which is one of this machine's; `home` as in `Cluster`."""
        started = replace(request, started_ranks=home is None and count > 1)
        return Pricing(replace(this_cluster(count, device), home=home), started, device)

    def decided(self, graph: LayerGraph, request: PlanRequest | None = None) -> Decision:
        """The plan with all that is to be said of it; `request` instead of its own."""
        request = request or self.request
        count = request.asked_micro_batches
        graph, costs, notes = self._priced(graph, count or 1)
        request = replace(request, notes=(*request.notes, *notes))

        def micro_batched(count: int) -> PricedGraph:
            small, costs, _ = self._priced(graph, count)
            return PricedGraph(small, costs)

        return decide(graph, self.cluster, costs, request, self.progress, micro_batched if count is None else None)

    def decided_at_best_batch(self, graph: LayerGraph) -> Decision:
        """The decision at the batch that promises most, of one captured graph at several.

        Raises:
            CaptureError: the model is not the same at every batch.
        """
        try:
            at_batch(graph, 2 * (graph.batch or 1))
            return best_batch(
                lambda batch, request: self.estimated(at_batch(graph, batch), request),
                lambda batch, request: self.decided(at_batch(graph, batch), request),
                self.cluster, self.request, graph.batch,
            )  # fmt: skip
        except CaptureError as error:
            reason = str(error).partition(";")[0]
            raise CaptureError(f"--batch auto: {reason}, so other batches cannot be priced; say --batch N") from error

    def predicted(self, graph: LayerGraph, plan: Plan) -> PlanPrediction:
        """The prediction of a step of `plan`, layer by layer."""
        graph, costs, _ = self._priced(graph, plan.micro_batches)
        return predict_plan(graph, plan, self.request.priced_on(self.cluster, plan), costs)

    def estimated(self, graph: LayerGraph, request: PlanRequest) -> Prediction:
        """The predicted step of the solver's plan, without the rest of a decision."""
        graph, costs, _ = self._priced(graph, request.asked_micro_batches or 1)
        return estimate(graph, self.cluster, costs, request)

    def _priced(self, graph: LayerGraph, micro_batches: int) -> tuple[LayerGraph, CostModel, tuple[str, ...]]:
        """A graph at the size of a micro-batch, the best costs there are, and what the reader must know about them.

        Raises:
            CaptureError: the model is not the same at another batch.
            PlanError: micro-batches that are not equal, or would have other numbers than the whole batch.
        """
        if micro_batches > 1:
            graph = at_batch(graph, equal_size(graph, micro_batches))
        precision, optimizer = self.request.precision, self.request.optimizer
        measured = self._measured(graph, self.device) if self.measure and self.device is not None else ()
        known = known_costs(
            graph, self.cluster, device=self.device, precision=precision, optimizer=optimizer,
            as_profiled=self.request.as_profiled, micro_batches=micro_batches,
        )  # fmt: skip
        notes = precision_notes(graph, self.cluster, precision, optimizer)
        return graph, known.costs, (*notes, *known.notes, *measured)

    def _measured(self, graph: LayerGraph, device: torch.device) -> tuple[str, ...]:
        """Measure, in this process, what the user's store lacks of the parts a plan could use."""
        cluster, progress = self.cluster, self.progress
        if progress is not None:
            progress.phase("measure")
        wanted = [part for own in parts_by_devices(graph, cluster).values() for part in own]
        with ProfileStore() as store:
            outcome = measure_parts(
                graph,
                RooflineCosts(graph, cluster),
                wanted,
                device,
                store.under(current_conditions(device, 1)),
                time_cap_s=MEASURE_S,
                on_progress=progress.advance if progress is not None else None,
            )
        notes = []
        if cluster.count > 1 and device.type == "cpu":
            notes.append(
                f"Measured one device at a time; `parplan profile --devices {cluster.count}` measures devices that "
                "work at once, and their links."
            )
        if outcome.left:
            notes.append(
                f"{counted(outcome.left, 'part')} of layers left after {MEASURE_S:.0f} s of measuring: interpolated."
            )
        return (*notes, *(f"Not measured: {why}" for why in outcome.failed[:3]))
