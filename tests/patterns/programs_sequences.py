"""More programs people train on language and other sequences: scans, lattices, pairs of models, adapters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import Run
from tests.patterns.nets import BATCH, train
from tests.patterns.pattern import Section
from tests.patterns.programs_language import SECTION as LANGUAGE
from tests.patterns.programs_language import SINGLE, WORDS, CausalBlock

SECTION = Section(LANGUAGE.heading)


@SECTION("a character CNN with highway layers under an LSTM, weights copied from a pretrained table", free=("lstm",))
def character_cnn(run: Run) -> None:
    class Highway(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.both = nn.Linear(width, 2 * width)
            self.both.bias.data[width:].fill_(1)

        def forward(self, x: Tensor) -> Any:
            new, gate = self.both(x).chunk(2, dim=-1)
            gate = torch.sigmoid(gate)
            return gate * x + (1 - gate) * F.relu(new)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chars = nn.Embedding.from_pretrained(torch.randn(10, 4), freeze=False, padding_idx=0)
            self.convs = nn.ModuleList(nn.Conv1d(4, n, width) for width, n in ((1, 2), (2, 4), (3, 4)))
            self.highways = nn.Sequential(Highway(10), Highway(10))
            self.lstm, self.out = nn.LSTM(10, 8, batch_first=True), nn.Linear(8, 6)

        def forward(self, chars: Tensor) -> Any:
            b, t, c = chars.shape
            x = self.chars(chars.view(b * t, c)).transpose(1, 2)
            x = torch.cat([torch.tanh(conv(x)).max(dim=-1)[0] for conv in self.convs], dim=1)
            return self.out(self.lstm(self.highways(x).view(b, t, -1))[0])

    model = run.compile(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(run.randint(10, BATCH, 4, 5)).flatten(0, 1), run.randint(6, BATCH, 4).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step(1.0)
        run.mean("loss", loss)
    run.same("rate", optimizer.param_groups[0]["lr"])
    run.state(model)


@SECTION("a BiLSTM tagger with a CRF: forward algorithm with masks, Viterbi in evaluation", free=("lstm",))
def crf_tagger(run: Run) -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(WORDS, 6), nn.LSTM(6, 4, bidirectional=True, batch_first=True)
            self.emit, self.move = nn.Linear(8, 5), nn.Parameter(torch.randn(5, 5))
            self.begin = nn.Parameter(torch.randn(5))

        def forward(self, words: Tensor, tags: Tensor | None = None) -> Any:
            emitted, mask = self.emit(self.lstm(self.embed(words))[0]), words.ne(0)
            if tags is None:
                return self.best(emitted)
            alpha = self.begin + emitted[:, 0]
            score = self.begin[tags[:, 0]] + emitted[:, 0].gather(1, tags[:, :1]).squeeze(1)
            for i in range(1, words.size(1)):
                step = torch.logsumexp(alpha.unsqueeze(2) + self.move + emitted[:, i].unsqueeze(1), dim=1)
                alpha = torch.where(mask[:, i].unsqueeze(1), step, alpha)
                gain = self.move[tags[:, i - 1], tags[:, i]] + emitted[:, i].gather(1, tags[:, i : i + 1]).squeeze(1)
                score = score + gain * mask[:, i]
            return torch.logsumexp(alpha, dim=1) - score

        def best(self, emitted: Tensor) -> Tensor:
            score = self.begin + emitted[:, 0]
            back: list[Tensor] = []
            for emission in emitted[:, 1:].unbind(1):
                top, which = (score.unsqueeze(2) + self.move).max(dim=1)
                score, back = top + emission, [*back, which]
            path = [score.argmax(dim=1)]
            for which in reversed(back):
                path.insert(0, which.gather(1, path[0].unsqueeze(1)).squeeze(1))
            return torch.stack(path, dim=1)

    model = run.compile(Tagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-4)
    for _ in range(3):
        loss = model(run.randint(WORDS, BATCH, 4), run.randint(5, BATCH, 4)).mean()
        model.zero_grad()
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    model.eval()
    with torch.no_grad():
        run.rows("tags", model(run.randint(WORDS, BATCH, 4)))
    run.state(model)


@SECTION("retention in float32: decays per head, parallel in training and recurrent in evaluation", tolerance=SINGLE)
def retention(run: Run) -> None:
    class Retention(nn.Module):
        decay: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.qkvg = nn.Embedding(WORDS, 8), nn.Linear(8, 32, bias=False)
            self.norm, self.out = nn.GroupNorm(2, 8), nn.Linear(8, WORDS)
            self.register_buffer("decay", torch.log(1 - 2.0 ** (-5 - torch.arange(2))))

        def forward(self, words: Tensor) -> Any:
            b, t = words.shape
            *qkv, gate = self.qkvg(self.embed(words)).chunk(4, dim=-1)
            q, k, v = (z.view(b, t, 2, 4).transpose(1, 2) for z in qkv)
            far = (torch.arange(t)[:, None] - torch.arange(t)[None, :]).to(q.dtype)
            kept = torch.where(far >= 0, torch.exp(far.clamp(min=0) * self.decay.view(2, 1, 1)), 0.0).to(q.dtype)
            if self.training:
                y = (q @ k.transpose(-1, -2) * kept) @ v
            else:
                state, found = q.new_zeros(b, 2, 4, 4), []
                for i in range(t):
                    state = self.decay.exp().view(2, 1, 1) * state + k[:, :, i, :, None] * v[:, :, i, None, :]
                    found.append(torch.einsum("bhk,bhkv->bhv", q[:, :, i], state))
                y = torch.stack(found, dim=2)
            y = self.norm(y.transpose(1, 2).reshape(b * t, 8)).view(b, t, 8)
            return self.out(F.silu(gate) * y)

    model = run.compile(Retention().float())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.98))
    for _ in range(3):
        text = run.randint(WORDS, BATCH, 6)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    model.eval()
    with torch.no_grad():
        run.rows("scores", model(run.randint(WORDS, BATCH, 5)))
    run.state(model)


@SECTION("a Mamba block in float32: selective scan, groups by marks on parameters", tolerance=SINGLE)
def selective_scan(run: Run) -> None:
    class Mamba(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.enter, self.leave = (
                nn.LayerNorm(8),
                nn.Linear(8, 24, bias=False),
                nn.Linear(12, 8, bias=False),
            )
            self.conv = nn.Conv1d(12, 12, 3, groups=12, padding=2)
            self.select, self.rate = nn.Linear(12, 2 + 2 * 4, bias=False), nn.Linear(2, 12)
            self.a_log = nn.Parameter(torch.log(torch.arange(1, 5.0).repeat(12, 1)))
            self.skip = nn.Parameter(torch.ones(12))
            self.a_log._no_weight_decay = self.skip._no_weight_decay = True  # type: ignore[attr-defined]

        def forward(self, x: Tensor) -> Any:
            t = x.size(1)
            u, z = self.enter(self.norm(x)).chunk(2, dim=-1)
            u = F.silu(self.conv(u.transpose(1, 2))[:, :, :t]).transpose(1, 2)
            delta, b, c = torch.split(self.select(u), [2, 4, 4], dim=-1)
            delta, a = F.softplus(self.rate(delta)), -torch.exp(self.a_log.float())
            kept = torch.exp(torch.einsum("btd,dn->btdn", delta, a))
            fresh = torch.einsum("btd,btn,btd->btdn", delta, b, u)
            state, found = torch.zeros_like(fresh[:, 0]), []
            for i in range(t):
                state = kept[:, i] * state + fresh[:, i]
                found.append(torch.einsum("bdn,bn->bd", state, c[:, i]))
            y = torch.stack(found, dim=1) + u * self.skip
            return x + self.leave(y * F.silu(z))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.out = nn.Embedding(WORDS, 8), Mamba(), nn.Linear(8, WORDS, bias=False)

        def forward(self, words: Tensor) -> Any:
            return self.out(self.block(self.embed(words)))

    model = run.compile(Net().float())
    for step in range(3):
        if step == 0 or step == 2:  # groups made before the first call, and again after it
            free = [p for p in model.parameters() if getattr(p, "_no_weight_decay", False)]
            rest = [p for p in model.parameters() if not getattr(p, "_no_weight_decay", False)]
            run.same("free", len(free))
            optimizer = torch.optim.AdamW(rest, lr=0.01)
            optimizer.add_param_group({"params": free, "weight_decay": 0.0})
        text = run.randint(WORDS, BATCH, 6)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("speech with CTC: strided convolutions, a GRU, lengths from a formula, clipped AdamW", free=("rnn",))
def speech_ctc(run: Run) -> None:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(4, 6, 3, stride=2, padding=1), nn.BatchNorm1d(6)
            self.rnn, self.out = nn.GRU(6, 4, bidirectional=True, batch_first=True), nn.Linear(8, 5)

        def forward(self, x: Tensor, lengths: Tensor) -> Any:
            x = F.hardtanh(self.norm(self.conv(x)), 0, 20)
            lengths = torch.div(lengths + 2 - 3, 2, rounding_mode="floor") + 1
            kept = torch.arange(x.size(2))[None, :] < lengths[:, None]
            x = self.rnn((x * kept.unsqueeze(1)).transpose(1, 2))[0]
            return self.out(x).log_softmax(-1), lengths

    model = run.compile(Speech())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    for _ in range(3):
        words, lengths = run.randint(4, BATCH, 3) + 1, run.randint(2, BATCH) + 1
        scores, sizes = model(run.randn(BATCH, 4, 12), run.randint(4, BATCH) + 9)
        loss = criterion(scores.transpose(0, 1), words, sizes, lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        run.mean("loss", loss)
        run.rows("sizes", sizes)
    run.state(model)


@SECTION("CLIP: two towers, all pairs as scores, both directions, a learned temperature that is clamped")
def contrastive_towers(run: Run) -> None:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.text, self.image = nn.Embedding(WORDS, 6), nn.Linear(6, 8), nn.Linear(5, 8, bias=False)
            self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

        def forward(self, image: Tensor, words: Tensor) -> Any:
            a, b = self.image(image), self.text(self.embed(words).mean(1))
            a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
            scores = self.logit_scale.exp() * a @ b.t()
            return scores, scores.t()

    model = run.compile(Clip())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, betas=(0.9, 0.98), eps=1e-6)
    for _ in range(4):
        optimizer.zero_grad()
        images, texts = model(run.randn(BATCH, 5), run.randint(WORDS, BATCH, 3))
        labels = torch.arange(images.shape[0])
        loss = (F.cross_entropy(images, labels) + F.cross_entropy(texts, labels)) / 2
        loss.backward()
        optimizer.step()
        model.logit_scale.data = torch.clamp(model.logit_scale.data, 0, 2.65)
        run.same("loss", loss)
        run.same("images", images)
    run.state(model)


class _Lora(nn.Linear):
    """A frozen layer with a trained product of low rank, which evaluation adds to the weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad = False
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))
        self.merged = False

    def train(self, mode: bool = True) -> _Lora:
        """Merge for evaluation, and take it back for training."""
        super().train(mode)
        if mode is self.merged:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.lora_b @ self.lora_a) * 0.5
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        found: Tensor = F.linear(x, self.weight, self.bias)
        more: Tensor = x @ self.lora_a.T @ self.lora_b.T
        return found if self.merged else found + more * 0.5


