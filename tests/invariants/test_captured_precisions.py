"""What trainers do by default reaches captured steps, on a device that only says it is one."""

import pytest
import torch
from device_laws import CASES, PROMPT, SMALL, assert_captured, assert_unpadded
from pretend_device import DEVICE, Pretended, pretend_device
from tiny import tiny_model

from cb_rollout import (
    GenerationOutput,
    RequestStatus,
    RolloutConfig,
    RolloutGenerator,
    packed_logprobs,
)
from cb_rollout.compat import inductor
from cb_rollout.compat import torch as torch_compat
from cb_rollout.engine.cuda_graphs import selection

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has a GPU")

FAST = {"a loop over experts"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES],
)
def test_steps_are_captured_and_give_what_the_trainers_forward_gives(case, monkeypatch, caplog):
    pretend_device(monkeypatch, CASES[case].capability)
    with Pretended():
        assert_captured(case, DEVICE, float32=1e-5)
    assert not warned(caplog)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_packed_and_shared(dtype, monkeypatch):
    pretend_device(monkeypatch)
    with Pretended():
        assert_unpadded(DEVICE, dtype, monkeypatch)


SLOWER = {
    "recurrent states": (
        ("lfm2", {}),
        {"prefill": "padded, not packed (recurrent states"},
    ),
    "a loop over experts": (
        ("qwen3_moe", SMALL | {"experts_implementation": "eager"}),
        {"CUDA graphs": "off (needs a forward that never waits for the device (RuntimeError: op"},
    ),
    "a bias of positions": (
        ("bloom", {}),
        {
            "prefill": "padded, not packed (its forward fails (ValueError: too many values",
            "decode attention": "gathered (",
            "CUDA graphs": "off (needs decode steps without a gather",
        },
    ),
    "unpadded attention that fails": (
        ("qwen3", SMALL),
        {"prefill": "padded, not packed (its forward fails (TypeError: "},
    ),
    "a trace that does not compile": (
        ("qwen3", SMALL),
        {"forwards": "by the model, not compiled (RuntimeError: no compiler"},
    ),
}


def lose(case, monkeypatch):
    """Take from the pretended device what a case lacks; return the model's dtype."""
    if case == "unpadded attention that fails":
        monkeypatch.setattr(torch_compat, "varlen_attn", lambda query, key, value: query)
        return torch.bfloat16
    if case == "a trace that does not compile":
        monkeypatch.setattr(selection, "COMPILED_DEVICES", {"cuda"})
        monkeypatch.setattr(inductor, "trace_graph", lambda *_: fail("no compiler"))
    return torch.float32


def fail(text):
    raise RuntimeError(text)


def warned(caplog):
    """The warnings of our loggers."""
    ours = (record for record in caplog.records if record.name.startswith("cb_rollout"))
    return [record.message for record in ours if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SLOWER],
)
def test_a_path_that_is_not_the_best_is_warned_of_with_its_reason(case, monkeypatch, caplog):
    (family, settings), lost = SLOWER[case]
    pretend_device(monkeypatch)
    dtype = lose(case, monkeypatch)
    with Pretended():
        model = tiny_model(family, **settings).to(DEVICE, dtype)
        with RolloutGenerator(model, RolloutConfig(seed=1, block_size=8)) as generator:
            generator.manager.engine._plan()
            slower = [path for path in generator.manager.engine.paged_model.paths if path.obstacle]
    assert [path.part for path in slower] == list(lost)
    for path in slower:
        assert path.text.startswith(lost[path.part])
    (warning,) = [line for line in warned(caplog) if "compiling decode forwards now" not in line]
    assert warning.endswith("; ".join(map(str, slower)))


def test_a_path_that_was_asked_for_is_not_warned_of(monkeypatch, caplog):
    pretend_device(monkeypatch)
    with Pretended():
        model = tiny_model("qwen3", **SMALL).to(DEVICE)
        RolloutGenerator(model, RolloutConfig(use_cuda_graph=False)).close()
    assert not warned(caplog)


def test_scores_that_are_padded_say_why_once(monkeypatch):
    outputs = []
    for number in range(2):
        output = GenerationOutput(f"row_{number}", PROMPT)
        output.generated_tokens, output.status = [3, 4 + number], RequestStatus.FINISHED
        outputs.append(output)
    pretend_device(monkeypatch)
    with Pretended():
        model = tiny_model("bloom").to(DEVICE)
        with pytest.warns(UserWarning, match=r"prompts cannot be shared \(.*; rows are") as caught:
            packed_logprobs(model, outputs)
        packed_logprobs(model, outputs)
    assert len(caught) == 1
