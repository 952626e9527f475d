"""A tiny model and its processor for each type that reads images, made without a file.

The tokenizer's words are `w4`, `w5`, ...; the tokens after them are those that the source of the
processor's class names. Sizes go from the config to the image processor, and token ids from the
tokenizer to the config. Shapes: B prompts (always 1), T tokens, C tokens of a completion, V tokens
of the vocabulary.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import configs
import image_needs
import multimodal
import numpy as np
import torch
import transformers
from image_needs import IMAGE_SIZE, MERGE_SIZE, PATCH_SIZE, TOKEN_SIZE
from parity import create_from_config
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torchvision_functions import import_with_torchvision
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    BatchFeature,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

# Tokens as the source of a processor writes them: a string, a template of rows and columns, part of
# a longer string, and an attribute of the tokenizer.
WHOLE = re.compile(r"""["'](<[^<>\s"'{}]{1,40}>|</\w+>|\|[A-Z]+\||\[[A-Z_]+\])["']""")
NUMBERED = re.compile(r"""["'](<[^<>\s"']*)\{[^<>"']*\}([^<>\s"'{]*)\{[^<>"']*\}([^<>"']*>)["']""")
INSIDE = re.compile(r"<[A-Z_]+>")
ATTRIBUTE = re.compile(r"""tokenizer\.(\w+_token)\b|getattr\(tokenizer, "(\w+_token)\"""")

TEXT_TOKENS = {
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "bos_token": "<bos>",
    "unk_token": "<unk>",
}
MIN_WORDS = 20
MAX_ROWS = 3
# Of the parts of an image that a token stands for.

ALIASES = {"merge_size": "spatial_merge_size", "encoder_patch_size": "patch_size"}
# What a config calls an argument of an image processor.

SMALLEST_AREA = 2500
# In pixels: a size below it is an edge.

NO_VIDEOS = SimpleNamespace(
    merge_size=MERGE_SIZE,
    temporal_patch_size=2,
    slice_mode=False,
    downsample_mode="16x",
    model_input_names=[],
)
# Stands for the video processor, which needs torchvision.

NO_SOUNDS = SimpleNamespace(model_input_names=[])


def create(model_type: str) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Create a model that no greedy token of is a special one, and its processor."""
    config = create_config(model_type)
    processor = create_processor(model_type, config)
    set_token_ids(config, processor)
    model = create_from_config(config, AutoModelForImageTextToText)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for parameter in model.parameters():
            # Such as a gate, or a projection of an image's features.
            if (parameter.dim() > 1 or parameter.numel() == 1) and not parameter.any():
                parameter.normal_(std=0.1)
        # A forward refuses a completion with image tokens that no image belongs to.
        head = model.get_output_embeddings() or model.get_decoder().lm_head
        head.weight[special_ids(processor.tokenizer)] = 0.0
    return model, processor


def create_config(model_type: str) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    default = config_class(**image_needs.PARTS.get(model_type, {}))
    needs = configs.OVERRIDES | multimodal.OVERRIDES
    needs |= {name: needs.get(name, {}) | n for name, n in image_needs.OVERRIDES.items()}
    return config_class(**configs.small(default, configs.SMALL | image_needs.SIZES, needs))


def parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield the config and the configs inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from parts(value)


def class_named(name: str) -> Any:
    """Find a class of transformers, also one that transformers hides for want of torchvision."""
    module = import_with_torchvision(f"transformers.{transformers._class_to_module[name]}")
    if getattr(module, "num2words", str) is None:
        # Spells the number of a video's frames.
        module.num2words = str
    return getattr(module, name)


def create_processor(model_type: str, config: PreTrainedConfig) -> ProcessorMixin:
    name = image_needs.PROCESSORS.get(model_type) or PROCESSOR_MAPPING_NAMES[model_type]
    processor_class = class_named(name)
    tokenizer = create_tokenizer(processor_class, config)
    made = {
        "image_processor": create_image_processor(model_type, config),
        "video_processor": NO_VIDEOS,
        "feature_extractor": NO_SOUNDS,
        "chat_template": None,
    }
    arguments = {}
    for name, parameter in inspect.signature(processor_class.__init__).parameters.items():
        if name in made:
            arguments[name] = made[name]
        elif name.endswith("tokenizer"):
            arguments[name] = tokenizer
        elif (value := argument(name, parameter.default, config)) is not None:
            arguments[name] = value
    arguments |= image_needs.PROCESSOR_ARGUMENTS.get(model_type, {})
    # Without torchvision the check of a video processor's class raises.
    with patch.object(ProcessorMixin, "check_argument_for_proper_class"):
        processor = processor_class(**arguments)
    for name, value in image_needs.PROCESSOR_ATTRIBUTES.get(model_type, {}).items():
        setattr(processor, name, value)
    return processor


def create_image_processor(model_type: str, config: PreTrainedConfig) -> Any:
    """Create the image processor for PIL, or the one for torchvision where there is no other."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(model_type, {})
    name = image_needs.IMAGE_PROCESSORS.get(model_type) or names.get("pil") or names["torchvision"]
    image_class = class_named(name)
    taken = [*image_class.valid_kwargs.__annotations__]
    taken += inspect.signature(image_class.__init__).parameters
    arguments = {name: argument(name, getattr(image_class, name, None), config) for name in taken}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    return image_class(**arguments | image_needs.IMAGE_PROCESSOR_ARGUMENTS.get(model_type, {}))