@SECTION("LoRA: frozen weights with products of low rank, merged by `eval()` and taken back by `train()`")
def lora_merged(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(WORDS, 6), _Lora(6, 8), _Lora(8, 4)

        def forward(self, words: Tensor) -> Any:
            return self.head(torch.tanh(self.body(self.embed(words)))).mean(1)

    plain = Net()
    for name, p in plain.named_parameters():
        p.requires_grad = "lora_" in name or "head.bias" in name
    model = run.compile(plain)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        model.train()
        for _ in range(2):
            loss = F.cross_entropy(model(run.randint(WORDS, BATCH, 3)), run.randint(4, BATCH))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.mean("loss", loss)
        model.eval()
        with torch.no_grad():
            run.rows("scores", model(run.randint(WORDS, BATCH, 3)))
    run.state(model, "merged ")
    model.train()
    run.state(model)


@SECTION("ELECTRA: a generator and a discriminator of one embedding, words drawn by given Gumbel noise")
def replaced_words(run: Run) -> None:
    class Electra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.small, self.large = nn.Embedding(WORDS, 6), CausalBlock(6, 1, 5), CausalBlock(6, 2, 5)
            self.decode, self.judge = nn.Linear(6, WORDS), nn.Linear(6, 1)
            self.decode.weight = self.embed.weight

        def forward(self, words: Tensor, hidden: Tensor, noise: Tensor) -> Any:
            masked = torch.where(hidden, torch.full_like(words, 0), words)
            scores = self.decode(self.small(self.embed(masked)))
            with torch.no_grad():
                drawn = torch.where(hidden, (scores + noise).argmax(-1), words)
            wrong = (drawn != words).to(scores.dtype)
            told = self.judge(self.large(self.embed(drawn))).squeeze(-1)
            each = F.cross_entropy(scores.transpose(1, 2), words, reduction="none") * hidden
            return each.sum(1) / 2, F.binary_cross_entropy_with_logits(told, wrong, reduction="none").mean(1)

    model = run.compile(Electra())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def loss() -> Tensor:
        words, hidden = run.randint(WORDS, BATCH, 5), run.randint(2, BATCH, 5).bool()
        generator, discriminator = model(words, hidden, -torch.log(run.randn(BATCH, 5, WORDS).square() + 0.1))
        found: Tensor = generator.mean() + 50.0 * discriminator.mean()
        return found

    train(run, model, optimizer, loss)


@SECTION("a Universal Transformer: one block repeated, each word halts by itself, a cost of pondering", free=("steps",))
def adaptive_depth(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.halt = nn.Embedding(WORDS, 8), CausalBlock(8, 2, 5), nn.Linear(8, 1)
            self.steps, self.out = nn.Embedding(3, 8), nn.Linear(8, WORDS)

        def forward(self, words: Tensor) -> Any:
            x = self.embed(words)
            halted, updates, mixed = (torch.zeros_like(x[..., :1]) for _ in range(3))
            mixed = torch.zeros_like(x)
            for i in range(3):
                p = torch.sigmoid(self.halt(x))
                running = (halted < 1.0).to(x.dtype)
                now = (halted + p * running > 0.9).to(x.dtype) * running if i < 2 else running
                weight = p * (running - now) + now * (1 - halted)
                halted, updates = halted + weight, updates + running
                x = self.block(x + self.steps.weight[i])
                mixed = mixed + weight * x
            return self.out(mixed), (updates + 1 - halted.detach() + p).mean((1, 2))

    model = run.compile(Net())
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.02)

    def loss() -> Tensor:
        text = run.randint(WORDS, BATCH, 6)
        scores, ponder = model(text[:, :-1])
        found: Tensor = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten()) + 0.1 * ponder.mean()
        return found

    train(run, model, optimizer, loss)


