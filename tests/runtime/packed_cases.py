"""Training of packed projections that are cut by heads, on every rank, as the plain model's."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.utils import clip_grad_norm_

from parplan.graph.layer_graph import Layer
from parplan.plan import Strategy
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.sharded_state.sharded_tensor import ShardedTensor
from tests.packed_models import GROUPED, PACKED
from tests.runtime.helpers import Rule, planner

__all__ = ["CASES", "cut_widely", "train_alike"]


def cut_widely(devices: int) -> Rule:
    """Every layer in as many shards as the first axis of features, or of heads, that divides has."""

    def rule(layer: Layer) -> Strategy:
        everyone = tuple(range(devices))
        for name in ("shared-heads", "heads", "out-features", "in-features", "features"):
            axis = layer.axis(name)
            if axis is not None and axis.units % devices == 0:
                return Strategy(1, devices, name, everyone)
        return Strategy(devices, 1, None, everyone) if layer.batch is not None else Strategy()

    return rule


def same(found: Tensor, wanted: Tensor, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11, msg=lambda text: f"{what}: {text}")


def train_alike(model: Compiled, plain: nn.Module, own: slice, whole: int) -> None:
    """Three steps with clipping; norms, losses and states of both are the same."""
    optimizers = [torch.optim.AdamW(list(module.parameters()), lr=0.1) for module in (model, plain)]
    for step in range(3):
        x = torch.randn(whole, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        norms = []
        for module, samples, optimizer in zip((model, plain), (own, slice(None)), optimizers, strict=True):
            optimizer.zero_grad()
            result = module(x[samples])
            result.square().mean().backward()
            norms.append(clip_grad_norm_(module.parameters(), 0.5))
            optimizer.step()
        same(norms[0], norms[1], f"norm of step {step}")
    state, wanted = model.state_dict(), plain.state_dict()
    assert list(state) == list(wanted)
    for name, value in wanted.items():
        same(state[name], value, name)
    moments, expected = optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"]
    for index, own_state in expected.items():
        same(moments[index]["exp_avg"], own_state["exp_avg"], f"moment {index}")


def trained(rank: int, ranks: int) -> None:
    """Three steps of every model, with clipping; then the state is loaded into a model that is cut anew."""
    _train(PACKED, rank, ranks)


def shared(rank: int, ranks: int) -> None:
    """The same where neighbours share heads of keys, and their gradients are summed."""
    _train(GROUPED, rank, ranks)


def _train(models: Mapping[str, Callable[[], nn.Module]], rank: int, ranks: int) -> None:
    for name, make in models.items():
        torch.manual_seed(3)
        plain = make().double()
        model = Compiled(copy.deepcopy(plain), planner(cut_widely(ranks), ranks))
        train_alike(model, plain, slice(2 * rank, 2 * rank + 2), 2 * ranks)
        cut = [p for p in model.parameters() if isinstance(p, ShardedTensor)]
        assert cut, name
        state = model.state_dict()
        other = Compiled(make().double(), planner(cut_widely(ranks), ranks))
        x = torch.randn(2 * ranks, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
        other(x[2 * rank : 2 * rank + 2])
        other.load_state_dict(state)
        same(other(x[2 * rank : 2 * rank + 2]), plain(x)[2 * rank : 2 * rank + 2], f"{name} loaded")


def checkpointed(rank: int, ranks: int) -> None:
    """Blocks in sections go through torch.distributed.checkpoint, into a model cut alike and into a plain one."""
    folders: list[str | None] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders, 0)
    for name in ("gpt2", "phi3", "vit"):
        torch.manual_seed(3)
        plain = PACKED[name]().double()
        x = torch.randn(2, 5, 16, dtype=torch.float64)
        models = [Compiled(copy.deepcopy(plain), planner(cut_widely(ranks), ranks)) for _ in range(2)]
        for model in models:
            model(x)
        with torch.no_grad():
            for parameter in models[1].parameters():
                parameter.zero_()
        save({"model": models[0].state_dict()}, checkpoint_id=f"{folders[0]}/{name}")
        loaded = {"model": models[1].state_dict()}
        load(loaded, checkpoint_id=f"{folders[0]}/{name}")
        models[1].load_state_dict(loaded["model"])
        same(models[1](x), models[0](x), name)
        whole = {"model": {key: torch.zeros_like(value) for key, value in plain.state_dict().items()}}
        load(whole, checkpoint_id=f"{folders[0]}/{name}", no_dist=True)
        for key, value in plain.state_dict().items():
            same(whole["model"][key], value, f"{name}: {key}")


CASES = {"trained": trained, "shared": shared, "checkpointed": checkpointed}
