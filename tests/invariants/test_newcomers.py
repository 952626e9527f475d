"""Code written for transformers' continuous batching: it runs, or is told what to write."""

from contextlib import closing

import pytest
import torch
from tiny import char_tokenizer, tiny_model
from transformers import BatchEncoding, ContinuousBatchingConfig, GenerationConfig

from cb_rollout import (
    ConfigurationError,
    ContinuousBatchingManager,
    InvalidRequestError,
    RequestStatus,
    RolloutConfig,
    RolloutError,
    RolloutGenerator,
    generate_batch,
)

PROMPTS = [[5, 6, 7], [8, 9]]
GUIDE = {"use_cuda_graph": False, "max_batch_tokens": 512, "eos_token_id": 1, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def manager(model):
    manager = ContinuousBatchingManager(model, GenerationConfig(max_new_tokens=3))
    yield manager
    if manager.is_running():
        manager.stop(timeout=0)


def guide_config(**more):
    return GenerationConfig(**GUIDE, max_new_tokens=4, do_sample=False, **more)


def test_the_guides_first_generation_config_runs_as_it_is(model):
    outputs = generate_batch(
        model, inputs=PROMPTS, generation_config=guide_config(), progress_bar=False
    )
    assert [o.status for o in outputs.values()] == [RequestStatus.FINISHED] * 2
    manager = ContinuousBatchingManager(model, generation_config=guide_config())
    assert manager.config == RolloutConfig(use_cuda_graph=False, max_batch_tokens=512)


def test_a_generator_takes_settings_of_the_engine_from_the_models_own_generation_config():
    model = tiny_model()
    model.generation_config.max_batch_tokens = 64
    with RolloutGenerator(model) as generator:
        assert generator.config.max_batch_tokens == 64
    outputs = generate_batch(model, PROMPTS, max_new_tokens=2, progress_bar=False)
    assert len(outputs) == 2


@pytest.mark.filterwarnings("ignore:Passing ContinuousBatchingConfig through:FutureWarning")
def test_a_batching_config_inside_a_generation_config_is_the_engines(model):
    theirs = ContinuousBatchingConfig(max_batch_tokens=64, max_queue_size=5)
    held = GenerationConfig(max_new_tokens=2, continuous_batching_config=theirs)
    assert ContinuousBatchingManager(model, held).config.max_queue_size == 5
    with RolloutGenerator(model, generation_config=held) as generator:
        assert generator.config.max_batch_tokens == 64
        assert generator.manager.config == generator.config
        generator.generate_batch(PROMPTS, held)
    outputs = generate_batch(model, PROMPTS, held, progress_bar=False)
    assert all(output.logprobs == [] for output in outputs.values())


def test_a_call_that_asks_for_another_engine_is_refused(model):
    with RolloutGenerator(model) as generator:
        for call in (
            lambda: generator.generate_batch(PROMPTS, guide_config()),
            lambda: generator.set_generation_config(guide_config()),
        ):
            with pytest.raises(ConfigurationError, match=r"cannot change; set RolloutConfig\("):
                call()


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"stream": True}, "'stream'; the name is streaming, which a manager's add_request"),
        ({"streaming": True}, "add the request to a manager"),
        ({"max_length": 9}, r"pass sampling_params=SamplingParams\(max_length"),
        ({"attention_mask": [[1]]}, "without padding"),
        ({"stopping_criteria": []}, r"SamplingParams\(stop="),
        ({"max_tokens": 4}, "did you mean 'max_new_tokens'"),
    ],
)
def test_an_argument_of_another_librarys_call_is_answered_with_ours(model, argument, said):
    with pytest.raises(ConfigurationError, match=f"generate_batch has no argument .*{said}"):
        generate_batch(model, PROMPTS, progress_bar=False, **argument)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"stream": True}, "the name is streaming"),
        ({"generation_config": None}, "give it to the ContinuousBatchingManager"),
        ({"attention_mask": [1]}, "without padding"),
        ({"tokenizer": None}, "give tokenizer= to"),
        ({"prompt": [5]}, "the name is inputs, or input_ids of add_request"),
    ],
)
def test_an_argument_of_another_librarys_request_is_answered_with_ours(manager, argument, said):
    with pytest.raises(InvalidRequestError, match=f"add_request has no argument .*{said}"):
        manager.add_request([5, 6], **argument)


def test_a_result_that_is_taken_for_pairs_says_what_to_read(manager):
    manager.start()
    manager.add_requests([[5, 6]] * 3)
    said = "one result, not .* pairs; read output.request_id and output.generated_tokens"
    with pytest.raises(TypeError, match=said):
        for _request_id, _request in manager.get_result():
            pass
    with pytest.raises(TypeError, match=said):
        for _request_id, _request in manager:
            pass
    with pytest.raises(TypeError, match=r"read the attribute output\.generated_tokens"):
        manager.get_result()["generated_tokens"]