@SECTION("multiple choice: choices flattened into the batch, a trained prefix of keys and values, a frozen body")
def prefix_choices(run: Run) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.q, self.kv = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, 16)
            self.prefix, self.drop, self.head = (
                nn.Parameter(torch.randn(3, 16)),
                nn.Dropout(0.0),
                nn.Linear(8, 1, bias=False),
            )

        def forward(self, words: Tensor, mask: Tensor) -> Any:
            choices = words.shape[1]
            words, mask = words.view(-1, words.size(-1)), mask.view(-1, mask.size(-1))
            x = self.embed(words)
            kv = torch.cat([self.prefix.unsqueeze(0).expand(x.shape[0], -1, -1), self.kv(x)], dim=1)
            k, v = kv.view(x.shape[0], -1, 2, 8).unbind(2)
            seen = torch.cat([mask.new_ones(x.shape[0], 3), mask], dim=1).bool()
            y = F.scaled_dot_product_attention(self.q(x), k, v, attn_mask=seen.unsqueeze(1))
            return self.head(y[:, 0]).view(-1, choices)

    plain = Net()
    for part in (plain.embed, plain.q, plain.kv):
        part.requires_grad_(False)
    model = run.compile(plain)
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=0.05)

    def loss() -> Tensor:
        scores = model(run.randint(WORDS, BATCH, 3, 5), run.randint(2, BATCH, 3, 5))
        return F.cross_entropy(scores, run.randint(3, BATCH), label_smoothing=0.1)

    train(run, model, optimizer, loss)
