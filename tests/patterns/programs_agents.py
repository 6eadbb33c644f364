"""Whole programs: agents, targets and preferences, where one network learns from another or an older one."""

# mypy: disable-error-code="operator"
from __future__ import annotations

import copy
import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.training import Run
from tests.patterns.nets import BATCH, sgd, steps
from tests.patterns.pattern import Section

SECTION = Section("Programs: training schemes")


def _mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def _mean(run: Run, value: Tensor) -> Tensor:
    """The mean over ranks, of what is the script's own to keep alike."""
    value = value.detach().clone()
    if run.ranks > 1:
        torch.distributed.all_reduce(value)
        value /= run.ranks
    return value


@SECTION("PPO: two heads, a clipped ratio to old log probabilities, clipped values, several epochs over minibatches")
def ppo(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 1)
            for layer, gain in ((self.body, math.sqrt(2)), (self.actor, 0.01), (self.critic, 1.0)):
                nn.init.orthogonal_(layer.weight, gain)

        def forward(self, x: Tensor) -> Any:
            h = torch.tanh(self.body(x))
            return self.actor(h), self.critic(h).flatten()

    model = run.compile(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
    for update in range(2):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - update / 2)
        x, action, reward = run.randn(BATCH, 2, 6), run.randint(4, BATCH, 2), run.randn(BATCH, 2)
        with torch.no_grad():
            logits, values = model(x.flatten(0, 1))
        old, values = Categorical(logits=logits).log_prob(action.flatten()), values.view(-1, 2)
        gains = reward - values + torch.stack([0.9 * (reward - values)[:, 1], torch.zeros(values.shape[0])], 1)
        returns = gains + values
        for epoch in range(2):
            part = slice(epoch, epoch + 1)
            logits, value = model(x[:, part].flatten(0, 1))
            policy = Categorical(logits=logits)
            gain, goal = gains[:, part].flatten(), returns[:, part].flatten()
            ratio = (policy.log_prob(action[:, part].flatten()) - old.view(-1, 2)[:, part].flatten()).exp()
            near = values[:, part].flatten() + (value - values[:, part].flatten()).clamp(-0.2, 0.2)
            loss = -torch.min(gain * ratio, gain * ratio.clamp(0.8, 1.2)).mean() - 0.01 * policy.entropy().mean()
            loss = loss + 0.5 * torch.max((value - goal).square(), (near - goal).square()).mean()
            optimizer.zero_grad()
            loss.backward()
            run.same("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            run.mean("loss", loss)
    run.state(model)


@SECTION("double DQN: a duelling network, its target set by `load_state_dict` every other step, replayed steps")
def dqn(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.value, self.gain = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            h = F.relu(self.body(x))
            gain = self.gain(h)
            return self.value(h) + gain - gain.mean(1, keepdim=True)

    model, target = run.compile(Net()), run.compile(Net())
    target.load_state_dict(model.state_dict())
    target.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    memory: list[tuple[Tensor, ...]] = []
    for step in range(4):
        memory.append((run.randn(BATCH, 6), run.randint(4, BATCH, 1), run.randn(BATCH), run.randn(BATCH, 6)))
        state, action, reward, after = random.choice(memory)
        found = model(state).gather(1, action).squeeze(1)
        with torch.no_grad():
            best = model(after).argmax(1, keepdim=True)
            goal = reward + 0.9 * target(after).gather(1, best).squeeze(1)
        loss = F.smooth_l1_loss(found, goal)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        run.mean("loss", loss)
        if step % 2:
            target.load_state_dict(model.state_dict())
    run.state(model)
    run.state(target, "target ")


@SECTION("SAC: twin critics, plain targets by Polyak averages (`.data.copy_`), a learned temperature of the script's")
def sac(run: Run) -> None:
    class Critics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = _mlp(8, 1), _mlp(8, 1)

        def forward(self, state: Tensor, action: Tensor) -> Any:
            both = torch.cat([state, action], 1)
            return self.a(both), self.b(both)

    plain = Critics()
    targets = copy.deepcopy(plain).requires_grad_(False)
    actor, critics, log_alpha = run.compile(_mlp(6, 4)), run.compile(plain), torch.zeros(1, requires_grad=True)
    steps_of = [torch.optim.Adam(p, lr=0.01) for p in (actor.parameters(), critics.parameters(), [log_alpha])]

    def act(state: Tensor) -> Any:
        mean, log_std = actor(state).chunk(2, 1)
        raw = mean + log_std.clamp(-5, 2).exp() * run.randn(BATCH, 2)
        density = -0.5 * ((raw - mean) / log_std.exp()).square() - log_std
        return raw.tanh(), (density - torch.log(1 - raw.tanh().square() + 1e-6)).sum(1, keepdim=True)

    for _ in range(3):
        state, action, reward, after = (
            run.randn(BATCH, 6),
            run.randn(BATCH, 2),
            run.randn(BATCH, 1),
            run.randn(BATCH, 6),
        )
        with torch.no_grad():
            next_action, log_prob = act(after)
            goal = reward + 0.9 * (torch.min(*targets(after, next_action)) - log_alpha.exp() * log_prob)
        critic_loss = sum((F.mse_loss(q, goal) for q in critics(state, action)), torch.zeros(()))
        steps_of[1].zero_grad()
        critic_loss.backward()
        steps_of[1].step()
        action, log_prob = act(state)
        actor_loss = (log_alpha.exp().detach() * log_prob - torch.min(*critics(state, action))).mean()
        steps_of[0].zero_grad()
        actor_loss.backward()
        steps_of[0].step()
        log_alpha.grad = -log_alpha.exp().detach() * _mean(run, log_prob.mean() - 2)
        steps_of[2].step()
        for slow, fast in zip(targets.parameters(), critics.parameters(), strict=True):
            slow.data.copy_(0.1 * fast.data + 0.9 * slow.data)
        run.mean("critic's loss", critic_loss)
        run.mean("actor's loss", actor_loss)
    run.same("alpha", log_alpha.exp())
    for name, network in (("actor", actor), ("critic", critics), ("target", targets)):
        run.state(network, f"{name} ")


@SECTION("BYOL: a target network and its moving average in a method of the model, which the script calls")
def byol(run: Run) -> None:
    class Learner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
            self.predictor, self.target = _mlp(4, 4), copy.deepcopy(self.online)
            for p in self.target.parameters():
                p.requires_grad = False

        @torch.no_grad()
        def update_target(self, keep: float) -> None:
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.data = keep * slow.data + (1 - keep) * fast.data

        def forward(self, a: Tensor, b: Tensor) -> Any:
            with torch.no_grad():
                wanted = [self.target(x).detach() for x in (b, a)]
            found = [self.predictor(self.online(x)) for x in (a, b)]
            far = [2 - 2 * F.cosine_similarity(f, w, dim=-1) for f, w in zip(found, wanted, strict=True)]
            return (far[0] + far[1]).mean()

    learner = run.compile(Learner())
    optimizer = torch.optim.Adam([p for p in learner.parameters() if p.requires_grad], lr=0.01)
    for step in range(3):
        loss = learner(run.randn(BATCH, 6), run.randn(BATCH, 6))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.update_target(1 - 0.5 * (math.cos(math.pi * step / 3) + 1) / 2)
        run.same("loss", loss)
    run.state(learner)


@SECTION("meta parameters: a policy gradient with a running baseline, returns discounted backwards, entropy annealed")
def reinforce(run: Run) -> None:
    model = run.compile(_mlp(6, 4))
    optimizer = sgd(model)
    baseline = torch.zeros(())
    for step in range(3):
        rewards, states, log_probs = run.randn(BATCH, 3), [run.randn(BATCH, 6) for _ in range(3)], []
        entropy = torch.zeros(())
        for state in states:
            policy = Categorical(logits=model(state))
            action = policy.probs.cumsum(1).gt(0.5).double().argmax(1)
            log_probs.append(policy.log_prob(action))
            entropy = entropy + policy.entropy().mean()
        total, returns = torch.zeros(rewards.shape[0]), list[Tensor]()
        for reward in reversed(rewards.unbind(1)):
            total = reward + 0.9 * total
            returns.insert(0, total)
        baseline = 0.9 * baseline + 0.1 * _mean(run, torch.stack(returns).mean())
        loss = -torch.stack([lp * (r - baseline) for lp, r in zip(log_probs, returns, strict=True)]).mean()
        optimizer.zero_grad()
        (loss - 0.1 / (step + 1) * entropy).backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("a mean teacher: a plain copy follows the student (`slow.data = keep * slow.data + (1 - keep) * fast.data`)")
def mean_teacher(run: Run) -> None:
    student = _mlp(6, 4)
    teacher = copy.deepcopy(student).requires_grad_(False)
    model = run.compile(student)
    optimizer = sgd(model)
    for step in range(3):
        x, noise = run.randn(BATCH, 6), 0.1 * run.randn(BATCH, 6)
        scores = model(x)
        agreement = F.mse_loss(scores.softmax(1), teacher(x + noise).softmax(1))
        loss = F.cross_entropy(scores, run.randint(4, BATCH)) + min(1.0, step / 2) * agreement
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keep = min(1 - 1 / (step + 1), 0.9)
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.data = keep * slow.data + (1 - keep) * fast.data
        run.mean("loss", loss)
    run.state(model)
    run.state(teacher, "teacher ")


@SECTION("self-training: the best model kept as a copy (`copy.deepcopy(model)`), confident pseudo-labels from it")
def pseudo_labels(run: Run) -> None:
    model = run.compile(_mlp(6, 4))
    optimizer = sgd(model)
    for _ in range(2):
        loss = F.cross_entropy(model(run.randn(BATCH, 6)), run.randint(4, BATCH))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        best = copy.deepcopy(model).eval()
        x = run.randn(BATCH, 6)
        with torch.no_grad():
            sure, labels = best(x).softmax(1).max(1)
        loss = (F.cross_entropy(model(x + 0.1 * run.randn(BATCH, 6)), labels, reduction="none") * (sure > 0.3)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
        run.state(best, "best ")
    run.state(model)


@SECTION(
    "features by a method of the model (`model.features(x)`), with batch norm in it, trained after some steps",
    refused={"ranks/*": "norm takes statistics of samples in features()"},
    why="call the model itself, with an argument for which forward returns them",
)
def features_method(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

        def features(self, x: Tensor) -> Any:
            return torch.relu(self.norm(self.body(x)))

        def forward(self, x: Tensor) -> Any:
            return self.head(self.features(x))

    model = run.compile(Net())
    optimizer = sgd(model)
    for _ in range(2):
        loss = F.cross_entropy(model(run.randn(BATCH, 6)), run.randint(4, BATCH))
        loss = loss + 0.1 * model.features(run.randn(BATCH, 6)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION(
    "observations normalised by running moments, buffers that one `torch._foreach_lerp_` updates in the forward",
    refused={"*": "writes several tensors at once"},
    why="write each buffer by itself",
)
def running_moments(run: Run) -> None:
    class Net(nn.Module):
        mean: Tensor
        square: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.net = _mlp(6, 4)
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("square", torch.ones(6))

        def forward(self, x: Tensor) -> Any:
            if self.training:
                with torch.no_grad():
                    torch._foreach_lerp_([self.mean, self.square], [x.mean(0), x.square().mean(0)], 0.1)
            return self.net((x - self.mean) / (self.square - self.mean.square() + 1e-2).sqrt())

    model = run.compile(Net())
    steps(run, model, sgd(model))
