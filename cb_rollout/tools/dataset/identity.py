"""Describe the inputs that determine a run's results, as JSON that a resumed run compares.

These are the weights, the model's settings, the tokenizer's files, and the code of a scoring
function. The hardware and the library versions are left out, because they only change rounding.
Called before anything is generated.
"""

import dataclasses
import dis
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from cb_rollout.compat.module_state import module_settings
from cb_rollout.compat.torch import own_forwards, own_hooks
from cb_rollout.config.hf import from_generation_config
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.tools.dataset.options import DatasetOptions
from cb_rollout.weights.adapters import scalings_of

# Entries of saved settings that change no result: where a checkpoint lies, who saved it, and what a
# tokenizer was last called with.
INERT = {
    "_name_or_path", "name_or_path", "is_local", "local_files_only", "transformers_version",
    "architectures", "dtype", "use_cache", "padding", "truncation", "padding_side",
    "truncation_side",
}  # fmt: skip

# Left out of the tokenizer's files, because the chat template is a separate setting.
CHAT_TEMPLATE_FILE = "chat_template.jinja"

# Entries of a class that its body does not write: links, and the place of its source.
OF_NO_CLASS_BODY = {
    "__module__", "__qualname__", "__dict__", "__weakref__", "__firstlineno__",
    "__static_attributes__",
}  # fmt: skip

# Attributes in which `property`, `staticmethod`, `cached_property` and the like hold functions.
DESCRIPTORS_FUNCTIONS = ("fget", "fset", "fdel", "__func__", "func", "dispatcher")

SCALARS = (type(None), bool, int, float, complex, str, bytes)


