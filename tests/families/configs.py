"""One tiny configuration for each causal-LM type of transformers."""

from typing import Any

import multimodal
from transformers import CONFIG_MAPPING, PreTrainedConfig

# A config takes those of these that it knows and does not leave at None.
SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "hidden_dim": 64,
    "embedding_size": 64,
    "embed_dim": 64,
    "layers": 2,
    "attention_heads": 4,
    "depth": 2,
    "image_size": 56,
    "out_hidden_size": 64,
    "text_hidden_size": 64,
    "projection_dim": 64,
    "projection_hidden_dim": 64,
    "projection_intermediate_size": 64,
    "projector_hidden_size": 64,
    "image_token_embed_dim": 64,
    "num_position_embeddings": 16,
    "word_embed_proj_dim": 64,
    "hidden_size_per_layer_input": 16,
    "hidden_size_global": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "num_key_value_heads": 2,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "swa_head_dim": 16,
    "intermediate_size": 128,
    "ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "n_inner": 128,
    "dff": 128,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "ffn_hidden_size": 64,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 128,
    "n_mamba_heads": 2,
    "time_step_rank": 4,
    "state_size": 16,
    "ssm_state_size": 16,
    "lru_width": 64,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}

# Layers of a model whose layers are of several kinds: its patterns are up to four long.
MANY_KINDS = 4


SHARED_KEYS = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

# What a type needs beside SMALL.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2, "num_local_experts": 4, "num_hidden_layers": 2},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "dots3_note_vision_encoder": {
        "pyramid_num_routed": [-1, 4],
        "adapter_in_dim": 64,
        "adapter_out_dim": 64,
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 16,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": SHARED_KEYS | {"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": SHARED_KEYS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {
        "num_hidden_layers": 2,
        "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "kolibri1": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"]},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [32, 32]},
    "xlstm": {"qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}


# The types that every test run checks: each kind of attention, cache and recurrence once or twice.
CORE = (
    "bloom",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt2",
    "gpt_oss",
    "granite",
    "granitemoehybrid",
    "lfm2",
    "llama",
    "mamba",
    "mistral",
    "nemotron_h",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
)

# Types that look ahead unless their config says is_decoder=True, as the tiny ones' do.
ENCODERS = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)

# Types that agree with their plain forward, while their own `generate` does not.
OWN_GENERATE = {
    **dict.fromkeys(
        (
            "camembert",
            "data2vec-text",
            "roberta",
            "roberta-prelayernorm",
            "xlm-roberta",
            "xlm-roberta-xl",
            "xmod",
        ),
        "its `generate` counts positions from 0, its forward from `pad_token_id + 1`",
    ),
    "moshi": "its `generate` drops keys outside a sliding window, which its forward attends to",
}

# Types whose engine raises ConfigurationError when it is made.
REFUSED = {
    "blt": "keeps one cache for each of its byte and patch models, not one transformers cache",
    "cpmant": "puts 32 tokens of its own before the prompt, which its cache counts too",
    "deepseek_v4": "its cache layers compress windows of keys, which pages cannot hold",
    "minimax": "takes a cache of its own class only, with keys and states that grow",
    "openai-gpt": "its forward takes no cache",
    "prophetnet": "predicts several tokens ahead; with a cache it differs from its plain forward",
    "recurrent_gemma": "keeps recurrent states inside its modules, for one batch only",
    "reformer": "its forward takes no transformers cache (`past_buckets_states`)",
    "xlm": "its forward takes no transformers cache (`cache`)",
    "xlnet": "its forward takes no transformers cache (`mems`)",
}

# Types that transformers itself cannot make a causal LM of, here.
NOT_BUILT = {
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "drafts for another model, whose keys it reads; its config raises ValueError (5.23.0)",
    ),
    "gemma3n": "needs timm and pillow; its text side is `gemma3n_text`",
    "musicgen": "`AutoModelForCausalLM` gives its decoder the whole model's config (5.23.0)",
    "musicgen_melody": "`AutoModelForCausalLM` gives its decoder the whole model's config (5.23.0)",
}


def small(
    default: PreTrainedConfig, sizes: dict[str, Any], needs: dict[str, Any]
) -> dict[str, Any]:
    """What of `sizes` this config takes, and what its type needs; so for the configs inside it."""
    given = default.to_dict()
    settings = {n: v for n, v in sizes.items() if given.get(n) is not None}
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        settings[name] = SMALL[name]
    if given.get("is_decoder") is False:
        settings["is_decoder"] = True
    if len(set(given.get("layer_types") or ())) > 1:
        settings["num_hidden_layers"] = MANY_KINDS
    if given.get("qk_rope_head_dim") is not None:
        settings.pop("head_dim", None)
        settings["num_key_value_heads"] = SMALL["num_attention_heads"]
    settings |= needs.get(default.model_type, {})
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            settings[name] = (
                {"model_type": value.model_type}
                | small(value, sizes, needs)
                | settings.get(name, {})
            )
    return settings


def tiny_config(model_type: str, **overrides: object) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    needs = OVERRIDES | multimodal.OVERRIDES
    return config_class(**small(config_class(), SMALL, needs) | overrides)
