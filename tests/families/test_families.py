"""Every type that transformers maps to a causal language model runs right, or is refused."""

import re
from pathlib import Path

import pytest
from configs import CORE, ENCODERS, NOT_BUILT, OWN_GENERATE, REFUSED, tiny_config
from huggingface_hub.errors import StrictDataclassError
from marks import IS_NEWEST, of_the_newest
from nightly import some_slow
from parity import check, create_model
from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cb_rollout import RolloutGenerator
from cb_rollout.errors import ConfigurationError

# The models' own warnings, about weights and settings that only a tiny model has.
pytestmark = pytest.mark.filterwarnings("default")

MAPPED = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
RUNNING = [t for t in MAPPED if t not in REFUSED and t not in NOT_BUILT]
DOCUMENT = Path(__file__).parents[2] / "docs" / "architectures.md"


@pytest.mark.fast_cases("bloom", "gemma2", "mistral", "olmo3", "qwen3", "qwen3_moe", "smollm3")
@pytest.mark.parametrize("model_type", some_slow(RUNNING, CORE))
def test_a_type_agrees_with_its_plain_forward_and_its_generate(model_type):
    found = check(create_model(model_type))
    assert found.drift <= found.tolerance
    assert found.margin <= found.tolerance
    assert found.is_as_generate == (model_type not in OWN_GENERATE)
    assert found.num_preemptions > 0


@pytest.mark.parametrize("model_type", some_slow(REFUSED, ("openai-gpt", "minimax")))
def test_a_type_that_cannot_run_is_refused_when_an_engine_is_made(model_type):
    model = create_model(model_type)
    with pytest.raises(ConfigurationError, match=r"^[^\n]+\.generate( for this model)?\.$"):
        RolloutGenerator(model)


@pytest.mark.parametrize("model_type", some_slow(ENCODERS, ("bert", "roberta")))
def test_an_encoder_that_looks_ahead_is_refused_and_told_how_not_to(model_type):
    model = create_model(model_type, is_decoder=False)
    with pytest.raises(ConfigurationError, match=r"off its plain forward by .*is_decoder=True"):
        RolloutGenerator(model)


@pytest.mark.slow
def test_an_encoder_is_refused_in_half_precision_too():
    with pytest.raises(ConfigurationError, match=r"off its plain forward by .*is_decoder=True"):
        RolloutGenerator(create_model("rembert", is_decoder=False).bfloat16())


@pytest.mark.parametrize("model_type", ["bart", "mbart", "t5"])
def test_an_encoder_decoder_is_refused(model_type):
    config = CONFIG_MAPPING[model_type](d_model=32, vocab_size=64, num_layers=1)
    with pytest.raises(ConfigurationError, match="is an encoder-decoder"):
        RolloutGenerator(AutoModelForSeq2SeqLM.from_config(config))


@pytest.mark.parametrize("model_type", NOT_BUILT)
def test_a_type_said_not_to_be_built_is_not(model_type):
    with pytest.raises((AttributeError, ImportError, ValueError, StrictDataclassError)):
        create_model(model_type)


@pytest.mark.parametrize("model_type", RUNNING)
def test_a_tiny_model_has_every_kind_of_layer_that_its_type_has(model_type):
    def kinds(config):
        return set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())

    if model_type == "dbrx" and not IS_NEWEST:
        pytest.skip("its inner configs of transformers 5.17 take no ids of special tokens")
    assert kinds(tiny_config(model_type)) >= kinds(CONFIG_MAPPING[model_type]())


def test_the_tables_name_types_that_are_mapped():
    assert set(CORE) | set(ENCODERS) | set(OWN_GENERATE) | set(REFUSED) | set(NOT_BUILT) <= set(
        MAPPED
    )
    assert len(RUNNING) >= 120


@of_the_newest
def test_the_document_lists_every_type_that_transformers_maps():
    section, _ = DOCUMENT.read_text().split("\n## Images, videos and sounds\n")
    rows = re.findall(r"^\| `([\w-]+)` \| (\w[\w ]*) \|", section, re.MULTILINE)
    assert [name for name, _ in rows] == MAPPED
    for name, status in rows:
        expected = "refused" if name in REFUSED else "not built" if name in NOT_BUILT else "runs"
        assert status == expected
