"""Identify the function that a model computes: its tensors, settings, configs and adapters.

torch 2.11 to 2.13, transformers 5.17 to 5.23, PEFT 0.21. If two reads are equal, the model computed
the same function of its weights both times. This module also selects the active adapters
temporarily. It writes no tensor. Any thread may call.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from cb_rollout.compat.accelerate import forward_of
from cb_rollout.compat.fsdp import write_state
from cb_rollout.compat.patching import replacing
from cb_rollout.compat.rope import rewritten_frequencies
from cb_rollout.compat.torch import named_hooks, plain_class
from cb_rollout.compat.transformers import vocab_size

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

# Attributes that every module has, such as its hooks.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))

# Settings that say how a forward runs, is trained or is described, and not what it computes.
# `rope_deltas` are offsets for the latest rows; `max_seq_len_cached` is the longest row so far.
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

# Attributes by which a module of PEFT says what it computes.
_ACTIVE = ("_active_adapter", "_disable_adapters")

# Standard deviation of the random numbers that replace an adapter's zeros.
MOVED_SIZE = 0.1

# numpy's numbers are numbers too.
_PLAIN = (Number, str, torch.dtype, type(None))


def module_settings(module: torch.nn.Module) -> dict[str, object]:
    """Return the plain values that a module's forward may compute with, by attribute name.

    Examples are an epsilon, a number of experts and a window: numbers, strings, None, and lists,
    tuples and dicts of them. Dropout rates are left out, because evaluation has none. Private names
    are left out too, except those of adapters and those of floats.
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
    """Return a module's tensors that are plain attributes: no parameters, no buffers."""
    tensors = {}
    for name, value in vars(module).items():
        if isinstance(value, torch.Tensor) and name not in _WITHOUT_EFFECT:
            tensors[name] = value
    return tensors


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
    """Yield each config that a model's modules read, once."""
    seen: set[int] = set()
    waiting: list[object] = [vars(module).get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if id(config) in seen or not isinstance(config, PreTrainedConfig):
            continue
        seen.add(id(config))
        # A model that contains other models has a config for each of them.
        waiting += [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
        yield config


def is_adapter(module: torch.nn.Module) -> bool:
    """Return whether a module is a layer of PEFT (0.21), which stores which adapters are active.

    In some layers, the switch is an attribute of their class until it is first set.
    """
    return "_disable_adapters" in vars(module) or hasattr(type(module), "_disable_adapters")


def adapter_names(model: torch.nn.Module) -> list[str]:
    """Return the names of the adapters that PEFT's layers in a model have, sorted."""
    names: set[str] = set()
    for module in model.modules():
        if is_adapter(module):
            names |= module._get_available_adapters()  # type: ignore[operator]
    return sorted(names)


def merged_adapters(model: torch.nn.Module) -> list[str]:
    """Return the names of the adapters that are merged into the weights in place, sorted."""
    names: set[str] = set()
    for module in model.modules():
        if is_adapter(module):
            names.update(module.merged_adapters)  # type: ignore[arg-type]
    return sorted(names)


@contextmanager
def with_active_adapter(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Make only one adapter compute inside the block, as PEFT's `set_adapter` does.

    `set_adapter` also changes which parameters train; this function does not. PEFT can also train
    whole modules or tokens with an adapter; if this adapter has none, the base model's run.
    """
    before: list[tuple[torch.nn.Module, dict[str, object]]] = []
    try:
        for module in model.modules():
            if not is_adapter(module):
                continue
            attributes = vars(module)
            before.append((module, {key: attributes[key] for key in _ACTIVE if key in attributes}))
            # Layers for whole trained modules, and for trained tokens, look up every active name;
            # other layers skip the names that they do not have.
            own = attributes.get("_adapters", attributes.get("token_indices"))
            attributes["_disable_adapters"] = own is not None and name not in own
            attributes["_active_adapter"] = [name]
        yield
    finally:
        for module, values in before:
            # Written in place, because another order of the attributes would be another state.
            vars(module).update(values)
            for key in _ACTIVE:
                if key not in values:
                    del vars(module)[key]


def with_wrappers_adapter(model: torch.nn.Module, name: str) -> AbstractContextManager[None]:
    """Return a context in which PEFT's wrappers of a model treat an adapter as the active one.

    A `PeftModel` computes what its own `active_adapter` needs, such as the offsets of an activated
    LoRA, and does not ask its layers.
    """
    named: list[tuple[torch.nn.Module, str, str]] = []
    for module in model.modules():
        if hasattr(module, "peft_config") and "active_adapter" in vars(module):
            named.append((module, "active_adapter", name))
    return replacing(named)


def rows_adapters(model: torch.nn.Module, names: Sequence[str | None]) -> list[str] | None:
    """Return each row's adapter as PEFT names it; None if one forward cannot run them all.

    LoRA layers can (`adapter_names` of PEFT 0.21). Modules that are trained in full cannot.

    Args:
        model: a model with layers of PEFT.
        names: the adapter of each row; None: the active one.
    """
    active: set[tuple[str, ...]] = set()
    for module in model.modules():
        if not is_adapter(module):
            continue
        if "lora_A" not in module._modules or not hasattr(module, "_mixed_batch_forward"):
            return None
        is_off = bool(module._disable_adapters)
        active.add(() if is_off else tuple(module.active_adapters))  # type: ignore[arg-type]
    if None not in names:
        return [name for name in names if name is not None]
    if len(active) != 1:
        return None
    (of_layers,) = active
    if len(of_layers) > 1:
        return None
    own = of_layers[0] if of_layers else "__base__"
    return [own if name is None else name for name in names]


@contextmanager
def with_adapter_of_each_row(model: torch.nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Make PEFT's layers compute each row (along the first axis) with its own adapter.

    Args:
        model: a model with layers of PEFT.
        names: what `rows_adapters` returned.
    """
    given = {"adapter_names": list(names)}

    def name_rows(module: object, arguments: Any, named: dict[str, Any]) -> Any:
        return arguments, named | given

    handles: list[RemovableHandle] = []
    switched_off: list[torch.nn.Module] = []
    try:
        for module in model.modules():
            if not is_adapter(module):
                continue
            handles.append(module.register_forward_pre_hook(name_rows, with_kwargs=True))
            if module._disable_adapters:
                switched_off.append(module)
                vars(module)["_disable_adapters"] = False
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module in switched_off:
            vars(module)["_disable_adapters"] = True


@contextmanager
def with_moved_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Make adapters that are still zero have an effect, while a model is checked.

    LoRA's second factor starts at zero, which hides any effect of its layer or of a wrapper.
    Parameters are swapped for others and put back; none is written.
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
                # Shards and quantised weights have another class.
                if parameter is None or type(parameter) is not torch.nn.Parameter:
                    continue
                if id(parameter) in seen or not parameter.numel():
                    continue
                seen.add(id(parameter))
                if parameter.is_floating_point() and not parameter.any():
                    yield module, name, parameter


def model_settings(model: torch.nn.Module, *, with_adapters: bool = True) -> list[object]:
    """Return a value that changes with a setting of a module or a config.

    Without `with_adapters`, the settings of adapters are left out: which are active, and their
    scale.
    """
    settings: list[object] = []
    for module in model.modules():
        if with_adapters or not is_adapter(module):
            settings.append(_frozen(module_settings(module)))
    for config in _configs(model):
        settings.append(_frozen(config_values(config)))
    return settings


def forward_identity(model: PreTrainedModel, *, is_autocast: bool = False) -> tuple[object, ...]:
    """Return a value that changes when a model has to be checked again.

    It changes with the dtype, device, vocabulary, `forward` or a setting, and when a layer is added
    or replaced, because a new layer caches its own states. It does not change with weights or
    active adapters.

    Args:
        model: the model that generates.
        is_autocast: True if the engine calls the forward that `below_accelerate` returns.
            accelerate 1.15 replaces `forward` when it prepares a model, and the new one may change
            the dtype of the keys. That counts as a change only if the engine calls the new forward.
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

    Attributes that accelerate, PEFT, TRL and others add without changing results are left out.
    """
    code: list[object] = [*named_hooks(model)]
    for module in model.modules():
        code.append((plain_class(module), forward_of(module)))
    return code


def captured_weights(model: torch.nn.Module, *, by_address: bool) -> list[object]:
    """List everything that a captured forward depends on; a capture is void once the list differs.

    The list has each tensor's place in memory, each module with the function that it runs as
    `forward`, and all settings, those of adapters included.

    Args:
        model: the model whose forward is captured.
        by_address: True: a tensor's place is its address; False: its storage and offset.
    """
    captured: list[object] = []
    for tensor in _tensors(model):
        if by_address:
            captured.append(tensor.data_ptr())
        else:
            captured.append((tensor.untyped_storage()._cdata, tensor.storage_offset()))
    return captured + captured_code(model)


def captured_code(model: torch.nn.Module) -> list[object]:
    """List what a captured forward ran: `captured_weights` without the places of tensors.

    Args:
        model: the model whose forward is captured.
    """
    captured: list[object] = []
    for module in model.modules():
        captured.append((weakref.ref(module), forward_of(module)))
    return captured + model_settings(model)


class ComputedFunction:
    """Notices when a model computes a different function than at the last check.

    Writes to weights or buffers, settings and the active adapters all change the function.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._seen: tuple[object, ...] | None = None

    def forget(self) -> None:
        """Treat the model's state at the next check as unchanged."""
        self._seen = None

    def has_changed(self, num_steps: int) -> bool:
        """Return whether the function changed since the last check.

        Args:
            num_steps: steps of the model's optimizers so far; torch does not count the writes of a
                fused optimizer.
        """
        writes = [write_state(tensor) for tensor in watched_tensors(self._model)]
        now = (num_steps, writes, model_settings(self._model), module_code(self._model))
        seen = self._seen
        self._seen = now
        return seen is not None and seen != now


def watched_tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that determine a model's results, except those that forwards rewrite.

    Forwards rewrite the frequencies of a rotary embedding that depends on the longest row.
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
    """Return an immutable copy of a plain value."""
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
