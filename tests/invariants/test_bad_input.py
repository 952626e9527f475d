"""Bad input is a typed error in the caller that names the value and the knob; the rest goes on."""

import dataclasses
import re

import pytest
import torch
from tiny import char_tokenizer, plain_logprobs, tiny_model
from transformers import AutoModel, GenerationConfig, T5Config, T5ForConditionalGeneration

from cb_rollout import (
    ConfigurationError,
    ContinuousBatchingManager,
    EngineDeadError,
    IncompleteRolloutError,
    InvalidRequestError,
    OutOfCacheMemoryError,
    RequestStatus,
    RolloutConfig,
    RolloutError,
    RolloutGenerator,
    SamplingParams,
)
from cb_rollout.errors import QueueFullError
from cb_rollout.strategies.request_stream import RequestStream

PARAMS = SamplingParams(max_new_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def generator():
    config = RolloutConfig(num_blocks=10, block_size=16)
    with RolloutGenerator(tiny_model(), config) as generator:
        yield generator


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "input 1 is empty"),
        ([5, 256], "token id 256, outside the model's vocabulary of 256"),
        ([5, -1], "token id -1"),
        ([5] * 160, "160 tokens and max_new_tokens=8, but the KV cache holds at most 160"),
        ([5] * 600, "num_blocks"),
        ([1.5], "not a list of token ids"),
        ("text", "tokenizer="),
        ([{"role": "user", "content": "hi"}], "tokenizer="),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_is_generated_or_fails_alone(
    generator, prompt, said
):
    given = {"sampling_params": PARAMS, "num_return_sequences": 2}
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        generator.generate_batch([[5, 6], prompt], **given)
    outputs = generator.generate_batch([[5, 6], prompt, [7]], on_error="return", **given)
    assert [o.status for o in outputs.values()] == ["finished"] * 2 + ["failed"] * 2 + [
        "finished"
    ] * 2
    bad = list(outputs.values())[2]
    assert said in bad.error
    assert bad.error.startswith("input 1 ")
    assert (bad.finish_reason, bad.generated_tokens, bad.logprobs) == ("error", [], [])


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ([{"role": "user", "content": "hi"}], "pass one chat as [[message, ...]]"),
        ([{"prompt": "hi", "answer": "4"}], "a dict of prompt, answer"),
        ([5, 6, 7], "[[5, 6, 7]] for one prompt"),
        (torch.tensor([5, 6, 7]), "[[5, 6, 7]] for one prompt"),
        ([b"text"], "decode it"),
        (["\ud800"], "input 0: the tokenizer does not take this text"),
    ],
)
def test_what_is_mistaken_for_a_prompt_is_named_with_what_to_pass(inputs, said):
    with (
        RolloutGenerator(tiny_model(), tokenizer=char_tokenizer()) as generator,
        pytest.raises(InvalidRequestError, match=re.escape(said)),
    ):
        generator.generate_batch(inputs, sampling_params=PARAMS)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ a.b.c }}", "{% if %}"]
)
def test_a_chat_that_the_template_refuses_is_named(template):
    tokenizer = char_tokenizer()
    tokenizer.chat_template = template
    chat = [{"role": "user", "content": "hi"}]
    with (
        RolloutGenerator(tiny_model(), tokenizer=tokenizer) as generator,
        pytest.raises(InvalidRequestError, match=r"input 1: .*chat template does not take"),
    ):
        generator.generate_batch([[5, 6], chat], sampling_params=PARAMS)


def test_a_tokenizers_name_is_no_tokenizer():
    with pytest.raises(ConfigurationError, match="from_pretrained"):
        RolloutGenerator(tiny_model(), tokenizer="Qwen/Qwen3-0.6B")


def test_a_request_id_that_is_no_text_is_refused(generator):
    with pytest.raises(InvalidRequestError, match="request_id=7 is not a string"):
        generator.manager.add_request([5, 6], 7)


def test_inputs_that_are_all_refused_are_returned_and_bad_parameters_raise(generator):
    (output,) = generator.generate_batch([[]], sampling_params=PARAMS, on_error="return").values()
    assert (output.status, output.prompt_ids) == ("failed", [])
    with pytest.raises(InvalidRequestError, match="nothing to compare"):
        generator.verify(1)
    with pytest.raises(InvalidRequestError, match="stop_token_ids holds token id 300"):
        generator.generate_batch(
            [[5]], sampling_params=SamplingParams(stop_token_ids=300), on_error="return"
        )


def test_of_two_limits_the_one_to_turn_first_is_named():
    with (
        RolloutGenerator(tiny_model(), RolloutConfig(num_blocks=20)) as generator,
        pytest.raises(InvalidRequestError, match="the model takes at most 512"),
    ):
        generator.generate_batch([[5]], max_new_tokens=10_000)


def test_a_prompt_longer_than_the_model_is_refused():
    with (
        RolloutGenerator(tiny_model()) as generator,
        pytest.raises(InvalidRequestError, match="the model takes at most 512"),
    ):
        generator.generate_batch([[5] * 600], sampling_params=PARAMS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -3}, "top_k=-3"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_a_sampling_parameter_out_of_range_is_named(values, said):
    with pytest.raises(InvalidRequestError, match=re.escape(said)):
        SamplingParams(**values)


