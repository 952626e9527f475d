"""Make a model's own continuous batching methods run in cb_rollout: `install` and `uninstall`.

Owns the methods of transformers' `ContinuousMixin`: their arguments, their defaults, and the
manager that they keep. Called from the thread that would call `model.generate_batch`.
"""

import copy
import dataclasses
import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from cb_rollout.compat.model_methods import route_of, set_route
from cb_rollout.compat.transformers import generation_config_of, unwrap
from cb_rollout.config.checks import require_known
from cb_rollout.config.enums import InFlight
from cb_rollout.config.hf import as_rollout_config, from_generation_config
from cb_rollout.config.reference import NAMES, own_settings
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.attention.traced_forward import STEPS_BEFORE_TRACE
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.errors import ConfigurationError, InvalidRequestError, RolloutError
from cb_rollout.rollout.generator import (
    RolloutGenerator,
    generator_of_call,
    require_batch_arguments,
)
from cb_rollout.rollout.kept import free_kept, keep_manager, kept_by
from cb_rollout.types import GenerationOutput

_LOGGER = logging.getLogger(__name__)

Model = TypeVar("Model", bound=torch.nn.Module)

# Settings that transformers up to 5.5 took as arguments of its methods.
MOVED_ARGUMENTS = (
    "allow_block_sharing",
    "kv_padding_interval_size",
    "max_cached_graphs",
    "max_queue_size",
    "q_padding_interval_size",
    "use_async_batching",
)

# Settings of the engine. A version of transformers may lack some of them.
_CONFIG_NAMES = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)} | NAMES


def install(model: Model, config: Any = None) -> "Installation[Model]":
    """Make a model's own continuous batching methods run in cb_rollout.

    Replaces `generate_batch`, `init_continuous_batching`, `continuous_batching_context_manager`
    and `destroy_cached_continuous_batching_manager`, with transformers' arguments and defaults.
    The model gains no attribute, and a copy of it keeps transformers' methods.

    Args:
        model: a causal language model of transformers, plain or wrapped. If it is wrapped, the
            methods of the model inside are replaced, and they generate with the wrapper. You may
            install a model twice. The installation does not keep the model alive.
        config: a `RolloutConfig` or a transformers `ContinuousBatchingConfig` for calls that pass
            none; None: `RolloutConfig()`.

    Returns:
        A context manager that yields the model, and restores its methods at the end.

    Raises:
        ConfigurationError: the config cannot be honoured, the model has no such methods, or it
            overrides them itself.
    """
    module = unwrap(model)
    before = route_of(module)
    set_route(module, ModelMethods(model, as_rollout_config(config)))
    return Installation(model, before)


def uninstall(model: torch.nn.Module) -> None:
    """Restore a model's own methods, and free the engines that `persistent_manager=True` kept.

    Does nothing if the model is not installed.
    """
    module = unwrap(model)
    was_installed = route_of(module) is not None
    set_route(module, None)
    if not was_installed:
        return
    for holder in (model, module):
        free_kept(holder)


class Installation(Generic[Model]):
    """An installed model; leaving its `with` block restores the model's methods."""

    def __init__(self, model: Model, before: "ModelMethods | None") -> None:
        """Remember the methods to restore; the model is not kept alive."""
        self._model = weakref.ref(model)
        self._before = before

    def __enter__(self) -> Model:
        """Return the model."""
        model = self._model()
        if model is None:
            raise RolloutError(
                "the installed model was deleted; keep a reference to it, and install it again."
            )
        return model

    def __exit__(self, *_: object) -> None:
        model = self._model()
        if model is None:
            return
        if self._before is None:
            uninstall(model)
        else:
            set_route(unwrap(model), self._before)


