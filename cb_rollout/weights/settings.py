"""Transfer the training module's settings to a copy of the model.

A copy is created from the model's config. Settings that the user changed later on a module or on
the config, such as a scale, a number of experts or a window, are transferred with the weights. Only
the copy is changed. Called from the training thread, while the engine is paused.
"""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from cb_rollout.compat.fsdp import write_state
from cb_rollout.compat.module_state import config_values, module_settings, module_tensors
from cb_rollout.weights.tensor import plain_modules


class Setting(NamedTuple):
    """Place of a setting in a model."""

    path: str
    """Path of the plain module that has the setting, or that reads the config that has it."""
    is_of_config: bool
    name: str


def settings_of(model: PreTrainedModel) -> dict[Setting, object]:
    """Return the settings of each plain module of a training model, and of the configs they read.

    A tensor in a plain attribute is represented by its identity and number of writes.
    """
    settings: dict[Setting, object] = {}
    for path, module, _ in plain_modules(model):
        for name, value in module_settings(module).items():
            settings[Setting(path, False, name)] = copy.deepcopy(value)
        for name, tensor in module_tensors(module).items():
            settings[Setting(path, False, name)] = (id(tensor), write_state(tensor))
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            for name, value in config_values(config).items():
                settings[Setting(path, True, name)] = copy.deepcopy(value)
    return settings


def take_over_settings(
    replica: PreTrainedModel, trained: PreTrainedModel, settings: Iterable[Setting]
) -> None:
    """Set these settings of a training model on its copy.

    A name that the copy's module lacks is left out, because it does not affect the forward, like a
    loss that a trainer stores on a module.

    Args:
        replica: the model that generates.
        trained: the training model, without its wrappers.
        settings: the settings of `trained` to set.
    """
    trained_modules = {path: module for path, module, _ in plain_modules(trained)}
    copied_modules = {path: module for path, module, _ in plain_modules(replica)}
    device = next(replica.parameters()).device
    for setting in settings:
        source: Any = trained_modules[setting.path]
        target: Any = copied_modules.get(setting.path)
        if setting.is_of_config:
            source = source.config
            target = getattr(target, "config", None)
        if target is None or setting.name not in vars(target):
            continue
        value = getattr(source, setting.name)
        if isinstance(value, torch.Tensor):
            copied_value = value.detach().to(device, copy=True)
        else:
            copied_value = copy.deepcopy(value)
        setattr(target, setting.name, copied_value)
