"""Patterns of the training loop: accumulation, clipping, freezing, several models, edits between steps."""

from __future__ import annotations

import copy
import random
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from benchmarks.training import Run
from tests.patterns.nets import BATCH, Mlp, conv_net, sgd, steps, train
from tests.patterns.pattern import SECOND_DERIVATIVES, Section

SECTION = Section("Training loops")


@SECTION("the usual loop, planned for at `compile`")
def usual_loop(run: Run) -> None:
    model = run.compile(Mlp(), torch.zeros(BATCH // run.ranks, 6))
    steps(run, model, sgd(model), 4)


@SECTION("the usual loop, planned at the first call; convolutions and batch norm")
def convolutions(run: Run) -> None:
    model = run.compile(conv_net())
    steps(run, model, sgd(model), shape=(3, 6, 6))


@SECTION("an optimizer made before `compile`")
def optimizer_made_first(run: Run) -> None:
    module = Mlp()
    optimizer = sgd(module)
    steps(run, run.compile(module), optimizer)


@SECTION("accumulation over micro-batches")
def accumulation(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    for _ in range(3):
        for _ in range(2):
            loss = F.cross_entropy(model(run.randn(BATCH, 6)), run.randint(4, BATCH)) / 2
            loss.backward()
            run.mean("loss", loss)
        optimizer.step()
        optimizer.zero_grad()
    run.state(model)


@SECTION("`clip_grad_norm_`")
def clip_norm(run: Run) -> None:
    model = run.compile(Mlp())

    def clip() -> None:
        run.same("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    steps(run, model, sgd(model), before_step=clip)


@SECTION("`clip_grad_norm_` of the largest entry, and of one layer at a time")
def clip_other_norms(run: Run) -> None:
    model = run.compile(Mlp())

    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=float("inf"))
        run.same("norm", nn.utils.clip_grad_norm_(model.head.parameters(), 0.05, norm_type=1.0))

    steps(run, model, sgd(model), before_step=clip)


@SECTION("`clip_grad_value_`")
def clip_value(run: Run) -> None:
    model = run.compile(Mlp())
    steps(run, model, sgd(model), before_step=lambda: nn.utils.clip_grad_value_(model.parameters(), 0.01))


@SECTION("clipping written by hand: the norm of all gradients as a Python number")
def clip_by_hand(run: Run) -> None:
    model = run.compile(Mlp())

    def clip() -> None:
        total = sum(p.grad.norm().item() ** 2 for p in model.parameters() if p.grad is not None) ** 0.5
        run.same("norm", total)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(min(1.0, 0.05 / total))

    steps(run, model, sgd(model), before_step=clip)


@SECTION("a penalty on weights in the loss")
def weight_penalty(run: Run) -> None:
    model = run.compile(Mlp())

    def loss_of(scores: Tensor, classes: Tensor) -> Tensor:
        penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        return F.cross_entropy(scores, classes) + 0.01 * penalty

    steps(run, model, sgd(model), loss_of=loss_of)


@SECTION("a term of the loss that uses a weight with each process's own samples")
def weight_with_samples(run: Run) -> None:
    model = run.compile(Mlp())
    body: Any = model.get_submodule("body")

    def loss() -> Tensor:
        x, classes = run.randn(BATCH, 6), run.randint(4, BATCH)
        scores = model(x)
        term: Tensor = (x @ body.weight.T + body.bias).square().mean()
        return F.cross_entropy(scores, classes) + 0.1 * term

    train(run, model, sgd(model), loss)


@SECTION("parameter groups: no weight decay on biases")
def parameter_groups(run: Run) -> None:
    model = run.compile(Mlp())
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.05}]
    steps(run, model, torch.optim.AdamW(groups, lr=0.01))


@SECTION("parameter groups by the number of dimensions of a parameter, made after the first step")
def parameter_groups_by_dimension(run: Run) -> None:
    model = run.compile(Mlp())
    model(run.randn(BATCH, 6))
    wide, narrow = ([p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False))
    steps(
        run,
        model,
        torch.optim.Adam([{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}], lr=0.01),
    )


@SECTION("learning-rate schedulers")
def schedulers(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=8)
    steps(run, model, optimizer, before_step=lambda: None)
    for _ in range(3):
        steps(run, model, optimizer, 1)
        scheduler.step()
    run.same("lr", scheduler.get_last_lr())


@SECTION("freezing and unfreezing layers between steps")
def freezing(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    steps(run, model, optimizer, 2)
    for frozen in (True, False):
        for p in model.body.parameters():
            p.requires_grad_(not frozen)
            p.grad = None
        steps(run, model, optimizer, 2)


@SECTION("training the head only: the body frozen from the beginning, the optimizer gets the rest")
def head_only(run: Run) -> None:
    module = Mlp()
    module.body.requires_grad_(False)
    model = run.compile(module)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    steps(run, model, optimizer)


@SECTION("`zero_grad(set_to_none=False)`")
def zero_in_place(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    steps(run, model, optimizer, 1)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(run.randn(BATCH, 6)), run.randint(4, BATCH)).backward()
        optimizer.step()
    run.state(model)


@SECTION("several losses, each with a backward of its own (`retain_graph=True`)")
def several_backwards(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    for _ in range(3):
        scores = model(run.randn(BATCH, 6))
        optimizer.zero_grad()
        scores[:, :2].square().mean().backward(retain_graph=True)
        scores[:, 2:].exp().mean().backward()
        optimizer.step()
    run.state(model)


@SECTION("a GAN: two models, each trained through the other")
def gan(run: Run) -> None:
    generator, critic = run.compile(Mlp()), run.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (generator, critic)]
    for _ in range(3):
        real, noise = run.randn(BATCH, 4), run.randn(BATCH, 6)
        optimizers[1].zero_grad()
        loss = critic(generator(noise).detach()).mean() - critic(real).square().mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        other = -critic(generator(noise)).mean()
        other.backward()
        optimizers[0].step()
        run.mean("critic's loss", loss)
        run.mean("generator's loss", other)
    run.state(generator, "generator ")
    run.state(critic, "critic ")


@SECTION("weight clipping as in WGAN (`p.data.clamp_`)")
def weight_clipping(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    for _ in range(3):
        steps(run, model, optimizer, 1)
        for p in model.parameters():
            p.data.clamp_(-0.1, 0.1)
    run.rows("scores", model(run.randn(BATCH, 6)))
    run.state(model, "end ")


@SECTION("edits of parameters between steps, under `no_grad`: scaled, and a norm constraint per row")
def parameter_edits(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    for _ in range(3):
        steps(run, model, optimizer, 1)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)
            model.body.weight.div_(model.body.weight.norm(dim=1, keepdim=True))
            model.head.weight.copy_(model.head.weight.renorm(2, 0, 0.5))
    run.rows("scores", model(run.randn(BATCH, 6)))
    run.state(model, "end ")


@SECTION("an average of the weights kept by hand (`copy.deepcopy`, then `lerp_`)")
def average_by_deepcopy(run: Run) -> None:
    model = run.compile(Mlp())
    average = copy.deepcopy(model)
    optimizer = sgd(model)
    for _ in range(3):
        steps(run, model, optimizer, 1)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
    run.state(average.eval(), "average ")
    with torch.no_grad():
        run.rows("scores", average(run.randn(BATCH, 6)))


@SECTION("an average of the plain model's copy, fed from `state_dict()`")
def average_of_states(run: Run) -> None:
    module = Mlp()
    average = copy.deepcopy(module)
    model = run.compile(module)
    optimizer = sgd(model)
    for _ in range(3):
        steps(run, model, optimizer, 1)
        state = model.state_dict()
        with torch.no_grad():
            for name, mean in average.state_dict().items():
                mean.lerp_(state[name], 0.1)
    run.state(average, "average ")


@SECTION("`torch.optim.swa_utils.AveragedModel`")
def averaged_model(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    steps(run, model, optimizer, 1)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        steps(run, model, optimizer, 1)
        average.update_parameters(model)
    with torch.no_grad():
        run.rows("scores", average(run.randn(BATCH, 6)))


@SECTION("rank 0 evaluates and saves a plain copy alone (`model.plain()` on all ranks), between steps")
def plain_copy(run: Run) -> None:
    model = run.compile(conv_net())
    optimizer = sgd(model)
    for _ in range(2):
        steps(run, model, optimizer, 1, shape=(3, 6, 6))
        plain = model.plain() if run.compiled else copy.deepcopy(model)
        x = torch.randn(BATCH, 3, 6, 6, generator=run.draws)
        found = {}
        if run.rank == 0:
            plain.eval()
            with torch.no_grad():
                found = {f"scores of {samples}": plain(x[:samples]) for samples in (1, BATCH)}
            found |= {name: value.clone() for name, value in plain.state_dict().items()}
        for name, value in run.from_first(partial(dict, found)).items():
            run.same(name, value)


@SECTION("evaluation in the middle: `eval()` with `no_grad` and `inference_mode`")
def evaluation(run: Run) -> None:
    model = run.compile(conv_net())
    optimizer = sgd(model)
    for context in (torch.no_grad, torch.inference_mode):
        steps(run, model, optimizer, 2, shape=(3, 6, 6))
        model.eval()
        with context():
            run.rows("scores", model(run.randn(BATCH, 3, 6, 6)))
        model.train()
    steps(run, model, optimizer, 1, shape=(3, 6, 6))


@SECTION("a smaller last batch")
def last_batch(run: Run) -> None:
    model = run.compile(conv_net(), torch.zeros(BATCH // run.ranks, 3, 6, 6))
    optimizer = sgd(model)
    for size in (BATCH, BATCH, 6, BATCH):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(run.randn(size, 3, 6, 6)), run.randint(4, size))
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("a last batch of an odd size, as many samples on no two ranks")
def uneven_batch(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    for sizes in ((5, 2), (4, 3)):
        whole, wanted = torch.randn(7, 6, generator=run.draws), torch.randn(7, 4, generator=run.draws)
        mine = slice(None) if run.ranks == 1 else slice(0, sizes[0]) if run.rank == 0 else slice(sizes[0], 7)
        optimizer.zero_grad()
        loss = (model(whole[mine]) - wanted[mine]).square().sum() * run.ranks / 7
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("siamese calls: the model called twice, one loss of both")
def siamese(run: Run) -> None:
    model = run.compile(conv_net())

    def loss() -> Tensor:
        a, b = model(run.randn(BATCH, 3, 6, 6)), model(run.randn(BATCH, 3, 6, 6))
        return F.cosine_similarity(a, b).mean()

    train(run, model, sgd(model), loss)


@SECTION("gradients of inputs: adversarial training (FGSM)")
def adversarial(run: Run) -> None:
    model = run.compile(Mlp())

    def loss() -> Tensor:
        x, classes = run.randn(BATCH, 6).requires_grad_(), run.randint(4, BATCH)
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), classes), x)
        return F.cross_entropy(model((x + 0.1 * gradient.sign()).detach()), classes)

    train(run, model, sgd(model), loss)


@SECTION("`torch.autograd.grad` of the parameters in place of `backward`")
def functional_gradients(run: Run) -> None:
    model = run.compile(Mlp())
    for _ in range(3):
        loss = F.cross_entropy(model(run.randn(BATCH, 6)), run.randint(4, BATCH))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p -= 0.1 * gradient
        run.mean("loss", loss)
    run.state(model)


@SECTION(
    "a gradient penalty (`create_graph=True`)",
    refused=SECOND_DERIVATIVES,
    why="second derivatives are kept where each process has the whole model; else take the plain model for it",
)
def gradient_penalty(run: Run) -> None:
    model = run.compile(Mlp())

    def loss() -> Tensor:
        x = run.randn(BATCH, 6).requires_grad_()
        scores = model(x)
        (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        penalty: Tensor = (gradient.norm(dim=1) - 1).square().mean()
        return F.cross_entropy(scores, run.randint(4, BATCH)) + penalty

    train(run, model, sgd(model), loss, 2)


@SECTION(
    "`torch.func.functional_call`, `grad` and `vmap` of a compiled model",
    refused={"*": "torch.func"},
    why="use the plain model there, or `loss.backward()`",
)
def torch_func(run: Run) -> None:
    model = run.compile(Mlp())
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x, classes = run.randn(BATCH, 6), run.randint(4, BATCH)

    def loss_of(given: Any) -> Any:
        return F.cross_entropy(torch.func.functional_call(model, given, (x,)), classes)

    for name, gradient in torch.func.grad(loss_of)(parameters).items():
        run.same(name, gradient)


@SECTION(
    "`torch.func.functional_call` with other parameters (meta-learning)",
    refused={"*": "functional_call makes"},
    why="a compiled model runs with its own parameters; use the plain model there",
)
def functional_call(run: Run) -> None:
    model = run.compile(Mlp())
    other = {name: p.detach() * 2 for name, p in model.named_parameters()}
    run.rows("scores", torch.func.functional_call(model, other, (run.randn(BATCH, 6),)))
    run.rows("own scores", model(run.randn(BATCH, 6)))


@SECTION("hooks of parameters: a gradient scaled, and a step taken where it is accumulated")
def parameter_hooks(run: Run) -> None:
    model = run.compile(Mlp())
    model.body.weight.register_hook(lambda gradient: gradient * 0.5)
    optimizer = sgd(model)
    steps(run, model, optimizer, 2)

    def update(p: Tensor) -> None:
        assert p.grad is not None
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)

    model.head.bias.register_post_accumulate_grad_hook(update)
    steps(run, model, optimizer, 2)


@SECTION("gradients changed by hand before the step: noise alike on all ranks, and one zeroed by its index")
def gradient_edits(run: Run) -> None:
    model = run.compile(Mlp())

    def edit() -> None:
        torch.manual_seed(7)
        for p in model.parameters():
            if p.grad is not None:
                p.grad.add_(torch.randn(p.shape), alpha=0.01)
        model.head.weight.grad[0] = 0
        model.body.bias.grad[3:].mul_(2)

    steps(run, model, sgd(model), before_step=edit)


@SECTION("rows of a weight read and set by index, as resets of dead units do")
def weight_rows(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    for number in range(3):
        steps(run, model, optimizer, 1)
        with torch.no_grad():
            weakest = int(model.body.weight.abs().sum(1).argmin())
            run.same("weakest", weakest)
            model.body.weight[weakest] = 0.1 * (number + 1)
            model.head.weight[:, weakest].zero_()
    run.state(model, "end ")


@SECTION("a replaced layer between steps (`model.head = ...`)")
def replaced_head(run: Run) -> None:
    model = run.compile(Mlp())
    steps(run, model, sgd(model), 2)
    torch.manual_seed(3)
    model.head = nn.Linear(8, 4)
    steps(run, model, sgd(model), 2)


@SECTION("weights loaded from a plain model in the middle")
def loaded_weights(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    steps(run, model, optimizer, 2)
    torch.manual_seed(5)
    model.load_state_dict(Mlp().state_dict())
    steps(run, model, optimizer, 2)


@SECTION("one optimizer for a compiled model and a plain part of the script")
def plain_rest(run: Run) -> None:
    model, scale = run.compile(Mlp()), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam(chain(model.parameters(), [scale]), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(run.randn(BATCH, 6)), run.randint(4, BATCH))
        (loss + scale.square().sum()).backward()
        nn.utils.clip_grad_norm_([*model.parameters(), scale], 0.05)
        optimizer.step()
        run.mean("loss", loss)
    run.same("scale", scale)
    run.state(model)


@SECTION("stochastic choices of the script itself: a step skipped by `random.random()`")
def skipped_steps(run: Run) -> None:
    model = run.compile(Mlp())
    optimizer = sgd(model)
    draws = random.Random(3)
    for _ in range(4):
        loss = F.cross_entropy(model(run.randn(BATCH, 6)), run.randint(4, BATCH))
        loss.backward()
        if draws.random() < 0.5:
            optimizer.step()
            optimizer.zero_grad()
    run.state(model)
