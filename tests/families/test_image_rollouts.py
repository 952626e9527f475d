"""Types that read images roll out with them as `generate` does, or are refused."""

import re
from pathlib import Path

import image_needs
import pytest
import torch
from images import create, picture, plain_logprobs, prompt
from marks import slow_beside
from parity import TOLERANCE
from test_images import READING

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator, SamplingParams

# The models' own warnings, about weights and settings that only a tiny model has.
pytestmark = pytest.mark.filterwarnings("default")

DOCUMENT = Path(__file__).parents[2] / "docs" / "images.md"
NEW_TOKENS = 6
TEXT = [120, 121, 122]
GREEDY = SamplingParams(do_sample=False, max_new_tokens=NEW_TOKENS, ignore_eos=True)

# Types that read images, and run in the engine on text alone.
REFUSED = {
    "git": "puts the image's features before the prompt, where no token stands for them",
    "mllama": "reads the image again at every token, by cross-attention",
    "ovis2": "embeds the markers around an image otherwise where pixels are passed",
    "qwen4_exp": "its index of sparse attention keeps the positions of images",
}
RUNNING = [t for t in READING if t not in REFUSED]
CORE = ("internvl", "paddleocr_vl", "qwen3_5")

# Types whose processor makes more of an image than ids can be matched with.
TEXT_ONLY = ("hunyuan_vl", "kosmos-2.5", "pp_chart2table", "qianfan_ocr")

# Two images take more positions than the tiny model has.
ONE_IMAGE = (*image_needs.ONE_IMAGE, "deepseek_ocr2")


def generator_of(model, processor):
    return RolloutGenerator(model, RolloutConfig(seed=0, block_size=4), tokenizer=processor)


@pytest.mark.parametrize("model_type", slow_beside(CORE, RUNNING))
def test_a_type_rolls_out_with_images_as_its_plain_forward_and_its_generate(model_type):
    model, processor = create(model_type)
    pictures = [picture(seed) for seed in range(1 if model_type in ONE_IMAGE else 2)]
    row = {"prompt": prompt(processor, len(pictures)), "images": pictures}
    with generator_of(model, processor) as generator:
        outputs = [*generator.generate_batch([row, TEXT], sampling_params=GREEDY).values()]
        assert generator.verify(2).max <= TOLERANCE
        images = generator._last_rollout[0].images
        again = row | {"prompt": outputs[0].prompt_ids}
        if model_type not in TEXT_ONLY:
            (same,) = generator.generate_batch([again], sampling_params=GREEDY).values()
            assert same.generated_tokens == outputs[0].generated_tokens
    token_ids, tokens = outputs[0].prompt_ids, outputs[0].generated_tokens
    dtype = model.dtype
    tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in images.tensors.items()}
    input_ids = torch.tensor([token_ids])
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), **tensors}
    logprobs = plain_logprobs(model, inputs, tokens)
    chosen = logprobs.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    assert outputs[0].logprobs == pytest.approx(chosen.tolist(), abs=TOLERANCE)
    expected = model.generate(
        **inputs, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
    )
    assert expected[0].tolist() == token_ids + tokens


@pytest.mark.parametrize("model_type", slow_beside(("mllama",), REFUSED))
def test_a_type_that_cannot_is_refused_in_one_line_and_runs_on_text(model_type):
    model, processor = create(model_type)
    row = {"prompt": prompt(processor, 1), "images": [picture(0)]}
    with generator_of(model, processor) as generator:
        with pytest.raises(ConfigurationError, match=r"^[^\n]+\.$"):
            generator.generate_batch([row], sampling_params=GREEDY)
        (output,) = generator.generate_batch([TEXT], sampling_params=GREEDY).values()
    assert len(output.generated_tokens) == NEW_TOKENS


def test_the_document_names_the_types_that_are_refused():
    text = DOCUMENT.read_text()
    assert f"{len(RUNNING)} of {len(READING)} types" in text
    assert set(re.findall(r"^\| `([\w.-]+)` \|", text, re.MULTILINE)) == set(REFUSED)
