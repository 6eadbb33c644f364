"""Public training programs on language: their models at small sizes, and their loops with all that is in them."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training import Run
from tests.patterns.nets import BATCH
from tests.patterns.pattern import Section

SECTION = Section("Public training programs")

WORDS = 12


class _SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.resid_dropout, self.dropout, self.n_head = nn.Dropout(dropout), dropout, heads

    def forward(self, x: Tensor) -> Any:
        b, t, c = x.size()
        q, k, v = (z.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for z in self.c_attn(x).split(c, dim=2))
        rate = self.dropout if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=rate, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class _LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), None

    def forward(self, x: Tensor) -> Any:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = _LayerNorm(width), _SelfAttention(width, 2), _LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False), nn.Dropout(0.0)
        )

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """nanoGPT's model: a dictionary of modules, a tied head, the loss inside, optimizer and generation as methods."""

    transformer: Any

    def __init__(self, block_size: int = 6, n_layer: int = 2, n_embd: int = 8) -> None:
        super().__init__()
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, n_embd), "wpe": nn.Embedding(block_size, n_embd), "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([_Block(n_embd) for _ in range(n_layer)]), "ln_f": _LayerNorm(n_embd),
            }
        )  # fmt: skip
        self.lm_head = nn.Linear(n_embd, WORDS, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * n_layer))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        """Scores of the next words and the loss, or the last word's scores."""
        _, t = idx.size()
        assert t <= self.block_size, f"cannot forward sequence of length {t}, block size is only {self.block_size}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, weight_decay: float, rate: float, betas: tuple[float, float]) -> Any:
        """AdamW with decay of matrices alone."""
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=betas)

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """More words, drawn among the likeliest `top_k`."""
        for _ in range(max_new_tokens):
            last = idx if idx.size(1) <= self.block_size else idx[:, -self.block_size :]
            logits, _ = self(last)
            logits = logits[:, -1, :] / temperature
            if top_k is not None:
                v, _ = torch.topk(logits, min(top_k, logits.size(-1)))
                logits[logits < v[:, [-1]]] = -float("Inf")
            drawn = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)
            idx = torch.cat((idx, drawn), dim=1)
        return idx


def get_lr(step: int, warmup: int = 2, last: int = 5, rate: float = 0.02, least: float = 0.002) -> float:
    """A warm-up and half a cosine."""
    if step < warmup:
        return rate * (step + 1) / (warmup + 1)
    if step > last:
        return least
    return least + 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / (last - warmup))) * (rate - least)


def _nanogpt(run: Run, alone: bool) -> None:
    """The loop of `train.py`; process 0 evaluates and saves `alone`, or all do."""
    data = {split: torch.randint(WORDS, (200,), generator=run.draws) for split in ("train", "val")}
    best = 1e9

    def get_batch(split: str, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data[split]) - 6, (BATCH,), generator=generator or run.draws)
        starts = starts if generator else run.own(starts)
        x = torch.stack([data[split][i : i + 6] for i in starts])
        return x, torch.stack([data[split][i + 1 : i + 7] for i in starts])

    @torch.no_grad()
    def estimate_loss() -> dict[str, Tensor]:
        out, own = {}, torch.Generator().manual_seed(step) if alone else None
        model.eval()
        for split in ("train", "val"):
            losses = torch.zeros(2)
            for k in range(2):
                with ctx:
                    _, loss = model(*get_batch(split, own))
                losses[k] = loss.item()
            out[split] = losses.mean()
        model.train()
        return out

    def evaluated() -> dict[str, Any]:
        nonlocal best
        best = min(best, estimate_loss()["val"].item())
        return {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": {"n_layer": 2},
            "iter_num": step, "best_val_loss": best,
        }  # fmt: skip

    def made() -> tuple[Any, Any]:
        plain = Gpt()
        return plain, plain.configure_optimizers(0.1, 0.02, (0.9, 0.95))

    ctx, scaler = nullcontext(), torch.amp.GradScaler("cpu", enabled=False)
    raw_model, optimizer = made()
    model = run.compile(raw_model)
    x, y = get_batch("train")
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(step)
        if step % 2 == 0:
            checkpoint = None if alone else evaluated()
            saved = run.from_first(lambda checkpoint=checkpoint: checkpoint or evaluated())  # type: ignore[misc]
            run.same("estimate", saved["best_val_loss"])
        if step == 2:  # ended here, and started again with init_from = "resume"
            raw_model, optimizer = made()
            raw_model.load_state_dict({name.removeprefix("_orig_mod."): p for name, p in saved["model"].items()})
            optimizer.load_state_dict(saved["optimizer"])
            model = run.compile(raw_model)
        for micro_step in range(2):
            if run.ranks > 1:
                model.require_backward_grad_sync = micro_step == 1
            with ctx:
                _, loss = model(x, y)
                loss = loss / 2
            x, y = get_batch("train")
            scaler.scale(loss).backward()
            run.same("loss", loss)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    model.eval()
    run.rows("text", model.generate(run.randint(WORDS, BATCH, 2), 6, temperature=0.8, top_k=1))
    run.state(model)


