"""What trainers do by default reaches captured steps, on a device that only says it is one."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from pretend_device import DEVICE, Pretended, pretend_device
from tiny import plain_logprobs, tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.compat import inductor
from cb_rollout.compat import torch as torch_compat
from cb_rollout.engine.cuda_graphs import selection

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu has a GPU")

SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
PROMPT = [3, 4, 5, 6, 7, 8, 9, 10, 11]
PARAMS = SamplingParams(ignore_eos=True, max_new_tokens=4)
CAPTURED = "; CUDA graphs: on"

# Nats between the kernels and torch's own attention where both round to bfloat16.
ROUNDING = 0.05


class Autocasting:
    """What the generator reads of accelerate's `Accelerator`."""

    mixed_precision = "bf16"
    process_index = 0
    state = SimpleNamespace()

    def __init__(self, device):
        self.device = device


def with_adapters(model):
    """Add float32 adapters, as PEFT does, that change what the model gives."""
    config = LoraConfig(target_modules=["q_proj", "up_proj"], r=4, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return inject_adapter_in_model(config, model).eval()


def with_replaced_forwards(model):
    """Replace forwards on instances, as Liger does."""
    for layer in model.model.layers:
        layer.mlp.forward = lambda states, mlp=layer.mlp: mlp.down_proj(
            torch.nn.functional.silu(mlp.gate_proj(states)) * mlp.up_proj(states)
        )
    return model


def with_float32_head(model):
    """Compute the head in float32, as TRL's `cast_lm_head_to_fp32` does."""
    head = model.to(torch.bfloat16).lm_head.float()
    head.forward = lambda states: torch.nn.functional.linear(states.float(), head.weight.float())
    return model


def in_bfloat16(model):
    return model.to(torch.bfloat16)


CASES = {
    "TRL's default precision": ("qwen3", None, True, (8, 0)),
    "LoRA on a float32 base": ("qwen3", with_adapters, True, (8, 0)),
    "replaced forwards": ("qwen3", with_replaced_forwards, False, (8, 0)),
    "a float32 head": ("qwen3", with_float32_head, False, (8, 0)),
    "experts in float32": ("qwen3_moe", None, False, (9, 0)),
    "experts in bfloat16": ("qwen3_moe", in_bfloat16, False, (9, 0)),
    "experts in bfloat16 on Ampere": ("qwen3_moe", in_bfloat16, False, (8, 0)),
    "experts in TRL's default precision": ("qwen3_moe", None, True, (9, 0)),
}
FAST = {"TRL's default precision", "a loop over experts"}


def made(family, change):
    model = tiny_model(family, tie_word_embeddings=False, **SMALL)
    return change(model) if change else model


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES],
)
def test_steps_are_captured_and_give_what_the_trainers_forward_gives(case, monkeypatch, caplog):
    family, change, is_autocast, capability = CASES[case]
    trained = made(family, change)
    pretend_device(monkeypatch, capability)
    with Pretended():
        model = made(family, change).to(DEVICE)
        accelerator = Autocasting(DEVICE) if is_autocast else None
        config = RolloutConfig(seed=1, block_size=8, num_speculative_tokens=0)
        with RolloutGenerator(model, config, accelerator=accelerator) as generator:
            outputs = generator.generate_batch([PROMPT], sampling_params=PARAMS).values()
            path = generator.manager.decode_path
            weights = generator.manager.model.model.layers[0].self_attn.o_proj.weight
            pages = generator.manager.engine.layout.layers[0].per_token
    assert CAPTURED in path, path
    assert not warned(caplog)
    is_half = is_autocast or change in (in_bfloat16, with_float32_head)
    assert {states.dtype for states in pages} == {torch.bfloat16 if is_half else torch.float32}
    assert weights.dtype == (torch.bfloat16 if is_half else torch.float32)
    for output in outputs:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            expected = plain_logprobs(trained, PROMPT, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=ROUNDING if is_half else 1e-5)


SLOWER = {
    "recurrent states": (
        ("lfm2", {}),
        {
            "prefill": "padded, not packed (recurrent states",
            "CUDA graphs": "off (needs a model without recurrent states",
            "drafts": "off (its steps take one token of each row)",
        },
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
            slower = [path for path in generator.manager.engine.paths if path.obstacle]
    assert [path.part for path in slower] == list(lost)
    for path in slower:
        assert path.text.startswith(lost[path.part])
    (warning,) = warned(caplog)
    assert warning.endswith("; ".join(map(str, slower)))


def test_a_path_that_was_asked_for_is_not_warned_of(monkeypatch, caplog):
    pretend_device(monkeypatch)
    with Pretended():
        model = tiny_model("qwen3", **SMALL).to(DEVICE)
        RolloutGenerator(model, RolloutConfig(use_cuda_graph=False)).close()
    assert not warned(caplog)