def argument(name: str, default: Any, config: PreTrainedConfig) -> Any:
    """Return a value that fits the config, or None to keep the default."""
    if name in ("image_seq_length", "image_seq_len", "num_image_tokens"):
        return num_image_tokens(config)
    if name in ("tile_size", "image_size", "scale_resolution", "img_size"):
        return IMAGE_SIZE
    if name in ("size", "crop_size", "max_image_size", "high_res_size"):
        sizes = default.items() if isinstance(default, Mapping) else ()
        return {name: tiny_size(size) for name, size in sizes if size} or None
    if name == "patch_size" and isinstance(default, Mapping):
        return dict.fromkeys(default, PATCH_SIZE)
    if name == "num_additional_image_tokens":
        # CLIP's class token.
        return int("clip" in config.vision_config.model_type)
    vision = [part for part in parts(config) if hasattr(part, "patch_size")]
    for part in (*vision, *parts(config)):
        value = getattr(part, name, getattr(part, ALIASES.get(name, ""), None))
        if value is not None:
            return value
    return None


def tiny_size(default: int) -> int:
    """Return an edge of an image; or, for an area, that of one token or of nine."""
    if default < SMALLEST_AREA:
        return IMAGE_SIZE
    return TOKEN_SIZE**2 if default < 400_000 else (3 * TOKEN_SIZE) ** 2


def num_image_tokens(config: PreTrainedConfig) -> int:
    """Return the number of tokens of one tiny image."""
    num_patches = (IMAGE_SIZE // PATCH_SIZE) ** 2
    for part in parts(config):
        for name in ("mm_tokens_per_image", "resampler_n_latents", "latent_query_num"):
            if number := getattr(part, name, None):
                return number
        if scale := getattr(part, "scale_factor", None):
            return num_patches // scale**2
        if ratio := getattr(part, "downsample_ratio", None):
            return int(num_patches * ratio**2)
    return num_patches


def create_tokenizer(processor_class: type, config: PreTrainedConfig) -> PreTrainedTokenizerFast:
    """Create a tokenizer of words between spaces, with the special tokens of the processor."""
    source = inspect.getsource(sys.modules[processor_class.__module__])
    attributes = {first or second for first, second in ATTRIBUTE.findall(source)}
    named = {name: f"<{name}>" for name in sorted(attributes - TEXT_TOKENS.keys())}
    tokens = {*WHOLE.findall(source), *INSIDE.findall(source)}
    tokens |= {getattr(processor_class, n) for n in dir(processor_class) if n.endswith("_TOKEN")}
    for start, middle, end in NUMBERED.findall(source):
        places = range(1, MAX_ROWS + 1)
        tokens |= {f"{start}{row}{middle}{column}{end}" for row in places for column in places}
    if config.model_type in image_needs.IMAGE_TOKENS:
        tokens.add(image_needs.IMAGE_TOKENS[config.model_type])
    special = [*named.values(), *sorted(tokens - {*named.values(), *TEXT_TOKENS.values()})]
    num_words = config.get_text_config(decoder=True).vocab_size - len(TEXT_TOKENS) - len(special)
    assert num_words >= MIN_WORDS
    words = [f"w{len(TEXT_TOKENS) + i}" for i in range(num_words)]
    vocabulary = [*TEXT_TOKENS.values(), *words, *special]
    model = WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>")
    backend = Tokenizer(model)
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens=named, **TEXT_TOKENS
    )
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    return tokenizer


