"""Programs people train on language and other sequences: models and loops as in well-known public code."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.training import Run
from tests.patterns.nets import BATCH, train
from tests.patterns.pattern import Section

SECTION = Section("Programs: language and sequences")

SINGLE = 1e-4  # float32 throughout, over a few steps
WORDS = 12


class CausalBlock(nn.Module):
    """Attention to what came before, and a feed-forward part, each with a norm before and a residual."""

    mask: Tensor

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: Tensor) -> Any:
        """As many words as came in."""
        b, t, c = x.size()
        q, k, v = (
            z.view(b, t, self.heads, c // self.heads).transpose(1, 2) for z in self.qkv(self.ln_1(x)).split(c, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
        y = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(b, t, c)
        x = x + self.proj(y)
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class _RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


@SECTION("a Llama in float32: complex rotary table, grouped queries, SwiGLU, RMSNorm, OneCycleLR", tolerance=SINGLE)
def llama(run: Run) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wq, self.wk, self.wv = (nn.Linear(16, n, bias=False) for n in (16, 8, 8))
            self.wo = nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor, turns: Tensor) -> Any:
            b, t, _ = x.shape
            q, k, v = (z.view(b, t, -1, 4) for z in (self.wq(x), self.wk(x), self.wv(x)))
            q, k = (
                torch.view_as_real(torch.view_as_complex(z.reshape(b, t, -1, 2, 2)) * turns.view(1, t, 1, 2)).flatten(3)
                for z in (q, k)
            )
            k, v = (torch.repeat_interleave(z, 2, dim=2) for z in (k, v))
            q, k, v = (z.transpose(1, 2) for z in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.wo(y.transpose(1, 2).reshape(b, t, -1))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm_1, self.norm_2 = Attention(), _RmsNorm(16), _RmsNorm(16)
            self.w1, self.w3 = nn.Linear(16, 24, bias=False), nn.Linear(16, 24, bias=False)
            self.w2 = nn.Linear(24, 16, bias=False)

        def forward(self, x: Tensor, turns: Tensor) -> Any:
            x = x + self.attention(self.norm_1(x), turns)
            y = self.norm_2(x)
            return x + self.w2(F.silu(self.w1(y)) * self.w3(y))

    class Llama(nn.Module):
        turns: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS, bias=False)
            self.layers, self.norm = nn.ModuleList(Layer() for _ in range(2)), _RmsNorm(16)
            angles = torch.outer(torch.arange(8).float(), 1.0 / (10000 ** (torch.arange(0, 4, 2).float() / 4)))
            self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

        def forward(self, words: Tensor) -> Any:
            h = self.embed(words)
            for layer in self.layers:
                h = layer(h, self.turns[: words.shape[1]])
            return self.out(self.norm(h)).float()

    model = run.compile(Llama().float())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=5)
    for length in (6, 6, 4, 6):
        text = run.randint(WORDS, BATCH, length + 1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("a T5 encoder: bias by buckets of relative positions, made by the first layer and used by all, padding mask")
def relative_buckets(run: Run) -> None:
    class Attention(nn.Module):
        def __init__(self, first: bool) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
            if first:
                self.bias = nn.Embedding(8, 2)

        def buckets(self, t: int) -> Tensor:
            far = torch.arange(t)[None, :] - torch.arange(t)[:, None]
            side, far = (far > 0).long() * 4, far.abs()
            large = 2 + (torch.log(far.clamp(min=1).double() / 2) / math.log(8 / 2) * 2).long()
            return side + torch.where(far < 2, far, large.clamp(max=3))

        def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None) -> Any:
            b, t, _ = x.shape
            q, k, v = (f(x).view(b, t, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
            if bias is None:
                bias = self.bias(self.buckets(t)).permute(2, 0, 1).unsqueeze(0) + mask
            weights = F.softmax(q @ k.transpose(3, 2) + bias, dim=-1)
            return self.o((weights @ v).transpose(1, 2).reshape(b, t, 8)), bias

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 4)
            self.layers = nn.ModuleList(Attention(i == 0) for i in range(3))

        def forward(self, words: Tensor) -> Any:
            dtype = torch.get_default_dtype()
            mask = (1.0 - words.ne(0).to(dtype))[:, None, None, :] * torch.finfo(dtype).min
            x, bias = self.shared(words), None
            for layer in self.layers:
                y, bias = layer(F.rms_norm(x, (8,)), mask, bias)
                x = x + y
            kept = words.ne(0).unsqueeze(-1)
            return self.head((x * kept).sum(1) / kept.sum(1).clamp(min=1))

    model = run.compile(Encoder())
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
    train(run, model, optimizer, lambda: F.cross_entropy(model(run.randint(WORDS, BATCH, 7)), run.randint(4, BATCH)), 4)


@SECTION("BERT: masked words given as positions and labels, tied decoder with a bias of its own, next-sentence head")
def masked_words(run: Run) -> None:
    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.kind, self.place = (
                nn.Embedding(WORDS, 8, padding_idx=0),
                nn.Embedding(2, 8),
                nn.Embedding(9, 8),
            )
            self.norm, self.drop = nn.LayerNorm(8, eps=1e-12), nn.Dropout(0.0)
            self.layer, self.pool = CausalBlock(8, 2, 9), nn.Linear(8, 8)
            self.transform, self.seen, self.next = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)
            self.bias = nn.Parameter(torch.zeros(WORDS))
            self.register_buffer("places", torch.arange(9).expand((1, -1)))

        def forward(self, words: Tensor, kinds: Tensor, where: Tensor, labels: Tensor, following: Tensor) -> Any:
            places = self.places[:, : words.size(1)]  # type: ignore[index]
            x = self.layer(self.drop(self.norm(self.word(words) + self.kind(kinds) + self.place(places))))
            at = torch.gather(x, 1, where.unsqueeze(-1).expand(-1, -1, x.size(-1)))
            scores = F.linear(self.seen(F.gelu(self.transform(at))), self.word.weight, self.bias)
            masked = F.cross_entropy(scores.view(-1, WORDS), labels.view(-1), ignore_index=-100)
            pooled = F.cross_entropy(self.next(torch.tanh(self.pool(x[:, 0]))), following)
            return {"loss": masked + pooled, "scores": scores}

    model = run.compile(Bert())
    plain = ["bias", "norm.weight", "seen.weight"]
    groups = [
        {"params": [p for n, p in model.named_parameters() if any(x in n for x in plain) is exempt],
         "weight_decay": 0.0 if exempt else 0.01}
        for exempt in (False, True)
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2, (6 - step) / 4))
    for _ in range(4):
        words, kinds = run.randint(WORDS, BATCH, 9), run.randint(2, BATCH, 9)
        where, labels, following = run.randint(9, BATCH, 3), run.randint(WORDS, BATCH, 3), run.randint(2, BATCH)
        labels = labels.masked_fill(where == 0, -100)
        found = model(words.scatter(1, where, 1), kinds, where, labels, following=following)
        found["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        model.zero_grad()
        run.same("loss", found["loss"])
        run.rows("scores", found["scores"])
    run.state(model)


@SECTION("a GRU encoder and decoder with additive attention; teacher forcing or not", free=("encoder",))
def translation(run: Run) -> None:
    class Seq2Seq(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(WORDS, 6), nn.Embedding(WORDS, 6)
            self.encoder, self.cell = nn.GRU(6, 8, batch_first=True), nn.GRUCell(14, 8)
            self.wa, self.ua, self.va, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, WORDS)

        def forward(self, source: Tensor, target: Tensor | None = None) -> Any:
            states, last = self.encoder(self.source(source))
            hidden, word = last[0], torch.zeros_like(source[:, 0])
            found = []
            for i in range(4):
                scores = self.va(torch.tanh(self.wa(hidden.unsqueeze(1)) + self.ua(states))).squeeze(2).unsqueeze(1)
                context = torch.bmm(F.softmax(scores, dim=-1), states).squeeze(1)
                hidden = self.cell(torch.cat((self.target(word), context), dim=1), hidden)
                found.append(self.out(hidden))
                word = target[:, i] if target is not None else found[-1].topk(1)[1].squeeze(-1).detach()
            return F.log_softmax(torch.stack(found, dim=1), dim=-1)

    model = run.compile(Seq2Seq())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    criterion = nn.NLLLoss()
    for forced in (True, False, True, False):
        source, target = run.randint(WORDS, BATCH, 5), run.randint(WORDS, BATCH, 4)
        optimizer.zero_grad()
        scores = model(source, target) if forced else model(source)
        loss = criterion(scores.view(-1, WORDS), target.view(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        run.mean("loss", loss)
    run.state(model)


@SECTION("a Transformer-XL: memories of every layer passed in and given back, relative shift, two lengths")
def segment_memory(run: Run) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv, self.r, self.o = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
            self.u, self.v, self.norm = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8)), nn.LayerNorm(8)

        def forward(self, x: Tensor, memory: Tensor, r: Tensor) -> Any:
            whole = torch.cat([memory, x], dim=1)
            t, n = x.size(1), whole.size(1)
            q, (k, v) = self.q(x), self.kv(whole).chunk(2, dim=-1)
            content = torch.einsum("bic,bjc->bij", q + self.u, k)
            place = torch.einsum("bic,jc->bij", q + self.v, self.r(r))
            place = F.pad(place, (1, 0)).view(-1, n + 1, t)[:, 1:].reshape(-1, t, n)
            later = torch.ones(t, n, dtype=torch.bool).triu(1 + n - t)
            weights = (content + place).masked_fill(later, -1e30).softmax(-1)
            return self.norm(x + self.o(weights @ v))

    class Xl(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers, self.out = (
                nn.Embedding(WORDS, 8),
                nn.ModuleList([Layer(), Layer()]),
                nn.Linear(8, WORDS),
            )
            self.register_buffer("rates", 1 / (100 ** (torch.arange(0, 8, 2) / 8)))

        def forward(self, words: Tensor, memories: list[Tensor]) -> Any:
            x, kept = self.embed(words), []
            n = words.size(1) + memories[0].size(1)
            angles = torch.outer(torch.arange(n - 1, -1, -1.0), self.rates)  # type: ignore[arg-type]
            r = torch.cat([angles.sin(), angles.cos()], dim=-1)
            for layer, memory in zip(self.layers, memories, strict=True):
                kept.append(torch.cat([memory, x], dim=1)[:, -4:].detach())
                x = layer(x, memory, r)
            return self.out(x), kept

    model = run.compile(Xl())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    memories = [torch.zeros(BATCH // run.ranks, 4, 8) for _ in range(2)]
    for length in (4, 4, 3, 4):
        text = run.randint(WORDS, BATCH, length + 1)
        optimizer.zero_grad()
        scores, memories = model(text[:, :-1], memories)
        loss = F.cross_entropy(scores.transpose(1, 2), text[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        run.mean("loss", loss)
        run.rows("memory", memories[1])
    run.state(model)


@SECTION("a Switch layer: the best expert by weight, balance loss over all words, router z-loss kept on `self`")
def switch_routing(run: Run) -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 4, bias=False)
            self.up, self.down = nn.Parameter(torch.randn(4, 8, 6) / 3), nn.Parameter(torch.randn(4, 6, 8) / 3)

        def forward(self, x: Tensor) -> Any:
            scores = self.router(x)
            gates = scores.softmax(-1)
            best, chosen = gates.max(-1)
            sent = F.one_hot(chosen, 4).to(x.dtype)
            self.balance = 4 * (sent.mean((0, 1)) * gates.mean((0, 1))).sum()
            self.z_loss = torch.logsumexp(scores, -1).square().mean()
            hidden = F.relu(torch.einsum("btd,edf->btef", x, self.up))
            return torch.einsum("btef,efd,bte->btd", hidden, self.down, sent * best.unsqueeze(-1))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.switch, self.out = nn.Embedding(WORDS, 8), Switch(), nn.Linear(8, WORDS)

        def forward(self, words: Tensor) -> Any:
            x = self.embed(words)
            return self.out(x + self.switch(x)), self.switch.balance, self.switch.z_loss

    model = run.compile(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        text = run.randint(WORDS, BATCH, 6)
        optimizer.zero_grad()
        scores, balance, z_loss = model(text[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        (loss + 0.1 * balance + 0.01 * z_loss).backward()
        optimizer.step()
        run.mean("loss", loss)
        run.same("balance", balance)
    run.state(model)
