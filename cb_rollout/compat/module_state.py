"""Identify the function that a model computes: its tensors, settings, configs and adapters.

torch 2.11 to 2.13, transformers 5.17 to 5.23, PEFT 0.21. Two reads that are equal say that the
model computed the same function of its weights both times. Writes no tensor. Any thread may call.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Number

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from cb_rollout.compat.accelerate import forward_of
from cb_rollout.compat.rope import rewritten_frequencies
from cb_rollout.compat.torch import own_hooks, plain_class
from cb_rollout.compat.transformers import vocab_size

# Attributes that every module has, such as its hooks.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))

# Settings that say how a forward runs, is trained or is described, and not what it computes. The
# offsets of images belong to the last rows; `max_seq_len_cached` is the longest row so far.
_WITHOUT_EFFECT = frozenset(
    (
        "gradient_checkpointing",
        "loss_type",
        "max_seq_len_cached",
        "name_or_path",
        "rope_deltas",
        "router_aux_loss_coef",
    )
)
_WITHOUT_EFFECT_IN_CONFIGS = _WITHOUT_EFFECT | {
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "problem_type",
    "return_dict",
    "transformers_version",
    "use_cache",
}

# Standard deviation of what stands for zeros of an adapter.
MOVED_SIZE = 0.1

# numpy's numbers are numbers too.
_PLAIN = (Number, str, torch.dtype, type(None))


def module_settings(module: torch.nn.Module) -> dict[str, object]:
    """Return the plain values that a module's forward may compute with, by attribute name.

    Such are an epsilon, a number of experts and a window: numbers, strings, None, and lists, tuples
    and dicts of them. Rates of dropout are left out, since evaluation has none, and so are the
    private names of everything but adapters and private floats.
    """
    if isinstance(module, torch.nn.Dropout):
        return {}
    of_adapter = is_adapter(module)
    settings: dict[str, object] = {}
    for name, value in vars(module).items():
        if name in _OF_EVERY_MODULE or name in _WITHOUT_EFFECT or "drop" in name:
            continue
        is_private = name.startswith("_") and type(value) is not float
        if is_private and not of_adapter:
            continue
        if _is_plain(value):
            settings[name] = value
    return settings


def module_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that are plain attributes of a module, neither parameters nor buffers."""
    attributes = vars(module).items()
    return {
        name: value
        for name, value in attributes
        if isinstance(value, torch.Tensor) and name not in _WITHOUT_EFFECT
    }


def config_values(config: PreTrainedConfig) -> dict[str, object]:
    """Return the plain values of a config that a forward may compute with, by name."""
    values: dict[str, object] = {}
    for name, value in vars(config).items():
        if name in _WITHOUT_EFFECT_IN_CONFIGS or "drop" in name:
            continue
        if name.startswith("_") or name.endswith("_token_id"):
            continue
        if _is_plain(value):
            values[name] = value
    return values


