"""A run that was stopped and resumed samples what one that went on samples."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from tiny import BOS, char_tokenizer, largest_difference, tiny_model
from tiny_vision import picture, tiny_vision_model

from cb_rollout import (
    InvalidRequestError,
    RolloutConfig,
    RolloutError,
    RolloutGenerator,
    SamplingParams,
)

CONFIG = RolloutConfig(seed=5, block_size=4, num_blocks=64, max_batch_tokens=64)
# Its cache does not hold all sequences, so that some are preempted.
CROWDED = replace(CONFIG, num_blocks=14)
PROMPTS = [[BOS, *range(20, 20 + length)] for length in (3, 9, 14, 5)]
NUM_TOKENS = 24


def reloaded(state):
    """Return a state as another process reads it from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("weight_sync", ["shared", "copy"])
def test_weights_that_are_loaded_after_the_generator_was_made_sample(weight_sync):
    """A copy has the weights that the model had when it was made."""
    config = replace(CONFIG, weight_sync=weight_sync)
    model = tiny_model(num_hidden_layers=1)
    weights = copy.deepcopy(model.state_dict())
    with RolloutGenerator(model, config) as generator:
        generator.sync_weights()
        generator.generate_batch(PROMPTS, max_new_tokens=4)
        state = reloaded(generator.state_dict())
        expected = list(generator.generate_batch(PROMPTS, max_new_tokens=8).values())
    other = tiny_model(seed=1, num_hidden_layers=1)
    with RolloutGenerator(other, config) as generator:
        other.load_state_dict(weights)
        generator.load_state_dict(state)
        outputs = list(generator.generate_batch(PROMPTS, max_new_tokens=8).values())
        assert generator.verify(4).max <= 1e-5
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.generated_tokens == wanted.generated_tokens
        assert output.policy_versions == wanted.policy_versions


def test_an_unread_output_of_a_sequence_that_goes_on_has_no_end():
    with RolloutGenerator(tiny_model(num_hidden_layers=1), CONFIG) as generator:
        manager = generator.manager
        manager.add_request(
            PROMPTS[0], streaming=True, max_new_tokens=60, sampling_params=SamplingParams()
        )
        manager.start()
        first = manager.get_result(timeout=60)
        assert first.lifespan[1] == -1.0
        with manager.pause():
            state = reloaded(generator.state_dict())
    going_on = [output for output in state["outputs"] if not output["finish_reason"]]
    assert all(output["lifespan"][1] == -1.0 for output in going_on)
    assert going_on


def add_all(manager, inputs, params):
    """Add every input twice, in one group, and stream the first; return all ids."""
    request_ids = [
        manager.add_request(inputs[0], streaming=True, sampling_params=params, max_new_tokens=30)
    ]
    return request_ids + manager.add_requests([*inputs, *inputs], sampling_params=params)


def finals(manager, request_ids):
    """Return the final output of each request."""
    outputs = {}
    while len(outputs) < len(request_ids):
        output = manager.get_result(timeout=60)
        assert output is not None, "a request was lost"
        if output.is_finished():
            outputs[output.request_id] = output
    assert sorted(outputs) == sorted(request_ids)
    return [outputs[request_id] for request_id in request_ids]


def stop_and_resume(model, inputs, params, config, num_streamed, **settings):
    """Return outputs of a run that goes on, and of one that is stopped amid its sequences."""
    with RolloutGenerator(model, config, **settings) as generator:
        request_ids = add_all(generator.manager, inputs, params)
        generator.manager.start()
        expected = finals(generator.manager, request_ids)
    stopped = RolloutGenerator(copy.deepcopy(model), config, **settings)
    request_ids = add_all(stopped.manager, inputs, params)
    taken = []
    if num_streamed:
        stopped.manager.start()
    while len(taken) < num_streamed:
        output = stopped.manager.get_result(request_ids[0], timeout=60)
        assert not output.is_finished(), "stopped too late"
        taken.append(output)
    state = reloaded(stopped.state_dict())
    assert len(state["requests"]) + len(state["outputs"]) >= len(request_ids)
    stopped.manager.stop(hard_stop=True)
    stopped.close()
    with RolloutGenerator(copy.deepcopy(model), config, **settings) as resumed:
        resumed.load_state_dict(state)
        resumed.manager.start()
        return expected, finals(resumed.manager, request_ids)


