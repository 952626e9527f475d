"""numerics="bitwise" over architectures: sampled in any way, the bits are the trainer's."""

import pytest
from bitwise_rollouts import compare_rollouts
from parity import create_model

# Sequences of each engine.
NUM_SEQUENCES = 20

TYPES = (
    # Dense.
    "gpt2",
    "bloom",
    "llama",
    "olmo2",
    "qwen3",
    # Sliding windows, sinks and soft caps.
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "mistral",
    # Experts, and latent attention.
    "deepseek_v3",
    "qwen3_moe",
    # Short convolutions and state spaces.
    "lfm2",
    "mamba",
)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TYPES)
def test_rollouts_are_the_trainers_forward_in_every_bit(model_type):
    rollouts = compare_rollouts(create_model(model_type), NUM_SEQUENCES)
    assert rollouts.num_compared >= 60
    assert rollouts.num_preemptions > 0
    assert (rollouts.num_accepted > 0) == (model_type != "mamba")
