"""Types that read images: a tiny model and its processor, `generate` and the plain forward."""

import re
from pathlib import Path

import image_needs
import multimodal
import pytest
import torch
from image_parity import SIZES, check
from images import (
    create,
    create_config,
    create_processor,
    picture,
    plain_logprobs,
    prompt,
    read,
)
from marks import IS_NEWEST, of_the_newest
from nightly import some_slow
from parity import TOLERANCE
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from cb_rollout import RolloutConfig, RolloutError, RolloutGenerator
from cb_rollout.engine.images.processor import encoded_row

# The models' own warnings, about weights and settings that only a tiny model has.
pytestmark = pytest.mark.filterwarnings("default")

MAPPED = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
LEFT_OUT = multimodal.REFUSED | multimodal.NOT_BUILT | image_needs.NO_PROCESSOR
READING = [t for t in MAPPED if t not in LEFT_OUT]
RUNNING = [t for t in READING if t not in image_needs.REFUSED]
DOCUMENT = Path(__file__).parents[2] / "docs" / "images.md"

NEW_TOKENS = 4
MAX_PROMPT_TOKENS = 320
# Nats that another picture changes some log-probability by, at least.
EFFECT = 1e-3


@pytest.mark.parametrize("model_type", image_needs.CORE)
def test_generate_reads_images_as_the_plain_forward_does(model_type):
    model, processor = create(model_type)
    sizes = SIZES[:1] if model_type in image_needs.ONE_IMAGE else SIZES
    for num_images in range(1, len(sizes) + 1):
        pictures = [picture(seed, size) for seed, size in enumerate(sizes[:num_images])]
        inputs = read(model, processor, pictures)
        num_prompt_tokens = inputs["input_ids"].shape[1]
        assert num_prompt_tokens <= MAX_PROMPT_TOKENS
        output = model.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        completion = output[0, num_prompt_tokens:]
        assert len(completion) == NEW_TOKENS
        logprobs = plain_logprobs(model, inputs, completion.tolist())
        chosen = logprobs.gather(-1, completion[:, None])[:, 0]
        assert (logprobs.max(-1).values - chosen).max() <= TOLERANCE
        pictures[-1] = picture(2, sizes[num_images - 1])
        others = read(model, processor, pictures)
        changed = plain_logprobs(model, others, completion.tolist())
        assert (changed - logprobs).abs().max() > EFFECT


@pytest.mark.fast_cases("qwen2_5_vl")
@pytest.mark.parametrize("model_type", some_slow(RUNNING, image_needs.ENGINE_CORE))
def test_prompts_with_images_agree_with_the_plain_forward_and_generate(model_type):
    found = check(model_type)
    assert found.drift <= found.tolerance
    assert found.is_as_generate
    assert found.effect > EFFECT


@pytest.mark.parametrize("model_type", some_slow(RUNNING, image_needs.TOKEN_IDS_CORE))
def test_expanded_token_ids_have_the_tensors_of_the_text(model_type):
    if model_type == "qianfan_ocr" and not IS_NEWEST:
        pytest.skip("its processor of transformers 5.17 does not expand markers without a text")
    processor = create_processor(model_type, create_config(model_type))
    pictures = [picture(seed, size) for seed, size in enumerate(SIZES)]
    pictures = pictures[: 1 if model_type in image_needs.ONE_IMAGE else None]
    row = {"prompt": prompt(processor, len(pictures)), "images": pictures}
    of_text = encoded_row(row, processor, 0)
    row["prompt"] = of_text.token_ids
    if model_type in image_needs.NO_TOKEN_IDS:
        with pytest.raises(RolloutError, match=r"pass text or a chat[^\n]*\.$"):
            encoded_row(row, processor, 0)
        return
    of_ids = encoded_row(row, processor, 0)
    assert of_ids.token_ids == of_text.token_ids
    assert of_ids.tensors.keys() == of_text.tensors.keys()
    assert all(torch.equal(of_ids.tensors[name], of_text.tensors[name]) for name in of_text.tensors)


@pytest.mark.parametrize("model_type", some_slow(image_needs.REFUSED, ("mllama",)))
def test_images_that_cannot_run_are_refused_in_one_line(model_type):
    with pytest.raises(RolloutError, match=r"^[^\n]+\.$"):
        check(model_type)


@pytest.mark.parametrize("model_type", image_needs.NO_PROCESSOR)
def test_a_type_said_to_have_no_processor_has_none(model_type):
    with pytest.raises((KeyError, StopIteration, ValueError)):
        read(*create(model_type), [picture(0)])


@of_the_newest
def test_the_tables_name_types_that_are_mapped():
    named = {*image_needs.CORE, *image_needs.ONE_IMAGE, *image_needs.NO_PROCESSOR}
    named |= {*image_needs.ENGINE_CORE, *image_needs.REFUSED}
    assert named <= set(MAPPED)
    assert len(READING) >= 70


@of_the_newest
def test_the_document_names_the_types_that_are_refused():
    text = DOCUMENT.read_text()
    assert f"{len(RUNNING)} of {len(READING)} types" in text
    named = set(re.findall(r"^\| `([\w.-]+)` \|", text, re.MULTILINE))
    assert named == set(image_needs.REFUSED)


@pytest.mark.fast_cases("qwen2_5_vl")
@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl"])
def test_images_run_in_16_bits_as_they_do_in_float32(model_type):
    """A mask that is wrong for image tokens is hundredths of a nat off, less than 16 bits round."""
    model, processor = create(model_type)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        row = {
            "prompt": prompt(processor, 2),
            "images": [picture(s, z) for s, z in enumerate(SIZES)],
        }
        config = RolloutConfig(seed=0, block_size=4)
        with RolloutGenerator(model.to(dtype), config, tokenizer=processor) as generator:
            generator.generate_batch([row], max_new_tokens=2)
            found.append(generator.manager.engine.request_checks.images.cuts)
    assert found[0] == found[1]
