"""Tiny random models of further architectures that stream, each tested once, in `test_more_models.py`.

The zoo has the models whose decoding is compared in every mode. Most other causal language models of transformers
call the cache and the attention as these do. They are listed here by model type, with only the options that make
them small: where two models would differ in sizes alone, both have `_SIZES`. A model ignores options that it does
not know.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from packaging.version import Version
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .zoo import SLIDING_TOKENS, TRANSFORMERS_VERSION, VOCABULARY, ZooEntry

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "is_decoder": True,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Mixtures of experts, under all the names that their sizes have.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    "moe_shared_expert_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    # Recurrent layers.
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
}
_SLIDING: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse"] * 2,
    "sliding_window": SLIDING_TOKENS,
}
_LINEAR: Mapping[str, Any] = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
_CONVOLUTION: Mapping[str, Any] = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
_ROPE_3D: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_GRANITE: Mapping[str, Any] = {"attention_multiplier": 0.35}
_TINY_ENCODER: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_blocks": 1,
    "num_attention_heads": 2,
}

_PLAIN = """
    apertus apertus1p5_text arcee aria_text bert bert-generation biogpt bitnet camembert data2vec-text
    dots1 emu3_text_model ernie ernie4_5 exaone flex_olmo glm glm4_moe helium hunyuan_v1_dense
    hunyuan_v1_moe hyperclovax internlm3 iquestcoder jais2 minimax_m2 ministral3 nanochat olmo olmoe
    persimmon phimoe qwen2_moe roberta roberta-prelayernorm sarvam_moe seed_oss solar_open xlm-roberta
    xlm-roberta-xl
"""
_NO_OPTIONS: Mapping[str, Any] = {}

_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(_PLAIN.split(), _NO_OPTIONS),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), _GRANITE),
    **dict.fromkeys(("beam", "cwm", "exaone_moe", "kolibri1", "mellum", "ministral"), _SLIDING),
    **dict.fromkeys(("granite_swa", "granitemoe_swa"), _SLIDING | _GRANITE | {"layer_rope_theta": [1e4] * 4}),
    **dict.fromkeys(("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"), _LINEAR),
    "afmoe": _SLIDING | {"num_dense_layers": 1},
    "cohere2_moe": _SLIDING | {"logit_scale": 1.0},
    "cohere_compass_text": {
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE_3D),
    },
    "ctrl": {"n_positions": 256, "n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 4},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "electra": {"embedding_size": 32},
    "ernie4_5_moe": {"moe_layer_end_index": 1},
    "flint": _SLIDING | {"mlp_only_layers": [0]},
    "granitemoehybrid": _LINEAR
    | _GRANITE
    | {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_chunk_size": 16},
    "hrm_text": {"num_hidden_layers": 1, "num_key_value_heads": 4, "H_cycles": 2, "L_cycles": 1},
    "hy_v3": {"mlp_layer_types": ["dense", "sparse"]},
    "laguna": _SLIDING | {"num_attention_heads_per_layer": [4] * 4},
    "lara_mini": _SLIDING | {"layer_types": ["linear_attention", "sliding_attention", *["full_attention"] * 2]},
    "lfm2_moe": _CONVOLUTION | {"num_dense_layers": 2},
    "lfm3": _CONVOLUTION,
    "mimo_v2_flash": _SLIDING | {"v_head_dim": 12},
    "modernbert-decoder": _SLIDING | {"local_attention": SLIDING_TOKENS},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "full_attention"],
        "ssm_state_size": 8,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "use_mamba_kernels": False,
    },
    "phi4_multimodal": {
        "original_max_position_embeddings": 256,
        "vision_config": _TINY_ENCODER | {"image_size": 16, "crop_size": 16, "patch_size": 8},
        "audio_config": _TINY_ENCODER | {"ext_pw_out_channel": 16, "nemo_conv_channels": 16},
    },
    "roc_bert": {
        "shape_embed_dim": 8,
        "shape_vocab_size": VOCABULARY,
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": VOCABULARY,
    },
    "vaultgemma": _SLIDING | {"query_pre_attn_scalar": 8},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}

# Added after 5.17.
_NEWER = """
    apertus1p5_text beam exaone flint internlm3 iquestcoder kolibri1 lara_mini lfm3 sarvam_moe
"""

_MODEL_CLASSES: Mapping[str, str] = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "emu3_text_model": "Emu3ForCausalLM"}

MORE_MODELS: tuple[str, ...] = tuple(
    sorted(name for name in _OPTIONS if name not in _NEWER.split() or Version("5.24") <= TRANSFORMERS_VERSION)
)
"""Return the model types that the installed transformers has."""


@functools.cache
def more_model(model_type: str) -> PreTrainedModel:
    """Return the model of a type, built once per process. Tests may change only its attention."""
    return ZooEntry(
        name=model_type,
        config_class=CONFIG_MAPPING_NAMES[model_type],
        model_class=_MODEL_CLASSES[model_type],
        options=_SIZES | _OPTIONS[model_type],
    ).build()
