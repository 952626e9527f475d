"""Walk every field of transformers' configs: a value that asks for something has an effect, is
refused with the reason, or is listed with the reason why it has none."""

import dataclasses
import math

import pytest
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig
from transformers.generation import WatermarkingConfig

from cb_rollout import RolloutConfig
from cb_rollout.config import generation_fields as fields
from cb_rollout.config import reference, removed
from cb_rollout.config.hf import as_rollout_config, as_trainers_config, from_generation_config
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError

INSTALLED = [name for name in vars(GenerationConfig()) if not name.startswith("_")]

TABLES = {
    "same name": fields.SAME_NAME,
    "other name": fields.OTHER_NAME,
    "elsewhere": fields.READ_ELSEWHERE,
    "no effect": fields.NO_EFFECT,
    "refused": fields.REFUSED,
}

# For each field a value that asks for something.
ASKING = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "do_sample": False,
    "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "max_new_tokens": 5, "max_length": 9,
    "min_new_tokens": 2, "min_length": 3, "eos_token_id": 7, "forced_bos_token_id": 4,
    "forced_eos_token_id": 4, "begin_suppress_tokens": [3], "stop_strings": ["END"],
    "bad_words_ids": [[3]], "sequence_bias": [[[3, 4], 2.0]], "suppress_tokens": [3],
    "num_return_sequences": 2,
    "continuous_batching_config": ContinuousBatchingConfig(max_batch_tokens=64),
    "compile_config": CompileConfig(), "pad_token_id": 3, "bos_token_id": 3,
    "decoder_start_token_id": 3, "use_cache": False, "max_cache_len": 99, "disable_compile": True,
    "low_memory": True, "early_stopping": True, "length_penalty": 2.0, "renormalize_logits": True,
    "return_dict_in_generate": True, "transformers_version": "5.0.0", "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.9,
    "assistant_lookbehind": 3, "target_lookbehind": 3, "assistant_ensemble_weight": 0.5,
    "max_matching_ngram_size": 3, "num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5,
    "constraints": ["a constraint"], "force_words_ids": [[3]], "encoder_no_repeat_ngram_size": 2,
    "epsilon_cutoff": 0.1, "eta_cutoff": 0.1, "top_h": 0.5, "typical_p": 0.5,
    "encoder_repetition_penalty": 1.5, "exponential_decay_length_penalty": (5, 1.1),
    "watermarking_config": WatermarkingConfig(), "guidance_scale": 2.0, "penalty_alpha": 0.6,
    "dola_layers": "high", "token_healing": True, "remove_invalid_values": True, "max_time": 1.0,
    "is_assistant": True, "use_mtp": True, "assistant_early_exit": 2,
    "prompt_lookup_num_tokens": 3, "speculation_type": "dflash", "output_scores": True,
    "output_logits": True, "output_attentions": True, "output_hidden_states": True,
    "cache_implementation": "quantized", "cache_config": {"nbits": 4}, "prefill_chunk_size": 8,
}  # fmt: skip


def holding(**settings):
    # transformers warns of some fields at construction, and validates others.
    config = GenerationConfig(do_sample=True)
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def said_of(path, compile_config):
    """Return a config as text, or what refuses it."""
    try:
        return repr(RolloutConfig(**{path: compile_config}))
    except ConfigurationError as error:
        return str(error)


def test_every_field_stands_in_one_table_and_the_walk_has_a_value_for_it():
    listed = [name for table in TABLES.values() for name in table]
    assert set(INSTALLED) - set(listed) == set(), "new fields: add each to generation_fields.py"
    assert len(listed) == len(set(listed)), "a field stands in two tables"
    assert set(listed) == set(ASKING)


