"""What a rollout and a loss do on any device: a card's by `tests/gpu`, or a pretended one."""

from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from tiny import plain_logprobs, tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams, attach, packed_logprobs
from cb_rollout.compat import torch as torch_compat
from cb_rollout.engine.model.runner import BatchLayout
from cb_rollout.packing import logprobs as logprobs_module
from cb_rollout.packing.batch import PackingLayout
from cb_rollout.weights.base import SharedWeights
from cb_rollout.weights.copied import CopiedWeights

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
    num_processes = 1
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


class Case(NamedTuple):
    """A model, what is done to it before it rolls out, and how forwards compute."""

    family: str
    change: Callable | None
    is_autocast: bool
    capability: tuple[int, int] = (8, 0)
    """Of the pretended device."""
    weights: type = SharedWeights
    num_blocks: int | None = None


CASES = {
    "TRL's default precision": Case("qwen3", None, True, weights=CopiedWeights),
    "LoRA on a float32 base": Case("qwen3", with_adapters, True, weights=CopiedWeights),
    "unmerged LoRA on a float32 base": Case("qwen3", with_adapters, True, num_blocks=64),
    "replaced forwards": Case("qwen3", with_replaced_forwards, False),
    "a float32 head": Case("qwen3", with_float32_head, False),
    "experts in float32": Case("qwen3_moe", None, False, (9, 0)),
    "experts in bfloat16": Case("qwen3_moe", in_bfloat16, False, (9, 0)),
    "experts in bfloat16 on Ampere": Case("qwen3_moe", in_bfloat16, False),
    "experts in TRL's default precision": Case(
        "qwen3_moe", None, True, (9, 0), weights=CopiedWeights
    ),
}


def made(family, change):
    model = tiny_model(family, tie_word_embeddings=False, **SMALL)
    return change(model) if change else model


def assert_captured(case, device, float32):
    """Roll out one prompt by graphs; compare with the trainer's forward, in float32 by so much."""
    family, change, is_autocast, _, kind, num_blocks = CASES[case]
    trained, model = made(family, change), made(family, change).to(device)
    accelerator = Autocasting(device) if is_autocast else None
    config = RolloutConfig(seed=1, block_size=8, num_blocks=num_blocks)
    with RolloutGenerator(model, config, accelerator=accelerator) as generator:
        outputs = generator.generate_batch([PROMPT], sampling_params=PARAMS).values()
        path = generator.manager.decode_path
        weights = generator.manager.model.model.layers[0].self_attn.o_proj.weight
        pages = generator.manager.engine.paged_model.layout.layers[0].per_token
        assert type(generator._weights) is kind
    assert CAPTURED in path, path
    is_half = is_autocast or change in (in_bfloat16, with_float32_head)
    assert {states.dtype for states in pages} == {torch.bfloat16 if is_half else torch.float32}
    # What an unmerged base holds in float32, autocast rounds in each step.
    is_rounded = is_half and not (is_autocast and kind is SharedWeights)
    assert weights.dtype == (torch.bfloat16 if is_rounded else torch.float32)
    for output in outputs:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            expected = plain_logprobs(trained, PROMPT, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=ROUNDING if is_half else float32)


def assert_trains(output_dir, device):
    """Take three GRPO steps in TRL's default precision, with a packed loss, on a float32 model."""
    # Where a card is, TRL may not be installed.
    from training.tiny_trainer import logged, tiny_trainer

    is_cpu = device.type == "cpu"
    trainer = tiny_trainer(
        output_dir,
        bf16=True,
        use_cpu=is_cpu,
        per_device_train_batch_size=8,
        num_generations=4,
    )
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    config = RolloutConfig(seed=1, loss_forward="packed", verify_every_steps=1)
    with attach(trainer, config) as generator:
        assert generator.manager.engine.runner.batch_layout is BatchLayout.PACKED
        assert is_cpu or CAPTURED in generator.manager.decode_path
        assert type(generator._weights) is CopiedWeights
        trainer.train()
        assert trainer.model.device == device
    drifts = logged(trainer, "rollout/logprob_drift_mean")
    assert len(drifts) == len(logged(trainer, "loss")) == 3
    assert max(drifts) <= ROUNDING
    assert min(logged(trainer, "rollout/prompts_shared")) > 0
    pairs = zip(before, trainer.model.parameters(), strict=True)
    changed = [not torch.equal(old, new) for old, new in pairs]
    assert all(new.isfinite().all() for new in trainer.model.parameters())
    assert any(changed)


