"""Read transformers' `GenerationConfig` and `ContinuousBatchingConfig` as settings.

A field is honoured, refused, or listed with the reason why it has no effect. Loads neither torch
nor transformers.
"""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

from cb_rollout.config import reference, removed
from cb_rollout.config.checks import shown
from cb_rollout.config.generation_fields import (
    NO_EFFECT,
    OTHER_NAME,
    READ_ELSEWHERE,
    REFUSED,
    SAME_NAME,
)
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SYNONYMS, SamplingParams
from cb_rollout.errors import ConfigurationError

# Names of all sampling parameters.
_PARAMETERS = {field.name for field in dataclasses.fields(SamplingParams)}

_ENGINE_FIELDS = {field.name for field in dataclasses.fields(RolloutConfig)} | reference.NAMES

# Fields of a `GenerationConfig` that are read, or that have no effect.
_TAKEN = frozenset(chain(SAME_NAME, OTHER_NAME, READ_ELSEWHERE, NO_EFFECT, _ENGINE_FIELDS))


def from_generation_config(
    generation_config: Any, engine: RolloutConfig | None = None
) -> SamplingParams:
    """Read a transformers `GenerationConfig`; a field that is None counts as unset.

    Args:
        generation_config: the config.
        engine: settings of the engine that will sample. Engine settings in the config must equal
            these settings. None: the settings are compared elsewhere.

    Raises:
        ConfigurationError: a field cannot be honoured, or asks for other engine settings.
        InvalidRequestError: a value is out of its range.
    """
    settings = _settings_of(generation_config)
    for name, value in settings.items():
        _require_honoured(name, value)
    if engine is not None:
        _require_engine(engine_settings(generation_config), engine)
    given = {name: settings[name] for name in SAME_NAME if name in settings}
    given.setdefault("do_sample", False)
    eos = given.get("eos_token_id")
    return SamplingParams(
        **given,
        stop=settings.get("stop_strings", ()),
        bad_words=_bad_words(settings.get("bad_words_ids", ()), eos),
        **_biases(settings),
    )


def _settings_of(generation_config: Any) -> dict[str, Any]:
    """Return the fields of a `GenerationConfig` that are not None."""
    # Check the class by its name, so that reading a config never loads torch.
    if "GenerationConfig" not in {kind.__name__ for kind in type(generation_config).__mro__}:
        raise ConfigurationError(
            f"generation_config is a {type(generation_config).__name__}, "
            f"{generation_config!r:.60}; {_advice_on_other(generation_config)}."
        )
    settings: dict[str, Any] = {}
    for name, value in vars(generation_config).items():
        is_private = name.startswith("_")
        if value is not None and not is_private:
            settings[name] = value
    return settings


def _advice_on_other(given: Any) -> str:
    """Return advice for an object that was passed instead of a `GenerationConfig`."""
    if isinstance(given, SamplingParams):
        return "pass it as sampling_params"
    if isinstance(given, RolloutConfig) or _is_batching_config(given):
        return "pass it as continuous_batching_config, or as config of a RolloutGenerator"
    if hasattr(given, "decode"):
        return "pass it as tokenizer"
    return "pass a transformers one"


def _require_honoured(name: str, value: Any) -> None:
    """Raise `ConfigurationError` for a field of a `GenerationConfig` that is not honoured."""
    if name in _TAKEN:
        return
    field = f"GenerationConfig.{name}={shown(value)}"
    if name not in REFUSED:
        raise ConfigurationError(
            f"{field} is not a field of transformers; {_advice_on_field(name)}"
        )
    refusal = REFUSED[name]
    if value not in refusal.neutral:
        raise ConfigurationError(
            f"{field} is not honoured by cb_rollout: {refusal.reason}; set it to "
            f"{refusal.neutral[0]!r}, or {refusal.advice}."
        )


def _advice_on_field(name: str) -> str:
    """Return advice for a field that neither transformers nor an engine has."""
    if name in _PARAMETERS:
        return f"pass sampling_params=SamplingParams({name}=...)."
    if name in removed.SETTINGS:
        return f"{removed.SETTINGS[name].sentence}."
    meant = SYNONYMS.get(name)
    if meant is None:
        fields = chain(SAME_NAME, OTHER_NAME, READ_ELSEWHERE, NO_EFFECT, REFUSED, _ENGINE_FIELDS)
        closest = difflib.get_close_matches(name, list(fields), n=1)
        if not closest:
            return "leave it out."
        meant = closest[0]
    return f"did you mean {meant!r}?"


def engine_settings(generation_config: Any) -> dict[str, Any]:
    """Return the engine settings in a `GenerationConfig`, as fields of `RolloutConfig`.

    A field of its `continuous_batching_config` counts if it differs from transformers' default. If
    that config is a dict, every value counts but None, which counts only for a field where it has a
    meaning. The `GenerationConfig` itself may also have such fields, as in transformers' guide.

    Raises `ConfigurationError` for a setting that cannot be honoured.
    """
    settings = _settings_of(generation_config)
    held = settings.get("continuous_batching_config", {})
    if isinstance(held, Mapping):
        # A saved generation config holds a dict.
        asked: dict[str, Any] = {}
        for name, value in held.items():
            if value is not None or name in reference.NONE_ASKS:
                asked[name] = value
    else:
        asked = _given_fields(held)
    for name in sorted(_ENGINE_FIELDS & settings.keys()):
        value = settings[name]
        if asked.setdefault(name, value) != value:
            raise ConfigurationError(
                f"the generation config has {name}={shown(value)}, but its "
                f"continuous_batching_config has {shown(asked[name])}; keep one of the two."
            )
    own = reference.own_settings(asked)
    if not own:
        return {}
    read = RolloutConfig(**own)
    return {name: getattr(read, name) for name in own}