@pytest.mark.parametrize("name", ASKING)
def test_a_field_has_an_effect_or_a_reason_why_it_has_none(name):
    asking, neutral = holding(**{name: ASKING[name]}), holding()
    (table,) = (kind for kind, names in TABLES.items() if name in names)
    if table == "refused":
        with pytest.raises(ConfigurationError) as raised:
            from_generation_config(asking)
        said = str(raised.value)
        refusal = fields.REFUSED[name]
        assert said.startswith(f"GenerationConfig.{name}=")
        assert refusal.reason in said
        assert refusal.advice in said
        assert from_generation_config(holding(**{name: refusal.neutral[0]})) == SamplingParams()
        return
    has_effect = from_generation_config(asking) != from_generation_config(neutral)
    assert has_effect == (table in ("same name", "other name"))
    if table == "no effect":
        assert fields.NO_EFFECT[name]
        assert as_rollout_config(None, asking) == RolloutConfig()


def test_a_field_under_its_own_name_is_read_into_that_name():
    for name in fields.SAME_NAME:
        params = from_generation_config(holding(**{name: ASKING[name]}))
        assert getattr(params, name) != getattr(SamplingParams(), name)


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static", "offloaded_hybrid"])
def test_a_cache_elsewhere_than_on_the_device_is_refused(implementation):
    with pytest.raises(ConfigurationError, match="keys stay on the model's device"):
        from_generation_config(holding(cache_implementation=implementation))


@pytest.mark.parametrize("implementation", ["dynamic", "static", "hybrid", "paged"])
def test_a_cache_of_the_same_keys_is_accepted(implementation):
    config = holding(cache_implementation=implementation)
    assert from_generation_config(config) == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("fullgraph", True),
        ("dynamic", True),
        ("backend", "eager"),
        ("mode", "max-autotune"),
        ("options", {"max_autotune": True}),
    ],
)
def test_a_field_of_a_compile_config_has_an_effect_or_is_refused(field, value):
    assert {f.name for f in dataclasses.fields(CompileConfig)} == {
        "fullgraph", "dynamic", "backend", "mode", "options",
    }  # fmt: skip
    for path in ("decode_compile_config", "varlen_compile_config"):
        plain = said_of(path, CompileConfig())
        asking = said_of(path, CompileConfig(**{field: value}))
        assert f"{path}=" in asking
        assert plain != asking


def test_a_batching_config_in_a_generation_config_is_the_config_where_none_is_given():
    theirs = ContinuousBatchingConfig(max_batch_tokens=64, max_queue_size=3)
    held = holding(continuous_batching_config=theirs)
    assert as_rollout_config(None, held) == as_rollout_config(theirs)
    with_own = as_rollout_config(RolloutConfig(num_blocks=7), held)
    assert with_own == RolloutConfig(num_blocks=7, max_batch_tokens=64, max_queue_size=3)


def test_settings_of_the_engine_in_a_generation_config_are_taken_as_in_transformers_guide():
    guide = holding(use_cuda_graph=False, max_batch_tokens=512)
    expected = RolloutConfig(use_cuda_graph=False, max_batch_tokens=512)
    assert as_rollout_config(None, guide) == expected
    assert as_rollout_config(expected, guide) is expected
    assert as_rollout_config(None, holding(page_size=16)).block_size == 16
    assert as_rollout_config(None, holding(seed=5)).seed == 5


def test_two_values_of_one_setting_are_refused_with_both():
    guide = holding(max_batch_tokens=512)
    said = "max_batch_tokens is 64 in the config and 512 in the generation config"
    with pytest.raises(ConfigurationError, match=said):
        as_rollout_config(RolloutConfig(max_batch_tokens=64), guide)
    guide.continuous_batching_config = ContinuousBatchingConfig(max_batch_tokens=64)
    with pytest.raises(ConfigurationError, match=r"has max_batch_tokens=512, but its .* 64; keep"):
        as_rollout_config(None, guide)


def test_a_setting_of_the_engine_that_cannot_be_honoured_is_refused_in_a_generation_config():
    with pytest.raises(ConfigurationError, match=r"max_batch_tokens=0 is not a whole number >= 1"):
        as_rollout_config(None, holding(max_batch_tokens=0))
    with pytest.raises(ConfigurationError, match="scheduler_type='lottery' is not one of fifo"):
        as_rollout_config(None, holding(scheduler_type="lottery"))


