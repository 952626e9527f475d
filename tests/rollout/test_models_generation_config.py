"""Defaults are those that `generate` of the object in the user's hands takes, at each call."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from training.tiny_trainer import tiny_trainer
from transformers import GenerationConfig

from cb_rollout import (
    ContinuousBatchingManager,
    RolloutConfig,
    RolloutGenerator,
    attach,
    generate_batch,
    install,
)

PROMPT = [5, 6, 7]
CONFIG = RolloutConfig(seed=0)


def by_generator(model, config=CONFIG):
    generator = RolloutGenerator(model, config)

    def output():
        return next(iter(generator.generate_batch([PROMPT]).values()))

    return output


def by_copy(model):
    return by_generator(model, RolloutConfig(seed=0, weight_sync="copy"))


def by_manager(model):
    manager = ContinuousBatchingManager(model, None, CONFIG)
    manager.start()
    return lambda: manager.get_result(manager.add_request(PROMPT), timeout=60)


def by_kept_generator(model):
    def output():
        outputs = generate_batch(
            model, [PROMPT], continuous_batching_config=CONFIG, persistent_manager=True
        )
        return next(iter(outputs.values()))

    return output


def by_function(model):
    def output():
        outputs = generate_batch(model, [PROMPT], continuous_batching_config=CONFIG)
        return next(iter(outputs.values()))

    return output


def by_installed(model):
    install(model, CONFIG)
    return lambda: next(iter(model.generate_batch([PROMPT], warmup=False).values()))


def by_session(model):
    install(model, CONFIG)

    def output():
        with model.continuous_batching_context_manager(
            persistent_manager=True, warmup=False
        ) as manager:
            manager.add_request(PROMPT)
            return next(iter(manager))

    return output


WAYS = [by_generator, by_copy, by_manager, by_kept_generator, by_function, by_installed, by_session]
SOME_WAYS = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def sampling(temperature, max_new_tokens):
    return GenerationConfig(
        do_sample=True, temperature=temperature, max_new_tokens=max_new_tokens, eos_token_id=-1
    )


def lora_model():
    return get_peft_model(
        tiny_model("llama"), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    ).eval()


@SOME_WAYS
@pytest.mark.parametrize("create", [tiny_model, lora_model])
def test_another_generation_config_of_the_model_is_followed(way, create):
    """Set on PEFT's wrapper it is the wrapper's, and goes before that of the model inside."""
    model = create()
    model.generation_config = sampling(temperature=0.5, max_new_tokens=3)
    output = way(model)
    for temperature, length in ((0.5, 3), (0.75, 5), (1.25, 4)):
        model.generation_config = sampling(temperature, length)
        sampled = output()
        assert (sampled.temperature, len(sampled.generated_tokens)) == (temperature, length)
    # It is edited in place from then on.
    model.generation_config.temperature = 2.0
    assert output().temperature == 2.0


@SOME_WAYS
def test_a_wrappers_end_ends_a_sequence_as_in_its_generate(way):
    model = lora_model()
    ids = torch.tensor([PROMPT])
    greedy = {"do_sample": False, "max_new_tokens": 8}
    model.generation_config = GenerationConfig(**greedy, eos_token_id=-1)
    tokens = model.generate(ids)[0, 3:].tolist()
    model.get_base_model().generation_config = sampling(temperature=0.5, max_new_tokens=3)
    output = way(model)
    for end in (tokens[2], tokens[5]):
        model.generation_config = GenerationConfig(**greedy, eos_token_id=end)
        assert output().generated_tokens == tokens[: tokens.index(end) + 1]


def test_a_generation_config_that_was_given_stays():
    model = tiny_model()
    given = sampling(temperature=0.5, max_new_tokens=3)
    generators = [RolloutGenerator(model, CONFIG, generation_config=given)]
    generators.append(RolloutGenerator(model, CONFIG))
    generators[1].set_generation_config(given)
    model.generation_config = sampling(temperature=0.75, max_new_tokens=5)
    for generator in generators:
        (output,) = generator.generate_batch([PROMPT]).values()
        assert (output.temperature, len(output.generated_tokens)) == (0.5, 3)


def test_a_trainer_takes_what_it_leaves_open_from_the_wrappers_generation_config(tmp_path):
    model = lora_model()
    model.generation_config = GenerationConfig(min_new_tokens=5, suppress_tokens=[7])
    with pytest.warns(UserWarning, match="suppress_tokens.*min_new_tokens"):
        generator = attach(tiny_trainer(tmp_path, model=model))
    with generator:
        assert generator.defaults.min_new_tokens == 5
