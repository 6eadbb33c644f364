"""Public training programs on signals, clicks and agents: their models at small sizes, and their loops."""

# mypy: disable-error-code="operator"
from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.training import Run
from tests.patterns.nets import BATCH, total, train
from tests.patterns.pattern import Section
from tests.patterns.programs_language import SINGLE

SECTION = Section("Public training programs")


@SECTION(
    "pytorch/examples `time_sequence_prediction`: LSTM cells in a loop over time, L-BFGS with a closure, a future of "
    "another length in evaluation"
)
def time_sequence_prediction(run: Run) -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 6), nn.LSTMCell(6, 6), nn.Linear(6, 1)

        def forward(self, inputs: Tensor, future: int = 0) -> Any:
            outputs = []
            h_t, c_t, h_t2, c_t2 = (torch.zeros(inputs.size(0), 6, dtype=torch.double) for _ in range(4))
            for input_t in inputs.split(1, dim=1):
                h_t, c_t = self.lstm1(input_t, (h_t, c_t))
                h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
                output = self.linear(h_t2)
                outputs += [output]
            for _ in range(future):
                h_t, c_t = self.lstm1(output, (h_t, c_t))
                h_t2, c_t2 = self.lstm2(h_t, (h_t2, c_t2))
                output = self.linear(h_t2)
                outputs += [output]
            return torch.cat(outputs, dim=1)

    phases = torch.randint(-8, 8, (BATCH, 1), generator=run.draws)
    data = run.own(torch.sin((torch.arange(7) + phases) / 2.0).double())
    seq, criterion = run.compile(Sequence().double()), nn.MSELoss()
    optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.8, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(seq(data[:, :-1]), data[:, 1:])
        loss.backward()
        if run.ranks > 1:  # the line search of every process sees the loss of all samples
            torch.distributed.all_reduce(loss.detach())
            loss.detach().div_(run.ranks)
        return loss

    for _ in range(2):
        run.same("loss", optimizer.step(closure))
        with torch.no_grad():
            pred = seq(data[:, :-1], future=3)
            run.mean("test loss", criterion(pred[:, :-3], data[:, 1:]))
            run.rows("future", pred[:, -3:])
    run.state(seq)


class _Dlrm(nn.Module):
    """DLRM; each table's words with offsets, as published, or as [B, n]."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(n, 4, mode="sum", sparse=sparse) for n in (7, 5, 9))
        self.bot_l = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU())
        self.top_l = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())
        for module in [*self.bot_l, *self.top_l]:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, 0.0, math.sqrt(2 / sum(module.weight.shape)))

    def forward(self, dense_x: Tensor, lS_o: Any, lS_i: Any) -> Any:
        x = self.bot_l(dense_x)
        offsets = lS_o if lS_o is not None else [None] * len(lS_i)
        ly = [emb(words, at) for emb, words, at in zip(self.emb_l, lS_i, offsets, strict=True)]
        whole = torch.cat([x, *ly], dim=1).view((x.shape[0], -1, x.shape[1]))
        products = torch.bmm(whole, torch.transpose(whole, 1, 2))
        li = torch.tensor([i for i in range(4) for j in range(i)])
        lj = torch.tensor([j for i in range(4) for j in range(i)])
        p = self.top_l(torch.cat([x, products[:, li, lj]], dim=1))
        return torch.clamp(p, min=1e-4, max=1 - 1e-4)


def _click_rates(run: Run, offsets: bool, sparse: bool) -> None:
    """DLRM's loop: rates by a warm-up and decay, accuracy and losses counted by hand, evaluation."""

    def batch() -> tuple[Any, ...]:
        words = [run.randint(n, BATCH, 2) for n in (7, 5, 9)]
        starts = torch.arange(words[0].size(0)) * 2
        given = ([starts] * 3, [w.flatten() for w in words]) if offsets else (None, words)
        return run.randn(BATCH, 5).float(), *given, run.randint(2, BATCH, 1).float()

    dlrm, loss_fn = run.compile(_Dlrm(sparse).float()), nn.BCELoss(reduction="mean")
    optimizer = torch.optim.SGD(dlrm.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda j: min(j + 1, 2) / 2 * (1 if j < 3 else 0.5))
    for _ in range(4):
        *given, target = batch()
        p = dlrm(*given)
        loss = loss_fn(p, target)
        right = (torch.round(p.detach()) == target).sum().item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        run.mean("loss", loss)
        run.same("right", total(run, right))
    dlrm.eval()
    with torch.no_grad():
        run.rows("p", dlrm(*batch()[:-1]))
    run.state(dlrm)


