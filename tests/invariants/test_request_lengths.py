"""`max_blocks_per_request` has transformers' meaning; `max_model_len` bounds a sequence."""

import pytest
from tiny import plain_logprobs, tiny_model
from transformers import ContinuousBatchingConfig

from cb_rollout import InvalidRequestError, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.config.hf import as_rollout_config

LONG = SamplingParams(max_new_tokens=40, ignore_eos=True, temperature=0)


def outputs_of(model, config):
    with RolloutGenerator(model, config) as generator:
        outputs = generator.generate_batch([[5, 6, 7], [8, 9]], sampling_params=LONG)
        return list(outputs.values()), generator.manager.decode_path


def test_a_request_of_more_blocks_than_transformers_table_finishes():
    model = tiny_model()
    expected, path = outputs_of(model, RolloutConfig(block_size=8))
    theirs = ContinuousBatchingConfig(block_size=8, max_blocks_per_request=2, return_logprobs=True)
    found, same_path = outputs_of(model, theirs)
    assert [o.generated_tokens for o in found] == [o.generated_tokens for o in expected]
    assert same_path == path


def test_zero_blocks_switch_the_kernels_off_that_read_blocks_and_no_token_changes():
    model = tiny_model()
    expected, path = outputs_of(model, RolloutConfig(block_size=8))
    found, gathered_path = outputs_of(model, RolloutConfig(block_size=8, max_blocks_per_request=0))
    assert [o.generated_tokens for o in found] == [o.generated_tokens for o in expected]
    for output in found:
        exact = plain_logprobs(model, output.prompt_ids, output.generated_tokens)
        assert output.logprobs == pytest.approx(exact, abs=1e-5)
    assert "decode attention: gathered (max_blocks_per_request=0)" in gathered_path
    assert "gathered" not in path


def test_a_cap_in_tokens_refuses_longer_requests_and_ends_open_ones():
    config = RolloutConfig(max_model_len=10)
    with RolloutGenerator(tiny_model(), config) as generator:
        with pytest.raises(
            InvalidRequestError, match=r"max_model_len allows at most 10 .*; raise it"
        ):
            generator.generate_batch([[5] * 8], max_new_tokens=3)
        open_ended = SamplingParams(ignore_eos=True)
        (output,) = generator.generate_batch([[5] * 8], sampling_params=open_ended).values()
        assert len(output.generated_tokens) == 2


def test_a_cap_that_is_no_length_is_refused():
    with pytest.raises(ValueError, match="max_model_len=0 is not a whole number >= 1"):
        RolloutConfig(max_model_len=0)
    ours = as_rollout_config(ContinuousBatchingConfig(max_blocks_per_request=0))
    assert ours.max_blocks_per_request == 0