class ModelMethods:
    """The methods of an installed model, under transformers' names."""

    def __init__(self, model: torch.nn.Module, config: RolloutConfig) -> None:
        """Refer to the model, or to its wrapper, without keeping it alive."""
        self._model = weakref.ref(model)
        self._config = config

    def _generating(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the object that was installed, or the model inside if its wrapper is gone."""
        installed = self._model()
        return model if installed is None else installed

    def init_continuous_batching(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
        **moved: Any,
    ) -> "ModelManager":
        """Return the model's kept manager, or a new one; nothing runs before `start()`.

        A kept manager gets this generation config, and does not reuse earlier keys. If the engine
        config differs, a new manager replaces it. `moved` are `MOVED_ARGUMENTS`.
        """
        defaults, config = self._settings(
            model, generation_config, continuous_batching_config, moved
        )
        generating = self._generating(model)
        kept = kept_by(generating)
        if kept.generator is not None:
            _free_memory(kept.generator)
        manager = kept.manager
        if isinstance(manager, ModelManager) and manager.is_for(model, config):
            manager.begin_session(defaults)
            return manager
        if manager is not None:
            manager.close()
        return ModelManager(generating, defaults, config, workload_hints)

    def destroy_cached_continuous_batching_manager(self, model: PreTrainedModel) -> None:
        """Free the engine that `persistent_manager=True` kept, with its memory."""
        for holder in (self._generating(model), model):
            free_kept(holder)

    @contextmanager
    def continuous_batching_context_manager(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: Any = None,
        persistent_manager: bool = False,
        warmup: bool = True,
        workload_hints: Any = None,
        **moved: Any,
    ) -> Iterator["ModelManager"]:
        """Start a manager, and stop it once its requests are done; keep it if it is persistent.

        Args:
            model: the model that generates.
            generation_config: see `ContinuousBatchingManager`.
            block: at the end, wait for the requests in flight.
            timeout: maximum wait in seconds; None: no limit.
            continuous_batching_config: see `ContinuousBatchingManager`.
            persistent_manager: keep the engine for the next call.
            warmup: trace and compile before the first request.
            workload_hints: see `ContinuousBatchingManager`.
            moved: `MOVED_ARGUMENTS`.
        """
        manager = self.init_continuous_batching(
            model, generation_config, continuous_batching_config, workload_hints, **moved
        )
        if warmup and not manager.warmed_up:
            hints = workload_hints or WorkloadHints()
            _warm_up(manager, hints.num_requests, hints.max_generated_length)
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=block, timeout=timeout, keep_for_next_session=persistent_manager)
            if not persistent_manager:
                manager.destroy()

    def generate_batch(
        self,
        model: PreTrainedModel,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        record_timestamps: bool = False,
        progress_bar: bool | None = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        **kwargs: Any,
    ) -> dict[str, GenerationOutput]:
        """Sample completions of many prompts; log failed ones, and return them with their errors.

        Args:
            model: the model that generates.
            inputs: token ids of each prompt.
            generation_config: see `ContinuousBatchingManager`.
            continuous_batching_config: see `ContinuousBatchingManager`.
            record_timestamps: record when each token was sampled.
            progress_bar: draw a bar; None: in a terminal or a notebook, and erase it at the end.
            persistent_manager: keep the engine for the next call.
            warmup: trace and compile before the first request.
            kwargs: `max_new_tokens`, `MOVED_ARGUMENTS`, and further arguments of
                `cb_rollout.generate_batch`.

        Returns:
            The output of each sequence by its request id.
        """
        if inputs is None:
            raise InvalidRequestError("inputs is None; pass a list of prompts, [[5, 6, 7], ...].")
        if len(inputs) == 0:
            return {}
        moved = {name: kwargs.pop(name) for name in MOVED_ARGUMENTS if name in kwargs}
        tokenizer = kwargs.pop("tokenizer", None)
        require_batch_arguments(kwargs)
        defaults, config = self._settings(
            model, generation_config, continuous_batching_config, moved
        )
        generating = self._generating(model)
        if (manager := kept_by(generating).manager) is not None:
            _free_memory(manager)
        arguments: dict[str, Any] = {"on_error": "return"} | kwargs
        with generator_of_call(generating, config, tokenizer, persistent_manager) as generator:
            if warmup and not generator.manager.warmed_up:
                generator.wake()
                num_requests = len(inputs) * (defaults.num_return_sequences or 1)
                most_tokens = kwargs.get("max_new_tokens") or defaults.max_new_tokens
                _warm_up(generator.manager, num_requests, most_tokens)
            outputs = generator.generate_batch(
                inputs,
                defaults,
                record_timestamps=record_timestamps,
                progress_bar=progress_bar,
                **arguments,
            )
        failed = [output for output in outputs.values() if output.error is not None]
        if failed:
            _LOGGER.error(
                "%d of %d sequences failed. The first, %s: %s",
                len(failed),
                len(outputs),
                failed[0].request_id,
                failed[0].error,
            )
        return outputs

    def _settings(
        self,
        model: PreTrainedModel,
        generation_config: Any,
        continuous_batching_config: Any,
        moved: Mapping[str, Any],
    ) -> tuple[GenerationConfig, RolloutConfig]:
        """Return a generation config with only sampling settings, and the engine's config.

        transformers' guide puts engine settings into the generation config; they are moved to the
        engine's config. A generation config without an end-of-sequence token gets none, as in
        transformers.
        """
        own = generation_config_of(self._generating(model))
        given = own if generation_config is None else generation_config
        if not isinstance(given, GenerationConfig):
            # Raises an error that says what to pass.
            from_generation_config(given)
        defaults = copy.deepcopy(given)
        found: dict[str, Any] = {}
        for name in _CONFIG_NAMES & vars(defaults).keys():
            if (value := getattr(defaults, name)) is not None:
                found[name] = value
            delattr(defaults, name)
        inside = getattr(defaults, "continuous_batching_config", None)
        if inside is not None:
            defaults.continuous_batching_config = None
        if continuous_batching_config is not None:
            _require_agreement(found, continuous_batching_config)
        elif isinstance(inside, Mapping):
            # A saved generation config holds it as a dict.
            found = {**inside, **found}
        else:
            continuous_batching_config = inside
        if defaults.eos_token_id is None:
            _LOGGER.warning(
                "the generation config has no eos_token_id, so no token ends a sequence, as in "
                "transformers; to end sequences, set it to the model's."
            )
            defaults.eos_token_id = -1
        require_known(moved, MOVED_ARGUMENTS, "the method has no argument", ConfigurationError)
        if moved:
            _LOGGER.warning(
                "%s: moved to the continuous_batching_config, where transformers expects it too.",
                ", ".join(moved),
            )
        config = self._config
        if continuous_batching_config is not None:
            config = as_rollout_config(continuous_batching_config)
        changes = own_settings({**found, **moved})
        return defaults, dataclasses.replace(config, **changes) if changes else config


class ModelManager(ContinuousBatchingManager):
    """The manager of an installed model, which can keep it between calls."""

    def __init__(
        self,
        model: torch.nn.Module,
        generation_config: GenerationConfig,
        config: RolloutConfig,
        workload_hints: Any = None,
    ) -> None:
        """Create the manager; arguments as in `ContinuousBatchingManager`."""
        super().__init__(model, generation_config, config, workload_hints)
        self._asked_config = config
        self._keeper = weakref.ref(model)

    def is_for(self, model: PreTrainedModel, config: RolloutConfig) -> bool:
        """Return whether this manager can serve a model with a config."""
        return self.model is model and self._asked_config == config

    def begin_session(self, generation_config: GenerationConfig) -> None:
        """Set new defaults, and do not reuse keys of earlier weights."""
        self.set_generation_config(generation_config)
        with self.loop.paused():
            self.loop.begin_policy_version(InFlight.RECOMPUTE)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Stop as `ContinuousBatchingManager.stop` does.

        `keep_for_next_session` keeps this manager on the model, whose next
        `init_continuous_batching` returns it.
        """
        super().stop(block, timeout, keep_for_next_session, hard_stop)
        model = self._keeper()
        if keep_for_next_session and model is not None:
            keep_manager(model, self)


def _require_agreement(found: Mapping[str, Any], config: Any) -> None:
    """Raise `ConfigurationError` if a generation config contradicts a setting of a config.

    Args:
        found: engine settings of the generation config itself, by transformers' names.
        config: the `continuous_batching_config` that was passed.
    """
    for name, value in found.items():
        given = getattr(config, name, value)
        if given not in (value, getattr(type(config), name, None)):
            raise ConfigurationError(
                f"{name} is {given!r} in the continuous_batching_config and {value!r} in the "
                "generation config; remove one of the two."
            )


def _warm_up(
    manager: ContinuousBatchingManager, num_requests: int, most_tokens: int | None
) -> None:
    """Warm up a manager for the number of decode steps that such requests take.

    On a CPU, makes no trace here if the rollout itself would make none for so few steps.
    """
    num_turns = math.ceil(num_requests / manager.engine.limits.max_requests)
    num_steps = num_turns * (most_tokens or 0)
    if manager.engine.device.type == "cpu" and num_steps < STEPS_BEFORE_TRACE:
        manager.warmed_up = True
        return
    manager.warmup(num_steps)


def _free_memory(engine: RolloutGenerator | ContinuousBatchingManager) -> None:
    """Free a kept engine's cache unless it has work; the next step allocates it again."""
    manager = engine.manager if isinstance(engine, RolloutGenerator) else engine
    if not manager.loop.is_live():
        engine.close()
