"""Public training programs known for how they train: momentum contrast, forward-forward, fake quantization."""

# mypy: disable-error-code="operator"
from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao import quantization

from benchmarks.training import Run
from tests.patterns.nets import BATCH, loader, sgd, total
from tests.patterns.pattern import Section
from tests.patterns.programs_language import SINGLE

SECTION = Section("Public training programs")


class _Moco(nn.Module):
    """MoCo's builder; `by_pointer` writes the queue at a number, as published, else at a tensor."""

    queue: Tensor
    queue_ptr: Tensor

    def __init__(self, by_pointer: bool) -> None:
        super().__init__()
        self.by_pointer = by_pointer
        self.encoder_q, self.encoder_k = (
            nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)
        )
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(4, 2 * BATCH), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def momentum_update(self) -> None:
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * 0.9 + param_q.data * 0.1

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        if self.by_pointer:
            ptr = int(self.queue_ptr)
            self.queue[:, ptr : ptr + keys.shape[0]] = keys.T
            self.queue_ptr[0] = (ptr + keys.shape[0]) % self.queue.shape[1]
            return
        at = (self.queue_ptr + torch.arange(keys.shape[0])) % self.queue.shape[1]
        self.queue.index_copy_(1, at, keys.T)
        self.queue_ptr.copy_((self.queue_ptr + keys.shape[0]) % self.queue.shape[1])

    def forward(self, im_q: Tensor, im_k: Tensor) -> Any:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            if self.by_pointer:
                self.momentum_update()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / 0.07
        self.enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


def _contrast(run: Run, by_pointer: bool) -> None:
    model = run.compile(_Moco(by_pointer))
    optimizer, criterion = sgd(model, 0.03), nn.CrossEntropyLoss()
    for epoch in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.03 * 0.5 * (1.0 + math.cos(math.pi * epoch / 3))
        if not by_pointer:
            model.momentum_update()
        output, target = model(run.randn(BATCH, 6), run.randn(BATCH, 6))
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
        run.same("right", total(run, (output.argmax(1) == target).sum().item()))
    run.state(model)


@SECTION(
    "MoCo: the momentum update and a queue written at `int(self.queue_ptr)` inside the forward",
    refused={"*": "the buffer 'queue_ptr' decides it"},
    why="the pointer is read as a Python number; write rows at a tensor, and update the key encoder in the script",
)
def moco_example(run: Run) -> None:
    _contrast(run, by_pointer=True)


@SECTION("the same: the queue written by `index_copy_` at a tensor, `momentum_update()` called by the script")
def moco_by_tensor(run: Run) -> None:
    _contrast(run, by_pointer=False)


class _ForwardLayer(nn.Linear):
    """A layer of the forward-forward algorithm."""

    def forward(self, x: Tensor) -> Any:
        """Activations of a direction."""
        return torch.relu(torch.mm(x / (x.norm(2, 1, keepdim=True) + 1e-4), self.weight.T) + self.bias.unsqueeze(0))


def _overlay(x: Tensor, y: Tensor) -> Tensor:
    x_ = x.clone()
    x_[:, :4] *= 0.0
    x_[range(x.shape[0]), y] = x.max()
    return x_


def _forward_forward_data(run: Run) -> tuple[Tensor, Tensor, Tensor]:
    whole = torch.rand(BATCH, 6, generator=run.draws)
    whole[::4, 5] = 1.0  # each process has the largest value, so that all mark classes alike
    x, y = run.own(whole), run.randint(4, BATCH)
    return x, y, (y + 1) % 4


def _goodness_loss(g_pos: Tensor, g_neg: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(torch.cat([-g_pos + 0.5, g_neg - 0.5]))).mean()


@SECTION(
    "pytorch/examples `mnist_forward_forward`: layers with an optimizer each, and a method `train(x_pos, x_neg)`",
    refused={"*": "in place of nn.Module.train(mode)"},
    why="that name is the mode's, which parplan sets; give the method another one, or make it a function of the script",
)
def mnist_forward_forward(run: Run) -> None:
    class Layer(_ForwardLayer):
        opt: torch.optim.Optimizer

        def train(self, x_pos: Any, x_neg: Any) -> Any:  # type: ignore[override]
            for _ in range(2):
                g_pos, g_neg = self.forward(x_pos).pow(2).mean(1), self.forward(x_neg).pow(2).mean(1)
                loss = _goodness_loss(g_pos, g_neg)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                losses.append(loss.detach())
            return self.forward(x_pos).detach(), self.forward(x_neg).detach()

    losses: list[Tensor] = []
    layers = [run.compile(Layer(6, 8)), run.compile(Layer(8, 8))]
    for layer in layers:
        layer.opt = torch.optim.Adam(layer.parameters(), lr=0.03)
    for _ in range(2):
        x, y, wrong = _forward_forward_data(run)
        h_pos, h_neg = _overlay(x, y), _overlay(x, wrong)
        for layer in layers:
            h_pos, h_neg = layer.train(h_pos, h_neg)
    run.mean("losses", torch.stack(losses))
    for number, layer in enumerate(layers):
        run.state(layer, f"{number} ")


