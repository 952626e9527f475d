"""Tiny real models that read images, and processors for them, made without any file.

The tokenizer knows words `w20`, `w21`, ... by their ids, and the special tokens of the processors.
"""

from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny import EOS, PAD, SHARPNESS
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    BaseVideoProcessor,
    Gemma3Processor,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

VOCAB_SIZE = 160

MARKERS = [
    *("<pad>", "<eos>", "<unk>", "<image>", "<video>", "<start>", "<end>"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<soft>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} "
    "{% if message.content is string %}{{ message.content }} {% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}w51 <image> w52 {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}w50{% endif %}"
)

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


class NoVideos(BaseVideoProcessor):
    """Stands where a processor wants a video processor, which all need torchvision."""

    def __init__(self):
        pass


class ImagesOnlyProcessor(Qwen2_5_VLProcessor):
    """A processor whose class may be checked without torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        return type(argument)


def word_tokenizer(image_token: str = "<image>") -> PreTrainedTokenizerFast:
    """One token a word or marker."""
    markers = [image_token if marker == "<image>" else marker for marker in MARKERS]
    words = [*markers, *(f"w{i}" for i in range(len(markers), VOCAB_SIZE))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=markers[3:],
        extra_special_tokens={
            "image_token": image_token,
            "video_token": "<video>",
            "boi_token": "<start>",
            "eoi_token": "<end>",
        },
    )


def _qwen2_5_vl(tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, Any], ProcessorMixin]:
    images = Qwen2VLImageProcessorPil(
        patch_size=7, merge_size=2, size={"shortest_edge": 14 * 14, "longest_edge": 14 * 14 * 12}
    )
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 7,
        "spatial_merge_size": 2,
        "window_size": 28,
        "fullatt_block_indexes": [1],
    }
    config = {
        "text_config": TEXT | {"rope_parameters": ROPE},
        "vision_config": vision,
        "image_token_id": tokenizer.image_token_id,
        "video_token_id": tokenizer.video_token_id,
        "vision_start_token_id": tokenizer.boi_token_id,
        "vision_end_token_id": tokenizer.eoi_token_id,
    }
    return config, ImagesOnlyProcessor(images, tokenizer, NoVideos(), chat_template=CHAT_TEMPLATE)


def _gemma3(tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, Any], ProcessorMixin]:
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    layers = ["sliding_attention", "full_attention"]
    config = {
        "text_config": TEXT | {"sliding_window": 8, "layer_types": layers},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_id": tokenizer.image_token_id,
        "boi_token_index": tokenizer.boi_token_id,
        "eoi_token_index": tokenizer.eoi_token_id,
    }
    template = CHAT_TEMPLATE.replace("<image>", "<start>")
    return config, Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=4)


def _llava(tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, Any], ProcessorMixin]:
    images = CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    config = {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model", "num_hidden_layers": 2},
        "image_token_index": tokenizer.image_token_id,
        "image_seq_length": 16,
    }
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )
    return config, processor


def _idefics3(tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, Any], ProcessorMixin]:
    # Pictures are cut into tiles, with a token between them.
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, do_image_splitting=True
    )
    config = {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION,
        "image_token_id": tokenizer.image_token_id,
        "scale_factor": 2,
        "pad_token_id": PAD,
    }
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=CHAT_TEMPLATE)
    return config, processor


BUILDERS = {
    "qwen2_5_vl": _qwen2_5_vl,
    "gemma3": _gemma3,
    "llava": _llava,
    "idefics3": _idefics3,
}


def tiny_vision_model(
    model_type: str, image_token: str = "<image>"
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """A float32 model on the CPU, in eval mode, and its processor; the same each time."""
    config, processor = BUILDERS[model_type](word_tokenizer(image_token))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type, **config))
        with torch.no_grad():
            for parameter in model.parameters():
                # Gemma3's projection of images starts as zeros.
                if not parameter.any():
                    parameter.normal_(std=0.1)
                if parameter.dim() > 1:
                    parameter.mul_(SHARPNESS)
    return model.eval(), processor


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """A picture of random colours, (width, height)."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def plain_logprobs(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor], generated: list[int]
) -> list[float]:
    """The log-probability of each generated token after a processor's prompt, without a cache."""
    logprobs = plain_logits(model, tensors, generated).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(generated)[:, None])[:, 0].tolist()


@torch.no_grad()
def plain_logits(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor], generated: list[int]
) -> torch.Tensor:
    """The logits that each generated token was sampled from, without a cache."""
    tensors = dict(tensors)
    shape = tensors["input_ids"].shape
    for name, tensor in tensors.items():
        if tensor.shape == shape:
            added = torch.zeros(1, len(generated), dtype=tensor.dtype)
            if name == "input_ids":
                added = torch.tensor([generated])
            tensors[name] = torch.cat([tensor, added], 1)
    tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
    return model(**tensors, use_cache=False).logits[0, shape[1] - 1 : -1]