def digest_of_weights(model: PreTrainedModel) -> str:
    """Hash the name, shape, dtype and bytes of each parameter and each buffer."""
    digest = hashlib.sha256()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().flatten().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the model's settings that affect its results, for a later run to compare.

    These are the config entries that differ from its class's defaults, adapter scalings, a hash of
    its modules' settings (including which adapters are active), and the modules with a hook or a
    replaced forward.
    """
    settings: dict[str, Any] = {"config": _without_inert(model.config.to_diff_dict())}
    modules = repr([module_settings(module) for module in model.modules()])
    settings["module_settings"] = hashlib.sha256(modules.encode()).hexdigest()
    settings["hooked_modules"] = [*own_hooks(model), *own_forwards(model)]
    scalings = scalings_of(model)
    if scalings:
        settings["adapter_scalings"] = scalings
    return settings


def sampling_settings(model: PreTrainedModel, options: DatasetOptions) -> dict[str, Any]:
    """Return the sampling parameters that a generation config sets to non-neutral values."""
    config = model.generation_config
    if options.generation_config == "none":
        config = GenerationConfig(do_sample=True)
    params = options.sampling_params(from_generation_config(config))
    neutral = SamplingParams()
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        is_decided_by_option = getattr(options, field.name, None) is not None
        value = getattr(params, field.name)
        if not is_decided_by_option and value != getattr(neutral, field.name):
            settings[field.name] = _jsonable(value)
    return settings


def tokenizer_settings(tokenizer: Any) -> dict[str, str]:
    """Hash each file of a tokenizer or a processor, as it would be saved now."""
    settings = {"class": type(tokenizer).__name__}
    if not hasattr(tokenizer, "save_pretrained"):
        return settings
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file() and path.name != CHAT_TEMPLATE_FILE:
                settings[str(path.relative_to(folder))] = _digest_of_settings_file(path)
    return settings


def digest_of_scorer(scorer: Any) -> str:
    """Hash the code of a scoring function, and the names that it uses from its module.

    Functions, classes and plain values of the module count with their current content. Comments,
    layout, and values that the function itself assigns, such as a counter, do not count. Of other
    modules, only the names count.
    """
    function = scorer
    while isinstance(function, partial):
        function = function.func
    described = _Description(getattr(function, "__module__", None)).of(scorer)
    return hashlib.sha256(repr(described).encode()).hexdigest()


def digest_of_file(path: Path) -> str:
    """Hash the bytes of a file; `OSError`: it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_settings_file(path: Path) -> str:
    """Hash a file; inert entries of a JSON file are left out."""
    if path.suffix != ".json":
        return digest_of_file(path)
    settings = _without_inert(json.loads(path.read_bytes()))
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _without_inert(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept: dict[str, Any] = {}
        for name, item in value.items():
            if name not in INERT:
                kept[str(name)] = _without_inert(item)
        return kept
    if isinstance(value, list | tuple):
        return [_without_inert(item) for item in value]
    return _jsonable(value)


def _jsonable(value: Any) -> Any:
    """Return a JSON value; other objects become their text, or else the name of their type.

    A dict's keys may be tuples of token ids.
    """
    if isinstance(value, Mapping):
        return [[_jsonable(key), _jsonable(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, str | int | float | None):
        return value
    # The text of a bare object is its address, which changes with the process.
    if type(value).__repr__ is object.__repr__:
        return type(value).__qualname__
    return repr(value)


class _Description:
    """Describes functions and values by lists that are the same in every process."""

    def __init__(self, module: str | None) -> None:
        """Describe only the functions and classes of this module in detail."""
        self._module = module
        self._described: set[int] = set()
        self._open: set[int] = set()
        """The containers that are being described: one may hold itself."""

    def of(self, value: Any) -> Any:
        """Return lists, texts and numbers that identify the value."""
        if isinstance(value, SCALARS):
            return repr(value)
        if isinstance(value, re.Pattern):
            return ["pattern", repr(value.pattern), value.flags]
        if not isinstance(value, list | tuple | set | frozenset | Mapping):
            return self._of_callable(value)
        if id(value) in self._open:
            return "itself"
        self._open.add(id(value))
        described = self._of_container(value)
        self._open.discard(id(value))
        return described

    def _of_container(self, value: Any) -> list[Any]:
        if isinstance(value, Mapping):
            described: list[Any] = ["dict"]
            for key, item in value.items():
                described.append([self.of(key), self.of(item)])
            return described
        if isinstance(value, set | frozenset):
            # The order of a set differs between processes.
            return ["set", *sorted(repr(self.of(item)) for item in value)]
        return [type(value).__name__, *map(self.of, value)]

    def _of_callable(self, value: Any) -> list[Any]:
        if isinstance(value, partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, BuiltinFunctionType):
            return ["builtin", value.__module__, value.__qualname__]
        # Functions may refer to each other.
        if id(value) in self._described:
            return ["described", type(value).__qualname__, getattr(value, "__qualname__", "")]
        self._described.add(id(value))
        if isinstance(value, FunctionType):
            return self._of_function(value)
        return self._of_object(value)

    def _of_function(self, function: FunctionType) -> list[Any]:
        if function.__module__ != self._module:
            return ["function", function.__module__, function.__qualname__]
        code = function.__code__
        assigned = set(_assigned_names(code))
        globals_read: dict[str, Any] = {}
        for name in sorted(set(_names(code)) - assigned):
            if name in function.__globals__:
                globals_read[name] = self.of(function.__globals__[name])
        closure: dict[str, Any] = {}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name not in assigned:
                closure[name] = self.of(cell.cell_contents)
        defaults = [self.of(function.__defaults__), self.of(function.__kwdefaults__)]
        attributes = self.of(vars(function))
        return ["function", self._of_code(code), globals_read, closure, defaults, attributes]

    def _of_object(self, value: Any) -> list[Any]:
        cls = value if isinstance(value, type) else type(value)
        described: list[Any] = [cls.__module__, cls.__qualname__]
        if hasattr(value, "__wrapped__"):
            # For example, a function that `functools.lru_cache` wraps.
            return [*described, self.of(value.__wrapped__)]
        if cls.__module__ != self._module:
            return [*described, getattr(value, "__qualname__", "")]
        described.append(self._of_class(cls))
        if cls is not value:
            described.append(self.of(_attributes(value)))
        return described

    def _of_class(self, cls: type) -> list[Any]:
        described: list[Any] = [self.of(type(cls))]
        for base in cls.__bases__:
            described.append(self.of(base))
        for name, attribute in vars(cls).items():
            if name not in OF_NO_CLASS_BODY:
                described.append([name, self._of_attribute(attribute)])
        return described

    def _of_attribute(self, attribute: Any) -> list[Any]:
        """Describe a class attribute; describe a descriptor by the functions that it calls."""
        functions = [getattr(attribute, name, None) for name in DESCRIPTORS_FUNCTIONS]
        if isinstance(attribute, FunctionType) or not any(functions):
            return self.of(attribute)
        return [type(attribute).__qualname__, *map(self.of, functions)]

    def _of_code(self, code: CodeType) -> list[Any]:
        constants: list[Any] = []
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                constants.append(self._of_code(constant))
            else:
                constants.append(self.of(constant))
        return [code.co_code.hex(), constants, code.co_names, code.co_varnames]


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, including those in slots."""
    attributes = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, attribute in vars(cls).items():
            if isinstance(attribute, MemberDescriptorType) and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _names(code: CodeType) -> Iterator[str]:
    yield from chain.from_iterable(each.co_names for each in _codes(code))


def _assigned_names(code: CodeType) -> Iterator[str]:
    """Yield names that the code assigns outside of itself, by `global` and `nonlocal`."""
    for each in _codes(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in ("STORE_GLOBAL", "STORE_DEREF"):
                yield instruction.argval