def _require_engine(asked: Mapping[str, Any], engine: RolloutConfig) -> None:
    """Raise `ConfigurationError` if an engine's settings differ from the requested ones."""
    for name, value in asked.items():
        present = getattr(engine, name)
        if present != value:
            raise ConfigurationError(
                f"the generation config asks for {name}={shown(value)}, but the engine was made "
                f"with {name}={shown(present)}. An engine's settings cannot change; set "
                f"RolloutConfig({name}={shown(value)}) when you make it."
            )


def _bad_words(words: Any, eos: Any) -> Any:
    """Return the banned sequences without end-of-sequence tokens, as in transformers."""
    eos_ids = eos
    if not isinstance(eos, list | tuple):
        eos_ids = (eos,)
    left_out = [[token_id] for token_id in eos_ids]
    return tuple(word for word in words if list(word) not in left_out)


def _biases(settings: dict[str, Any]) -> dict[str, Any]:
    """Split `sequence_bias` by length, and merge `suppress_tokens` into the single tokens."""
    pairs = settings.get("sequence_bias", {})
    if isinstance(pairs, dict):
        pairs = pairs.items()
    of_tokens: dict[Any, Any] = {}
    of_sequences: dict[Any, Any] = {}
    for token_ids, bias in pairs:
        sequence = tuple(token_ids)
        if len(sequence) == 1:
            of_tokens[sequence[0]] = bias
        elif sequence:
            of_sequences[sequence] = bias
    for token_id in settings.get("suppress_tokens", ()):
        of_tokens[token_id] = -math.inf
    return {"logit_bias": of_tokens or None, "sequence_bias": of_sequences or None}


def as_rollout_config(config: Any, generation_config: Any = None) -> RolloutConfig:
    """Read the settings of an engine.

    Args:
        config: a `RolloutConfig`, or a transformers `ContinuousBatchingConfig`; None: the settings
            in the generation config, else the defaults.
        generation_config: a transformers `GenerationConfig`, or None. Its engine settings apply to
            fields that `config` leaves at their defaults.

    Raises:
        ConfigurationError: a setting cannot be honoured, or the two configs disagree about it.
    """
    if generation_config is None:
        return _rollout_config(config)
    held = getattr(generation_config, "continuous_batching_config", None)
    if config is None and not isinstance(held, Mapping):
        config = held
    resolved = _rollout_config(config)
    changes = {}
    for name, value in engine_settings(generation_config).items():
        present = getattr(resolved, name)
        if present == value:
            continue
        if present != getattr(RolloutConfig, name):
            raise ConfigurationError(
                f"{name} is {shown(present)} in the config and {shown(value)} in the generation "
                "config; remove one of the two."
            )
        changes[name] = value
    if not changes:
        return resolved
    return dataclasses.replace(resolved, **changes)


def _rollout_config(config: Any) -> RolloutConfig:
    if config is None:
        return RolloutConfig()
    if isinstance(config, RolloutConfig):
        return config
    return RolloutConfig(**_given_fields(config, are_all=True))


def _is_batching_config(config: Any) -> bool:
    is_record = dataclasses.is_dataclass(config) and not isinstance(config, type)
    return is_record and hasattr(config, "max_batch_tokens")


def _given_fields(config: Any, *, are_all: bool = False) -> dict[str, Any]:
    """Return the fields of transformers' `ContinuousBatchingConfig` that are not at its defaults.

    `are_all`: return fields at transformers' defaults too, unless None leaves the choice open.
        Raises `ConfigurationError` for an unknown field that is not at its default.
    """
    if not _is_batching_config(config):
        raise ConfigurationError(
            f"config is a {type(config).__name__}; {_advice_on_config(config)}."
        )
    given: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name in _ENGINE_FIELDS:
            # None leaves the choice open, except in fields where None has a meaning.
            is_asked = field.name in reference.NAMES or field.name in reference.NONE_ASKS
            is_given = value is not None or is_asked
            if is_given and (are_all or value != default):
                given[field.name] = value
        elif value != default:
            advice = "cb_rollout does not know this field"
            raise reference.unavailable(field.name, value, default, advice)
    return given


def _advice_on_config(given: Any) -> str:
    """Return advice for an object that was passed instead of an engine's settings."""
    if "GenerationConfig" in {kind.__name__ for kind in type(given).__mro__}:
        return "pass it as generation_config"
    if isinstance(given, SamplingParams):
        return "pass it as sampling_params of generate_batch or add_request"
    return "pass a RolloutConfig or a transformers ContinuousBatchingConfig"


def as_trainers_config(config: Any, seed: int, generation_config: Any = None) -> RolloutConfig:
    """Read a trainer's engine settings, with its seed; refuse `return_logprobs=False`."""
    if isinstance(config, RolloutConfig) and not config.return_logprobs:
        raise ConfigurationError(
            "return_logprobs=False: the trainer needs log-probabilities; set it to True."
        )
    resolved = as_rollout_config(config, generation_config)
    if resolved.seed is not None:
        seed = resolved.seed
    # transformers' config leaves log-probabilities out by default.
    return dataclasses.replace(resolved, return_logprobs=True, seed=seed)
