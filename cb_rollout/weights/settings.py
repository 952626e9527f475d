"""Have a copy of a model compute with the training module's settings, not those of its config file.

A copy is made from the model's config. What the user has set on a module or on the config since,
such as a scale, a number of experts or a window, is taken over with the weights. Changes the copy
alone. Called from the training thread, while the engine is paused.
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
    """Of the plain module that has it, or that reads the config which has it."""
    is_of_config: bool
    name: str


def settings_of(model: PreTrainedModel) -> dict[Setting, object]:
    """Return the settings of each plain module of a training model, and of the configs they read.

    Of a tensor that is a plain attribute the identity and the number of writes stand for its
    values.
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

    A name that the copy's module lacks is left out: it is not computed with, as a loss that a
    trainer notes there.

    Args:
        replica: the model that generates.
        trained: the training model, without its wrappers.
        settings: of `trained`.
    """
    modules = {path: module for path, module, _ in plain_modules(trained)}
    copied = {path: module for path, module, _ in plain_modules(replica)}
    device = next(replica.parameters()).device
    for setting in settings:
        source: Any = modules[setting.path]
        target: Any = copied.get(setting.path)
        if setting.is_of_config:
            source = source.config
            target = getattr(target, "config", None)
        if target is None or setting.name not in vars(target):
            continue
        value = getattr(source, setting.name)
        if isinstance(value, torch.Tensor):
            own_value = value.detach().to(device, copy=True)
        else:
            own_value = copy.deepcopy(value)
        setattr(target, setting.name, own_value)
