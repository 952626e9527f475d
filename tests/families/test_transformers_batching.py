"""transformers' own continuous batching, where it runs, samples the same greedy tokens."""

import pytest
from nightly import some_slow
from parity import create_model, prompts
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams

# transformers warns of its own settings.
pytestmark = pytest.mark.filterwarnings("default")

NEW_TOKENS = 8
LENGTHS = (5, 21, 33)

BOTH_RUN = ("gemma3_text", "gpt_oss", "llama", "qwen3", "qwen3_moe")


def tokens_of_transformers(model, inputs):
    outputs = model.generate_batch(
        inputs,
        generation_config=GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=64, block_size=16, max_batch_tokens=128
        ),
        progress_bar=False,
    )
    return {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}


BOTH_RUN_TOO = (
    "cohere2",
    "ernie4_5",
    "gemma2",
    "glm4",
    "granite",
    "helium",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "seed_oss",
    "smollm3",
    "starcoder2",
)


@pytest.mark.parametrize("model_type", some_slow([*BOTH_RUN, *BOTH_RUN_TOO], BOTH_RUN))
def test_transformers_manager_and_ours_sample_the_same_greedy_tokens(model_type):
    inputs = prompts(*LENGTHS)
    params = SamplingParams(do_sample=False, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with RolloutGenerator(create_model(model_type), RolloutConfig(block_size=16)) as generator:
        outputs = generator.generate_batch(inputs, sampling_params=params)
    ours = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    assert ours == tokens_of_transformers(create_model(model_type), inputs)
