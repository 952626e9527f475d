"""Compile configs are read, resolved in transformers' order, or refused with the reason."""

import dataclasses
import re

import pytest
from transformers import CompileConfig, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from cb_rollout import RolloutConfig
from cb_rollout.config.compilation import (
    CompileSettings,
    require_compiled_so,
    trainer_settings,
    with_compile_settings,
)
from cb_rollout.config.hf import as_rollout_config
from cb_rollout.errors import ConfigurationError

PATHS = ("varlen_compile_config", "decode_compile_config")


def a_backend(module, inputs):
    return module


def own_arguments(settings):
    return None if settings is None else {n: getattr(settings, n) for n in FIELDS}


# A value of each field that its default is not.
SET_TO = {
    "fullgraph": True,
    "dynamic": False,
    "backend": a_backend,
    "mode": "max-autotune-no-cudagraphs",
    "options": {"max_autotune": True},
    "_compile_all_devices": True,
}
FIELDS = [field.name for field in dataclasses.fields(CompileConfig)]


def test_every_field_of_the_installed_compile_config_is_tried_here():
    private = {name for name in vars(CompileConfig) if re.fullmatch("_[a-z][a-z_]*", name)}
    assert {*FIELDS, *private} == SET_TO.keys(), "new fields: honour or refuse each"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("as_dict", [False, True])
def test_every_field_is_read(path, name, as_dict):
    given = {"mode": None} | {name: SET_TO[name]}
    config = RolloutConfig(**{path: given if as_dict else CompileConfig(**given)})
    settings = getattr(config, path)
    assert own_arguments(settings) == CompileConfig(**given).to_dict()
    assert settings.source == path


@pytest.mark.parametrize("path", PATHS)
def test_a_config_of_all_devices_is_as_any_other_for_all_are_compiled_on_every_device(path):
    theirs = CompileConfig()
    theirs._compile_all_devices = True
    assert RolloutConfig(**{path: theirs}) == RolloutConfig(**{path: CompileConfig()})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("max-autotune", "is neither a CompileConfig of transformers nor a dict"),
        ({"speed": 2}, "has 'speed'; known: fullgraph, dynamic, backend, mode, options"),
        (CompileConfig(options={"max_autotune": True}), "set mode=None beside options"),
        ({"mode": "default", "options": {}}, "set mode=None beside options"),
        ({"fullgraph": "yes"}, "has fullgraph='yes'"),
        ({"dynamic": 1}, "has dynamic=1, which is not"),
        ({"backend": 3}, "has backend=3, which is neither a name nor a function"),
        ({"mode": 2}, "has mode=2, which is neither a name nor None"),
        ({"mode": None, "options": [1]}, r"has options=\[1\]"),
    ],
)
def test_what_torch_would_not_take_is_refused_with_the_reason(given, said):
    with pytest.raises(ConfigurationError, match=f"decode_compile_config=.*{said}"):
        RolloutConfig(decode_compile_config=given)


def test_a_field_of_a_later_transformers_is_refused_by_name():
    theirs = CompileConfig()
    theirs.warp = 9
    with pytest.raises(ConfigurationError, match=r"varlen_compile_config=.* has 'warp'"):
        RolloutConfig(varlen_compile_config=theirs)


THEIRS = {
    "nothing": {},
    "level 1": {"default_compile_level": 1},
    "level 2": {"default_compile_level": 2},
    "level 3": {"default_compile_level": 3},
    "one path": {"varlen_compile_config": CompileConfig(dynamic=True)},
    "the other path": {"decode_compile_config": CompileConfig(fullgraph=True)},
    "a path and a level": {
        "varlen_compile_config": CompileConfig(mode=None),
        "default_compile_level": 2,
    },
    "deprecated, on": {"use_default_compile_configs": True},
    "deprecated, off": {"use_default_compile_configs": False},
}


