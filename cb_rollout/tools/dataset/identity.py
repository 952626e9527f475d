"""Describe what decides the results of a run over a data set, as JSON that a resumed run repeats.

Owns what counts: the weights, the model's settings, the tokenizer's files, and the code of a
scoring function. Leaves out where and by which libraries a run computes, which only rounds
otherwise. Called before anything is generated.
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
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
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

# A setting of its own.
CHAT_TEMPLATE_FILE = "chat_template.jinja"

SCALARS = (type(None), bool, int, float, complex, str, bytes)


def digest_of_weights(model: PreTrainedModel) -> str:
    """Hash the name, shape, dtype and bytes of each parameter and each buffer."""
    digest = hashlib.sha256()
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().flatten().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def model_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return what a model computes with beside its weights, for a later run to compare.

    These are the entries of its config that are not its class's, adapters' scalings, a hash of its
    modules' settings (which adapters are active among them), and the modules that run a hook or a
    forward of one's own.
    """
    settings: dict[str, Any] = {"config": _without_inert(model.config.to_diff_dict())}
    modules = repr([module_settings(module) for module in model.modules()])
    settings["module_settings"] = hashlib.sha256(modules.encode()).hexdigest()
    settings["hooked_modules"] = [*own_hooks(model), *own_forwards(model)]
    if scalings := scalings_of(model):
        settings["adapter_scalings"] = scalings
    return settings


def sampling_settings(model: PreTrainedModel, options: DatasetOptions) -> dict[str, Any]:
    """Return the sampling parameters that a generation config decides, and that are not neutral."""
    is_plain = options.generation_config == "none"
    config = GenerationConfig(do_sample=True) if is_plain else model.generation_config
    params = options.sampling_params(from_generation_config(config))
    neutral = SamplingParams()
    decided = {name for name, value in vars(options).items() if value is not None}
    return {
        field.name: _jsonable(getattr(params, field.name))
        for field in dataclasses.fields(params)
        if field.name not in decided and getattr(params, field.name) != getattr(neutral, field.name)
    }


def tokenizer_settings(tokenizer: Any) -> dict[str, str]:
    """Hash each file of a tokenizer or a processor, as it would be saved now."""
    found = {"class": type(tokenizer).__name__}
    if not hasattr(tokenizer, "save_pretrained"):
        return found
    with tempfile.TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        for path in sorted(Path(name).rglob("*")):
            if path.is_file() and path.name != CHAT_TEMPLATE_FILE:
                found[str(path.relative_to(name))] = _digest_of_settings_file(path)
    return found


def digest_of_scorer(scorer: Any) -> str:
    """Hash the code of a scoring function, and what it names in its module.

    Functions, classes and plain values of the module count, by what they are now. Comments and
    layout don't, and neither do values that the function itself assigns, such as a counter. Other
    modules count by their names.
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
    """Hash a file, a JSON one without its inert entries."""
    if path.suffix != ".json":
        return digest_of_file(path)
    settings = _without_inert(json.loads(path.read_bytes()))
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _without_inert(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(name): _without_inert(item) for name, item in value.items() if name not in INERT
        }
    if isinstance(value, list | tuple):
        return [_without_inert(item) for item in value]
    return _jsonable(value)


def _jsonable(value: Any) -> Any:
    """Return a value as JSON holds it; anything else as its text, or its type's where it has none.

    A dict's keys may be tuples of token ids.
    """
    if isinstance(value, Mapping):
        return [[_jsonable(key), _jsonable(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, str | int | float | None):
        return value
    has_own_text = type(value).__repr__ is not object.__repr__
    return repr(value) if has_own_text else type(value).__qualname__


class _Description:
    """Describes functions and values by lists whose text is the same in every process."""

    def __init__(self, module: str | None) -> None:
        """Look into functions and classes of this module alone."""
        self._module = module
        self._described: set[int] = set()
        self._open: set[int] = set()
        """The containers that are being described: one may hold itself."""

    def of(self, value: Any) -> Any:
        """Return lists, texts and numbers that tell the value from others."""
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
            return ["dict", *([self.of(key), self.of(item)] for key, item in value.items())]
        if isinstance(value, set | frozenset):
            return ["set", *sorted(repr(self.of(item)) for item in value)]
        return [type(value).__name__, *map(self.of, value)]

    def _of_callable(self, value: Any) -> list[Any]:
        if isinstance(value, partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if isinstance(value, MethodType):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        if isinstance(value, BuiltinFunctionType):
            return ["builtin", value.__module__, value.__qualname__]
        # Functions may name each other.
        if id(value) in self._described:
            return ["described", type(value).__qualname__, getattr(value, "__qualname__", "")]
        self._described.add(id(value))
        is_function = isinstance(value, FunctionType)
        return self._of_function(value) if is_function else self._of_object(value)

    def _of_function(self, function: FunctionType) -> list[Any]:
        if function.__module__ != self._module:
            return ["function", function.__module__, function.__qualname__]
        code = function.__code__
        assigned = set(_assigned_names(code))
        named = {
            name: self.of(function.__globals__[name])
            for name in sorted(set(_names(code)) - assigned)
            if name in function.__globals__
        }
        cells = {
            name: self.of(cell.cell_contents)
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
            if name not in assigned
        }
        defaults = [self.of(function.__defaults__), self.of(function.__kwdefaults__)]
        return ["function", self._of_code(code), named, cells, defaults]

    def _of_object(self, value: Any) -> list[Any]:
        kind = value if isinstance(value, type) else type(value)
        described: list[Any] = [kind.__module__, kind.__qualname__]
        if kind.__module__ != self._module:
            return [*described, getattr(value, "__qualname__", "")]
        for name, attribute in vars(kind).items():
            if isinstance(attribute, (FunctionType, *SCALARS)):
                described.append([name, self.of(attribute)])
        if kind is not value:
            own = getattr(value, "__dict__", {})
            described.append({n: self.of(x) for n, x in own.items() if isinstance(x, SCALARS)})
        return described

    def _of_code(self, code: CodeType) -> list[Any]:
        constants = [
            self._of_code(x) if isinstance(x, CodeType) else self.of(x) for x in code.co_consts
        ]
        return [code.co_code.hex(), constants, code.co_names, code.co_varnames]


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
