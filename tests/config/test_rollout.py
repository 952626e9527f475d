import dataclasses

import pytest
from transformers.generation.configuration_utils import CompileConfig, ContinuousBatchingConfig

from cb_rollout.config.hf import as_rollout_config
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.errors import ConfigurationError

# transformers 5.17 calls it block_size.
BLOCK_FIELD = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"


def test_the_defaults_are_valid():
    assert RolloutConfig() == RolloutConfig(block_size=32, max_memory_percent=0.8, seed=None)


def test_a_config_is_frozen_and_replaced_as_a_whole():
    config = RolloutConfig(block_size=16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 8
    assert dataclasses.replace(config, num_blocks=4) == RolloutConfig(block_size=16, num_blocks=4)
    with pytest.raises(ConfigurationError, match="num_blocks=0"):
        dataclasses.replace(config, num_blocks=0)


def test_settings_are_given_by_name():
    with pytest.raises(TypeError):
        RolloutConfig(32)


def test_an_unknown_field_is_answered_with_the_nearest_one():
    with pytest.raises(
        ConfigurationError,
        match=r"RolloutConfig has no field 'blocksize'; did you mean 'block_size'",
    ):
        RolloutConfig(blocksize=32)


def test_an_unknown_field_like_no_other_is_answered_with_all_of_them():
    with pytest.raises(
        ConfigurationError, match=r"no field 'zzz'; known: block_size, .*weight_sync"
    ):
        RolloutConfig(zzz=1)


@pytest.mark.parametrize(
    ("field", "value", "least"),
    [
        ("block_size", 0, 1),
        ("num_blocks", 0, 1),
        ("max_batch_tokens", -5, 1),
        ("max_requests_per_batch", 0, 1),
        ("max_blocks_per_request", -1, 0),
        ("max_queue_size", -1, 0),
        ("verify_every_steps", -1, 0),
        ("verify_num_sequences", 0, 1),
        ("record_num_sequences", -1, 0),
        ("replay_num_rollouts", -1, 0),
    ],
)
def test_a_number_has_a_least_value(field, value, least):
    with pytest.raises(ConfigurationError, match=f"^{field}={value} is not a whole number"):
        RolloutConfig(**{field: value})
    assert getattr(RolloutConfig(**{field: least}), field) == least


@pytest.mark.parametrize("value", [0, -0.1, 1.01, 40, float("nan")])
def test_the_memory_share_is_a_share(value):
    with pytest.raises(ConfigurationError, match=rf"max_memory_percent={value} .*0\.4 is 40%"):
        RolloutConfig(max_memory_percent=value)
    assert RolloutConfig(max_memory_percent=1).max_memory_percent == 1


@pytest.mark.parametrize("value", [-1, float("nan"), "8", None])
def test_the_training_reserve_is_auto_or_gibibytes(value):
    with pytest.raises(ConfigurationError, match=f"training_reserve_gib={value!r} .*'auto'.*GiB"):
        RolloutConfig(training_reserve_gib=value)


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf"), "much", True])
def test_the_allowed_drift_is_an_amount_of_nats_or_none(value):
    with pytest.raises(ConfigurationError, match=f"max_logprob_drift={value!r} .*None.*nats"):
        RolloutConfig(max_logprob_drift=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", None),
        ("block_size", 1.5),
        ("num_blocks", "8"),
        ("max_queue_size", None),
        ("seed", "a"),
        ("verify_every_steps", True),
    ],
)
def test_a_whole_number_is_nothing_else(field, value):
    with pytest.raises(ConfigurationError, match=f"^{field}={value!r} is not a whole number"):
        RolloutConfig(**{field: value})


@pytest.mark.parametrize("name", ["allow_block_sharing", "return_logprobs", "verify_weight_sync"])
def test_a_switch_is_true_or_false(name):
    with pytest.raises(ConfigurationError, match=f"{name}='no' is not True or False"):
        RolloutConfig(**{name: "no"})


def test_graphs_that_are_off_are_off():
    assert as_rollout_config(ContinuousBatchingConfig(use_cuda_graph=(False, False)))


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [(None, None), (True, True), ((False, True), True), ([False, False], False)],
)
def test_graphs_are_asked_for_of_decode_alone_or_as_a_pair(asked, wanted):
    assert RolloutConfig(use_cuda_graph=asked).wants_graphs is wanted
    theirs = ContinuousBatchingConfig(use_cuda_graph=asked, q_padding_interval_size=64)
    assert as_rollout_config(theirs).wants_graphs is wanted
    assert as_rollout_config(theirs).q_padding_interval_size == 64


@pytest.mark.parametrize("value", ["auto", 0, 2.5])
def test_the_training_reserve_is_kept_as_given(value):
    assert RolloutConfig(training_reserve_gib=value).training_reserve_gib == value


