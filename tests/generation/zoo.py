"""Tiny random causal language models, built from configs: the models of the equality matrix.

Every entry is cheap (two to six layers, hidden size 32), deterministic (seeded by its name) and sharp: its
weights are drawn wide enough that its output depends on every cached token. A model whose output ignores its
cache would pass any equality test; `test_equality.py` has a control that rules this out.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

TRANSFORMERS_VERSION = Version(transformers.__version__)
VOCABULARY = 97
SLIDING_TOKENS = 24
"""Length of sliding windows: shorter than the prompts, so that sliding layers do slide beside the tiered ones."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The reason why transformers itself cannot run a mode, and the version from which it can, if there is one."""

    reason: str
    fixed_in: str | None = None

    @property
    def holds(self) -> bool:
        """True if the installed transformers refuses, too."""
        return self.fixed_in is None or Version(self.fixed_in) > TRANSFORMERS_VERSION


_SLIDING: Mapping[str, Refusal] = {
    "cropped": Refusal(
        reason="a sliding layer that records its past returns more than its mask covers until it is cropped",
        fixed_in="5.20",
    )
}
_RECURRENT: Mapping[str, Refusal] = {
    "prompt_lookup": Refusal(reason="assisted decoding is not supported with stateful models"),
    "cropped": Refusal(reason="recurrent states cannot be rolled back (is_croppable is False)"),
}


@dataclass(frozen=True, kw_only=True)
class ZooEntry:
    """One model of the matrix.

    `stock_refuses` maps a mode to the reason, found by trying it, why transformers itself cannot run it with a
    `DynamicCache`.
    """

    name: str
    config_class: str
    model_class: str
    options: Mapping[str, Any]
    attention: str | None = None
    dtype: torch.dtype = torch.float32
    min_version: str | None = None
    stock_refuses: Mapping[str, Refusal] = field(default_factory=dict)

    @property
    def is_available(self) -> bool:
        """True if the installed transformers has this model."""
        return self.min_version is None or Version(self.min_version) <= TRANSFORMERS_VERSION

    def refusal(self, mode: str) -> str | None:
        """Return why the installed transformers cannot run `mode` with its own cache; `None` if it can."""
        refusal = self.stock_refuses.get(mode)
        return refusal.reason if refusal is not None and refusal.holds else None

    def build(self) -> PreTrainedModel:
        """Build a new model in eval mode that never stops early."""
        config = getattr(transformers, self.config_class)(**self.options)
        if self.attention is not None:
            config._attn_implementation = self.attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(self.name.encode()))
            model: PreTrainedModel = getattr(transformers, self.model_class)(config)
        model = model.to(self.dtype).eval().requires_grad_(False)
        generation_config = model.generation_config
        assert generation_config is not None
        generation_config.eos_token_id = None
        generation_config.bos_token_id = 1
        generation_config.pad_token_id = 0
        return model


def _llama_like(family: str, **options: Any) -> ZooEntry:
    """Make an entry of a family that has llama's config names."""
    prefix = options.pop("prefix", None) or family
    name = options.pop("name", None) or family.lower()
    entry_fields = {
        key: options.pop(key) for key in ("attention", "dtype", "min_version", "stock_refuses") if key in options
    }
    defaults: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return ZooEntry(
        name=name,
        config_class=f"{prefix}Config",
        model_class=f"{options.pop('model_prefix', family)}ForCausalLM",
        options=defaults | options,
        **entry_fields,
    )


