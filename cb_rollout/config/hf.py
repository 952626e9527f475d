"""Read transformers' `GenerationConfig` and `ContinuousBatchingConfig` as our settings.

Honours or refuses every field that would change what is sampled. Loads no torch, no transformers.
"""

import dataclasses
import math
from typing import Any

from cb_rollout.config import reference
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError

# Fields that are honoured, under the same name and under another.
SAME_NAME = (
    "temperature", "top_k", "top_p", "min_p", "do_sample", "repetition_penalty",
    "no_repeat_ngram_size", "max_new_tokens", "max_length", "min_new_tokens", "min_length",
    "eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens",
)  # fmt: skip
OTHER_NAME = ("stop_strings", "bad_words_ids", "sequence_bias", "suppress_tokens")

# Fields of transformers' `GenerationConfig` that sampling parameters correspond to.
COUNTERPARTS = {name: name for name in (*SAME_NAME, "sequence_bias")} | {
    "stop": "stop_strings",
    "bad_words": "bad_words_ids",
    "logit_bias": "suppress_tokens, sequence_bias of single tokens",
}

# Read elsewhere, or without effect on which tokens continuous batching samples; from
# `num_assistant_tokens` on, settings of a draft model.
INERT = {
    "num_return_sequences", "pad_token_id", "bos_token_id", "use_cache", "cache_implementation",
    "cache_config", "max_cache_len", "compile_config", "disable_compile", "low_memory",
    "early_stopping", "length_penalty", "transformers_version", "output_attentions",
    "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate",
    "prefill_chunk_size", "continuous_batching_config", "decoder_start_token_id", "use_mtp",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
    "assistant_early_exit", "assistant_lookbehind", "target_lookbehind",
    "assistant_ensemble_weight", "max_matching_ngram_size",
}  # fmt: skip

# Settings that are refused: the value at which each changes nothing, and what to use instead.
_GENERATE = "use model.generate"
_PROCESSOR = "pass transformers' own processor in SamplingParams(logits_processors=...)"
REFUSED: dict[str, tuple[Any, str]] = {
    "num_beams": (1, "use model.generate for beam search"),
    "num_beam_groups": (1, "use model.generate for beam search"),
    "diversity_penalty": (0.0, "use model.generate for beam search"),
    "constraints": (None, "use model.generate for beam search, or SamplingParams(grammar=...)"),
    "force_words_ids": (None, "use model.generate for beam search, or SamplingParams(grammar=...)"),
    "encoder_no_repeat_ngram_size": (0, "use no_repeat_ngram_size"),
    "epsilon_cutoff": (0.0, "use min_p"),
    "eta_cutoff": (0.0, "use min_p"),
    "top_h": (None, "use min_p"),
    "typical_p": (1.0, "use min_p"),
    "encoder_repetition_penalty": (1.0, _PROCESSOR),
    "exponential_decay_length_penalty": (None, _PROCESSOR),
    "guidance_scale": (1, _GENERATE),
    "penalty_alpha": (None, _GENERATE),
    "dola_layers": (None, _GENERATE),
    "token_healing": (False, _GENERATE),
    "renormalize_logits": (False, "leave it out: log-probabilities are normalized"),
    "remove_invalid_values": (False, "leave it out: a sequence with invalid logits fails alone"),
    "watermarking_config": (None, _PROCESSOR),
    "max_time": (None, "end requests with cancel_request"),
    "is_assistant": (False, _GENERATE),
    "prompt_lookup_num_tokens": (None, _GENERATE),
    "speculation_type": (None, _GENERATE),
}


def from_generation_config(generation_config: Any) -> SamplingParams:
    """Read a transformers `GenerationConfig`, whose fields are off where they are None.

    Raises `ConfigurationError` for what is not honoured, `InvalidRequestError` for a bad value.
    """
    # By name, so that reading a config never loads torch.
    if "GenerationConfig" not in {kind.__name__ for kind in type(generation_config).__mro__}:
        is_params = isinstance(generation_config, SamplingParams)
        advice = "pass it as sampling_params" if is_params else "pass a transformers one"
        raise ConfigurationError(
            f"generation_config is a {type(generation_config).__name__}, "
            f"{generation_config!r:.60}; {advice}."
        )
    settings = {
        name: value
        for name, value in vars(generation_config).items()
        if value is not None and not name.startswith("_")
    }
    known = {*SAME_NAME, *OTHER_NAME, *INERT}
    for name, value in settings.items():
        neutral, advice = REFUSED.get(name, (None, _GENERATE))
        if name not in known and value != neutral:
            raise ConfigurationError(
                f"GenerationConfig.{name}={value!r} is not honoured by cb_rollout; set it to "
                f"{neutral!r}, or {advice}."
            )
    given = {name: settings[name] for name in SAME_NAME if name in settings}
    given.setdefault("do_sample", False)
    eos = given.get("eos_token_id")
    return SamplingParams(
        **given,
        stop=settings.get("stop_strings", ()),
        bad_words=_bad_words(settings.get("bad_words_ids", ()), eos),
        **_biases(settings),
    )


def _bad_words(words: Any, eos: Any) -> Any:
    """Leave out end-of-sequence tokens, as transformers' own processor does."""
    eos_ids = eos if isinstance(eos, list | tuple) else (eos,)
    return tuple(word for word in words if list(word) not in [[token] for token in eos_ids])


def _biases(settings: dict[str, Any]) -> dict[str, Any]:
    """Split `sequence_bias` by length, and join `suppress_tokens` to the single tokens."""
    given = settings.get("sequence_bias", {})
    pairs = {tuple(s): v for s, v in (given.items() if isinstance(given, dict) else given)}
    single = {sequence[0]: value for sequence, value in pairs.items() if len(sequence) == 1}
    single |= dict.fromkeys(settings.get("suppress_tokens", ()), -math.inf)
    several = {sequence: value for sequence, value in pairs.items() if len(sequence) > 1}
    return {"logit_bias": single or None, "sequence_bias": several or None}


def as_rollout_config(config: Any) -> RolloutConfig:
    """Read None or a transformers `ContinuousBatchingConfig`; may raise `ConfigurationError`."""
    if config is None:
        return RolloutConfig()
    if isinstance(config, RolloutConfig):
        return config
    is_record = dataclasses.is_dataclass(config) and not isinstance(config, type)
    if not (is_record and hasattr(config, "max_batch_tokens")):
        raise ConfigurationError(
            f"config is a {type(config).__name__}; pass a RolloutConfig or a transformers "
            "ContinuousBatchingConfig."
        )
    known = {field.name for field in dataclasses.fields(RolloutConfig)} | reference.NAMES
    given: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        if field.name in known:
            # None leaves the choice open, except to a field whose default is something else.
            if value is not None or field.name in reference.NAMES:
                given[field.name] = value
        elif value != default:
            advice = "cb_rollout does not know this field"
            raise reference.unavailable(field.name, value, default, advice)
    if "use_default_compile_configs" in given:
        # transformers sets the level too, to another compilation than ours.
        given.pop("default_compile_level", None)
    return RolloutConfig(**given)


def as_trainers_config(config: Any, seed: int) -> RolloutConfig:
    """Return `as_rollout_config(config)` with a seed, and log-probabilities, which must be on."""
    if isinstance(config, RolloutConfig) and not config.return_logprobs:
        raise ConfigurationError("return_logprobs=False: the trainer needs them; leave it True.")
    resolved = as_rollout_config(config)
    # transformers' own config leaves them out by default.
    return dataclasses.replace(
        resolved, return_logprobs=True, seed=seed if resolved.seed is None else resolved.seed
    )