def require_equal(resumed, expected):
    for ours, theirs in zip(resumed, expected, strict=True):
        assert ours.generated_tokens == theirs.generated_tokens
        assert ours.prompt_ids == theirs.prompt_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
        assert ours.policy_versions == theirs.policy_versions
        assert ours.finish_reason == theirs.finish_reason
        assert ours.temperature == theirs.temperature


@pytest.mark.parametrize(
    ("config", "num_streamed"),
    [
        pytest.param(CONFIG, 0, id="before the first step"),
        pytest.param(CROWDED, 7, id="crowded"),
        *(
            pytest.param(config, num_streamed, marks=pytest.mark.slow, id=f"{name} {num_streamed}")
            for name, config in [("roomy", CONFIG), ("crowded", CROWDED)]
            for num_streamed in (1, 2, 12, 20)
        ),
    ],
)
def test_a_run_that_was_stopped_samples_what_it_would_have(config, num_streamed):
    params = SamplingParams(temperature=0.9, max_new_tokens=NUM_TOKENS, eos_token_id=-1)
    expected, resumed = stop_and_resume(tiny_model(), PROMPTS, params, config, num_streamed)
    require_equal(resumed, expected)


@pytest.mark.parametrize(
    "family",
    [
        "lfm2",
        pytest.param("mistral", marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", marks=pytest.mark.slow),
    ],
)
def test_layers_of_every_kind_are_computed_again(family):
    params = SamplingParams(temperature=0.9, max_new_tokens=NUM_TOKENS, eos_token_id=-1)
    expected, resumed = stop_and_resume(tiny_model(family), PROMPTS, params, CONFIG, 5)
    require_equal(resumed, expected)


def test_what_depends_on_the_tokens_so_far_is_kept():
    tokenizer = char_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    params = SamplingParams(
        temperature=1.0,
        top_k=20,
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        logit_bias={5: 2.0},
        sequence_bias={(7, 8): 3.0},
        bad_words=((9, 10),),
        stop=("ab", "q", "zz"),
        top_logprobs=2,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=-1,
    )
    expected, resumed = stop_and_resume(model, PROMPTS, params, CONFIG, 2, tokenizer=tokenizer)
    require_equal(resumed, expected)
    for ours, theirs in zip(resumed, expected, strict=True):
        own_ids = [[token for token, _ in place] for place in ours.top_logprobs]
        assert own_ids == [[token for token, _ in place] for place in theirs.top_logprobs]


def test_recorded_experts_and_masks_are_kept():
    config = replace(CONFIG, router_replay=True, sampling_mask="replay")
    params = SamplingParams(top_k=6, temperature=1.0, max_new_tokens=NUM_TOKENS, eos_token_id=-1)
    expected, resumed = stop_and_resume(tiny_model("qwen3_moe"), PROMPTS, params, config, 5)
    require_equal(resumed, expected)
    for ours, theirs in zip(resumed, expected, strict=True):
        assert (ours.routed_experts == theirs.routed_experts).all()
        assert ours.kept_token_ids == theirs.kept_token_ids


@pytest.mark.slow
def test_prompts_with_images_go_on():
    model, processor = tiny_vision_model("qwen2_5_vl")
    inputs = [{"prompt": "w60 <image> w61", "images": [picture(seed)]} for seed in (1, 2)]
    params = SamplingParams(temperature=0.9, max_new_tokens=NUM_TOKENS, eos_token_id=-1)
    expected, resumed = stop_and_resume(model, inputs, params, CONFIG, 4, tokenizer=processor)
    require_equal(resumed, expected)


def test_the_next_rollout_draws_as_it_would_have_without_a_seed_in_the_config():
    model = tiny_model()
    config = replace(CONFIG, seed=None)
    params = SamplingParams(temperature=1.0, max_new_tokens=8)
    with RolloutGenerator(model, config) as generator:
        generator.generate_batch(PROMPTS, sampling_params=params)
        generator.sync_weights()
        state = reloaded(generator.state_dict())
        expected = list(generator.generate_batch(PROMPTS, sampling_params=params).values())
    with RolloutGenerator(model, config) as resumed:
        resumed.load_state_dict(state)
        assert resumed.policy_version == 1
        require_equal(resumed.generate_batch(PROMPTS, sampling_params=params).values(), expected)


def test_outputs_that_nobody_took_are_kept():
    model = tiny_model()
    with RolloutGenerator(model, CONFIG) as generator:
        manager = generator.manager
        request_id = manager.add_request(PROMPTS[0], max_new_tokens=3, record_timestamps=True)
        manager.start()
        manager.stop()
        state = reloaded(generator.state_dict())
        expected = manager.get_result(request_id, timeout=0)
    with RolloutGenerator(model, CONFIG) as resumed:
        resumed.load_state_dict(state)
        output = resumed.manager.get_result(request_id, timeout=0)
    require_equal([output], [expected])
    seconds = [stamp - output.created_time for stamp in output.timestamps]
    assert seconds == pytest.approx([s - expected.created_time for s in expected.timestamps])


def test_a_cancelled_request_stays_cancelled():
    model = tiny_model()
    with RolloutGenerator(model, CONFIG) as generator:
        request_id = generator.manager.add_request(PROMPTS[0], max_new_tokens=3)
        generator.manager.cancel_request(request_id)
        state = reloaded(generator.state_dict())
    with RolloutGenerator(model, CONFIG) as resumed:
        resumed.load_state_dict(state)
        resumed.manager.start()
        assert resumed.manager.get_result(request_id, timeout=60).status == "cancelled"


def test_new_requests_share_neither_id_nor_group_with_restored_ones():
    model = tiny_model()
    params = SamplingParams(temperature=1.0, max_new_tokens=6, eos_token_id=-1)
    with RolloutGenerator(model, CONFIG) as generator:
        old_ids = generator.manager.add_requests(PROMPTS, sampling_params=params)
        state = reloaded(generator.state_dict())
    with RolloutGenerator(model, CONFIG) as resumed:
        resumed.load_state_dict(state)
        others = [list(reversed(prompt)) for prompt in PROMPTS]
        new_ids = resumed.manager.add_requests(others, sampling_params=params)
        assert not set(new_ids) & set(old_ids)
        resumed.manager.start()
        outputs = finals(resumed.manager, [*old_ids, *new_ids])
    assert [output.prompt_ids for output in outputs] == [*PROMPTS, *others]
    assert largest_difference(model, outputs) < 2e-5


class _AnyToken:
    """A grammar that allows every token."""

    def matcher(self):
        return self

    def fill_allowed_tokens(self, mask_V):
        mask_V.fill_(True)

    def accept_token(self, token_id):
        return True

    def is_terminated(self):
        return False


def test_what_cannot_be_saved_or_loaded_is_refused():
    with RolloutGenerator(tiny_model(), CONFIG) as generator:
        state = generator.state_dict()
        with pytest.raises(InvalidRequestError, match=r"has format None, but .* reads format 1"):
            generator.load_state_dict({})
        params = SamplingParams(grammar=_AnyToken(), max_new_tokens=4)
        generator.manager.add_request(PROMPTS[0], sampling_params=params)
        with pytest.raises(RolloutError, match="req_0 is sampled under a grammar"):
            generator.state_dict()
        with pytest.raises(RolloutError, match=r"1 requests are in flight \(req_0, "):
            generator.load_state_dict(state)