@pytest.mark.parametrize(
    ("field", "choices"),
    [
        ("scheduler_type", "fifo"),
        ("weight_sync", "auto, shared, copy"),
        ("rollout_dtype", "auto, float32, bfloat16, float16"),
        ("logprobs_mode", "policy, processed"),
        ("sampling_mask", "ignore, replay"),
        ("old_logps", "auto, trainer, rollout"),
        ("on_logprob_drift", "raise, recompute"),
        ("release_cache", "between_steps, with_weights, never"),
    ],
)
def test_a_choice_outside_the_list_is_answered_with_the_list(field, choices):
    with pytest.raises(ConfigurationError, match=f"{field}='fast' is not one of {choices}"):
        RolloutConfig(**{field: "fast"})


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_every_rollout_dtype_is_accepted(dtype):
    assert RolloutConfig(rollout_dtype=dtype).rollout_dtype == dtype


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_async_batching", "yes"),
        ("use_cuda_graph", (True, True)),
        ("use_cuda_graph", "yes"),
    ],
)
def test_what_is_not_available_is_refused_with_the_value_to_leave(field, value):
    default = getattr(RolloutConfig(), field)
    with pytest.raises(ConfigurationError) as raised:
        RolloutConfig(**{field: value})
    assert str(raised.value) == f"{field}={value!r} is not available; leave it at {default!r}."


@pytest.mark.parametrize("field", ["use_async_batching", "use_cuda_graph"])
def test_switching_off_what_a_device_may_lack_is_honoured(field):
    assert getattr(RolloutConfig(**{field: False}), field) is False


@pytest.mark.parametrize("off", [False, 0])
def test_a_zero_switches_off_as_false_does(off):
    assert RolloutConfig(use_async_batching=off).looks_ahead is False
    assert RolloutConfig(use_cuda_graph=off).wants_graphs is False
    assert RolloutConfig(use_cuda_graph=(off, off)).wants_graphs is False


def test_steps_ahead_without_graphs_are_refused():
    said = "launches CUDA graphs ahead of time, but use_cuda_graph=.* makes none"
    for use_cuda_graph in (False, (False, False)):
        with pytest.raises(ConfigurationError, match=said):
            RolloutConfig(use_async_batching=True, use_cuda_graph=use_cuda_graph)


def test_no_config_is_the_default_config():
    assert as_rollout_config(None) == RolloutConfig()


def test_a_rollout_config_is_taken_as_it_is():
    config = RolloutConfig(num_blocks=7)
    assert as_rollout_config(config) is config


def test_a_default_transformers_config_keeps_its_own_defaults():
    theirs = ContinuousBatchingConfig()
    ours = as_rollout_config(theirs)
    assert ours.block_size == getattr(theirs, BLOCK_FIELD)
    assert ours.return_logprobs is theirs.return_logprobs is False
    assert ours.max_memory_percent == theirs.max_memory_percent or theirs.max_memory_percent is None


def test_a_transformers_config_is_read_field_by_field():
    settings = {
        "num_blocks": 64,
        "max_batch_tokens": 128,
        "max_memory_percent": 0.5,
        "max_blocks_per_request": 4,
        "allow_block_sharing": False,
        "use_cuda_graph": False,
        "use_async_batching": False,
        "return_logprobs": True,
        "max_queue_size": 3,
        "seed": 11,
    }
    theirs = ContinuousBatchingConfig(**{BLOCK_FIELD: 16}, **settings)
    # Their default is a number of seconds.
    timeout = getattr(theirs, "cpu_group_timeout", None)
    expected = RolloutConfig(block_size=16, cpu_group_timeout=timeout, **settings)
    assert as_rollout_config(theirs) == expected


def test_the_deprecated_block_size_of_transformers_is_read_too():
    assert as_rollout_config(ContinuousBatchingConfig(block_size=8)).block_size == 8


INSTALLED_FIELDS = {field.name: field for field in dataclasses.fields(ContinuousBatchingConfig)}

# For each field of transformers' config, a value that asks for something, and what it is read as;
# where it is refused, what is said.
READ_AS = {
    "page_size": (16, {"block_size": 16}),
    "block_size": (16, {"block_size": 16}),
    "num_blocks": (64, {"num_blocks": 64}),
    "max_batch_tokens": (128, {"max_batch_tokens": 128}),
    "max_memory_percent": (0.5, {"max_memory_percent": 0.5}),
    "max_requests_per_batch": (3, {"max_requests_per_batch": 3}),
    "max_blocks_per_request": (4, {"max_blocks_per_request": 4}),
    "allow_block_sharing": (False, {"allow_block_sharing": False}),
    "use_async_batching": (False, {"use_async_batching": False}),
    "use_cuda_graph": (False, {"use_cuda_graph": False}),
    "q_padding_interval_size": (64, {"q_padding_interval_size": 64}),
    "kv_padding_interval_size": (64, {"kv_padding_interval_size": 64}),
    "max_cached_graphs": (4, {"max_cached_graphs": 4}),
    "varlen_compile_config": (CompileConfig(), {"varlen_compile_config": CompileConfig()}),
    "decode_compile_config": (CompileConfig(), {"decode_compile_config": CompileConfig()}),
    "default_compile_level": (1, {"default_compile_level": 1}),
    "use_default_compile_configs": (True, {"use_default_compile_configs": True}),
    "scheduler_type": ("prefill_first", {"scheduler_type": "prefill_first"}),
    "safety_margin": (0.2, {"safety_margin": 0.2}),
    "return_logprobs": (True, {"return_logprobs": True}),
    "seed": (11, {"seed": 11}),
    "auto_switch_to_flash": (False, {}),
    "cpu_offload_space": (2.0, {"cpu_offload_space": 2.0}),
    "cpu_offload_space_safety_threshold": (0.5, {"cpu_offload_space_safety_threshold": 0.5}),
    "max_queue_size": (3, {"max_queue_size": 3}),
    "per_request_processors": (True, {}),
    "drop_unsupported_processors": (False, {}),
    "disable_nccl_graph_mixing": (False, {}),
    "cpu_group_timeout": (5.0, {"cpu_group_timeout": 5.0}),
}


