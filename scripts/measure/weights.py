"""Print the figures of docs/weights.md: cost and exactness of each weight source.

python scripts/measure/weights.py

Speeds are medians of rounds in which the weight sources take turns.
"""

import statistics
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

# The folders of scripts/ import each other.
sys.path.insert(0, str(Path(__file__).parents[1]))

from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from measure.agreement import BF16_TRAINER

ROUNDS = 5
PROMPTS = [[5 + i, 6, 7, 8] for i in range(16)]
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


def create_model() -> PreTrainedModel:
    """Create a Qwen3 shape in float32, its random weights scaled up so that errors show."""
    config = Qwen3Config(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=4096,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
    return model.eval()


def with_lora() -> torch.nn.Module:
    """Create the model with nonzero adapters on every projection."""
    config = LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(create_model(), config).eval()


@torch.no_grad()
def forward(model: torch.nn.Module, autocast: bool = False) -> torch.Tensor:
    """Return the log-probabilities of every token of a fixed batch."""
    ids = torch.randint(3, 4096, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model(input_ids=ids).logits.float().log_softmax(-1)


def measure(title: str, generators: dict[str, RolloutGenerator]) -> None:
    """Print speed, sync time and memory of each weight source."""
    speeds: dict[str, list[float]] = {name: [] for name in generators}
    syncs: dict[str, list[float]] = {name: [] for name in generators}
    num_bytes = {}
    for turn in range(ROUNDS + 1):
        for name, generator in generators.items():
            report = generator.sync_weights()
            generator.generate_batch(PROMPTS, sampling_params=PARAMS)
            num_bytes[name] = report.bytes_copied
            if turn:
                syncs[name].append(report.seconds)
                speeds[name].append(generator.metrics()["rollout/tokens_per_second"])
    for name, generator in generators.items():
        module, trained = generator.manager.model, generator.manager.engine.training_model.module
        held = 0 if module is trained else sum(p.nbytes for p in module.parameters())
        print(
            f"{title} | {name} | {statistics.median(speeds[name]):.0f} tokens/s | sync "
            f"{statistics.median(syncs[name]) * 1e3:.1f} ms, {num_bytes[name] / 2**20:.1f} MiB | "
            f"holds {held / 2**20:.0f} MiB more"
        )
        generator.close()


def generators_of(
    model: torch.nn.Module, accelerator: object = None
) -> dict[str, RolloutGenerator]:
    """Create a generator of each weight source on one model."""
    return {
        name: RolloutGenerator(
            model, RolloutConfig(seed=0, weight_sync=name), accelerator=accelerator
        )
        for name in ("shared", "copy")
    }


def main() -> None:
    """Print every figure."""
    model, adapted = create_model(), with_lora()
    size = sum(p.nbytes for p in model.parameters()) / 2**20
    print(f"model: {size:.0f} MiB in float32; torch {torch.__version__}, CPU")
    measure("float32", generators_of(model))
    measure("float32 under bf16 autocast", generators_of(model, BF16_TRAINER))
    measure("float32 with LoRA", generators_of(adapted))

    copy = RolloutConfig(weight_sync="copy")
    with RolloutGenerator(model, copy, accelerator=BF16_TRAINER) as generator:
        ours = forward(generator.manager.model, autocast=True)
    wanted = forward(model, autocast=True)
    print(f"copy under autocast, against autocast: {(ours - wanted).abs().max():.3g} nats")
    cast = forward(create_model().to(torch.bfloat16))
    difference = (cast - wanted).abs()
    print(
        f"whole model cast to bf16, against autocast: max {difference.max():.3g}, "
        f"mean {difference.mean():.3g} nats"
    )
    with RolloutGenerator(adapted, copy) as generator:
        merged = forward(generator.manager.model)
    print(f"LoRA merged, against unmerged: {(merged - forward(adapted)).abs().max():.3g} nats")
    with RolloutGenerator(adapted, copy, accelerator=BF16_TRAINER) as generator:
        merged = forward(generator.manager.model, autocast=True)
    difference = (merged - forward(adapted, autocast=True)).abs()
    print(
        f"LoRA merged, against unmerged, both under autocast: max {difference.max():.3g}, "
        f"mean {difference.mean():.3g} nats"
    )


if __name__ == "__main__":
    main()