MOST = 2**31 - 1
EXTREMES = [
    {"top_k": MOST}, {"top_k": MOST, "top_p": 1e-300}, {"top_p": 1e-300}, {"min_p": 1},
    {"temperature": 1e30}, {"temperature": 1e-6},
    {"repetition_penalty": 1e30}, {"repetition_penalty": 1e-30},
    {"presence_penalty": -1e30}, {"frequency_penalty": 1e30},
    {"no_repeat_ngram_size": MOST}, {"top_logprobs": 256}, {"seed": 2**64 - 1}, {"seed": -(2**63)},
    {"logit_bias": {5: 1e30}}, {"sequence_bias": {(5,): 1e30}},
]  # fmt: skip


@pytest.mark.parametrize("values", EXTREMES, ids=str)
def test_the_largest_and_least_values_that_are_accepted_generate(generator, values):
    params = dataclasses.replace(PARAMS, **values)
    for inputs in ([[5, 6]], [[5, 6], [7], [8]]):
        given = [PARAMS] * len(inputs)
        given[0] = params
        outputs = list(generator.generate_batch(inputs, sampling_params=given).values())
        assert [output.status for output in outputs] == ["finished"] * len(inputs)


def test_an_unknown_config_field_is_named_with_the_nearest_known_one():
    with pytest.raises(ConfigurationError, match=r"no field 'max_memory_pct'.*max_memory_percent"):
        RolloutConfig(max_memory_pct=0.5)


@pytest.mark.parametrize(
    ("settings", "neighbours_word", "said"),
    [
        (RolloutConfig, "max_num_seqs", "'max_requests_per_batch'"),
        (RolloutConfig, "gpu_memory_utilization", "'max_memory_percent'"),
        (RolloutConfig, "temperature", "SamplingParams"),
        (SamplingParams, "n", "num_return_sequences"),
    ],
)
def test_a_neighbours_word_is_answered_with_ours(settings, neighbours_word, said):
    with pytest.raises(RolloutError, match=f"did you mean .*{said}"):
        settings(**{neighbours_word: 1})


def test_a_model_whose_weights_are_not_loaded_is_refused():
    model = tiny_model().to("meta")
    for create in (RolloutGenerator, ContinuousBatchingManager):
        with pytest.raises(ConfigurationError, match="not loaded, or a device_map offloaded"):
            create(model)


def test_wrong_counts_and_words_are_refused(generator):
    with pytest.raises(InvalidRequestError, match="sampling_params has 2 entries for 1 inputs"):
        generator.generate_batch([[5]], sampling_params=[PARAMS, PARAMS])
    with pytest.raises(InvalidRequestError, match="max_new_tokens='5' is not a whole number"):
        generator.generate_batch([[5], [6]], max_new_tokens="5")
    with pytest.raises(ConfigurationError, match="sampling_params is a str"):
        generator.generate_batch([[5], [6]], sampling_params="greedy")
    with pytest.raises(InvalidRequestError, match="num_return_sequences=-1"):
        generator.generate_batch([[5]], sampling_params=PARAMS, num_return_sequences=-1)
    with pytest.raises(ConfigurationError, match="on_error='ignore'"):
        generator.generate_batch([[5]], sampling_params=PARAMS, on_error="ignore")


def test_an_encoder_decoder_or_a_headless_model_is_refused_at_construction():
    t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8))
    with pytest.raises(ConfigurationError, match="encoder-decoder"):
        RolloutGenerator(t5)
    with pytest.raises(ConfigurationError, match="AutoModelForCausalLM"):
        RolloutGenerator(AutoModel.from_config(tiny_model().config))
    with pytest.raises(ConfigurationError, match="Linear"):
        RolloutGenerator(torch.nn.Linear(2, 2))


class PoisonedEmbedding(torch.nn.Module):
    """NaN for one token, the wrapped embedding for every other."""

    def __init__(self, embedding, token):
        super().__init__()
        self.embedding, self.token = embedding, token

    @property
    def weight(self):
        return self.embedding.weight

    def forward(self, input_ids):
        poison = torch.where(input_ids == self.token, torch.nan, 0.0)
        return self.embedding(input_ids) + poison[..., None]


def test_nan_logits_fail_their_own_request_and_no_other():
    model = tiny_model()
    model.set_input_embeddings(PoisonedEmbedding(model.get_input_embeddings(), token=17))
    inputs = [[5, 6, 7], [5, 17, 7], [8, 9]]
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    with RolloutGenerator(model) as generator:
        with pytest.raises(IncompleteRolloutError, match=r"req_1.*NaN or infinite") as caught:
            generator.generate_batch(inputs, sampling_params=params)
        outputs = list(caught.value.outputs.values())
        assert [o.status for o in outputs] == ["finished", "failed", "finished"]
        returned = generator.generate_batch(inputs, sampling_params=params, on_error="return")
        assert [o.status for o in returned.values()].count(RequestStatus.FAILED) == 1
        assert generator.metrics()["rollout/kv_blocks_used"] == 0
    for output in (outputs[0], outputs[2]):
        expected = plain_logprobs(model, output.prompt_ids, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)