def _configs(model: torch.nn.Module) -> Iterator[PreTrainedConfig]:
    """Yield each config that modules of a model read, once."""
    seen: set[int] = set()
    waiting: list[object] = [vars(module).get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if id(config) in seen or not isinstance(config, PreTrainedConfig):
            continue
        seen.add(id(config))
        # A model that holds others has a config for each.
        waiting += [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
        yield config


def is_adapter(module: torch.nn.Module) -> bool:
    """Return whether PEFT (0.21) runs a layer: it keeps there which adapters are active."""
    return "_disable_adapters" in vars(module)


@contextmanager
def with_moved_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Have adapters that are still zero compute something, while a model is checked.

    LoRA's second factor begins at zero, which hides what its layer, or a wrapper, does with it.
    Parameters are exchanged for others and put back; none is written.
    """
    draws = torch.Generator().manual_seed(0)
    exchanged: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    try:
        for owner, name, parameter in _zero_parameters_of_adapters(model):
            drawn = torch.randn(parameter.shape, generator=draws) * MOVED_SIZE
            moved = torch.nn.Parameter(drawn.to(parameter), requires_grad=parameter.requires_grad)
            owner._parameters[name] = moved
            exchanged.append((owner, name, parameter))
        yield
    finally:
        for owner, name, parameter in exchanged:
            owner._parameters[name] = parameter


def _zero_parameters_of_adapters(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Yield the parameters of adapters that are zero, with their modules and names, each once."""
    seen: set[int] = set()
    for layer in model.modules():
        if not is_adapter(layer):
            continue
        for path, module in layer.named_modules():
            if path.startswith("base_layer"):
                continue
            for name, parameter in list(module._parameters.items()):
                # Of a shard, or of quantised weights, the class is another.
                if parameter is None or type(parameter) is not torch.nn.Parameter:
                    continue
                if id(parameter) in seen or not parameter.numel():
                    continue
                seen.add(id(parameter))
                if parameter.is_floating_point() and not parameter.any():
                    yield module, name, parameter


def model_settings(model: torch.nn.Module, *, with_adapters: bool = True) -> list[object]:
    """Return a value that changes with a setting of a module or a config.

    Without `with_adapters` that of adapters is left out: which are active, and their scale.
    """
    settings: list[object] = []
    for module in model.modules():
        if with_adapters or not is_adapter(module):
            settings.append(_frozen(module_settings(module)))
    for config in _configs(model):
        settings.append(_frozen(config_values(config)))
    return settings


def forward_identity(model: PreTrainedModel, *, is_autocast: bool = False) -> tuple[object, ...]:
    """Return a value that changes when a model computes otherwise, or keeps other states, or may.

    accelerate 1.15 wraps `forward` on the instance, under autocast, when it prepares a model; keys
    then arrive in another dtype, unless the model runs `below_accelerate` (`is_autocast`). A layer
    that was added or replaced keeps states of its own. Left out are weights, and which adapters are
    active.
    """
    parameter = next(model.parameters())
    modules = tuple(weakref.ref(module) for module in model.modules())
    own_forward = forward_of(model) if is_autocast else model.__dict__.get("forward")
    settings = tuple(model_settings(model, with_adapters=False))
    return (
        own_forward,
        parameter.dtype,
        parameter.device,
        vocab_size(model),
        modules,
        settings,
    )


def module_code(model: torch.nn.Module) -> list[object]:
    """Return a value that changes with the class, the forward or the hooks of a module.

    Left out is what accelerate, PEFT, TRL and others put there without changing what is computed.
    """
    code: list[object] = [own_hooks(model)]
    for module in model.modules():
        code.append((plain_class(module), forward_of(module)))
    return code


def captured_weights(model: torch.nn.Module, *, by_address: bool) -> list[object]:
    """Return what a captured forward relies on, to be compared with what it relies on later.

    These are modules, the functions that they run as `forward`, tensors' storages or addresses, and
    settings, of adapters too.
    """
    captured: list[object] = []
    for tensor in _tensors(model):
        if by_address:
            captured.append(tensor.data_ptr())
        else:
            captured.append((tensor.untyped_storage()._cdata, tensor.storage_offset()))
    for module in model.modules():
        captured.append((weakref.ref(module), forward_of(module)))
    return captured + model_settings(model)


def watched_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model that decide what it computes, but those that forwards rewrite.

    A forward rewrites the frequencies of a rotary embedding that follows the longest row.
    """
    rewritten = {id(frequencies) for frequencies in rewritten_frequencies(model)}
    for tensor in _tensors(model):
        if id(tensor) not in rewritten:
            yield tensor


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from module_tensors(module).values()


def _frozen(value: object) -> object:
    """Return a plain value that a later write to a list or a dict does not change."""
    if isinstance(value, dict):
        return tuple((name, _frozen(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    return value


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, _PLAIN) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)
