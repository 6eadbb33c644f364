"""Models that start on the meta device: training on ranks beside a plain model that is made module by module."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import parplan
from examples.gpt2 import GPT2
from parplan.errors import RuntimeFailure, UncheckedWarning
from parplan.runtime.module.compiled import Compiled
from parplan.runtime.programs.start_values import StartValues, Weights
from parplan.runtime.sharded_state.sharded_tensor import local_tensor
from tests.runtime.helpers import Rule, planner, spread, spread_all
from tests.runtime.slice_cases import Decoder, sharded

__all__ = [
    "different_values",
    "early_state",
    "made_plainly",
    "on_meta",
    "on_ranks",
    "resumed_by_block",
    "saved_by_block",
    "train",
]

SEED = 5


def on_meta() -> Decoder:
    """The decoder without values; its head is tied to the embedding of its tokens."""
    with torch.device("meta"):
        return Decoder()


def made_plainly() -> Decoder:
    """The decoder with the values that its modules give themselves, one after the other, from `SEED`."""
    model = on_meta()
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        for name, part in model.named_modules():
            if name != "net.head" and any(True for _ in part.parameters(recurse=False)):
                part.to_empty(device="cpu", recurse=False)
                part.reset_parameters()
    net: GPT2 = model.net
    net.head.weight = net.wte.weight
    return model


def started(rule: Rule, devices: int, weights: Weights | None = None) -> Compiled:
    """The decoder from the meta device, by a rule, before its first call."""
    net = on_meta()
    start = StartValues.of(net, None, weights, SEED)
    places = None if dist.is_initialized() else ["cpu"] * devices
    return Compiled(net, planner(rule, devices), devices=places, start=start)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """The norms of clipped gradients in steps on tokens of their own; a compiled model takes this rank's."""
    norms = []
    for step in steps:
        tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(step))
        if isinstance(model, Compiled) and dist.is_initialized():
            tokens = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.zero_grad()
        model(tokens).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).detach())
        optimizer.step()
    return norms


def agree(model: Compiled, norms: list[Tensor], plain: nn.Module, wanted: list[Tensor]) -> None:
    """Norms and state are the plain model's."""
    for found, norm in zip(norms, wanted, strict=True):
        torch.testing.assert_close(found, norm, rtol=1e-9, atol=1e-12)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-10)


def on_ranks(kinds: tuple[str, ...], rank: int, ranks: int) -> None:
    """AdamW, made before any value is there; what is cut is cut from the start, and the check says that it is not."""
    plain = made_plainly()
    wanted = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), range(3))
    everyone = spread_all(ranks)
    rules = {
        "replicas": everyone,
        "shards": spread(ranks, "out-features"),
        "sharded": sharded(everyone),
        "gathered": sharded(everyone, "gathered"),
    }
    for kind in kinds:
        model = started(rules[kind], ranks)
        before = [*model.parameters()]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            norms = train(model, optimizer, range(3))
        assert all(p is q for p, q in zip(before, model.parameters(), strict=True))
        cut = any(local_tensor(p) is not p for p in model.parameters())
        assert cut == (kind != "replicas")
        assert cut == any(w.category is UncheckedWarning and "meta device" in str(w.message) for w in told)
        assert model.module.get_parameter("net.head.weight") is model.module.get_parameter("net.wte.weight")
        agree(model, norms, plain, wanted)


def different_values(rank: int, ranks: int) -> None:
    """An initialisation that depends on the process is refused in all of them."""
    net = on_meta()
    start = StartValues.of(
        net, lambda part: [nn.init.constant_(p, rank) for p in part.parameters(recurse=False)], seed=SEED
    )
    model = Compiled(net, planner(sharded(spread(ranks, "data")), ranks), start=start)
    with pytest.raises(RuntimeFailure, match="processes 0 and 1 made different values for the meta tensors of Decoder"):
        model.prepare(torch.randint(64, (4, 17)))


def saved_by_block(folder: Path, rank: int, ranks: int) -> None:
    """Two steps, saved as each rank holds them."""
    model = started(sharded(spread(ranks, "data")), ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    weights, updates = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": updates}, checkpoint_id=folder)


def resumed_by_block(folder: Path, rank: int, ranks: int) -> None:
    """Weights from the folder at the start, the optimizer's state behind it; two steps on, as if never stopped."""
    plain = made_plainly()
    wanted = train(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), range(4))
    model = started(sharded(spread(ranks, "data"), "gathered"), ranks, folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.prepare(torch.randint(64, (8 // ranks, 17)))
    weights, updates = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        state_dict_loader.load({"optimizer": updates}, checkpoint_id=folder, no_dist=ranks == 1)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=updates)
    agree(model, train(model, optimizer, range(2, 4)), plain, wanted[2:])


def early_state(rank: int, ranks: int) -> None:
    """The state that an optimizer makes before there are values is refused: it has none either."""
    model = started(sharded(spread_all(ranks)), ranks)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncheckedWarning)
        model(torch.randint(64, (4, 17))).backward()
    with pytest.raises(RuntimeFailure, match=r"the state of Adagrad for .* was made, or loaded, while it was on"):
        optimizer.step()


def different_weights(rank: int, ranks: int) -> None:
    """Blocks came from the weights of different processes, without a word."""
    weights = {name: tensor + rank for name, tensor in made_plainly().state_dict().items()}
    model = started(sharded(spread(ranks, "data")), ranks, weights)
    with pytest.raises(RuntimeFailure, match="processes 0 and 1 made different values"):
        model.prepare(torch.randint(64, (4, 17)))


def weights_of_one_process(folder: Path, rank: int, ranks: int) -> None:
    """A file that one process cannot read is told to all, which waited for that one until the group's timeout."""
    if rank == 0:
        torch.save(made_plainly().state_dict(), folder / "weights.pt")
    dist.barrier()
    with pytest.raises(RuntimeFailure, match=r"the start differs: .*cannot read the weights in .*nowhere"):
        parplan.compile(on_meta(), weights=folder / ("weights.pt" if rank == 0 else "nowhere"))