@SECTION("the same, each layer trained by a function of the script, and the classes of the greatest goodness")
def forward_forward(run: Run) -> None:
    layers = [run.compile(_ForwardLayer(6, 8)), run.compile(_ForwardLayer(8, 8))]
    optimizers = [torch.optim.Adam(layer.parameters(), lr=0.03) for layer in layers]
    for _ in range(2):
        x, y, wrong = _forward_forward_data(run)
        h_pos, h_neg = _overlay(x, y), _overlay(x, wrong)
        for layer, optimizer in zip(layers, optimizers, strict=True):
            for _ in range(2):
                loss = _goodness_loss(layer(h_pos).pow(2).mean(1), layer(h_neg).pow(2).mean(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.mean("loss", loss)
            h_pos, h_neg = layer(h_pos).detach(), layer(h_neg).detach()
    goodness_per_label = []
    with torch.no_grad():
        for label in range(4):
            h, goodness = _overlay(x, torch.full((len(x),), label)), []
            for layer in layers:
                h = layer(h)
                goodness += [h.pow(2).mean(1)]
            goodness_per_label += [sum(goodness).unsqueeze(1)]
    found = torch.cat(goodness_per_label, 1).argmax(1)
    run.same("right", total(run, found.eq(y).sum().item()))
    for number, layer in enumerate(layers):
        run.state(layer, f"{number} ")


def _quantization_aware(run: Run, called: bool) -> None:
    """The loop of QAT: observers switched off and batch norm frozen in later epochs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
            self.conv, self.bn, self.relu = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
            self.fc = nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Any:
            x = self.relu(self.bn(self.conv(self.quant(x))))
            return self.dequant(self.fc(x.flatten(1)))

    plain = Net().float().train()
    quantization.fuse_modules_qat(plain, ["conv", "bn", "relu"], inplace=True)
    plain.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    plain = quantization.prepare_qat(plain).float()
    if called:
        plain(torch.randn(1, 1, 6, 6, generator=run.draws).float())
    model = run.compile(plain)
    optimizer = sgd(model, 0.05)
    data = loader(run, torch.randn(16, 1, 6, 6, generator=run.draws).float(), torch.arange(16) % 4)
    for epoch in range(3):
        model.train()
        if epoch == 1:
            model.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)
        if epoch == 2:
            model.apply(quantization.disable_observer)
        for image, target in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(image), target)
            loss.backward()
            optimizer.step()
            run.mean("loss", loss)
    run.state(model)


@SECTION(
    "QAT in float32: `torch.ao`'s `prepare_qat`, observers switched off, batch norm frozen",
    refused={"*": "fills the empty buffer"},
    why="observers make their buffers at the first call; call the plain model once before it is compiled",
    tolerance=SINGLE,
)
def quantization_aware(run: Run) -> None:
    _quantization_aware(run, called=False)


@SECTION(
    "the same, the plain model called once before",
    refused={
        "one/replicas": "its samples depend on each other",
        "one/mixed": "its samples depend on each other",
        "one/shards": "it cannot be sharded",
        "ranks/*": "does not know how aten._fused_moving_avg_obs_fq_helper_functional",
    },
    why="the fused observer's ranges are over the batch, and its axes are not known: observe by plain ops",
    tolerance=SINGLE,
)
def quantization_aware_called(run: Run) -> None:
    _quantization_aware(run, called=True)


class _FakeQuantize(nn.Module):
    """Moving ranges in buffers, of a tensor or its channels, and rounding with straight-through gradients."""

    low: Tensor
    high: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.observed, self.dims = True, tuple(range(len(shape) > 0, 4))
        self.register_buffer("low", torch.zeros(shape))
        self.register_buffer("high", torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.observed:
            with torch.no_grad():
                self.low.lerp_(x.amin(self.dims, keepdim=self.low.dim() > 0), 0.1)
                self.high.lerp_(x.amax(self.dims, keepdim=self.low.dim() > 0), 0.1)
        scale = (self.high - self.low).clamp(min=1e-5) / 255
        rounded = torch.clamp(torch.round((x - self.low) / scale), 0, 255) * scale + self.low
        return x + (rounded - x).detach()


class _QatConv(nn.Conv2d):
    def __init__(self, inputs: int, outputs: int, size: int) -> None:
        super().__init__(inputs, outputs, size)
        self.weight_fake_quant = _FakeQuantize(outputs, 1, 1, 1)

    def forward(self, x: Tensor) -> Any:
        return self._conv_forward(x, self.weight_fake_quant(self.weight), self.bias)


@SECTION(
    "QAT by plain ops: ranges in buffers, rounding with straight-through gradients, observers switched off",
    refused={"*/shards": "it cannot be sharded", "ranks/slices": "is held as"},
    why="weights whose ranges are observed are not cut; leave their layers whole",
)
def quantization_by_hand(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.conv, self.between, self.fc = (
                _FakeQuantize(),
                _QatConv(1, 4, 3),
                _FakeQuantize(),
                nn.Linear(64, 4),
            )

        def forward(self, x: Tensor) -> Any:
            return self.fc(self.between(F.relu(self.conv(self.enter(x)))).flatten(1))

    model = run.compile(Net())
    optimizer = sgd(model, 0.05)
    for step in range(4):
        for module in model.modules():
            if isinstance(module, _FakeQuantize):
                module.observed = step < 3
        loss = F.cross_entropy(model(run.randn(BATCH, 1, 6, 6)), run.randint(4, BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    model.eval()
    with torch.no_grad():
        run.rows("scores", model(run.randn(BATCH, 1, 6, 6)))
    run.state(model)