def assert_unpadded(device, dtype, monkeypatch):
    """Prefill and score a group; by PyTorch's own unpadded attention where it takes the dtype."""
    returned, layouts = [], []
    kernel, pack = torch_compat.varlen_attn, logprobs_module.pack

    @wraps(kernel)
    def counted(query, *args, **named):
        output = kernel(query, *args, **named)
        assert output.shape == query.shape
        returned.append(dtype)
        return output

    def watched(rows, numbers, layout, *rest):
        layouts.append(layout)
        return pack(rows, numbers, layout, *rest)

    monkeypatch.setattr(torch_compat, "varlen_attn", counted)
    monkeypatch.setattr(logprobs_module, "pack", watched)
    model = tiny_model("qwen3", **SMALL).to(device, dtype)
    config = RolloutConfig(seed=1, block_size=8, use_default_compile_configs=False)
    with RolloutGenerator(model, config) as generator:
        assert generator.manager.engine.runner.batch_layout is BatchLayout.PACKED
        is_new = torch.cuda.get_device_capability(device) >= torch_compat.VARLEN_CAPABILITY
        is_called = is_new and dtype in torch_compat.VARLEN_DTYPES
        assert bool(returned) is is_called
        outputs = generator.generate_batch(
            [PROMPT], sampling_params=PARAMS, num_return_sequences=2
        ).values()
    returned.clear()
    scores = packed_logprobs(model, list(outputs))
    assert set(layouts) == {PackingLayout.SHARED_PREFIXES}
    assert bool(returned) is is_called
    tolerance = ROUNDING if is_called else 1e-4
    for output, logprobs in zip(outputs, scores, strict=True):
        assert output.logprobs == pytest.approx(logprobs.tolist(), abs=tolerance)


REAL_SHAPES = {"head 64": (14, 2, 64), "head 128": (16, 8, 128), "head 256": (8, 1, 256)}
# Heads of queries and of keys, and the size of a head, of models that people train.

SHAPE_PATHS = {
    "kernels": {"use_cuda_graph": False},
    "graphs": {"use_cuda_graph": True, "use_default_compile_configs": False},
    "compiled": {"use_cuda_graph": True, "use_default_compile_configs": True},
}


def assert_real_shape(
    shape,
    path,
    device,
    *,
    dtype=torch.bfloat16,
    vocabulary=151_936,
    prompt_lengths=(60, 960),
    num_completions=8,
    num_tokens=40,
    num_rows=32,
):
    """A rollout has the log-probabilities of the model's own forward, up to its rounding.

    Each group shares a prompt, of which the longer one is long enough to be cut. The arguments make
    it small where an interpreter runs the kernels.
    """
    heads, key_heads, size = REAL_SHAPES[shape]
    model = tiny_model(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=size,
        max_position_embeddings=2048,
    )
    config = RolloutConfig(seed=0, max_requests_per_batch=num_rows, **SHAPE_PATHS[path])
    prompts = [[3 + 5 * place % (vocabulary - 3) for place in range(n)] for n in prompt_lengths]
    params = SamplingParams(ignore_eos=True, max_new_tokens=num_tokens)
    with RolloutGenerator(model.to(device, dtype), config) as generator:
        decode_path = generator.manager.decode_path
        assert decode_path.startswith("decode attention: triton"), decode_path
        assert ("forwards: compiled" in decode_path) is (path == "compiled"), decode_path
        assert (CAPTURED in decode_path) is (path != "kernels"), decode_path
        outputs = generator.generate_batch(
            prompts, sampling_params=params, num_return_sequences=num_completions
        )
        report = generator.verify(8)
    assert len(outputs) == num_completions * len(prompts)
    assert report.agreement, report
