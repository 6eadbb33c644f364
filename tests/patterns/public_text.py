"""Public training programs on pairs of texts, tags and adapters: their models at small sizes, and their loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.training import Run
from tests.patterns.nets import BATCH, train
from tests.patterns.pattern import Section

SECTION = Section("Public training programs")

WORDS, PAD = 12, 1


class _TokenEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.width = nn.Embedding(WORDS, width), width
        angles = torch.outer(torch.arange(10.0), torch.exp(-torch.arange(0, width, 2) * math.log(10000) / width))
        places = torch.stack([torch.sin(angles), torch.cos(angles)], 2).flatten(1)
        self.register_buffer("pos_embedding", places)

    def forward(self, tokens: Tensor) -> Any:  # [T, B], or [B, T] where the batch is first
        return self.embedding(tokens.long()) * math.sqrt(self.width)


class _Seq2Seq(nn.Module):
    """The model of `language_translation`, with its masks as arguments; encoder and decoder as methods, too."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.causal = {"src_is_causal": False, "tgt_is_causal": True} if batch_first else {}
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=batch_first)
        self.generator, self.src_tok_emb, self.tgt_tok_emb = nn.Linear(8, WORDS), _TokenEmbedding(8), _TokenEmbedding(8)

    def placed(self, embedding: Any, tokens: Tensor) -> Any:
        x, places = embedding(tokens), embedding.pos_embedding
        return x + (places[: x.size(1)] if self.batch_first else places[: x.size(0)].unsqueeze(1))

    def forward(self, src: Tensor, trg: Tensor, masks: tuple[Tensor, Tensor], paddings: tuple[Tensor, Tensor]) -> Any:
        src_emb, tgt_emb = self.placed(self.src_tok_emb, src), self.placed(self.tgt_tok_emb, trg)
        outs = self.transformer(
            src_emb, tgt_emb, *masks, None, **self.causal,
            src_key_padding_mask=paddings[0], tgt_key_padding_mask=paddings[1], memory_key_padding_mask=paddings[0],
        )  # fmt: skip
        return self.generator(outs)

    def encode(self, src: Tensor, src_mask: Tensor) -> Any:
        return self.transformer.encoder(self.placed(self.src_tok_emb, src), src_mask)

    def decode(self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor) -> Any:
        return self.transformer.decoder(self.placed(self.tgt_tok_emb, tgt), memory, tgt_mask)


def _translate(run: Run, batch_first: bool) -> None:
    """The loop of `language_translation`: masks made in the script, the decoder called word by word at the end."""
    time = int(batch_first)

    def square_mask(size: int) -> Tensor:
        return torch.zeros(size, size).masked_fill(torch.ones(size, size).triu(1) == 1, float("-inf"))

    def padding(tokens: Tensor) -> Tensor:
        seen = tokens == PAD
        return (seen if batch_first else seen.transpose(0, 1)).to(torch.get_default_dtype()) * -1e9

    def words(length: int) -> Tensor:
        whole = torch.randint(2, WORDS, (BATCH, length), generator=run.draws)
        whole[:, 0], whole[::2, -1] = 0, PAD  # as many words in each half of the batch
        found = run.own(whole)
        return found if batch_first else found.transpose(0, 1).contiguous()

    model = run.compile(_Seq2Seq(batch_first), dim=1 - time)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    loss_fn = nn.CrossEntropyLoss(ignore_index=PAD)
    # eps is 1e-9 there, with which biases of keys, whose gradients are rounding alone, take whole steps along it.
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, betas=(0.9, 0.98), eps=1e-5)
    for _ in range(3):
        src, tgt = words(5), words(7)
        given, out = tgt.narrow(time, 0, 6), tgt.narrow(time, 1, 6)
        masks = torch.zeros(5, 5), square_mask(6)
        logits = model(src, given, masks, (padding(src), padding(given)))
        optimizer.zero_grad()
        loss = loss_fn(logits.reshape(-1, logits.shape[-1]), out.reshape(-1))
        loss.backward()
        optimizer.step()
        run.mean("loss", loss)
    model.eval()
    with torch.no_grad():
        src = words(5)
        memory = model.encode(src, torch.zeros(5, 5))
        ys = src.narrow(time, 0, 1)
        for size in (1, 2, 3):
            out = model.decode(ys, memory, square_mask(size))
            prob = model.generator(out.select(time, -1))
            ys = torch.cat([ys, prob.argmax(1).unsqueeze(time)], dim=time)
        run.rows("translated", ys, 1 - time)
    run.state(model)


