"""Numbers that ranks tell each other go between hosts, whatever device computes."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from parplan.runtime.transport.distributed import DistributedTransport
from tests.runtime.ranks import run_case


def _numbers(rank: int, ranks: int) -> None:
    whole, own = dist.new_group(list(range(ranks))), dist.new_group
    accelerator = torch.device("meta")  # a tensor there has no values to read
    for group, device, backends, made in (
        (None, torch.device("cpu"), "gloo", 0),
        (None, accelerator, "cuda:nccl", 1),
        (None, accelerator, "cpu:gloo,cuda:nccl", 0),
        (whole, accelerator, "cpu:gloo,cuda:nccl", 0),
    ):
        transport = DistributedTransport(device, group)
        with (
            patch.object(dist, "new_group", wraps=own) as new,
            patch("torch.distributed.get_backend_config", return_value=backends),
        ):
            for step in range(2):
                assert transport.gather(rank, step) == [(other, step) for other in range(ranks)]
                assert transport.any([rank == 0, False]) == [True, False]
        assert new.call_count == made
    # A group of some processes, without a backend for CPUs: they lie on the device, as all others are elsewhere.
    transport = DistributedTransport(accelerator, whole)
    with (
        patch("torch.distributed.get_backend_config", return_value="cuda:nccl"),
        patch.object(dist, "all_gather") as sent,
        pytest.raises(RuntimeError, match="meta tensor"),
    ):
        transport.gather(rank)
    assert sent.call_args.args[1].device == accelerator


def test_numbers_go_between_hosts() -> None:
    run_case(_numbers, 2)