def test_a_manager_that_nobody_started_says_so_instead_of_returning_nothing(manager):
    assert manager.get_result() is None
    manager.add_request([5, 6])
    for take in (manager.get_result, lambda: manager.get_result(timeout=1), manager.__iter__):
        with pytest.raises(
            RolloutError, match=r"not running and has 1 waiting in its queue; call start\(\)"
        ):
            list(take())
    manager.start()
    assert manager.get_result().is_finished()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda m: m.get_result(1.0),
            r"request_id=1\.0 is not a string.*get_result\(timeout=...\)",
        ),
        (
            lambda m: m.get_result(["req_0"]),
            "request_id=.* is not a string; pass the id that add_request",
        ),
        (lambda m: list(m.request_id_iter(0)), "request_id=0 is not a string"),
        (lambda m: m.cancel_request(["req_0"]), "cancel_request takes one id"),
        (lambda m: m.register_result_handler(print, "req_0"), "callback is the second argument"),
        (lambda m: m.add_requests("text"), "inputs is a str; pass a list of token-id"),
        (lambda m: m.add_requests(BatchEncoding({"input_ids": [[5]]})), "inputs is a BatchEncodi"),
        (lambda m: m.add_request(torch.tensor([[5, 6]])), "a batch of 1 sequences, but one"),
    ],
)
def test_a_call_with_arguments_of_another_kind_is_told_what_to_pass(manager, call, said):
    manager.start()
    with pytest.raises(InvalidRequestError, match=said):
        call(manager)


def test_a_padded_matrix_is_refused_and_rows_of_one_length_are_taken(model):
    settings = {"max_new_tokens": 2, "progress_bar": False}
    for padded in ([[0, 5, 6], [7, 8, 9]], [[5, 6, 0], [7, 8, 9]]):
        for inputs in (torch.tensor(padded), torch.tensor(padded).numpy()):
            with pytest.raises(InvalidRequestError, match=r"1 of its rows .* with 0, the padding"):
                generate_batch(model, inputs, **settings)
    whole = torch.tensor([[5, 6, 7], [7, 8, 9]])
    assert [o.prompt_ids for o in generate_batch(model, whole, **settings).values()] == [
        [5, 6, 7], [7, 8, 9],
    ]  # fmt: skip
    # Every row begins with this token, which a matrix may have for its beginning of sequence.
    same = torch.tensor([[0, 5], [0, 6]])
    assert len(generate_batch(model, same, tokenizer=char_tokenizer(), **settings)) == 2


def test_a_row_that_a_tokenizer_returned_whole_is_told_what_to_pass(model):
    row = BatchEncoding({"input_ids": [5, 6], "attention_mask": [1, 1]})
    with pytest.raises(InvalidRequestError, match=r"a tokenizer's BatchEncoding .*\['input_ids'\]"):
        generate_batch(model, [row], progress_bar=False)


def test_attention_of_transformers_own_batching_is_told_what_to_load_with():
    model = tiny_model()
    model.set_attn_implementation("paged|eager")
    said = r"'paged\|eager', .* attn_implementation='sdpa', or .*set_attn_implementation\('eager'\)"
    for make in (ContinuousBatchingManager, RolloutGenerator):
        with pytest.raises(ConfigurationError, match=said):
            make(model)
    model.set_attn_implementation("eager")
    assert ContinuousBatchingManager(model).model is model


@pytest.mark.parametrize("timeout", [float("nan"), -1, "5", True])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout):
    with closing(ContinuousBatchingManager(tiny_model())) as manager:
        manager.start()
        for wait in (manager.get_result, manager.stop, manager.join):
            with pytest.raises(InvalidRequestError, match=r"is not a number >= 0 of seconds"):
                wait(timeout=timeout)
        assert manager.is_running()


@pytest.mark.parametrize("timeout", [float("inf"), 1e30])
def test_an_endless_timeout_waits_until_the_end(timeout):
    with closing(ContinuousBatchingManager(tiny_model())) as manager:
        manager.start()
        request_id = manager.add_request([5, 6, 7], max_new_tokens=3)
        manager.stop(timeout=timeout)
        assert not manager.is_running()
        assert manager.get_result(request_id, timeout=timeout).is_finished()


def test_a_step_inside_pause_and_a_sync_after_it_begin_two_policy_versions(model):
    with RolloutGenerator(model, RolloutConfig(seed=0, weight_sync="shared")) as generator:
        with generator.manager.pause():
            pass
        assert generator.policy_version == 1
        assert generator.sync_weights().policy_version == 2