def _gpt_like(family: str, options: Mapping[str, Any], **fields: Any) -> ZooEntry:
    """Make an entry of a family that has other config names."""
    name = fields.pop("name", None) or family.lower()
    tokens = {
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return ZooEntry(
        name=name,
        config_class=f"{family}Config",
        model_class=fields.pop("model_class", f"{family}ForCausalLM"),
        options=tokens | {"initializer_range": 0.2} | dict(options),
        **fields,
    )


_SLIDING_FULL = ["sliding_attention", "full_attention"] * 2
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MLA = {
    "kv_lora_rank": 512,  # as in real models: smaller matrix products hide differences of memory layout
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    **_MOE,
}
_INDEXED = {"index_topk": 32, "index_head_dim": 8, "index_n_heads": 2}
_GPT2 = {
    "n_positions": 256,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

ENTRIES: tuple[ZooEntry, ...] = (
    # Plain full attention, grouped queries, rotary positions.
    _llama_like("Llama"),
    _llama_like("Llama", name="llama-eager", attention="eager"),
    _llama_like("Llama", name="llama-bfloat16", dtype=torch.bfloat16),
    _llama_like("Mistral", sliding_window=None),
    _llama_like("Qwen2"),
    _llama_like("Qwen3", head_dim=8),
    _llama_like("Phi", num_key_value_heads=4),
    _llama_like("Phi3", original_max_position_embeddings=256),
    _llama_like("Gemma", head_dim=8),
    _llama_like("Olmo2"),
    _llama_like("Cohere", logit_scale=1.0),
    _llama_like("Starcoder2", residual_dropout=0.0, embedding_dropout=0.0),
    _llama_like("Glm4", head_dim=8),
    _llama_like("Granite", attention_multiplier=0.35),
    _llama_like("StableLm", use_qkv_bias=True),
    _llama_like("Nemotron", head_dim=8),
    _llama_like("SmolLM3", num_hidden_layers=4),
    _llama_like("DiffLlama"),
    _llama_like("DiffLlama", name="diffllama-eager", attention="eager"),
    # Mixtures of experts.
    _llama_like("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    _llama_like("Qwen3Moe", head_dim=8, num_experts=4, decoder_sparse_step=1, **_MOE),
    # The older families: learned or ALiBi positions, one KV head, packed projections.
    _gpt_like("GPT2", _GPT2, model_class="GPT2LMHeadModel"),
    _gpt_like("GPT2", _GPT2, model_class="GPT2LMHeadModel", name="gpt2-eager", attention="eager"),
    _gpt_like("GPTBigCode", _GPT2),
    _gpt_like("GPTJ", _GPT2 | {"rotary_dim": 4}),
    _gpt_like("CodeGen", _GPT2 | {"rotary_dim": 4, "n_ctx": 256}),
    _gpt_like(
        "GPTNeo",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": SLIDING_TOKENS,
            "max_position_embeddings": 256,
            "resid_dropout": 0.0,
            "embed_dropout": 0.0,
        },
    ),
    _gpt_like(
        "GPTNeoX",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
        },
    ),
    _gpt_like(
        "OPT",
        {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 256,
            "init_std": 0.2,
            "dropout": 0.0,
        },
    ),
    _gpt_like("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    _gpt_like(
        "Falcon",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "max_position_embeddings": 256,
        },
    ),
    _gpt_like(
        "Falcon",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
        name="falcon-alibi",
    ),
    _gpt_like("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256, "use_cache": True}),
    # Alternating sliding and full attention.
    _llama_like(
        "Gemma2",
        stock_refuses=_SLIDING,
        num_hidden_layers=4,
        head_dim=8,
        sliding_window=SLIDING_TOKENS,
        query_pre_attn_scalar=8,
    ),
    _llama_like(
        "Gemma2",
        stock_refuses=_SLIDING,
        name="gemma2-eager",
        attention="eager",
        num_hidden_layers=4,
        head_dim=8,
        sliding_window=SLIDING_TOKENS,
        query_pre_attn_scalar=8,
    ),
    _llama_like(
        "Gemma3",
        stock_refuses=_SLIDING,
        prefix="Gemma3Text",
        num_hidden_layers=4,
        head_dim=8,
        sliding_window=SLIDING_TOKENS,
        query_pre_attn_scalar=8,
        layer_types=_SLIDING_FULL,
    ),
    _llama_like(
        "Olmo3",
        stock_refuses=_SLIDING,
        num_hidden_layers=4,
        sliding_window=SLIDING_TOKENS,
        layer_types=_SLIDING_FULL,
    ),
    _llama_like(
        "Cohere2",
        stock_refuses=_SLIDING,
        num_hidden_layers=4,
        sliding_window=SLIDING_TOKENS,
        layer_types=_SLIDING_FULL,
        logit_scale=1.0,
    ),
    _llama_like(
        "Exaone4",
        stock_refuses=_SLIDING,
        num_hidden_layers=4,
        sliding_window=SLIDING_TOKENS,
        layer_types=_SLIDING_FULL,
    ),
    _llama_like(
        "GptOss",
        stock_refuses=_SLIDING,
        num_hidden_layers=4,
        head_dim=8,
        sliding_window=SLIDING_TOKENS,
        layer_types=_SLIDING_FULL,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    _llama_like(
        "Llama4",
        stock_refuses=_SLIDING,
        prefix="Llama4Text",
        num_hidden_layers=4,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=SLIDING_TOKENS,
        floor_scale=64,
    ),
    # Layers that share K and V of an earlier layer.
    _llama_like(
        "Gemma3n",
        stock_refuses=_SLIDING,
        prefix="Gemma3nText",
        num_hidden_layers=6,
        head_dim=8,
        sliding_window=SLIDING_TOKENS,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 6,
    ),
    _llama_like(
        "Gemma4",
        stock_refuses=_SLIDING,
        prefix="Gemma4Text",
        num_hidden_layers=6,
        head_dim=8,
        global_head_dim=16,
        sliding_window=SLIDING_TOKENS,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
    ),
    # Latent attention: K and V of different sizes.
    _llama_like("DeepseekV2", topk_method="greedy", **_MLA),
    _llama_like("DeepseekV3", n_group=2, topk_group=1, **_MLA),
    _llama_like(
        "DeepseekV3",
        name="deepseekv3-bfloat16",
        dtype=torch.bfloat16,
        n_group=2,
        topk_group=1,
        **_MLA | {"qk_nope_head_dim": 32, "v_head_dim": 32},
    ),
    _llama_like("Glm4MoeLite", mlp_layer_types=["dense", "sparse"], **_MLA),
    _llama_like(
        "MiniCPM3",
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=24,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=12,
        dim_model_base=32,
    ),
    # Loops over layers, for which the model deep-copies cache layers or reads their keys and values itself.
    *(
        _llama_like(
            "Dory",
            name=f"dory-{cache_mode.replace('_', '-')}",
            min_version="5.24",
            num_hidden_layers=4,
            head_dim=8,
            n_input_layers=1,
            n_output_layers=1,
            n_recurrent_loops=2,
            recurrent_kv_cache_mode=cache_mode,
            layer_types=["full_attention", "full_attention", "sliding_attention", "full_attention"],
            sliding_window=SLIDING_TOKENS,
        )
        for cache_mode in ("per_loop", "last_loop")
    ),
    # Indexed sparse attention.
    _llama_like("DeepseekV32", n_group=2, topk_group=1, **_MLA, **_INDEXED),
    _llama_like("GlmMoeDsa", **_MLA, **_INDEXED),
    # Hybrids of attention and recurrent layers.
    _llama_like(
        "Jamba",
        stock_refuses=_RECURRENT,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=8,
        use_mamba_kernels=False,
    ),
    _llama_like(
        "Qwen3Next",
        stock_refuses=_RECURRENT,
        num_hidden_layers=4,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        shared_expert_intermediate_size=24,
        **_MOE,
    ),
    _llama_like("Bamba", stock_refuses=_RECURRENT, num_hidden_layers=4, attn_layer_indices=[1, 3], **_MAMBA2),
    _llama_like("FalconH1", stock_refuses=_RECURRENT, mamba_d_ssm=64, **_MAMBA2),
    _llama_like(
        "Zamba2",
        stock_refuses=_RECURRENT,
        num_hidden_layers=4,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_key_value_heads=4,
        n_mamba_heads=4,
        mamba_d_state=8,
        chunk_size=16,
        use_mamba_kernels=False,
    ),
    _llama_like(
        "Lfm2",
        num_hidden_layers=4,
        layer_types=["conv", "full_attention"] * 2,
        block_multiple_of=8,
    ),
)

ZOO: Mapping[str, ZooEntry] = {entry.name: entry for entry in ENTRIES if entry.is_available}


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    """Return the model of an entry, built once per process. Tests must not change it."""
    return ZOO[name].build()
