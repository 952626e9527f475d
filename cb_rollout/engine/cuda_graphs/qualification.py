"""Choose, for an engine on a GPU, settings that did not end a child process.

An illegal memory access ends a CUDA context, and the process that trains with it. So an engine of a
model's shape runs in a child first: as configured, then without compilation, then without CUDA
graphs. Gathered decode steps, which are PyTorch's own, are the last resort. Called by the thread
that makes an engine.
"""

import importlib.metadata
import json
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import cb_rollout
from cb_rollout.compat import torch as torch_compat
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.numerics.qualification.qualifier import (
    SWITCH,
    Subject,
    UnprovedError,
    UntriedError,
    is_switched_off,
    require_proved,
)
from cb_rollout.errors import ConfigurationError, error_text

_LOGGER = logging.getLogger(__name__)

# Devices on which an engine runs in a child process first.
TRIED_DEVICES = {"cuda"}

TRIAL = "cb_rollout.engine.service.engine_trial:try_engine"

# A child compiles and captures, and imports torch and transformers.
SECONDS_OF_A_TRIAL = 300

# Of the small model.
LEAST_LAYERS = 2
BLOCKS = 512

# Settings that a child's engine takes from its parent's.
_PASSED = (
    "block_size",
    "max_requests_per_batch",
    "use_async_batching",
    "use_cuda_graph",
    "q_padding_interval_size",
    "max_cached_graphs",
    "default_compile_level",
    "use_default_compile_configs",
    "max_blocks_per_request",
    "logprobs_mode",
    "sampling_mask",
)


class TriedSettings(NamedTuple):
    """Settings under which a child tries an engine."""

    name: str
    changes: dict[str, Any]
    """Settings that differ from the user's."""


# The fastest first.
RUNGS = (
    TriedSettings("as configured", {}),
    TriedSettings("not compiled", {"use_default_compile_configs": False}),
    TriedSettings("without CUDA graphs", {"use_cuda_graph": False}),
    TriedSettings("gathered", {"use_cuda_graph": False, "max_blocks_per_request": 0}),
)


def qualified(
    model: PreTrainedModel, config: RolloutConfig, autocast_dtype: torch.dtype | None
) -> RolloutConfig:
    """Return the config, or one that leaves out what ended a child process; log a line for each.

    Args:
        model: on its device.
        config: the user's.
        autocast_dtype: of the engine's forwards; None: none.

    Raises:
        ConfigurationError: the config asks for what was left out.
    """
    device = next(model.parameters()).device
    if device.type not in TRIED_DEVICES or is_switched_off():
        return config
    if obstacle := _obstacle(model, config):
        _LOGGER.info("no engine of this model is tried in a child process: %s", obstacle)
        return config
    reason = ""
    for rung, lower in pairwise(RUNGS):
        if reason:
            _require_not_asked(config, rung, reason)
        candidate = replace(config, **rung.changes)
        # What the user switched off need not be tried twice.
        if rung.changes and candidate == config:
            continue
        try:
            require_proved(_subject(model, candidate, autocast_dtype, rung, lower))
        except UntriedError as error:
            reason = str(error)
            break
        except UnprovedError as error:
            reason = str(error)
        else:
            return candidate
    _require_not_asked(config, RUNGS[-1], reason)
    return replace(config, **RUNGS[-1].changes)


def _require_not_asked(config: RolloutConfig, rung: TriedSettings, reason: str) -> None:
    """Raise `ConfigurationError` if the user requires a feature that a rung leaves out."""
    asked = {
        "use_cuda_graph": config.wants_graphs,
        "use_default_compile_configs": config.use_default_compile_configs,
    }
    for name in rung.changes:
        if asked.get(name):
            raise ConfigurationError(
                f"{name}={getattr(config, name)!r}: {reason}; leave it None, or set "
                f"{SWITCH}=0 in the environment to run it without a trial."
            )