# What transformers' config sets beside a field.
SET_BESIDE = {"use_default_compile_configs": {"default_compile_level": 3}}


@pytest.mark.parametrize("name", INSTALLED_FIELDS)
def test_every_field_of_the_installed_transformers_config_is_honoured_or_refused(name):
    assert name in READ_AS, f"transformers has a new setting, {name}: read it or refuse it"
    value, expected = READ_AS[name]
    assert value != INSTALLED_FIELDS[name].default
    theirs = ContinuousBatchingConfig(**{name: value})
    if isinstance(expected, str):
        with pytest.raises(ConfigurationError, match=expected):
            as_rollout_config(theirs)
        with pytest.raises(ConfigurationError, match=expected):
            RolloutConfig(**{name: value})
    else:
        others = as_rollout_config(ContinuousBatchingConfig())
        beside = SET_BESIDE.get(name, {})
        assert as_rollout_config(theirs) == dataclasses.replace(others, **expected, **beside)
        assert RolloutConfig(**{name: value}) == RolloutConfig(**expected)


def test_a_field_of_a_later_transformers_is_refused_by_name_once_it_is_set():
    @dataclasses.dataclass
    class Later(ContinuousBatchingConfig):
        warp_factor: int = 1
        lanes: list[int] = dataclasses.field(default_factory=lambda: [1])

    assert as_rollout_config(Later()) == as_rollout_config(ContinuousBatchingConfig())
    with pytest.raises(ConfigurationError, match=r"\.warp_factor=9 is not available.* at 1: cb_"):
        as_rollout_config(Later(warp_factor=9))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"cpu_offload_space": None}, (None, 0.8)),
        ({"cpu_offload_space_safety_threshold": 0.0}, (0.0, 0.0)),
        ({"cpu_offload_space": 4}, (4.0, 0.8)),
    ],
)
def test_the_space_of_offloaded_keys_is_read_as_transformers_means_it(settings, expected):
    ours = as_rollout_config(ContinuousBatchingConfig(**settings))
    assert (ours.cpu_offload_space, ours.cpu_offload_space_safety_threshold) == expected


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("cpu_offload_space", -1, "is neither None nor a finite number >= 0 of GiB"),
        ("cpu_offload_space_safety_threshold", 1.5, r"is outside \[0, 1\]; 0.8 is 80%"),
        ("cpu_offload_space_safety_threshold", 80, r"is outside \[0, 1\]"),
        ("safety_margin", -0.1, r"is neither None nor a share in \[0, 1\]; 0.15 is 15%"),
        ("safety_margin", 15, r"is neither None nor a share in \[0, 1\]"),
        ("cpu_group_timeout", 0, "is neither None nor a finite number > 0 of seconds"),
    ],
)
def test_settings_of_memory_and_time_have_a_range(field, value, complaint):
    with pytest.raises(ConfigurationError, match=f"{field}={value} {complaint}"):
        RolloutConfig(**{field: value})


def test_one_setting_under_two_names_is_refused_unless_they_agree():
    assert RolloutConfig(page_size=16, block_size=16).block_size == 16
    with pytest.raises(ConfigurationError, match="block_size=8 and page_size=16 are one setting"):
        RolloutConfig(page_size=16, block_size=8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_cuda_graph", (True, False)),
        ("use_cuda_graph", (True, True)),
    ],
)
def test_a_transformers_field_that_asks_for_graphs_of_prefill_is_refused(field, value):
    with pytest.raises(ConfigurationError, match=f"{field}=.* is not available; leave it at"):
        as_rollout_config(ContinuousBatchingConfig(**{field: value}))


def test_a_scheduler_that_nobody_knows_is_refused():
    with pytest.raises(
        ConfigurationError, match="scheduler_type='lottery' is not one of fifo, prefill_first"
    ):
        as_rollout_config(ContinuousBatchingConfig(scheduler_type="lottery"))


@pytest.mark.parametrize("config", [{"block_size": 16}, "fifo", 3, RolloutConfig])
def test_anything_else_is_not_a_config(config):
    with pytest.raises(ConfigurationError, match=f"config is a {type(config).__name__}; pass a"):
        as_rollout_config(config)


def test_a_dataclass_of_something_else_is_not_a_config():
    @dataclasses.dataclass
    class Settings:
        block_size: int = 16

    with pytest.raises(ConfigurationError, match="config is a Settings"):
        as_rollout_config(Settings())
