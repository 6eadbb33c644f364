"""What the ranks of the towers' torchrun test do: plan, see that rows are on ranks of their own, train beside the
plain model.
"""

from __future__ import annotations

from parplan.cost_models.devices.presets import cluster_preset
from parplan.cost_models.roofline import RooflineCosts
from parplan.planner.decide import PlanRequest, decide
from parplan.runtime.sharded_state.sharded_tensor import local_tensor
from tests.planner.branches import Pair, pair
from tests.runtime.rank_cases import steps, train

__all__ = ["chosen_towers"]


def chosen_towers(rank: int, ranks: int) -> None:
    """The planner's own plan for two rows of heavy layers: results, gradients and states are the plain model's."""
    graph, cluster = pair(width=256, batch=2), cluster_preset("k20", ranks, "10gbe")
    decision = decide(graph, cluster, RooflineCosts(graph, cluster), PlanRequest())
    assert decision.branches is not None
    (phase,) = decision.branches.phases
    assert len(phase.tracks) == 2
    model = train(Pair(256).double(), dict(decision.plan.layers), (256,), rank, steps(ranks))
    held = {
        name[0] for name, parameter in model.named_parameters() if local_tensor(parameter).numel() and name[1] == "."
    }
    assert held == {"ab"[rank]}
