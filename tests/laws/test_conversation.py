"""A conversation's next turn reuses the keys of the turns before, under one policy version."""

import pytest
from tiny import plain_logprobs, tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams

PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)
BLOCK_SIZE = 16
NEW_TURN = list(range(100, 130))


def test_a_second_turn_prefills_only_what_is_new_until_the_weights_change():
    model = tiny_model(max_position_embeddings=4096)
    config = RolloutConfig(seed=0, block_size=BLOCK_SIZE)
    with RolloutGenerator(model, config) as generator:
        history = [5 + i % 200 for i in range(2000)]
        (first,) = generator.generate_batch([history], sampling_params=PARAMS).values()
        history = history + first.generated_tokens + NEW_TURN

        (second,) = generator.generate_batch([history], sampling_params=PARAMS).values()
        # The last sampled token was never fed back, and a block is shared when it is full.
        most_new = 1 + len(NEW_TURN) + BLOCK_SIZE - 1
        assert len(NEW_TURN) < generator.metrics()["rollout/prefill_tokens"] <= most_new
        expected = plain_logprobs(model, second.prompt_ids, second.generated_tokens)
        assert second.logprobs == pytest.approx(expected, abs=1e-5)

        generator.sync_weights()
        generator.generate_batch([history], sampling_params=PARAMS)
        assert generator.metrics()["rollout/prefill_tokens"] == len(history)