def _obstacle(model: PreTrainedModel, config: RolloutConfig) -> str:
    """Return why a child cannot make a small model of this one; "": it can."""
    if not type(model).__module__.startswith("transformers.models."):
        return "its class is not one of transformers'"
    if hf_compat.is_quantized(model):
        return "it is quantised"
    if hf_compat.tensor_parallel_group(model) is not None:
        return "its layers are split over processes"
    if config.varlen_compile_config is not None or config.decode_compile_config is not None:
        return "it is compiled by settings of the user"
    if config.router_replay:
        return "router_replay=True records experts"
    try:
        # Without memory or numbers.
        with torch.device("meta"):
            attention = model.config._attn_implementation
            small_model(small_config(model), torch_compat.compute_dtype(model), attention)
    except Exception as error:  # noqa: BLE001  it is the answer
        return f"no small model can be made of its config ({error_text(error)})"
    return ""


def _subject(
    model: PreTrainedModel,
    config: RolloutConfig,
    autocast_dtype: torch.dtype | None,
    rung: TriedSettings,
    lower: TriedSettings,
) -> Subject:
    """Describe the trial of an engine in a child process.

    Args:
        model: on its device.
        config: the settings to try.
        autocast_dtype: of the engine's forwards; None: none.
        rung: the name of these settings.
        lower: the settings that follow if the child ends.
    """
    device = next(model.parameters()).device
    settings = {name: getattr(config, name) for name in _PASSED}
    argument = {
        "device": str(device),
        "dtype": str(torch_compat.compute_dtype(model)).removeprefix("torch."),
        "autocast_dtype": str(autocast_dtype or "").removeprefix("torch."),
        "config": small_config(model),
        "attention": model.config._attn_implementation,
        "settings": settings | {"num_blocks": BLOCKS, "seed": 0},
    }
    key = {**argument, "device": _card(device), "versions": _versions()}
    return Subject(
        name=f"an engine of {type(model).__name__} {rung.name}, on {_card(device)[0]}",
        function=TRIAL,
        argument=argument,
        key=key,
        otherwise=f"decode steps run {lower.name}",
        if_untried=f"decode steps run {RUNGS[-1].name}",
        limit_seconds=SECONDS_OF_A_TRIAL,
        # The child's engine starts no further child.
        environment={SWITCH: "0"},
    )


def small_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return a config with few layers, one of each of the model's layer types."""
    config = model.config.get_text_config(decoder=True)
    described = config.to_dict()
    for name in ("torch_dtype", "dtype", "_name_or_path", "transformers_version", "architectures"):
        described.pop(name, None)
    settings: dict[str, Any] = json.loads(json.dumps(described))
    num_layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["layer"] * num_layers
    kept = _kept_layers(kinds, num_layers)
    for name, value in settings.items():
        # A list with an entry for each layer.
        if isinstance(value, list) and len(value) == num_layers:
            settings[name] = [value[index] for index in kept]
    settings["num_hidden_layers"] = len(kept)
    return settings


def _kept_layers(kinds: Sequence[str], num_layers: int) -> list[int]:
    """Return the first layer of each kind, and more up to `LEAST_LAYERS`, in their order.

    Args:
        kinds: of the layers.
        num_layers: of the model.
    """
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    for index in range(num_layers):
        if len(kept) < LEAST_LAYERS and index not in kept:
            kept.append(index)
    return sorted(kept)


def small_model(
    settings: Mapping[str, Any], dtype: torch.dtype, attention: str | None
) -> PreTrainedModel:
    """Make a model of a config's settings, with random weights, on torch's default device."""
    others = {name: value for name, value in settings.items() if name != "model_type"}
    config = AutoConfig.for_model(settings["model_type"], **others)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def _card(device: torch.device) -> list[str]:
    """Describe a device and its driver."""
    if device.type != "cuda":
        return [device.type, platform.processor()]
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    driver = Path("/proc/driver/nvidia/version")
    version = ""
    if driver.exists():
        version = driver.read_text().splitlines()[0]
    return [torch.cuda.get_device_name(device), capability, version]


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "cb_rollout": cb_rollout.__version__}
    for package in ("torch", "triton", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = ""
    versions["cuda"] = str(torch.version.cuda or torch.version.hip or "")
    return versions
