"""What types that read images, videos or sounds need beside the tables of `configs`, on text."""

from typing import Any


def mrope(*sections: int, **others: object) -> dict[str, Any]:
    """Give each axis of a position its share of the rotary frequencies: half a head in all."""
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections]}
    return {"rope_parameters": parameters | others}


MROPE = mrope(2, 3, 3)
THINKER = {"vision_start_token_id": 123, "image_token_id": 124, "video_token_id": 125}

# By the type of a config, or of a config inside it.
OVERRIDES: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 120, "IMGIMGA": 121}},
    "chameleon_vqgan": {"base_channels": 32, "latent_channels": 32, "num_embeddings": 128},
    "cosmos3_edge_text": MROPE,
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "n_group": 1,
        "num_experts_per_tok": 2,
        "topk_group": 1,
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "emu3": {"vocabulary_map": {"<image>": 120}},
    "emu3_vqgan": {"base_channels": 32, "hidden_size": 64},
    "ernie4_5_vl_moe_text": mrope(2, 2, 4) | {"moe_intermediate_size": [32, 32]},
    "florence_vision": {"num_heads": [4] * 4, "embed_dim": [64] * 4},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "glm4v_moe_text": mrope(1, 1, 2, partial_rotary_factor=0.5),
    "glm4v_text": MROPE,
    "glm5_next_text": {
        "index_kpool": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "qk_rope_head_dim": 0,
    },
    "glm_ocr_text": MROPE,
    "granite4_vision": {
        "deepstack_layer_map": [[1, 0]],
        "downsample_rate": "1/2",
        "spatial_target_layers": [1],
    },
    "granite_docling_vision": {"deepstack_visual_indexes": [0]},
    "hunyuan_vl_text": MROPE | {"head_dim": 16},
    "janus_vqgan": {"base_channels": 32, "latent_channels": 32},
    "kyutai_speech_to_text": {"audio_pad_token_id": 120},
    "mimi": {"upsample_groups": 64},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_vision": {"image_size": [56, 56]},
    "muse_spark_audio": {"depths": [1] * 4, "hidden_sizes": [16] * 4, "num_hidden_layers": 4},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 127},
    "nemotron3_diarization": {"head_config": {"audio_hidden_size": 64}},
    "paddleocr_vl_text": MROPE,
    "qwen2_5_omni": {"enable_audio_output": False},
    "qwen2_5_omni_text": MROPE,
    "qwen2_5_omni_thinker": THINKER,
    "qwen2_5_vl_text": MROPE,
    "qwen2_vl_text": MROPE,
    "qwen3_omni_moe": {"enable_audio_output": False},
    "qwen3_omni_moe_text": MROPE,
    "qwen3_omni_moe_thinker": THINKER,
    "qwen3_vl_moe_text": MROPE,
    "qwen3_vl_text": MROPE,
    "radio": {"video_temporal_patch_size": 2},
    "step3p5": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "vibevoice_acoustic_tokenizer_encoder": {"depths": [1] * 7, "num_filters": 2},
}

# The types that every test run checks.
CORE = (
    "gemma3",
    "lfm2_vl",
    "qwen2_5_vl",
    "qwen3_5",
)

ENCODER_DECODERS = (
    "florence2",
    "pix2struct",
    "pp_formulanet",
    "t5gemma2",
    "udop",
    "vision-encoder-decoder",
)

# Types whose engine raises ConfigurationError when it is made.
REFUSED = {
    **dict.fromkeys(ENCODER_DECODERS, "is an encoder-decoder"),
    **dict.fromkeys(
        ("blip", "blip-2", "instructblip", "instructblipvideo"),
        "its forward takes no cache (`past_key_values`)",
    ),
    "diffusion_gemma": "refines a canvas of random tokens, so it has no next-token probabilities",
    "glm5_next": "its sparse attention reads the cache's own keys, which lie in pages",
    "idefics": "its forward needs images",
    "kosmos-2": "its forward needs images",
    "kyutai_speech_to_text": "embeds text and sound tokens together",
    "paligemma": "its prompt attends both ways, so each new token would change the stored keys",
    "pi0": "predicts a robot's actions, and has no language-model head",
    "qwen2_5_omni": "has no forward of its own; its thinker is `qwen2_5_omni_thinker`",
    "qwen3_omni_moe": "has no forward of its own; its thinker is `qwen3_omni_moe_thinker`",
    "unlimited_ocr": "registers a cache layer of its own, which may hold more than keys",
    "voxtral_realtime": "its forward needs sound",
}

# Types that transformers itself cannot make a model of, here.
NOT_BUILT = {
    **dict.fromkeys(
        ("fast_vlm", "gemma3n", "perception_lm"),
        "needs timm",
    ),
    "evolla": "`AutoModelForMultimodalLM` does not know its config (5.23.0)",
    "inkling_mm_model": "needs scipy; its text side is `inkling_text`",
}
