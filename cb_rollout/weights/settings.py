"""Have a copy of a model compute with the training module's settings, not those of its config file.

A copy is made from the model's config. What the user has set on a module or on the config since,
such as a scale, a number of experts or a window, is taken over with the weights. Changes the copy
alone. Called from the training thread, while the engine is paused.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from cb_rollout.compat.fsdp import write_state
from cb_rollout.compat.module_state import config_values, module_settings, module_tensors
from cb_rollout.weights.tensor import plain_modules

Settings = dict[tuple[str, str], object]
"""Values by the path of their module and their name; of configs the name begins with "config."."""


def settings_of(model: PreTrainedModel) -> Settings:
    """Return the settings of each plain module of a training model, and of the configs they read.

    Of a tensor that is a plain attribute the address and the number of writes stand for its values.
    """
    settings: Settings = {}
    for path, module, _ in plain_modules(model):
        for name, value in module_settings(module).items():
            settings[path, name] = _copied(value)
        for name, tensor in module_tensors(module).items():
            settings[path, name] = (id(tensor), write_state(tensor))
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            for name, value in config_values(config).items():
                settings[path, f"config.{name}"] = _copied(value)
    return settings


def take_over_settings(
    copy: PreTrainedModel, trained: PreTrainedModel, names: Mapping[tuple[str, str], object]
) -> None:
    """Set on a copy's modules and configs what the training model's have under these names.

    A name that the copy's module lacks is left out: it is not computed with, as a loss that a
    trainer notes there.

    Args:
        copy: the model that generates.
        trained: the training model, without its wrappers.
        names: as `settings_of` returns; only its keys are read.
    """
    modules = {path: module for path, module, _ in plain_modules(trained)}
    copied = {path: module for path, module, _ in plain_modules(copy)}
    for path, name in names:
        source: Any = modules[path]
        target: Any = copied.get(path)
        if name.startswith("config."):
            name = name.removeprefix("config.")
            source, target = source.config, getattr(target, "config", None)
        if target is None or name not in vars(target):
            continue
        value = getattr(source, name)
        if isinstance(value, torch.Tensor):
            device = next(copy.parameters()).device
            value = value.detach().to(device, copy=True)
        setattr(target, name, _copied(value))


def _copied(value: Any) -> Any:
    """Return a value that a later write to the original list or dict does not change."""
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copied(item) for item in value)
    return value