@SECTION(
    "nanoGPT `train.py`: micro-steps with `require_backward_grad_sync`, a scaler, the rate by hand, `generate`; "
    "process 0 alone estimates the loss and saves, all resume",
    refused={
        "ranks/shards": "move it out of `if rank == 0:`",
        "ranks/mixed": "move it out of `if rank == 0:`",
        "ranks/slices": "move it out of `if rank == 0:`",
    },
    why="where parameters are cut, one process does not have them all; call `estimate_loss()` and `state_dict()` on "
    "every process, or evaluate `model.plain()`",
)
def nanogpt(run: Run) -> None:
    _nanogpt(run, alone=True)


@SECTION("the same, `estimate_loss()` and `model.state_dict()` called on every process")
def nanogpt_together(run: Run) -> None:
    _nanogpt(run, alone=False)


class RnnModel(nn.Module):
    """The LSTM of `word_language_model`."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.ntoken, self.nhid, self.nlayers = WORDS, width, layers
        self.drop, self.encoder = nn.Dropout(0.0), nn.Embedding(WORDS, width)
        self.rnn, self.decoder = nn.LSTM(width, width, layers, dropout=0.0), nn.Linear(width, WORDS)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: Tensor, hidden: Any) -> Any:
        """Log probabilities of words after those of `[T, B]`, and the state."""
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz: int) -> tuple[Tensor, Tensor]:
        """A state of zeros."""
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


class TransformerModel(nn.Transformer):
    """The transformer of `word_language_model`, whose decoder is a linear layer."""

    src_mask: Tensor | None

    def __init__(self, width: int) -> None:
        super().__init__(d_model=width, nhead=2, dim_feedforward=width, num_encoder_layers=1, dropout=0.0)
        self.src_mask, self.ninp = None, width
        position, rates = torch.arange(10.0).unsqueeze(1), torch.exp(torch.arange(0, width, 2) * (-4.0 / width))
        self.register_buffer("pe", torch.cat([torch.sin(position * rates), torch.cos(position * rates)], 1)[:, None])
        self.input_emb, self.decoder = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)

    def forward(self, src: Tensor, has_mask: bool = True) -> Any:  # type: ignore[override]
        """Log probabilities of words after those of `[T, B]`."""
        if has_mask and (self.src_mask is None or self.src_mask.size(0) != len(src)):
            self.src_mask = torch.log(torch.tril(torch.ones(len(src), len(src))))
        src = self.input_emb(src) * math.sqrt(self.ninp)
        output = self.encoder(src + self.pe[: src.size(0)], mask=self.src_mask)  # type: ignore[index]
        return F.log_softmax(self.decoder(output), dim=-1)


def _word_language_model(run: Run, plain: nn.Module) -> None:
    """The loop of `word_language_model`: text in columns, its own SGD, the rate divided where validation is worse."""

    def repackage_hidden(h: Any) -> Any:
        return h.detach() if isinstance(h, Tensor) else tuple(repackage_hidden(v) for v in h)

    def get_batch(source: Tensor, i: int) -> tuple[Tensor, Tensor]:
        seq_len = min(4, len(source) - 1 - i)
        return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].reshape(-1)

    def result(words: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        if not recurrent:
            return model(words).view(-1, WORDS), None
        return model(words, repackage_hidden(hidden))  # type: ignore[no-any-return]

    def first_state() -> Any:
        return model.init_hidden(BATCH // run.ranks) if recurrent else None

    def evaluate(source: Tensor) -> Tensor:
        model.eval()
        total_loss, hidden = torch.zeros(()), first_state()
        with torch.no_grad():
            for i in range(0, source.size(0) - 1, 4):
                words, targets = get_batch(source, i)
                output, hidden = result(words, hidden)
                total_loss += len(words) * criterion(output, targets)
        if run.ranks > 1:
            torch.distributed.all_reduce(total_loss)
        return total_loss / run.ranks / (len(source) - 1)

    recurrent = isinstance(plain, RnnModel)
    model, criterion, rate, best = run.compile(plain, dim=1), nn.NLLLoss(), 2.0, math.inf
    train_data, val_data = (run.randint(WORDS, n, BATCH, dim=1) for n in (11, 6))
    for _ in range(3):
        model.train()
        hidden = first_state()
        for i in range(0, train_data.size(0) - 1, 4):
            words, targets = get_batch(train_data, i)
            model.zero_grad()
            output, hidden = result(words, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            for p in model.parameters():
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-rate)
            run.mean("loss", loss)
        val_loss = evaluate(val_data)
        run.same("validation", val_loss)
        if val_loss.item() < best:
            best, kept = val_loss.item(), copy.deepcopy(model.state_dict())
        else:
            rate /= 4.0
    model.load_state_dict(kept)
    run.same("test", evaluate(val_data))
    run.state(model)


@SECTION(
    "pytorch/examples `word_language_model`: an LSTM of [T, B] words, its state carried on (`dim=1`), tied weights, "
    "SGD by hand, the rate divided on a plateau",
    free=("rnn",),
)
def word_language_model(run: Run) -> None:
    _word_language_model(run, RnnModel(8, 2))


@SECTION(
    "pytorch/examples `word_language_model --model Transformer`: a subclass of `nn.Transformer` that keeps its mask",
    free=("encoder.layers.0.self_attn.out_proj",),
)
def word_transformer(run: Run) -> None:
    _word_language_model(run, TransformerModel(8))


@SECTION(
    "DPO: chosen and rejected answers in one batch, a frozen reference, RMSprop with warm-up, accumulation, rewards, "
    "evaluation"
)
def dpo(run: Run) -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.block = nn.Embedding(WORDS, 8), nn.Embedding(10, 8), _Block(8)
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, WORDS, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> Any:
            return self.head(self.norm(self.block(self.words(ids) + self.places(torch.arange(ids.shape[1])))))

    policy_plain = Language()
    reference = run.compile(copy.deepcopy(policy_plain).eval().requires_grad_(False))
    policy = run.compile(policy_plain)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

    def logps(logits: Tensor, labels: Tensor) -> Tensor:
        labels = labels[:, 1:].clone()
        mask = labels != -100
        labels[labels == -100] = 0
        per_token = torch.gather(logits[:, :-1].log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
        return (per_token * mask).sum(-1)

    def forward(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        found = logps(model(ids.flatten(0, 1)), labels.flatten(0, 1)).view(-1, 2)  # pairs, so that parts stay samples
        return found[:, 0], found[:, 1]

    def metrics() -> tuple[Tensor, Tensor]:
        ids = run.randint(WORDS, BATCH, 2, 6)
        labels = torch.where(torch.arange(6) < 2, -100, ids)
        chosen, rejected = forward(policy, ids, labels)
        with torch.no_grad():
            ref_chosen, ref_rejected = forward(reference, ids, labels)
        logits = (chosen - rejected) - (ref_chosen - ref_rejected)
        losses = -F.logsigmoid(0.5 * logits) * 0.9 - F.logsigmoid(-0.5 * logits) * 0.1
        return losses.mean(), 0.5 * (chosen - ref_chosen).detach().mean()

    for _ in range(3):
        policy.train()
        for _ in range(2):
            loss, reward = metrics()
            (loss / 2).backward()
            run.mean("loss", loss)
            run.mean("reward", reward)
        run.same("norm", nn.utils.clip_grad_norm_(policy.parameters(), 1.0))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        policy.eval()
        with torch.no_grad():
            run.mean("evaluation", metrics()[0])
    run.state(policy)
