from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model

from cb_rollout import ConfigurationError, RolloutConfig
from cb_rollout.engine.model.precision import Precision, rollout_precision
from cb_rollout.weights.replica import held_dtype

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def accelerator(mixed_precision="no", param_dtype=None):
    policy = SimpleNamespace(param_dtype=param_dtype)
    plugin = SimpleNamespace(mixed_precision_policy=policy) if param_dtype else None
    return SimpleNamespace(
        mixed_precision=mixed_precision, state=SimpleNamespace(fsdp_plugin=plugin)
    )


@pytest.mark.parametrize(
    ("held", "mixed_precision", "rollout_dtype", "weight_sync", "expected"),
    [
        (F32, "no", "auto", "auto", Precision(None, None)),
        (F32, "bf16", "auto", "auto", Precision(BF16, None)),
        (F32, "fp16", "auto", "copy", Precision(F16, None)),
        (F32, "fp8", "auto", "auto", Precision(None, None)),
        (F32, "bf16", "bfloat16", "auto", Precision(BF16, None)),
        (F32, "bf16", "float32", "copy", Precision(None, F32)),
        (F32, "no", "bfloat16", "auto", Precision(BF16, None)),
        (F32, "no", "bfloat16", "copy", Precision(BF16, None)),
        (BF16, "no", "bfloat16", "auto", Precision(None, None)),
        (BF16, "no", "float32", "copy", Precision(None, F32)),
        (BF16, "no", "float16", "copy", Precision(None, F16)),
    ],
)
def test_precision_follows_the_trainer(held, mixed_precision, rollout_dtype, weight_sync, expected):
    config = RolloutConfig(rollout_dtype=rollout_dtype, weight_sync=weight_sync)
    model = tiny_model().to(held)
    assert rollout_precision(config, model, accelerator(mixed_precision)) == expected


@pytest.mark.parametrize(
    ("held", "mixed_precision", "rollout_dtype"),
    [(F32, "bf16", "float32"), (BF16, "no", "float32"), (BF16, "no", "float16")],
)
def test_a_dtype_that_needs_a_copy_is_refused_with_that_advice(
    held, mixed_precision, rollout_dtype
):
    config = RolloutConfig(rollout_dtype=rollout_dtype)
    with pytest.raises(ConfigurationError, match="or weight_sync='copy'"):
        rollout_precision(config, tiny_model().to(held), accelerator(mixed_precision))


def test_a_copy_has_the_dtype_to_which_fsdp2_casts_parameters():
    config = RolloutConfig()
    planned = accelerator("bf16", param_dtype=BF16)
    assert rollout_precision(config, tiny_model(), planned) == Precision(BF16, BF16)


def test_a_copy_stores_in_the_autocast_dtype_only_what_autocast_casts():
    linear, embedding = torch.nn.Linear(2, 2), torch.nn.Embedding(2, 2)
    autocast = Precision(BF16, None)
    assert held_dtype(autocast, linear, F32) == BF16
    assert held_dtype(autocast, embedding, F32) == F32
    assert held_dtype(autocast, torch.nn.LayerNorm(2), F32) == F32
    assert held_dtype(autocast, linear, torch.float64) == torch.float64
    assert held_dtype(Precision(None, BF16), linear, torch.int64) == torch.int64
    assert held_dtype(Precision(None, BF16), embedding, F32) == BF16