@SECTION(
    "pytorch/examples `language_translation`: `nn.Transformer` of [T, B] words with [B, T] padding masks (`dim=1`)",
    refused={"*": "src_is_causal=False, tgt_is_causal=True"},
    why="it looks at masks to see whether they are causal, and samples lie along two dimensions; say "
    "`src_is_causal=False, tgt_is_causal=True`, and take `batch_first=True`",
)
def language_translation(run: Run) -> None:
    _translate(run, batch_first=False)


@SECTION(
    "the same with `batch_first=True` and `tgt_is_causal=True`: masks as arguments, decoded word by word by methods",
    free=(
        "transformer.encoder.layers.0.self_attn.out_proj",
        "transformer.decoder.layers.0.self_attn.out_proj",
        "transformer.decoder.layers.0.multihead_attn.out_proj",
    ),
)
def language_translation_batch_first(run: Run) -> None:
    _translate(run, batch_first=True)


def _tagger(run: Run, total_length: int | None) -> None:
    class LstmTagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word_embeddings = nn.Embedding(WORDS, 6, padding_idx=0)
            self.lstm, self.hidden2tag = nn.LSTM(6, 4, batch_first=True, bidirectional=True), nn.Linear(8, 5)

        def forward(self, sentences: Tensor, lengths: Tensor) -> Any:
            packed = pack_padded_sequence(
                self.word_embeddings(sentences), lengths, batch_first=True, enforce_sorted=False
            )
            out, _ = self.lstm(packed)
            out, _ = pad_packed_sequence(out, batch_first=True, total_length=total_length)
            return F.log_softmax(self.hidden2tag(out), dim=-1)

    model = run.compile(LstmTagger())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    loss_function = nn.NLLLoss(ignore_index=-1, reduction="sum")
    for _ in range(3):
        lengths = run.own(torch.randperm(8, generator=run.draws) % 4 + 4)
        inside = torch.arange(7) < lengths[:, None]
        sentences = (run.randint(WORDS - 1, BATCH, 7) + 1) * inside
        targets = run.randint(5, BATCH, 7).masked_fill(~inside, -1)
        model.zero_grad()
        tag_scores = model(sentences, lengths)
        found = tag_scores.flatten(0, 1)
        loss = loss_function(found, targets[:, : tag_scores.size(1)].flatten()) / BATCH * run.ranks
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.mean("loss", loss)
    model.eval()
    with torch.no_grad():
        tags = model(sentences, lengths).argmax(-1)
        run.rows("tags", tags * inside[:, : tags.size(1)])
    scheduler.step(0.0)
    run.state(model)


@SECTION("an LSTM tagger of packed sentences, unpacked to their whole length (`total_length=`)", free=("lstm",))
def packed_tagger(run: Run) -> None:
    _tagger(run, 7)


@SECTION(
    "the same, unpacked to the length of the longest sentence",
    refused={"*": "give total_length=x.size(1)"},
    why="replicas would return results of different lengths; give `pad_packed_sequence` a `total_length`",
    free=("lstm",),
)
def packed_tagger_longest(run: Run) -> None:
    _tagger(run, None)


