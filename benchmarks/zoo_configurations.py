"""Small configurations of architectures of transformers: few layers, narrow, with a layer of every sort."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

__all__ = ["HEADS", "configurations", "first_layers", "small"]

HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
)  # fmt: skip

SMALL = {
    1: """first_k_dense_replace num_dense_layers moe_layer_start_index n_group topk_group encoder_sparse_step
        decoder_sparse_step""",
    2: """num_hidden_layers n_layer num_layers n_layers num_blocks num_layers_per_stack encoder_layers decoder_layers
        num_decoder_layers num_encoder_layers depth num_experts_per_tok moe_topk num_experts_per_token n_groups
        mamba_n_groups""",
    4: """num_attention_heads n_head num_heads n_heads mamba_n_heads mamba_num_heads encoder_attention_heads
        decoder_attention_heads linear_num_key_heads linear_num_value_heads num_experts
        n_routed_experts num_local_experts moe_num_experts""",
    16: """head_dim d_head d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim linear_key_head_dim linear_value_head_dim
        rotary_dim attention_window""",
    64: """hidden_size n_embd d_model dim embed_dim moe_intermediate_size q_lora_rank kv_lora_rank d_embed
        embedding_size embedding_dim""",
    128: "intermediate_size n_inner d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim max_position_embeddings n_positions",
    256: "vocab_size decoder_vocab_size vocab_size_per_layer_input",
}
"""Sizes of a small configuration by the names that configurations have for them."""


def small(kind: str) -> Any:
    """The configuration of a model type with small sizes; those that it does not have, or has smaller, are left.

    Layers are not dropped at random: a graph has every layer.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    config = CONFIG_MAPPING[kind]()
    for part in reversed(configurations(config)):
        _shrink(part)
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # what labels are padded with when they are shifted to be inputs
    seq2seq = getattr(modeling_auto, HEADS[1], {})
    if getattr(config, "is_encoder_decoder", False) and kind in seq2seq:
        config.architectures = [seq2seq[kind]]
    return config


def configurations(config: Any) -> list[Any]:
    """A configuration and those inside it."""
    from transformers import PretrainedConfig

    inside = [one for one in vars(config).values() if isinstance(one, PretrainedConfig)]
    return [config, *(part for one in inside for part in configurations(one))]


def _shrink(part: Any) -> None:
    """Set the sizes of one configuration, as far as they can be."""

    def put(name: str, value: Any) -> None:
        with suppress(Exception):  # a property that other sizes give, or a size that does not fit them
            setattr(part, name, value)

    def get(name: str) -> Any:
        with suppress(Exception):  # one that layers have each their own of
            return getattr(part, name, None)
        return None

    listed = {name: own for name, own in vars(part).items() if isinstance(own, list)}
    depth = get("num_hidden_layers")
    by_layer = {name.removeprefix("_"): own for name, own in listed.items() if depth and len(own) == depth > 2}
    unlike = {str(own): layer for layer, own in reversed(list(enumerate(zip(*by_layer.values(), strict=True))))}
    kept = sorted(unlike.values())[:4] if len(unlike) > 1 else [0, 1]
    heads = get("num_attention_heads")
    shared = isinstance(get("num_key_value_heads"), int) and get("num_key_value_heads") != heads
    for size, words in SMALL.items():
        for name in words.split():
            known = get(name)
            if isinstance(known, int) and not isinstance(known, bool) and known > size:
                put(name, size)
    if get("num_key_value_heads") is not None:
        put("num_key_value_heads", 2 if shared else 4)
    for name in ("depths", "num_blocks", "num_block_repeats"):  # of the stages of a model of images
        if isinstance(get(name), list):
            put(name, [1] * len(get(name)))
    if hasattr(part, "depth_coefficient"):
        put("depth_coefficient", 1.0)
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "speech_encoder_layerdrop"):
        if hasattr(part, name):
            put(name, 0.0)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if isinstance(get(name), int) and get(name) >= 256:
            put(name, 1)
    for count, width in (
        ("num_heads", "head_dim"),
        ("mamba_n_heads", "mamba_d_head"),
        ("mamba_num_heads", "mamba_head_dim"),
    ):
        expand = get("expand") or get("mamba_expand")
        if expand and get(count) and get(width):  # heads of a state space make up the expanded width
            put(width, int(expand * get("hidden_size") // get(count)))
            if get("mamba_d_ssm"):
                put("mamba_d_ssm", get(width) * get(count))
    if hasattr(part, "is_moe"):  # with the experts that it has sizes for
        put("is_moe", True)
    if "_out_features" in vars(part):  # the last stage, however many there are
        put("_out_features", None)
        put("_out_indices", None)
    if by_layer:  # lists with an entry for each layer keep a layer of every sort
        put("num_hidden_layers", len(kept))
        for name, own in by_layer.items():
            put(name, [own[layer] for layer in kept])


def first_layers(fields: Any) -> Any:
    """The fields of a configuration without what they say of layers that it no longer has; its last one has experts."""
    if not isinstance(fields, dict):
        return fields
    depth = fields.get("num_hidden_layers")
    own: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "per_layer_config" and isinstance(value, dict) and depth:
            own[name] = {layer: value[layer] for layer in value if int(layer) < depth}
        elif name == "mlp_only_layers" and value and depth:
            own[name] = [layer for layer in value if layer < depth - 1]
        else:
            own[name] = first_layers(value)
    return own