def special_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids of the tokens that are no words."""
    return [i for token, i in tokenizer.get_vocab().items() if not re.fullmatch(r"w\d+", token)]


def set_token_ids(config: PreTrainedConfig, processor: ProcessorMixin) -> None:
    """Give the config the ids of its image token and of the other tokens that it names."""
    to_id = processor.tokenizer.convert_tokens_to_ids
    image_token = image_needs.IMAGE_TOKENS.get(config.model_type)
    image_token_ids = [to_id(image_token)] if image_token else processor.image_token_ids or [None]
    for part in parts(config):
        for name in [*vars(part)]:
            match = re.fullmatch(r"(\w+_token|image_patch)_(id|index)", name)
            if match is None or match[1] in TEXT_TOKENS:
                continue
            tokens = [getattr(it, match[1], None) for it in (processor.tokenizer, processor)]
            ids = [to_id(token) for token in tokens if isinstance(token, str)]
            if match[1] in ("image_token", "image_patch"):
                ids = [i for i in image_token_ids if i is not None] or ids
            if ids:
                setattr(part, name, ids[0])
    if vocabulary_map := getattr(config, "vocabulary_map", None):
        vocabulary_map["<image>"] = config.image_token_id
    if hasattr(config, "visual_indicator_token_ids"):
        names = ("START", "GRID", "COL", "ROW", "END")
        config.visual_indicator_token_ids = to_id([f"<IMG_{name}>" for name in names])


def picture(seed: int, size: tuple[int, int] = (48, 64)) -> Image.Image:
    """Return a picture of random colours; `size` is (width, height) in pixels."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def prompt(processor: ProcessorMixin, num_images: int) -> str:
    """Return three words, and two words after each image."""
    placeholder = image_needs.PLACEHOLDERS.get(
        type(processor).__name__, "{processor.image_token}"
    ).format(processor=processor)
    words = [f"w{10 + i}" for i in range(3 + 2 * num_images)]
    for i in range(num_images):
        words.insert(3 + 3 * i, placeholder)
    return " ".join(words)


def read(
    model: PreTrainedModel, processor: ProcessorMixin, pictures: Sequence[Image.Image]
) -> BatchFeature:
    """Return the inputs of a forward: a prompt with these pictures, in the model's dtype."""
    text = [prompt(processor, len(pictures))]
    if not pictures:
        return processor.tokenizer(text, return_tensors="pt")
    is_flat = type(processor).__name__ in image_needs.FLAT_IMAGES
    given = [*pictures] if is_flat else [[*pictures]]
    return processor(text=text, images=given, return_tensors="pt").to(model.dtype)


@torch.no_grad()
def plain_logprobs(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], completion: Sequence[int]
) -> torch.Tensor:
    """Return log-probabilities (C, V) where each token of the completion was chosen.

    By one forward without a cache. `inputs` are a prompt's; those with a number for each token
    (B, T, ...) go on over the completion.
    """
    longer = dict(inputs)
    added = torch.tensor([list(completion)])
    for name, value in inputs.items():
        is_of_image = value.is_floating_point() or name == "image_position_ids"
        if is_of_image or value.shape[:2] != inputs["input_ids"].shape:
            continue
        if name == "input_ids":
            more = added
        elif name.endswith("_type_ids"):
            more = torch.zeros_like(added)
        else:
            # Masks: the completion sees what the prompt's last token sees.
            more = value[:, -1:].expand(-1, len(completion), *value.shape[2:])
        longer[name] = torch.cat([value, more], dim=1)
    logits_BTV = model(**longer, use_cache=False).logits
    return logits_BTV[0, -1 - len(completion) : -1].float().log_softmax(-1)
