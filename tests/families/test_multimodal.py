"""Every type that reads images, videos or sounds runs right on text, or is refused."""

import re
from pathlib import Path

import pytest
import torch
from configs import tiny_config
from marks import of_the_newest
from multimodal import CORE, NOT_BUILT, REFUSED
from nightly import some_slow
from parity import check, create_model, plain_logprobs, prompts
from transformers import CONFIG_MAPPING, AutoModelForMultimodalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.errors import ConfigurationError

# The models' own warnings, about weights and settings that only a tiny model has.
pytestmark = pytest.mark.filterwarnings("default")

MAPPED = sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)
RUNNING = [t for t in MAPPED if t not in REFUSED and t not in NOT_BUILT]
DOCUMENT = Path(__file__).parents[2] / "docs" / "architectures.md"

# Types that keep the last forward's position offset (`rope_deltas`) on a module.
KEEP_OFFSETS = (
    "cohere_compass",
    "cosmos3_edge",
    "cosmos3_omni",
    "ernie4_5_vl_moe",
    "exaone4_5",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "hunyuan_vl",
    "minicpmv4_7",
    "paddleocr_vl",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_omni_moe_thinker",
    "qwen3_vl",
    "qwen4_exp",
)


def create(model_type):
    return create_model(model_type, AutoModelForMultimodalLM)


# The greedy token would be `image_token_index`, which lies among the tokens of text here.
DRAWS_IMAGE_TOKEN = pytest.param(
    "mistral_large4",
    marks=[
        pytest.mark.nightly,
        pytest.mark.xfail(
            strict=True,
            reason="once, the greedy token is not the plain forward's most likely, the image token",
        ),
    ],
)


@pytest.mark.fast_cases("lfm2_vl")
@pytest.mark.parametrize(
    "model_type",
    [*some_slow([t for t in RUNNING if t != "mistral_large4"], CORE), DRAWS_IMAGE_TOKEN],
)
def test_a_type_agrees_on_text_with_its_plain_forward_and_its_generate(model_type):
    found = check(create(model_type))
    assert found.drift <= found.tolerance
    assert found.margin <= found.tolerance
    assert found.is_as_generate
    assert found.num_preemptions > 0


@pytest.mark.parametrize("model_type", some_slow(REFUSED, ("idefics", "paligemma")))
def test_a_type_that_cannot_run_is_refused_in_one_line(model_type):
    model = create(model_type)
    with pytest.raises(ConfigurationError, match=r"^[^\n]+\.$"):
        RolloutGenerator(model)


@pytest.mark.parametrize("model_type", NOT_BUILT)
def test_a_type_said_not_to_be_built_is_not(model_type):
    with pytest.raises((ImportError, ValueError)):
        create(model_type)


@pytest.mark.parametrize("model_type", RUNNING)
def test_a_tiny_model_has_every_kind_of_layer_that_its_type_has(model_type):
    def kinds(config):
        return set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())

    assert kinds(tiny_config(model_type)) >= kinds(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize("model_type", some_slow(KEEP_OFFSETS, ("qwen2_5_vl", "qwen3_5")))
def test_a_rollout_neither_reads_nor_writes_the_position_offset_of_another_forward(model_type):
    model = create(model_type)
    (module,) = (m for m in model.modules() if "rope_deltas" in vars(m))
    # Rows of several lengths, a group, chunks of prompts, and decode steps.
    inputs = [prompt for prompt in prompts(3, 9, 20) for _ in range(2)]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    with RolloutGenerator(model, RolloutConfig(seed=0, max_batch_tokens=16)) as generator:
        stale = module.rope_deltas = torch.full((2, 1), 7)
        outputs = generator.generate_batch(inputs, sampling_params=params).values()
    assert module.rope_deltas is stale
    module.rope_deltas = None
    for output in outputs:
        expected = plain_logprobs(model, output.prompt_ids + output.generated_tokens)
        expected = expected[len(output.prompt_ids) - 1 : -1]
        chosen = expected.gather(-1, torch.tensor(output.generated_tokens)[:, None])[:, 0]
        assert torch.allclose(chosen, torch.tensor(output.logprobs), rtol=0.0, atol=1e-5)


@of_the_newest
def test_the_tables_name_types_that_are_mapped():
    assert set(CORE) | set(REFUSED) | set(NOT_BUILT) | set(KEEP_OFFSETS) <= set(MAPPED)
    assert set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) <= set(MAPPED)
    assert len(RUNNING) >= 80


@of_the_newest
def test_the_document_lists_every_type_that_transformers_maps():
    _, section = DOCUMENT.read_text().split("\n## Images, videos and sounds\n")
    rows = re.findall(r"^\| `([\w.-]+)` \| (\w[\w ]*) \|", section, re.MULTILINE)
    assert [name for name, _ in rows] == MAPPED
    for name, status in rows:
        expected = "refused" if name in REFUSED else "not built" if name in NOT_BUILT else "runs"
        assert status == expected
