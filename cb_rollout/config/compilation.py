"""Read `torch.compile` settings: transformers' `CompileConfig` and `default_compile_level`.

Decides which compile settings each path gets, prefill or decode. The order is that of transformers
(5.23, `resolve_compile_configs`): first the path's own config, then the level's, then the
generation config's. Does not compile. Loads neither torch nor transformers.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cb_rollout.errors import ConfigurationError

# transformers calls the path of prefill "varlen", because its rows have various lengths.
PREFILL = "varlen_compile_config"
DECODE = "decode_compile_config"

_FALLBACK = "GenerationConfig.compile_config"

MAX_LEVEL = 3

# Fields of `CompileConfig`, each an argument of `torch.compile`, with how the engine uses it.
FIELDS = {
    "fullgraph": "True: a forward that does not become one graph is an error",
    "dynamic": (
        "True: one graph for all sizes; False: one for each size, which the engine rounds up; "
        "None: the latter first, and the former once a size changes"
    ),
    "backend": "a name of `torch.compile`'s, or a function",
    "mode": "a name of `torch.compile`'s; on a GPU one that captures CUDA graphs is refused",
    "options": "those of the backend; not beside a mode",
}

# Fields of `CompileConfig` that have no effect, whatever their value, with the reason.
FIELDS_WITHOUT_EFFECT = {
    "_compile_all_devices": "these configs compile on every device, as in transformers' batching",
}

# transformers' default, which also applies to a dict without a mode.
_DEFAULT_MODE = "reduce-overhead"


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """Arguments of `torch.compile`, and the setting that they come from."""

    fullgraph: bool = False
    """True: a graph break is an error."""
    dynamic: bool | None = None
    """True: one graph for all sizes; False: one graph per size, which the engine rounds up; None: a
    graph for the first size, then one for all sizes once a size changes."""
    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    """None or "default": no further options."""
    options: Mapping[str, Any] | None = field(default=None, hash=False)
    source: str = "CompileConfig"
    """The name of the setting in messages."""
    refuses_obstacle: bool = True
    """True: a path that cannot be compiled is a `ConfigurationError` when the engine starts; False:
    a warning."""
    raises_failure: bool = True
    """True: a compilation that fails is an error; False: a warning, and the model itself runs."""

    @property
    def is_static(self) -> bool:
        return self.dynamic is False


def compile_setting(name: str) -> Callable[[Any], CompileSettings | None]:
    """Return a setting's check, which accepts None, a `CompileConfig`, or a dict of its fields."""

    def check(value: Any) -> CompileSettings | None:
        if value is None or isinstance(value, CompileSettings):
            return value
        return _read(value, name)

    return check


def _read(value: Any, source: str) -> CompileSettings:
    """Read a `CompileConfig` by field name; `ValueError` says what is wrong with it."""
    given: dict[str, Any]
    if isinstance(value, Mapping):
        given = dict(value)
    elif "CompileConfig" in {kind.__name__ for kind in type(value).__mro__}:
        given = dict(vars(value))
    else:
        raise ValueError("is neither a CompileConfig of transformers nor a dict of its fields")
    for name in FIELDS_WITHOUT_EFFECT:
        given.pop(name, None)
    for name in given:
        if name not in FIELDS:
            raise ValueError(f"has {name!r}; known: {', '.join(FIELDS)}")
    mode = given.get("mode", _DEFAULT_MODE)
    options = given.get("options")
    _require_types(given)
    if mode is not None and options is not None:
        raise ValueError(
            f"has mode={mode!r} and options, of which torch.compile takes one; set mode=None "
            "beside options"
        )
    given |= {"mode": mode, "options": options}
    return CompileSettings(**given, source=source)


def _require_types(given: Mapping[str, Any]) -> None:
    fullgraph = given.get("fullgraph", False)
    dynamic = given.get("dynamic")
    backend = given.get("backend", "inductor")
    mode = given.get("mode")
    options = given.get("options")
    if not isinstance(fullgraph, bool):
        raise ValueError(f"has fullgraph={fullgraph!r}, which is not True or False")
    if not (dynamic is None or isinstance(dynamic, bool)):
        raise ValueError(f"has dynamic={dynamic!r}, which is not True, False or None")
    if not (isinstance(backend, str) or callable(backend)):
        raise ValueError(f"has backend={backend!r}, which is neither a name nor a function")
    if not (mode is None or isinstance(mode, str)):
        raise ValueError(f"has mode={mode!r}, which is neither a name nor None")
    if not (options is None or isinstance(options, Mapping)):
        raise ValueError(f"has options={options!r}, which is neither a dict nor None")


def level_settings(level: int) -> CompileSettings | None:
    """Return the settings with which a `default_compile_level` compiles a path; None: level 0."""
    if not level:
        return None
    mode = "max-autotune-no-cudagraphs"
    if level == 1:
        mode = "default"
    return CompileSettings(
        mode=mode,
        dynamic=level <= 2,
        source=f"default_compile_level={level}",
        raises_failure=False,
    )


def trainer_settings(arguments: Any) -> CompileSettings | None:
    """Return prefill settings for a trainer with `torch_compile=True`; None: it is off.

    `arguments`: transformers' `TrainingArguments`.
    """
    if not getattr(arguments, "torch_compile", False):
        return None
    return CompileSettings(
        backend=getattr(arguments, "torch_compile_backend", None) or "inductor",
        mode=getattr(arguments, "torch_compile_mode", None),
        # Each batch of prompts has a different size.
        dynamic=True,
        source="torch_compile=True",
        refuses_obstacle=False,
        raises_failure=False,
    )


def with_compile_settings(config: Any, generation_config: Any) -> Any:
    """Return a `RolloutConfig` with the resolved compile configs of prefill and decode steps.

    `generation_config`: a transformers `GenerationConfig`. Its `compile_config` applies to a path
        that has neither a config nor a level, unless its `disable_compile` is True.

    Raises:
        ConfigurationError: `generation_config.compile_config` cannot be read.
    """
    default = level_settings(config.default_compile_level)
    fallback = _fallback(generation_config)
    prefill = getattr(config, PREFILL) or default or fallback
    decode = getattr(config, DECODE) or default
    if decode is None and not config.use_default_compile_configs:
        decode = fallback
    return dataclasses.replace(config, **{PREFILL: prefill, DECODE: decode})


def require_compiled_so(config: Any, generation_config: Any) -> None:
    """Refuse a generation config whose compile settings differ from the engine's.

    `config`: the engine's config, from `with_compile_settings`.

    Raises:
        ConfigurationError: they differ, or its `compile_config` cannot be read.
    """
    fallback = _fallback(generation_config)
    if fallback is None:
        return
    is_same = True
    for path in (getattr(config, PREFILL), getattr(config, DECODE)):
        is_of_fallback = path is not None and path.source == fallback.source
        if is_of_fallback and path != fallback:
            is_same = False
    if not is_same or with_compile_settings(config, generation_config) != config:
        raise ConfigurationError(
            f"{_FALLBACK} of one call: forwards are compiled when the engine starts; give the "
            "generation config to the generator or manager that is made, or set "
            f"{PREFILL} and {DECODE}."
        )


def _fallback(generation_config: Any) -> CompileSettings | None:
    asked = getattr(generation_config, "compile_config", None)
    if asked is None or getattr(generation_config, "disable_compile", False):
        return None
    try:
        return _read(asked, _FALLBACK)
    except ValueError as error:
        raise ConfigurationError(f"{_FALLBACK} {error}.") from None
