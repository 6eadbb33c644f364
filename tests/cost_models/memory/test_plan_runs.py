"""What cost models take the runtime to make of a plan, against what it makes of it."""

from __future__ import annotations

import pytest

from parplan.cost_models.memory.plan_runs import plan_runs
from parplan.lowering.lower import lower
from parplan.lowering.program import Code, Compute
from parplan.lowering.step_setting import Setting
from tests.cost_models.networks import NETWORKS, network
from tests.plans import PLANS, plan_by


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "solver"])
def test_runs_moves_and_messages_are_the_runtimes(name: str, plan: str) -> None:
    graph = network(name).graph
    strategies = plan_by(plan, 2, graph).layers
    batch = graph.batch or 1
    program = lower(graph, strategies, Setting(2, (batch - batch // 2, batch // 2), (0, 1)))
    steps = [step for step in program.forward if isinstance(step, Compute) and step.code is not Code.STATISTICS]
    found = plan_runs(graph, strategies, 2)
    order = list(graph.layers)
    assert [order[first] for first in dict.fromkeys(found.first)] == [step.layers[0] for step in steps]
    assert sorted(found.messages) == sorted(bucket.parameters for bucket in program.buckets)
    moved = [program.slots[transfer.source].value for transfer in program.transfers]
    assert {move.value for move in found.moves} == {value for value in moved if value in graph.values}
