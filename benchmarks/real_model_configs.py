"""Small configurations of twelve well-known models with random weights, and the batches that they are trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo import _declare_torchvision

__all__ = ["MODELS", "Subject"]

BATCH, WORDS, LENGTH, CLASSES = 8, 64, 16, 8
LAYERS, WIDTH, HEADS = 2, 32, 4
TABLES = (16, 24, 8)
Batch = dict[str, Tensor]


def own_loss(result: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The loss that the model computes."""
    loss: Tensor = result.loss
    return loss


@dataclass(frozen=True)
class Subject:
    """A model that is trained; its functions belong to modules, as processes are sent their names.

    Args:
        build: makes the model in float64, with the same weights every time.
        batch: draws inputs by keyword, and `targets` where the loss is outside of the model; all samples.
        loss: of results and a batch, a mean over samples.
        settings: further arguments of the model, which are no tensors.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Any, Mapping[str, Tensor]], Tensor] = own_loss
    settings: Mapping[str, Any] = field(default_factory=dict)


class Recommender(nn.Module):
    """Dense features and bags of categories, all pairs of which interact (DLRM, Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="sum") for rows in TABLES)
        self.bottom = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        features = len(TABLES) + 1
        self.top = nn.Sequential(nn.Linear(WIDTH + features * (features - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(features, features, -1))

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """[samples, dense], [samples, tables, length] -> a score per sample."""
        first = self.bottom(dense)
        found = [table(indices) for table, indices in zip(self.tables, categories.unbind(1), strict=True)]
        features = torch.stack([first, *found], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        score: Tensor = self.top(torch.cat([first, products[:, self.pairs[0], self.pairs[1]]], 1))
        return score


def _transformers(kind: str, name: str, **sizes: Any) -> nn.Module:
    _declare_torchvision()
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model: nn.Module = getattr(transformers, name)(config)
    return model.double().train()


def _timm(module: str, name: str, **sizes: Any) -> nn.Module:
    _declare_torchvision()
    from timm import models  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model: nn.Module = getattr(getattr(models, module), name)(**sizes)
    return model.double().train()


def _recommender() -> nn.Module:
    torch.manual_seed(0)
    return Recommender().double()


def _words(draw: torch.Generator) -> Tensor:
    return torch.randint(1, WORDS - 1, (BATCH, LENGTH), generator=draw)


def _text(draw: torch.Generator) -> Batch:
    words = _words(draw)
    return {"input_ids": words, "labels": words}


def _reversed_text(draw: torch.Generator) -> Batch:
    words = _words(draw)
    return {"input_ids": words, "labels": words.flip(1)}


def _masked_text(draw: torch.Generator) -> Batch:
    """Texts of unequal lengths; labels at a third of the words."""
    words = _words(draw)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1), generator=draw)
    labels = words.masked_fill(torch.rand(BATCH, LENGTH, generator=draw) < 0.7, -100)
    return {"input_ids": words, "attention_mask": (torch.arange(LENGTH) < lengths).long(), "labels": labels}


def _images(draw: torch.Generator, side: int) -> Batch:
    images = torch.randn(BATCH, 3, side, side, generator=draw)
    return {"x": images, "targets": torch.randint(CLASSES, (BATCH,), generator=draw)}


def _texts_and_images(draw: torch.Generator) -> Batch:
    words = _words(draw)
    words[:, -1] = WORDS - 1  # the end of the text, whose features stand for it
    return {"input_ids": words, "pixel_values": torch.randn(BATCH, 3, 12, 12, generator=draw)}


def _clicks(draw: torch.Generator) -> Batch:
    categories = torch.stack([torch.randint(rows, (BATCH, 3), generator=draw) for rows in TABLES], 1)
    dense, targets = torch.randn(BATCH, 12, generator=draw), torch.rand(BATCH, 1, generator=draw)
    return {"dense": dense, "categories": categories, "targets": targets}


def _class_loss(result: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(result, batch["targets"])


def _click_loss(result: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.binary_cross_entropy_with_logits(result, batch["targets"])


_TEXT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 64, "max_position_embeddings": 2 * LENGTH,
}  # fmt: skip
_DECODER = {**_TEXT, "num_key_value_heads": 2, "use_cache": False, "pad_token_id": 0}
_GPT2 = {
    "vocab_size": WORDS, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 2 * LENGTH,
    "use_cache": False, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
_T5 = {
    "vocab_size": WORDS, "d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": LAYERS, "num_heads": HEADS,
    "dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip
_VIT = {
    "img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": HEADS, "num_classes": CLASSES,
    "reg_tokens": 3,
}  # fmt: skip
_SWIN = {
    "img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (4, 8),
    "num_classes": CLASSES, "drop_path_rate": 0.0,
}  # fmt: skip
_CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64), "num_classes": CLASSES}
_BERT = {**_TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MAMBA = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "state_size": 8, "use_cache": False,
}  # fmt: skip
_CLIP = {
    "text_config": {**_TEXT, "max_position_embeddings": LENGTH, "eos_token_id": WORDS - 1},
    "vision_config": {
        "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 64,
        "image_size": 12, "patch_size": 4,
    },
    "projection_dim": WIDTH,
}  # fmt: skip


def _decoder(kind: str, sizes: Mapping[str, Any]) -> Subject:
    return Subject(partial(_transformers, kind, f"{kind}ForCausalLM", **sizes), _text)


def _classifier(module: str, name: str, sizes: Mapping[str, Any], side: int) -> Subject:
    return Subject(partial(_timm, module, name, **sizes), partial(_images, side=side), _class_loss)


MODELS: Mapping[str, Subject] = {
    "gpt2": Subject(partial(_transformers, "GPT2", "GPT2LMHeadModel", **_GPT2), _text),
    "llama": _decoder("Llama", _DECODER),
    "phi3": _decoder("Phi3", _DECODER),
    "t5": Subject(partial(_transformers, "T5", "T5ForConditionalGeneration", **_T5), _reversed_text),
    "vit": _classifier("vision_transformer", "VisionTransformer", _VIT, 16),
    "swin": _classifier("swin_transformer", "SwinTransformer", _SWIN, 32),
    "convnext": _classifier("convnext", "ConvNeXt", _CONVNEXT, 32),
    "bert": Subject(partial(_transformers, "Bert", "BertForMaskedLM", **_BERT), _masked_text),
    "mixtral": _decoder("Mixtral", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mamba": _decoder("Mamba", _MAMBA),
    "clip": Subject(
        partial(_transformers, "CLIP", "CLIPModel", **_CLIP), _texts_and_images, settings={"return_loss": True}
    ),
    "dlrm": Subject(_recommender, _clicks, _click_loss),
}
