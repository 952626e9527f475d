"""Print the speed of rollouts with pictures of docs/images.md, beside `model.generate`.

python scripts/measure/images.py

A LLaVA with random weights: SmolLM-135M's shape below a vision tower of ViT-S/16's. Eight pictures,
eight completions of each, with long-tailed lengths that both are forced to. Each figure is the
median of rounds in which the two take turns; pictures are new in each.
"""

import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness.workload import LLAMA_135M
from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.tools.bench import long_tailed_lengths

ROUNDS = 3
NUM_PICTURES, NUM_COMPLETIONS = 8, 8
LONGEST, LOG_MEAN = 128, 3.2
SIDE, PATCH = 224, 16
IMAGE, NUM_WORDS = 2, 32
PROMPT = "<image>" + "".join(f"w{n} " for n in range(3, 19))


def create_processor() -> LlavaProcessor:
    """Create a processor of words, whose pictures have 196 tokens."""
    words = {"<pad>": 0, "<eos>": 1, "<image>": IMAGE} | {f"w{n}": n for n in range(3, NUM_WORDS)}
    backend = Tokenizer(models.WordLevel(words, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        extra_special_tokens={"image_token": "<image>"},
    )
    return LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SIDE),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def create_model() -> LlavaForConditionalGeneration:
    """Create the model."""
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    config = LlavaConfig(
        text_config=LLAMA_135M.shape,
        vision_config=vision,
        image_token_index=IMAGE,
        image_seq_length=(SIDE // PATCH) ** 2,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config).eval()


def pictures(draws: random.Random) -> list[Image.Image]:
    """Return new pictures of random pixels."""
    return [
        Image.frombytes("RGB", (SIDE, SIDE), draws.randbytes(3 * SIDE * SIDE))
        for _ in range(NUM_PICTURES)
    ]


def seconds_of_rollout(generator: RolloutGenerator, drawn: list[Any], lengths: list[int]) -> float:
    """Return the seconds of a rollout by cb_rollout."""
    started = time.perf_counter()
    rows = [{"prompt": PROMPT, "images": [one]} for one in drawn for _ in range(NUM_COMPLETIONS)]
    generator.generate_batch(
        rows, max_new_tokens=lengths, sampling_params=SamplingParams(ignore_eos=True)
    )
    return time.perf_counter() - started


def seconds_of_generate(model: Any, processor: Any, drawn: list[Any], longest: int) -> float:
    """Return the seconds of the same rows by `model.generate`, which runs all to the longest."""
    started = time.perf_counter()
    repeated = [one for one in drawn for _ in range(NUM_COMPLETIONS)]
    inputs = processor(
        text=[PROMPT] * len(repeated), images=repeated, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        model.generate(
            **inputs, do_sample=True, top_k=0, min_new_tokens=longest, max_new_tokens=longest
        )
    return time.perf_counter() - started


def main() -> None:
    """Take turns, and print medians."""
    model, processor, draws = create_model(), create_processor(), random.Random(0)
    num_sequences = NUM_PICTURES * NUM_COMPLETIONS
    ours, theirs = [], []
    with RolloutGenerator(model, RolloutConfig(seed=0), tokenizer=processor) as generator:
        lengths = long_tailed_lengths(draws, num_sequences, LOG_MEAN, LONGEST)
        seconds_of_rollout(generator, pictures(draws), [8] * num_sequences)
        for _ in range(ROUNDS):
            ours.append(seconds_of_rollout(generator, pictures(draws), lengths))
            theirs.append(seconds_of_generate(model, processor, pictures(draws), max(lengths)))
            generator.sync_weights()
    own, other = statistics.median(ours), statistics.median(theirs)
    num_parameters = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{num_parameters:.0f} M parameters, {num_sequences} sequences, {sum(lengths)} tokens")
    print(f"cb_rollout {own:.1f} s, model.generate {other:.1f} s: {other / own:.1f} times")


if __name__ == "__main__":
    main()