class _SkipGram(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.u_embeddings = nn.Embedding(WORDS, 6, sparse=sparse)
        self.v_embeddings = nn.Embedding(WORDS, 6, sparse=sparse)
        nn.init.uniform_(self.u_embeddings.weight.data, -0.5, 0.5)

    def forward(self, pos_u: Tensor, pos_v: Tensor, neg_v: Tensor) -> Any:
        emb_u, emb_v, emb_neg_v = self.u_embeddings(pos_u), self.v_embeddings(pos_v), self.v_embeddings(neg_v)
        score = -F.logsigmoid(torch.clamp(torch.sum(torch.mul(emb_u, emb_v), dim=1), max=10, min=-10))
        neg_score = torch.clamp(torch.bmm(emb_neg_v, emb_u.unsqueeze(2)).squeeze(2), max=10, min=-10)
        return torch.mean(score - torch.sum(F.logsigmoid(-neg_score), dim=1))


def _skip_grams(run: Run, sparse: bool) -> None:
    model = run.compile(_SkipGram(sparse))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    if sparse:
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(run.randint(WORDS, BATCH), run.randint(WORDS, BATCH), run.randint(WORDS, BATCH, 3))
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.same("loss", loss)
    run.same("saved", model.u_embeddings.weight.detach().clone())
    run.state(model)


@SECTION(
    "word2vec: skip-grams with negative samples, `sparse=True` tables, SparseAdam",
    refused={"*": "asks for a sparse gradient"},
    why="devices sum dense gradients; make the tables with `sparse=False`, and take Adam",
)
def word2vec(run: Run) -> None:
    _skip_grams(run, sparse=True)


@SECTION("the same with `sparse=False` and Adam")
def word2vec_dense(run: Run) -> None:
    _skip_grams(run, sparse=False)


class _Conv1D(nn.Module):
    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.weight, std=0.2)

    def forward(self, x: Tensor) -> Any:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.size()[:-1], self.nf)


class _Gpt2Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.c_attn, self.c_proj = nn.LayerNorm(8), nn.LayerNorm(8), _Conv1D(24, 8), _Conv1D(8, 8)
        self.c_fc, self.c_out = _Conv1D(16, 8), _Conv1D(8, 16)
        self.register_buffer(
            "bias", torch.tril(torch.ones(10, 10, dtype=torch.bool)).view(1, 1, 10, 10), persistent=False
        )

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> Any:
        q, k, v = (z.view(*z.shape[:2], 2, 4).transpose(1, 2) for z in self.c_attn(self.ln_1(x)).split(8, dim=2))
        if past is not None:
            k, v = torch.cat((past[0], k), dim=-2), torch.cat((past[1], v), dim=-2)
        weights = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(4)
        mask = self.bias[:, :, k.size(-2) - q.size(-2) : k.size(-2), : k.size(-2)]  # type: ignore[index]
        weights = torch.where(mask, weights, torch.full([], torch.finfo(weights.dtype).min, dtype=weights.dtype))
        y = torch.matmul(F.softmax(weights, dim=-1), v).transpose(1, 2).reshape(x.shape)
        x = x + self.c_proj(y)
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")), (k, v)


class _Gpt2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.ln_f = nn.Embedding(WORDS, 8), nn.Embedding(10, 8), nn.LayerNorm(8)
        self.h, self.lm_head = nn.ModuleList([_Gpt2Block(), _Gpt2Block()]), nn.Linear(8, WORDS, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(
        self, input_ids: Tensor, past: Any = None, labels: Tensor | None = None, use_cache: bool = False
    ) -> Any:
        start = past[0][0].size(-2) if past is not None else 0
        x = self.wte(input_ids) + self.wpe(torch.arange(start, start + input_ids.size(1)).unsqueeze(0))
        presents = []
        for i, block in enumerate(self.h):
            x, present = block(x, past[i] if past is not None else None)
            presents.append(present)
        found = {"logits": self.lm_head(self.ln_f(x))}
        if use_cache:
            found["past_key_values"] = tuple(presents)
        if labels is not None:
            shifted, wanted = found["logits"][..., :-1, :].contiguous(), labels[..., 1:].contiguous()
            found["loss"] = F.cross_entropy(shifted.view(-1, WORDS), wanted.view(-1))
        return found

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int) -> Tensor:
        past, given = None, input_ids
        for _ in range(max_new_tokens):
            out = self(given, past=past, use_cache=True)
            past, given = out["past_key_values"], out["logits"][:, -1].argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, given], dim=-1)
        return input_ids