def test_a_dead_engine_says_what_it_died_of_and_starts_over():
    model = tiny_model()
    with RolloutGenerator(model) as generator:
        broken = model.model.layers[0].forward

        def fail(*_, **__):
            raise RuntimeError("the wheels came off")

        model.model.layers[0].forward = fail
        model.train()
        with pytest.raises(EngineDeadError, match="RuntimeError: the wheels came off") as caught:
            generator.generate_batch([[5, 6]], sampling_params=PARAMS)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert model.training
        model.model.layers[0].forward = broken
        assert len(generator.generate_batch([[5, 6]], sampling_params=PARAMS)) == 1


def test_text_and_chats_are_encoded_by_the_tokenizer():
    tokenizer = char_tokenizer()
    with RolloutGenerator(tiny_model(vocab_size=len(tokenizer)), tokenizer=tokenizer) as generator:
        text, chat = generator.generate_batch(
            ["1+2=", [{"role": "user", "content": "1+2="}]], sampling_params=PARAMS
        ).values()
    assert tokenizer.decode(text.prompt_ids) == "1+2="
    assert tokenizer.decode(chat.prompt_ids) == "user: 1+2=\nassistant: "


def test_what_no_longer_fits_after_a_new_plan_fails_with_the_numbers():
    with RolloutGenerator(tiny_model(), RolloutConfig(num_blocks=10, block_size=16)) as generator:
        manager, engine = generator.manager, generator.manager.engine
        manager.start()
        with manager.pause():
            manager.add_request([5] * 20, max_new_tokens=50, sampling_params=PARAMS)
            engine.memory_plan = dataclasses.replace(engine.memory_plan, num_blocks=2)
            engine.release_cache()
        output = manager.get_result(timeout=60)
        assert "33 tokens do not fit 2 KV cache blocks" in output.error
        assert "KV cache" in output.error.splitlines()[-2], "the plan is told too"
        with pytest.raises(InvalidRequestError, match="holds at most 32 per sequence"):
            manager.add_request([5] * 20, max_new_tokens=50)


def test_equal_greedy_completions_are_warned_of_and_no_strategy_takes_them(generator):
    said = r"greedy decoding \(do_sample=False\) makes all num_return_sequences=4"
    with pytest.warns(UserWarning, match=said):
        outputs = generator.generate_batch([[5, 6]], max_new_tokens=3, num_return_sequences=4)
    first, *others = [output.generated_tokens for output in outputs.values()]
    assert others == [first] * 3
    many = [PARAMS, SamplingParams(temperature=0, max_new_tokens=2)]
    with pytest.warns(UserWarning, match="temperature=0"):
        generator.generate_batch([[5], [6]], sampling_params=many, num_return_sequences=2)
    with pytest.raises(ConfigurationError, match="greedy"):
        RequestStream(generator).submit([5, 6], 2)


def test_the_number_of_sequences_of_the_generators_own_config_counts():
    config = GenerationConfig(num_return_sequences=3, max_new_tokens=2, do_sample=True)
    with RolloutGenerator(tiny_model(), generation_config=config) as generator:
        assert len(generator.generate_batch([[5]])) == 3
        with pytest.raises(InvalidRequestError, match="num_return_sequences=0"):
            generator.generate_batch([[5]], num_return_sequences=0)


def test_inputs_that_are_no_list_of_prompts_are_refused_and_any_iterable_is_taken():
    tokenizer = char_tokenizer()
    tokenizer.chat_template = None
    with RolloutGenerator(tiny_model(vocab_size=len(tokenizer)), tokenizer=tokenizer) as generator:
        with pytest.raises(InvalidRequestError, match="inputs is a NoneType; pass a list"):
            generator.generate_batch(None)
        with pytest.raises(InvalidRequestError, match="no chat template"):
            generator.generate_batch([[{"role": "user", "content": "hi"}]])
        with pytest.raises(InvalidRequestError, match=r"num_return_sequences=2\.5"):
            generator.generate_batch([[5]], num_return_sequences=2.5)
        prompts = ([5, 6] for _ in range(2))
        assert len(generator.generate_batch(prompts, sampling_params=PARAMS)) == 2
        with pytest.raises(InvalidRequestError, match="num_sequences=0"):
            generator.verify(0)
    with (
        RolloutGenerator(tiny_model(), RolloutConfig(max_queue_size=2)) as generator,
        pytest.raises(QueueFullError, match="3 more would exceed max_queue_size=2; send fewer"),
    ):
        generator.generate_batch([[5]] * 3, sampling_params=PARAMS)


def test_a_device_without_room_for_a_block_is_told_at_construction_with_the_plan():
    config = RolloutConfig(training_reserve_gib=10_000.0)
    with pytest.raises(OutOfCacheMemoryError, match=r"(?s)lower training_reserve_gib.*10000\.000"):
        RolloutGenerator(tiny_model(), config)
