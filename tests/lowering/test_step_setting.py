"""The setting of a step: which samples a replica has, however they were brought."""

from __future__ import annotations

import torch
from torch import nn

from parplan.graph.capture.capture import capture
from parplan.lowering.lower import lower
from parplan.lowering.program import Compute
from parplan.lowering.step_setting import StepSetting
from parplan.plan import Strategy


def test_replicas_have_the_same_samples_in_one_process_and_in_many() -> None:
    for devices in (1, 2, 3, 4, 6, 8, 12):
        for batch in range(devices, 3 * devices + 1):
            setting, one = StepSetting.per_process(devices, batch), StepSetting(devices, (batch,), (0,) * devices)
            assert setting.batch == batch
            for replicas in range(1, devices + 1):
                assert setting.rows(replicas) == one.rows(replicas), (devices, batch, replicas)


def test_programs_for_one_process_and_for_many_give_layers_the_same_samples() -> None:
    graph = capture(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)), (torch.zeros(10, 6),))
    for replicas in (2, 4, 8):
        strategy = Strategy(replicas, 1, None, tuple(range(replicas)))
        settings = StepSetting.per_process(8, 10), StepSetting(8, (10,), tuple(range(8)))
        programs = [lower(graph, dict.fromkeys(graph.layers, strategy), setting) for setting in settings]
        many, one = ({step.batches for step in p.forward if isinstance(step, Compute)} for p in programs)
        assert many == one, replicas