@SECTION(
    "GPT-2 fine-tuned: the loss inside by `labels=`, then `model.generate()`, and decoding with a cache in the script"
)
def gpt2_generate(run: Run) -> None:
    model = run.compile(_Gpt2())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, (4 - step) / 4))
    for _ in range(2):
        model.train()
        for _ in range(2):
            ids = run.randint(WORDS, BATCH, 6)
            loss = model(input_ids=ids, labels=ids)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            run.same("loss", loss)
        model.eval()
        ids = run.randint(WORDS, BATCH, 3)
        run.rows("generated", model.generate(ids, max_new_tokens=4))
        past, given = None, ids
        with torch.no_grad():
            for _ in range(3):
                out = model(given, past=past, use_cache=True)
                past, given = out["past_key_values"], out["logits"][:, -1].argmax(-1, keepdim=True)
                run.rows("decoded", given)
    run.state(model)


class _LoraLinear(nn.Module):
    """A linear layer wrapped as peft wraps it: adapters by name in dictionaries of modules."""

    def __init__(self, base_layer: nn.Linear, r: int, alpha: float) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.active_adapters = base_layer, {"default": alpha / r}, ["default"]
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, base_layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)  # type: ignore[arg-type]
        self.disable_adapters = False

    def forward(self, x: Tensor) -> Any:
        result = self.base_layer(x)
        if self.disable_adapters:
            return result
        for name in self.active_adapters:
            lora_a, lora_b = self.lora_A[name], self.lora_B[name]
            result = result + lora_b(lora_a(self.lora_dropout[name](x))) * self.scaling[name]
        return result

    def merged(self) -> nn.Linear:
        """The plain layer with the adapter in its weight."""
        a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
        self.base_layer.weight.data += (b @ a) * self.scaling["default"]  # type: ignore[operator]
        return self.base_layer


def _replaced(model: nn.Module, kind: type, made: Any) -> nn.Module:
    """A model whose modules of one kind are exchanged."""
    for name, module in [(n, m) for n, m in model.named_modules() if isinstance(m, kind)]:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made(module))
    return model


@SECTION(
    "peft LoRA: linear layers of a GPT-2 wrapped, adapters trained alone, `disable_adapter()`, their state saved, "
    "`merge_and_unload`"
)
def peft_lora(run: Run) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(WORDS, 8), nn.LayerNorm(8)
            self.q_proj, self.v_proj, self.score = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, input_ids: Tensor) -> Any:
            x = self.norm(self.embed(input_ids))
            y = F.scaled_dot_product_attention(self.q_proj(x).unsqueeze(1), x.unsqueeze(1), self.v_proj(x).unsqueeze(1))
            return self.score(y.squeeze(1).mean(1))

    @contextmanager
    def disable_adapter(model: Any) -> Iterator[None]:
        wrapped = [m for m in model.modules() if isinstance(m, _LoraLinear)]
        for m in wrapped:
            m.disable_adapters = True
        yield
        for m in wrapped:
            m.disable_adapters = False

    plain = Body()
    plain.q_proj, plain.v_proj = (_LoraLinear(p, 2, 4.0) for p in (plain.q_proj, plain.v_proj))  # type: ignore[assignment]
    for name, p in plain.named_parameters():
        p.requires_grad = "lora_" in name or name.startswith("score")
    model = run.compile(plain)
    trained = [p for p in model.parameters() if p.requires_grad]
    run.same("trained", sum(p.numel() for p in trained))
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    for _ in range(2):
        train(
            run,
            model,
            optimizer,
            lambda: F.cross_entropy(model(run.randint(WORDS, BATCH, 5)), run.randint(4, BATCH)),
            2,
        )
        ids = run.randint(WORDS, BATCH, 5)
        with torch.no_grad(), disable_adapter(model):
            run.rows("reference", model(ids))
    weights = model.state_dict()
    base = {name.replace("base_layer.", ""): p for name, p in weights.items() if "lora_" not in name}
    saved = run.from_first(lambda: {name: p for name, p in weights.items() if "lora_" in name})
    fresh = Body()
    fresh.load_state_dict(base)
    fresh.q_proj, fresh.v_proj = (_LoraLinear(p, 2, 4.0) for p in (fresh.q_proj, fresh.v_proj))  # type: ignore[assignment]
    fresh.load_state_dict(saved, strict=False)
    merged = run.compile(_replaced(fresh, _LoraLinear, _LoraLinear.merged).eval())
    model.eval()
    with torch.no_grad():
        run.rows("merged", merged(ids))
        run.rows("adapted", model(ids))
