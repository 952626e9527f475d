"""What types that read images need beside the tables of `configs` and `multimodal`.

A tiny image is 4 x 4 patches of 14 x 14 pixels, and 2 x 2 patches make a token where a type merges.
"""

from typing import Any

IMAGE_SIZE, PATCH_SIZE, MERGE_SIZE = 56, 14, 2
TOKEN_SIZE = PATCH_SIZE * MERGE_SIZE
SQUARE = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}

# A config takes those of these that it knows and does not leave at None, as it does of SMALL.
SIZES: dict[str, Any] = {
    "image_grid_pinpoints": [[IMAGE_SIZE, 2 * IMAGE_SIZE], [2 * IMAGE_SIZE, IMAGE_SIZE]],
    "image_seq_length": 16,
    # The range of one vision tower is 1e-10, which leaves nothing of an image.
    "initializer_range": 0.02,
    "latent_query_num": 4,
    "mm_tokens_per_image": 4,
    "num_query_tokens": 4,
    "patch_size": PATCH_SIZE,
    "pooling_kernel_size": 2,
    "projection_hidden_size": 64,
    "resampler_n_latents": 4,
}

# By the type of a config, or of a config inside it.
OVERRIDES: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {1225: 4, 4900: 4}},
    # Models that put tokens of a codebook in an image's place name the codes in a vocabulary.
    "chameleon": {"vocabulary_map": {f"IMGIMG{'ABCDEFGH'[i]}Z": 110 + i for i in range(8)}},
    "chameleon_vqgan": {"num_embeddings": 8},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, 64]},
    # Two images take up to 290 tokens.
    "deepseek_ocr2_text": {"max_position_embeddings": 512},
    "gemma4_unified_text": {"max_position_embeddings": 512},
    "emu3": {
        "vocabulary_map": {f"<|visual token {i:06}|>": 110 + i for i in range(8)}
        | {"<|extra_200|>": 109}
    },
    "emu3_vqgan": {"codebook_size": 8, "hidden_size": 128},
    "kosmos_2_5_vision_model": {
        "max_num_patches": 64,
        "patch_embed_hidden_size": 3 * PATCH_SIZE**2,
    },
    "llama4_vision_model": {
        "intermediate_size": 256,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
        "vision_output_dim": 64,
    },
    "minicpmv4_6": {"insert_layer_id": 0},
    "minicpmv4_7": {"insert_layer_id": 0},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "mllama_vision_model": {
        "intermediate_layers_indices": [0, 1],
        "num_global_layers": 1,
        "vision_output_dim": 192,
    },
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {"out_hidden_size": 256},
    "nemotron_h_omni": {"projector_hidden_size": 64, "vision_hidden_size": 64},
    "qwen3_vl_moe_vision": {"deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_vision": {"deepstack_visual_indexes": [0]},
    "sam_vision_model": {"global_attn_indexes": [0]},
    "vipllava": {"vision_feature_layer": [-2, -1]},
}

# Configs inside a config that are None unless they are given.
PARTS: dict[str, dict[str, Any]] = {
    "gemma4": {"vision_config": {}},
    "gemma4_unified": {"vision_config": {}},
}

# Arguments of an image processor and of a processor that do not follow from the config.
IMAGE_PROCESSOR_ARGUMENTS: dict[str, dict[str, Any]] = {
    # The smaller of its two sizes: 1,225 patches, not 4,900.
    "aria": {"max_image_size": 490},
    "deepseek_ocr2": {"tile_size": 128},
    "dots3_note": {"temporal_patch_size": 1},
    "emu3": {"min_pixels": 32 * 32, "max_pixels": 48 * 48},
    "gemma4": {"max_soft_tokens": 70},
    "gemma4_unified": {"max_soft_tokens": 140},
    "inkling2": {"size": {"height": TOKEN_SIZE, "width": TOKEN_SIZE}},
    "molmo2": {"max_crops": 2, "overlap_margins": [1, 1]},
    "nemotron_h_omni": {"max_num_patches": 36, "min_num_patches": 4},
    "step3p7": {"patch_size": IMAGE_SIZE},
    "video_llava": {"crop_size": SQUARE, "size": {"shortest_edge": IMAGE_SIZE}},
}
PROCESSOR_ARGUMENTS: dict[str, dict[str, Any]] = {
    # Its pictures are 490 pixels wide, at least.
    "aria": {"size_conversion": {490: 4, 980: 4}},
    "chameleon": {"image_seq_length": 9},
    "vipllava": {"vision_feature_select_strategy": "default"},
}