@SECTION(
    "DLRM in float32: `nn.EmbeddingBag` with `sparse=True` and offsets",
    refused={"*": "asks for a sparse gradient"},
    why="devices sum dense gradients; make the tables with `sparse=False`",
    tolerance=SINGLE,
)
def dlrm(run: Run) -> None:
    _click_rates(run, offsets=True, sparse=True)


@SECTION(
    "the same with `sparse=False`",
    refused={"ranks/*": "positions along the samples"},
    why="offsets count each process's own words from 0; bring words as [B, n] without offsets, padded where needed",
    tolerance=SINGLE,
    free=("emb_l.0", "emb_l.1", "emb_l.2", "top_l.2"),
)
def dlrm_dense(run: Run) -> None:
    _click_rates(run, offsets=True, sparse=False)


@SECTION(
    "the same with `sparse=False` and words as [B, n] without offsets",
    tolerance=SINGLE,
    free=("emb_l.0", "emb_l.1", "emb_l.2", "top_l.2"),
)
def dlrm_rows(run: Run) -> None:
    _click_rates(run, offsets=False, sparse=False)


@SECTION("FNO in float32: `rfft`, complex weights of the low modes, relative losses, StepLR, tests", tolerance=SINGLE)
def fourier_operator(run: Run) -> None:
    class SpectralConv1d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights1 = nn.Parameter(0.2 * torch.rand(6, 6, 3, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            x_ft = torch.fft.rfft(x)
            out_ft = torch.zeros(x.size(0), 6, x.size(-1) // 2 + 1, dtype=torch.cfloat, device=x.device)
            out_ft[:, :, :3] = torch.einsum("bix,iox->box", x_ft[:, :, :3], self.weights1)
            found: Tensor = torch.fft.irfft(out_ft, n=x.size(-1))
            return found

    class Fno1d(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc0, self.fc1, self.fc2 = nn.Linear(2, 6), nn.Linear(6, 8), nn.Linear(8, 2)
            self.conv = nn.ModuleList(SpectralConv1d() for _ in range(2))
            self.w = nn.ModuleList(nn.Conv1d(6, 6, 1) for _ in range(2))

        def forward(self, x: Tensor) -> Any:
            gridx = torch.linspace(0, 1, x.size(1), dtype=x.dtype).view(1, -1, 1).repeat([x.size(0), 1, 1])
            x = F.pad(self.fc0(torch.cat((x, gridx), dim=-1)).permute(0, 2, 1), [0, 2])
            for conv, w in zip(self.conv, self.w, strict=True):
                x = F.gelu(conv(x) + w(x))
            return self.fc2(F.gelu(self.fc1(x[..., :-2].permute(0, 2, 1))))

    def relative(found: Tensor, wanted: Tensor) -> Tensor:
        off: Tensor = torch.norm(found - wanted, 2, 1) / torch.norm(wanted, 2, 1)
        return off

    model = run.compile(Fno1d().float())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        model.train()
        train(run, model, optimizer, lambda: relative(model(run.randn(BATCH, 10, 1).float()).flatten(1),
                                                      run.randn(BATCH, 20).float()).mean(), 2)  # fmt: skip
        scheduler.step()
        model.eval()
        with torch.no_grad():
            found = model(run.randn(BATCH, 10, 1).float()).flatten(1)
            run.rows("test", relative(found, run.randn(BATCH, 20).float()))


def _layer_init(layer: nn.Linear, std: float = math.sqrt(2)) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


@SECTION(
    "cleanrl `ppo.py`: an agent of methods alone, its environments, advantages backwards, minibatches, annealed rates "
    "(its draws are inputs here)"
)
def cleanrl_ppo(run: Run) -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.critic = nn.Sequential(_layer_init(nn.Linear(4, 8)), nn.Tanh(), _layer_init(nn.Linear(8, 1), std=1.0))
            self.actor = nn.Sequential(_layer_init(nn.Linear(4, 8)), nn.Tanh(), _layer_init(nn.Linear(8, 2), std=0.01))

        def get_value(self, x: Tensor) -> Any:
            return self.critic(x)

        def get_action_and_value(self, x: Tensor, action: Tensor | None = None, noise: Tensor | None = None) -> Any:
            logits = self.actor(x)
            probs = Categorical(logits=logits)
            if action is None:
                action = (logits + noise).argmax(1)
            return action, probs.log_prob(action), probs.entropy(), self.critic(x)

    def env_step(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        push = action.to(state.dtype) * 2 - 1
        state = state * 0.9 + torch.stack([push, -push, 0.1 * push, push * 0], 1) * 0.3
        done = (state.abs().amax(1) > 0.8).to(state.dtype)
        return state * (1 - done[:, None]), 1.0 - done, done

    def normalized(x: Tensor) -> Tensor:
        number = x.numel() * run.ranks
        mean = total(run, x.sum().item()) / number
        square = total(run, (x - mean).square().sum().item())
        return (x - mean) / ((square / (number - 1)).sqrt() + 1e-8)

    agent = run.compile(Agent())
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.01, eps=1e-5)
    next_obs, steps = run.randn(BATCH, 4) * 0.3, 4
    next_done = torch.zeros(len(next_obs))
    for iteration in range(1, 3):
        optimizer.param_groups[0]["lr"] = (1.0 - (iteration - 1.0) / 2) * 0.01
        kept: list[list[Tensor]] = []
        for _ in range(steps):
            with torch.no_grad():
                noise = -torch.log(run.randn(BATCH, 2).square())
                action, logprob, _, value = agent.get_action_and_value(next_obs, noise=noise)
            obs, done = next_obs, next_done
            next_obs, reward, next_done = env_step(obs, action)
            kept.append([obs, action, logprob, value.flatten(), reward, done])
        obs, actions, logprobs, values, rewards, dones = (torch.stack(x) for x in zip(*kept, strict=True))
        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(-1)
            advantages, lastgaelam = torch.zeros_like(rewards), torch.zeros(())
            for t in reversed(range(steps)):
                last = t == steps - 1
                nonterminal = 1.0 - (next_done if last else dones[t + 1])
                delta = rewards[t] + 0.9 * (next_value if last else values[t + 1]) * nonterminal - values[t]
                advantages[t] = lastgaelam = delta + 0.9 * 0.95 * nonterminal * lastgaelam
            returns = advantages + values
        for _ in range(2):
            for mb in np.random.permutation(steps).reshape(2, 2):
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(
                    obs[mb].flatten(0, 1), actions[mb].long().flatten()
                )
                ratio = (newlogprob - logprobs[mb].flatten()).exp()
                gain, newvalue = normalized(advantages[mb].flatten()), newvalue.view(-1)
                pg_loss = torch.max(-gain * ratio, -gain * torch.clamp(ratio, 0.8, 1.2)).mean()
                old = values[mb].flatten()
                clipped = old + torch.clamp(newvalue - old, -0.2, 0.2)
                goal = returns[mb].flatten()
                v_loss = 0.5 * torch.max((newvalue - goal) ** 2, (clipped - goal) ** 2).mean()
                loss = pg_loss - 0.01 * entropy.mean() + v_loss * 0.5
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                run.mean("loss", loss)
    run.state(agent)


def _actor_critic(run: Run, **options: Any) -> None:
    saved = namedtuple("saved", ["log_prob", "value"])

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine1, self.action_head, self.value_head = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)
            self.saved_actions: list[Any] = []
            self.rewards: list[float] = []

        def forward(self, x: Tensor) -> Any:
            x = F.relu(self.affine1(x))
            return F.softmax(self.action_head(x), dim=-1), self.value_head(x)

    model = run.compile(Policy(), **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(3):
        state = torch.randn(4, generator=run.draws) * 0.3
        for _ in range(3):
            probs, state_value = model(state)
            m = Categorical(probs)
            action = m.sample()
            model.saved_actions.append(saved(m.log_prob(action), state_value))
            push = action.item() * 2.0 - 1.0
            state = state * 0.9 + push * torch.tensor([0.3, -0.3, 0.1, 0.0])
            model.rewards.append(1.0 - state.abs().max().item())
        r, returns = 0.0, list[float]()
        for reward in model.rewards[::-1]:
            r = reward + 0.99 * r
            returns.insert(0, r)
        goals = torch.tensor(returns)
        goals = (goals - goals.mean()) / (goals.std() + 1e-6)
        policy_losses, value_losses = [], []
        for (log_prob, value), goal in zip(model.saved_actions, goals, strict=True):
            policy_losses.append(-log_prob * (goal - value.item()))
            value_losses.append(F.smooth_l1_loss(value, goal.view(1)))
        optimizer.zero_grad()
        loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
        loss.backward()
        optimizer.step()
        del model.rewards[:]
        del model.saved_actions[:]
        run.same("loss", loss)
    run.state(model)


@SECTION(
    "pytorch/examples `actor_critic`: one state of shape [4], log probabilities kept on the model by the script",
    refused={
        "ranks/*": 'compile with inputs="same"',
        "one/replicas": "its samples depend on each other",
        "one/mixed": "its samples depend on each other",
    },
    why='one state is no batch of samples; compile with `inputs="same"`, or bring states of several environments',
)
def actor_critic(run: Run) -> None:
    _actor_critic(run)


@SECTION(
    'the same, compiled with `inputs="same"`',
    refused={"*/replicas": "as of inputs without samples", "*/mixed": "as of inputs without samples"},
    why="inputs without samples have no replicas",
)
def actor_critic_same(run: Run) -> None:
    _actor_critic(run, inputs="same")