def test_an_engine_that_runs_keeps_its_settings():
    guide = holding(max_batch_tokens=512)
    params = from_generation_config(guide, RolloutConfig(max_batch_tokens=512))
    assert params == SamplingParams()
    said = r"asks for max_batch_tokens=512, but the engine .*=None. .* RolloutConfig\(max_batch"
    with pytest.raises(ConfigurationError, match=said):
        from_generation_config(guide, RolloutConfig())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("presence_penalty", 1.0, r"pass sampling_params=SamplingParams\(presence_penalty=...\)"),
        ("logits_processors", (), r"pass sampling_params=SamplingParams\(logits_processors=...\)"),
        ("max_tokens", 5, "did you mean 'max_new_tokens'"),
        ("temperatureX", 0.5, "did you mean 'temperature'"),
        ("num_speculative_tokens", 3, "it was removed after 0.3.0: n-gram drafts .* leave it out"),
        ("chat_format", "chatml", "leave it out"),
    ],
)
def test_a_strange_field_of_a_generation_config_is_answered_with_what_to_write(name, value, said):
    with pytest.raises(
        ConfigurationError, match=f"{name}=.* is not a field of transformers; {said}"
    ):
        from_generation_config(holding(**{name: value}))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (RolloutConfig(), "pass it as continuous_batching_config"),
        (ContinuousBatchingConfig(), "pass it as continuous_batching_config"),
        (math.inf, "pass a transformers one"),
    ],
)
def test_another_object_in_the_place_of_a_generation_config_is_told_its_place(given, said):
    with pytest.raises(ConfigurationError, match=said):
        from_generation_config(given)


def test_another_object_in_the_place_of_the_engines_settings_is_told_its_place():
    with pytest.raises(ConfigurationError, match="GenerationConfig; pass it as generation_config"):
        as_rollout_config(GenerationConfig())
    with pytest.raises(ConfigurationError, match="SamplingParams; pass it as sampling_params"):
        as_rollout_config(SamplingParams())


def test_every_field_of_the_batching_config_is_read_under_a_name_or_listed_with_a_reason():
    installed = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    assert installed <= {*reference.SAME_NAME, *reference.NAMES}
    ours = {field.name for field in dataclasses.fields(RolloutConfig)}
    assert set(reference.SAME_NAME) <= ours
    assert not set(reference.SAME_NAME) & reference.NAMES


def test_a_trainers_engine_takes_what_its_generation_config_asks():
    settings = as_trainers_config(None, 42, holding(max_batch_tokens=64))
    assert settings == RolloutConfig(max_batch_tokens=64, seed=42)
    theirs = ContinuousBatchingConfig(seed=7)
    held = holding(continuous_batching_config=theirs)
    settings = as_trainers_config(None, 42, held)
    assert settings.seed == 7
    assert settings.return_logprobs
    # The generator reads the generation config again.
    assert as_rollout_config(settings, held) == settings


def test_a_batching_config_of_a_saved_generation_config_is_read_too():
    saved = {"max_batch_tokens": 64, "num_blocks": None, "page_size": 16}
    held = holding(continuous_batching_config=saved)
    assert as_rollout_config(None, held) == RolloutConfig(max_batch_tokens=64, block_size=16)
    with pytest.raises(ConfigurationError, match="no field 'warp_factor'"):
        as_rollout_config(None, holding(continuous_batching_config={"warp_factor": 9}))


def test_what_was_removed_is_answered_with_since_when_and_what_to_do():
    fields_now = (*dataclasses.fields(RolloutConfig), *dataclasses.fields(SamplingParams))
    settings = {field.name for field in fields_now}
    assert not settings & removed.SETTINGS.keys(), "a setting that came back is not removed"
    for name, gone in removed.SETTINGS.items():
        for kind in (RolloutConfig, SamplingParams):
            with pytest.raises(ValueError, match=f"'{name}'; it was removed {gone.when}: .*"):
                kind(**{name: 1})
    for (name, value), gone in removed.VALUES.items():
        with pytest.raises(ConfigurationError, match=f"{value}.*; it was removed {gone.when}: "):
            RolloutConfig(**{name: value})