# Attributes of a processor that its `__init__` takes no argument for.
PROCESSOR_ATTRIBUTES: dict[str, dict[str, Any]] = {
    "cohere2_vision": {"patch_size": 2},
    # The model refuses images without it, and the processor gives it only when asked (5.23.0).
    "cosmos3_edge": {"return_mm_token_type_ids": True},
    # The model makes 12 x 12 tokens of a small image.
    "deepseek_ocr2": {"downsample_ratio": 1, "patch_size": 5},
    "got_ocr2": {"num_image_tokens": 1},
    "kosmos-2.5": {"images_kwargs": {"max_patches": 16}},
}

# The token in whose place the image's features go, where the prompt names another.
IMAGE_TOKENS = {
    "llama4": "<|patch|>",
    "molmo2": "<im_patch>",
    "ovis2": "<IMG_ATOM>",
    "pp_chart2table": "<imgpad>",
}

# How a prompt names an image, where not by `{processor.image_token}`.
PLACEHOLDERS = {
    "GitProcessor": "",
    "HunYuanVLProcessor": (
        "{processor.image_start_token}{processor.image_token}{processor.image_end_token}"
    ),
    "PPChart2TableProcessor": "<imgpad>",
    "QianfanOCRProcessor": "{processor.image_placeholder_token}",
}

# Processors that take the pictures of several prompts in one list, not in a list for each prompt.
FLAT_IMAGES = ("GotOcr2Processor",)

# Types of which transformers' mappings name no processor, or no image processor.
PROCESSORS = {
    "cosmos3_omni": "Qwen3VLProcessor",
    "glm_ocr": "Glm46VProcessor",
    "glmga": "Glm46VProcessor",
    "kosmos-2.5": "Kosmos2_5Processor",
    "qwen2_5_omni_thinker": "Qwen2_5OmniProcessor",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor",
}
IMAGE_PROCESSORS = {
    "glm4v_moe": "Glm4vImageProcessorPil",
    "glm_ocr": "Glm46VImageProcessorPil",
    "qwen2_5_omni_thinker": "Qwen2VLImageProcessorPil",
    "qwen3_omni_moe_thinker": "Qwen2VLImageProcessorPil",
    "qwen3_vl_moe": "Qwen2VLImageProcessorPil",
}

# The types that every test run checks.
CORE = ("gemma3", "llava", "qwen2_5_vl")
# Those that every test run holds the engine against: another number of pictures changes the tokens
# of each, and positions along several axes.
ENGINE_CORE = ("llava_onevision", "qwen2_5_vl")

# Types whose prompts hold one image at most.
ONE_IMAGE = ("git", "kosmos-2.5")

# Types that run on text, and of which no processor can be made here.
NO_PROCESSOR = {
    "fuyu": "its processor drops a token that only the tokenizer of its checkpoint adds",
    "mistral4": "reads text only",
    "shieldgemma2": "classifies images; its processor needs the chat template of its checkpoint",
}

# Types of which no token ids are taken with images: their processors name no image token.
NO_TOKEN_IDS = ("kosmos-2.5", "pp_chart2table")
# Types whose processors expand something else than their image token alone.
TOKEN_IDS_CORE = ("hunyuan_vl", "qianfan_ocr", "qwen2_5_vl")

# Types whose images the engine refuses.
REFUSED = {
    "git": "puts an image's features before the prompt, which its cache counts too",
    "mllama": "attends to images in separate layers, and pages do not hold the keys of these",
    "ovis2": "replaces the tokens around an image, even sampled ones, with features of its own",
    "qwen4_exp": "its sparse attention selects keys by image positions, which pages do not hold",
}
