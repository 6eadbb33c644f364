"""Public training programs on images: their models at small sizes, and their loops with all that is in them."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training import Run
from tests.patterns.nets import BATCH, loader, total
from tests.patterns.pattern import Section

SECTION = Section("Public training programs")

COUNT = 16  # of samples in a training set: two batches an epoch


def images(run: Run, *shape: int, count: int = COUNT, classes: int = 4) -> tuple[Tensor, Tensor]:
    """A whole set of images and their classes, alike in every process."""
    return torch.randn(count, *shape, generator=run.draws), torch.randint(classes, (count,), generator=run.draws)


@SECTION("pytorch/examples `mnist`: Adadelta, StepLR, a loader with a sampler, summed test losses, the state saved")
def mnist(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 8, 3, 1)
            self.dropout1, self.dropout2 = nn.Dropout(0.0), nn.Dropout(0.0)
            self.fc1, self.fc2 = nn.Linear(128, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Any:
            x = F.relu(self.conv2(F.relu(self.conv1(x))))
            x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
            return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)

    model = run.compile(Net())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    train_loader, test_loader = (
        loader(run, *images(run, 1, 12, 12)),
        loader(run, *images(run, 1, 12, 12), shuffle=False),
    )
    for epoch in range(2):
        model.train()
        train_loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for data, target in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            run.mean("loss", loss)
        model.eval()
        test_loss, correct = 0.0, 0
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                test_loss += F.nll_loss(output, target, reduction="sum").item()
                pred = output.argmax(dim=1, keepdim=True)
                correct += pred.eq(target.view_as(pred)).sum().item()
        run.same("test", total(run, test_loss, correct))
        scheduler.step()
    weights = model.state_dict()
    saved = run.from_first(lambda: weights)
    run.same("saved", saved["fc2.weight"])
    run.state(model)


class _BasicBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Any:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A residual network of two stages, as torchvision writes them."""

    def __init__(self, channels: int = 3, classes: int = 4) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = nn.Sequential(_BasicBlock(4, 4, 1)), nn.Sequential(_BasicBlock(4, 8, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(8, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Any:
        """Scores of classes."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


class _AverageMeter:
    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, n: int) -> None:
        self.sum, self.count = self.sum + value * n, self.count + n

    def average(self, run: Run) -> Tensor:
        found = total(run, self.sum, self.count)
        return found[0] / found[1]


@SECTION("pytorch/examples `imagenet`: a ResNet, top-k meters summed over processes, the best checkpoint, resumed")
def imagenet(run: Run) -> None:
    def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            pred = output.topk(max(topk), 1, True, True)[1].t()
            correct = pred.eq(target.view(1, -1).expand_as(pred))
            return [correct[:k].reshape(-1).float().sum().item() * 100.0 / target.size(0) for k in topk]

    def made() -> Any:
        model = run.compile(ResNet())
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)

    def validate() -> Tensor:
        meters = [_AverageMeter() for _ in range(3)]
        model.eval()
        with torch.no_grad():
            for image, target in val_loader:
                output = model(image)
                values = [criterion(output, target).item(), *accuracy(output, target, (1, 2))]
                for meter, value in zip(meters, values, strict=True):
                    meter.update(value, image.size(0))
        return torch.stack([meter.average(run) for meter in meters])

    model, optimizer, scheduler = made()
    criterion, best = nn.CrossEntropyLoss(), 0.0
    train_loader, val_loader = loader(run, *images(run, 3, 8, 8)), loader(run, *images(run, 3, 8, 8), shuffle=False)
    for epoch in range(3):
        train_loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        model.train()
        for image, target in train_loader:
            loss = criterion(model(image), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.mean("loss", loss)
        top1 = validate()
        run.same("validation", top1)
        scheduler.step()
        best = max(best, top1[1].item())
        checkpoint = {
            "epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best,
            "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
        }  # fmt: skip
        saved = run.from_first(lambda checkpoint=checkpoint: checkpoint)  # type: ignore[misc]
        if epoch == 0:  # ended here, and started again with --resume
            model, optimizer, scheduler = made()
            model.load_state_dict(saved["state_dict"])
            optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
    run.state(model)


@SECTION("pytorch/examples `siamese_network`: one ResNet called for both images, features joined, BCELoss")
def siamese_network(run: Run) -> None:
    class SiameseNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            resnet = ResNet(channels=1)
            self.resnet = nn.Sequential(*(list(resnet.children())[:-1]))
            self.fc = nn.Sequential(nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))
            self.sigmoid = nn.Sigmoid()
            self.resnet.apply(self.init_weights)
            self.fc.apply(self.init_weights)

        def init_weights(self, m: nn.Module) -> None:
            if isinstance(m, nn.Linear):
                nn.init.xavier_uniform_(m.weight)
                m.bias.data.fill_(0.01)

        def forward_once(self, x: Tensor) -> Any:
            output = self.resnet(x)
            return output.view(output.size()[0], -1)

        def forward(self, input1: Tensor, input2: Tensor) -> Any:
            output = torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)
            return self.sigmoid(self.fc(output))

    model = run.compile(SiameseNetwork())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    criterion = nn.BCELoss()
    pairs = [torch.randn(COUNT, 1, 8, 8, generator=run.draws) for _ in range(2)]
    target_of = torch.randint(2, (COUNT,), generator=run.draws).to(torch.get_default_dtype())
    data = loader(run, *pairs, target_of)
    for epoch in range(2):
        model.train()
        data.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for one, two, target in data:
            optimizer.zero_grad()
            loss = criterion(model(one, two).squeeze(), target)
            loss.backward()
            optimizer.step()
            run.mean("loss", loss)
        model.eval()
        found, correct = 0.0, 0.0
        with torch.no_grad():
            for one, two, target in data:
                outputs = model(one, two).squeeze()
                found += criterion(outputs, target).sum().item()
                pred = torch.where(outputs > 0.5, 1, 0)
                correct += pred.eq(target.view_as(pred)).sum().item()
        run.same("test", total(run, found / run.ranks, correct))
        scheduler.step()
    run.state(model)


@SECTION("pytorch/examples `super_resolution`: orthogonal weights, PixelShuffle, PSNR, the model saved as a whole")
def super_resolution_example(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.relu, self.conv1 = nn.ReLU(), nn.Conv2d(1, 8, 5, padding=2)
            self.conv2, self.conv3 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
            self.conv4, self.shuffle = nn.Conv2d(4, factor**2, 3, padding=1), nn.PixelShuffle(factor)
            for conv in (self.conv1, self.conv2, self.conv3):
                nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))

        def forward(self, x: Tensor) -> Any:
            x = self.relu(self.conv3(self.relu(self.conv2(self.relu(self.conv1(x))))))
            return self.shuffle(self.conv4(x))

    model, criterion = run.compile(Net(2)), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    wide = images(run, 1, 8, 8)[0]
    data = loader(run, F.avg_pool2d(wide, 2), wide)
    for _ in range(2):
        epoch_loss, psnr = 0.0, 0.0
        for low, target in data:
            optimizer.zero_grad()
            loss = criterion(model(low), target)
            epoch_loss += loss.item()
            loss.backward()
            optimizer.step()
        run.same("epoch", total(run, epoch_loss) / run.ranks)
        with torch.no_grad():
            for low, target in data:
                mean = total(run, criterion(model(low), target).item()).item() / run.ranks
                psnr += 10 * math.log10(1 / mean)
        run.same("PSNR", psnr)
    whole = copy.deepcopy(model)
    with torch.no_grad():
        run.mean("upscaled", whole(next(iter(data))[0]).square().mean())
    run.state(model)


@SECTION("pytorch/examples `mnist_rnn`: an LSTM over rows of images, batch norm of its last step", free=("rnn",))
def mnist_rnn(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.batchnorm = nn.LSTM(input_size=6, hidden_size=8, batch_first=True), nn.BatchNorm1d(8)
            self.dropout1, self.dropout2 = nn.Dropout(0.0), nn.Dropout(0.0)
            self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            x = x.reshape(-1, 6, 6)
            output, _ = self.rnn(x)
            x = self.dropout1(self.batchnorm(output[:, -1, :]))
            x = self.dropout2(F.relu(self.fc1(x)))
            return F.log_softmax(self.fc2(x), dim=1)

    model = run.compile(Net())
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    data = loader(run, *images(run, 1, 6, 6))
    for epoch in range(2):
        model.train()
        data.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for x, target in data:
            optimizer.zero_grad()
            loss = F.nll_loss(model(x), target)
            loss.backward()
            optimizer.step()
            run.mean("loss", loss)
        model.eval()
        with torch.no_grad():
            found = sum(F.nll_loss(model(x), target, reduction="sum").item() for x, target in data)
        run.same("test", total(run, found))
        scheduler.step()
    run.state(model)


class _AdaptiveClip:
    """Gradients clipped by the norms of the units' weights (timm's adaptive clipping)."""

    def __call__(self, parameters: Any, factor: float = 0.05) -> None:
        for p in parameters:
            if p.grad is None:
                continue
            units = tuple(range(1, p.ndim))
            weight, gradient = (x.norm(2.0, dim=units, keepdim=True) if p.ndim > 1 else x for x in (p.detach(), p.grad))
            largest = weight.abs().clamp_(min=1e-3).mul_(factor)
            clipped = p.grad * (largest / gradient.abs().clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(gradient.abs() < largest, p.grad, clipped))


@SECTION("timm `train.py`: mixup, soft targets, warm-up and cosine per update, adaptive clipping, an EMA, accumulation")
def timm_train(run: Run) -> None:
    def mixup(x: Tensor, target: Tensor, lam: float) -> tuple[Tensor, Tensor]:
        one, other = (F.one_hot(y, 4).to(x.dtype) * 0.9 + 0.025 for y in (target, target.flip(0)))
        return x * lam + x.flip(0) * (1 - lam), one * lam + other * (1 - lam)

    def rate(update: int) -> float:
        return 0.02 * (update + 1) / 2 if update < 2 else 0.01 * (1 + math.cos(math.pi * (update - 2) / 4))

    net = ResNet()
    nn.init.zeros_(net.layer2[0].bn2.weight)  # type: ignore[union-attr,arg-type]
    model = run.compile(net.to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    model_ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    plain = [p for n, p in model.named_parameters() if p.ndim <= 1 or n.endswith(".bias")]
    decayed = [p for n, p in model.named_parameters() if not (p.ndim <= 1 or n.endswith(".bias"))]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True)
    data, update, clip = loader(run, *images(run, 3, 8, 8), shuffle=False), 0, _AdaptiveClip()
    for _ in range(3):
        model.train()
        batches = [*data, *data]
        for index, (x, target) in enumerate(batches):
            if run.ranks == 1:  # a batch is mixed within each process
                order = torch.arange(BATCH).view(-1, 2).t()  # the sampler deals samples to processes in turn
                halves = [mixup(x[mine], target[mine], 0.7) for mine in order]
                x, soft = (torch.cat(parts) for parts in zip(*halves, strict=True))
            else:
                x, soft = mixup(x, target, 0.7)
            x = x.contiguous(memory_format=torch.channels_last)
            loss = torch.sum(-soft * F.log_softmax(model(x), dim=-1), dim=-1).mean()
            (loss / 2).backward()
            run.mean("loss", loss)
            if index % 2 == 0:
                continue
            clip(model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            model_ema.update_parameters(model)
            update += 1
            for group in optimizer.param_groups:
                group["lr"] = rate(update)
        for tested in (model, model_ema):
            tested.eval()
            with torch.no_grad():
                found = [F.cross_entropy(tested(x), target) for x, target in data]
            run.mean("validation", torch.stack(found).mean())
    run.state(model)
    run.state(model_ema.module, "mean ")


class _Gather(torch.autograd.Function):
    """The samples of all processes; gradients are summed over processes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        summed = gradient.clone()
        dist.all_reduce(summed)
        return summed.chunk(dist.get_world_size())[dist.get_rank()]


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.token_embedding = nn.Linear(12, 8), nn.Embedding(12, 8)
        self.text_projection = nn.Parameter(torch.randn(8, 8) * 8**-0.5)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image: Tensor, text: Tensor) -> Any:
        return {
            "image_features": F.normalize(self.visual(image.flatten(1)), dim=-1),
            "text_features": F.normalize(self.token_embedding(text).mean(1) @ self.text_projection, dim=-1),
            "logit_scale": self.logit_scale.exp(),
        }


@SECTION(
    "open_clip: features of all processes gathered in the script (`gather_with_grad`), both directions, "
    "decay groups, the scale clamped"
)
def open_clip(run: Run) -> None:
    def clip_loss(image_features: Tensor, text_features: Tensor, logit_scale: Tensor) -> Tensor:
        if run.ranks > 1:
            gather: Any = _Gather.apply
            image_features, text_features = gather(image_features), gather(text_features)
        logits = logit_scale * image_features @ text_features.T
        labels = torch.arange(logits.shape[0])
        loss: Tensor = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        return loss

    model = run.compile(_Towers())
    named = list(model.named_parameters())
    excluded = [p for n, p in named if p.ndim < 2 or "bias" in n or "logit_scale" in n]
    rest = [p for n, p in named if not (p.ndim < 2 or "bias" in n or "logit_scale" in n)]
    groups = [{"params": excluded, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.98), eps=1e-6)
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * min(1.0, (step + 1) / 2)
        optimizer.zero_grad()
        loss = clip_loss(**model(run.randn(BATCH, 3, 2, 2), run.randint(12, BATCH, 3)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(14))
        run.same("loss", loss)
    model.eval()
    with torch.no_grad():
        found = model(run.randn(BATCH, 3, 2, 2), run.randint(12, BATCH, 3))
        run.same("validation", clip_loss(**found))
    run.state(model)