@pytest.mark.parametrize("asked", THEIRS)
@pytest.mark.parametrize("fallback", [None, CompileConfig(backend="aot_eager", mode=None)])
def test_settings_are_resolved_as_transformers_resolves_them(asked, fallback):
    theirs = ContinuousBatchingConfig(**THEIRS[asked])
    ours = as_rollout_config(theirs)
    ours = with_compile_settings(ours, GenerationConfig(compile_config=fallback))
    # Of the versions that have the module.
    initialization = pytest.importorskip(
        "transformers.generation.continuous_batching.initialization"
    )
    initialization.resolve_compile_configs(
        theirs, fallback, is_flash_attn=False, decode_fast_path_available=True
    )
    for path in PATHS:
        expected = getattr(theirs, path)
        found = own_arguments(getattr(ours, path))
        assert found == (None if expected is None else expected.to_dict())


def test_settings_that_are_resolved_stay_as_they_are():
    once = with_compile_settings(RolloutConfig(default_compile_level=2), GenerationConfig())
    assert once.decode_compile_config.source == "default_compile_level=2"
    assert with_compile_settings(once, GenerationConfig()) == once


def test_a_level_beyond_three_is_refused():
    with pytest.raises(ConfigurationError, match="default_compile_level=4 is above 3"):
        RolloutConfig(default_compile_level=4)


def test_a_level_and_no_default_compilation_contradict_each_other():
    with pytest.raises(ConfigurationError, match="default_compile_level=2 compiles what use_de"):
        RolloutConfig(default_compile_level=2, use_default_compile_configs=False)


def test_a_generation_config_that_disables_compilation_is_no_fallback():
    theirs = GenerationConfig(compile_config=CompileConfig(), disable_compile=True)
    assert with_compile_settings(RolloutConfig(), theirs) == RolloutConfig()


def test_the_engines_own_compilation_of_decode_steps_comes_before_the_fallback():
    config = RolloutConfig(use_default_compile_configs=True)
    theirs = GenerationConfig(compile_config=CompileConfig(mode=None))
    resolved = with_compile_settings(config, theirs)
    assert resolved.decode_compile_config is None
    assert resolved.varlen_compile_config.source == "GenerationConfig.compile_config"


def test_a_fallback_that_cannot_be_read_is_refused_by_its_name():
    theirs = GenerationConfig(compile_config=CompileConfig(options={"a": 1}))
    with pytest.raises(ConfigurationError, match=r"GenerationConfig\.compile_config has mode="):
        with_compile_settings(RolloutConfig(), theirs)


def test_one_call_may_not_ask_for_another_compilation_than_the_engines():
    first = GenerationConfig(compile_config=CompileConfig(mode=None))
    second = GenerationConfig(compile_config=CompileConfig(mode="default"))
    compiled = with_compile_settings(RolloutConfig(), first)
    require_compiled_so(compiled, first)
    require_compiled_so(compiled, GenerationConfig())
    for config in (compiled, RolloutConfig()):
        with pytest.raises(ConfigurationError, match=r"compile_config of one call: .* starts"):
            require_compiled_so(config, second)
    # A path's own config comes first, as it does when the engine is made.
    own = {"mode": None}
    explicit = RolloutConfig(varlen_compile_config=own, decode_compile_config=own)
    require_compiled_so(explicit, second)


@pytest.mark.parametrize("name", [*PATHS, "default_compile_level"])
def test_bitwise_numerics_refuse_every_compilation(name):
    value = 1 if name == "default_compile_level" else CompileConfig()
    with pytest.raises(ConfigurationError, match=f"numerics='bitwise': {name}=.*another order"):
        RolloutConfig(numerics="bitwise", **{name: value})


def test_a_trainer_that_compiles_has_prefill_compiled_for_all_sizes():
    @dataclasses.dataclass
    class Arguments:
        torch_compile: bool = True
        torch_compile_backend: str | None = None
        torch_compile_mode: str | None = "max-autotune-no-cudagraphs"

    expected = CompileSettings(
        mode="max-autotune-no-cudagraphs",
        dynamic=True,
        source="torch_compile=True",
        refuses_obstacle=False,
        raises_failure=False,
    )
    assert trainer_settings(Arguments()) == expected
    assert trainer_settings(Arguments(torch_compile_backend="eager")).backend == "eager"
    assert trainer_settings(Arguments(torch_compile=False)) is None
