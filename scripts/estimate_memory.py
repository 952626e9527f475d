"""Print the memory of one GRPO step with LoRA on one GPU, from the shape of Qwen3-8B alone.

For docs/tasks/one_gpu.md. Nothing is measured and no model is made. The KV cache follows from the
engine's own memory plan; activations are an estimate.

python scripts/estimate_memory.py
python scripts/estimate_memory.py --total-gib 44 --batch-size 8
"""

import argparse
from dataclasses import dataclass

import torch

from cb_rollout.engine.kv_cache.sizing import workspace_bytes_per_request
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import GIB, MemoryModel, TrainingBytes, create_memory_plan
from cb_rollout.engine.memory.training import optimizer_state_bytes
from cb_rollout.engine.scheduler.scheduler import MAX_GATHER_RATIO

BFLOAT16, FLOAT32 = 2, 4

# Tensors of a Qwen3 layer that its backward pass reads, as multiples of the hidden size and of the
# intermediate size: inputs of norms and products, queries, keys and values, the MLP's parts.
SAVED_HIDDEN, SAVED_INTERMEDIATE = 14, 4


@dataclass(frozen=True)
class Shape:
    """Numbers of a Qwen3's config.json; the defaults are those of Qwen3-8B."""

    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 40960

    @property
    def linear_layers(self) -> list[tuple[int, int]]:
        """Return inputs and outputs of the linear layers of one layer."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
        return [*attention, (hidden, inner), (hidden, inner), (inner, hidden)]

    @property
    def num_weights(self) -> int:
        """Return the parameters, with an embedding and a head of its own."""
        products = sum(inputs * outputs for inputs, outputs in self.linear_layers)
        norms = 2 * self.hidden_size + 2 * self.head_dim
        embeddings = 2 * self.vocab_size * self.hidden_size
        return embeddings + self.num_hidden_layers * (products + norms) + self.hidden_size

    def num_adapter_weights(self, rank: int) -> int:
        """Return the parameters of LoRA on all linear layers but the head."""
        return self.num_hidden_layers * sum(rank * sum(layer) for layer in self.linear_layers)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of a token's keys and values in bfloat16."""
        of_layer = 2 * self.num_key_value_heads * self.head_dim
        return self.num_hidden_layers * of_layer * BFLOAT16

    @property
    def gathered_bytes_per_token(self) -> int:
        """Return the bytes that a prefill gathers of one layer, repeated for each query head."""
        repeats = self.num_attention_heads // self.num_key_value_heads
        return 2 * self.num_key_value_heads * self.head_dim * (1 + repeats) * BFLOAT16

    def activation_bytes(self, num_tokens: int) -> int:
        """Return the inputs of checkpointed layers, and one layer's tensors, which come again."""
        inputs = self.num_hidden_layers * self.hidden_size
        of_layer = SAVED_HIDDEN * self.hidden_size + SAVED_INTERMEDIATE * self.intermediate_size
        return num_tokens * (inputs + of_layer) * BFLOAT16


def memory_model(shape: Shape, args: argparse.Namespace, has_copy: bool) -> MemoryModel:
    """Return what the engine would plan from, after the model was loaded."""
    cuda = torch.device("cuda")
    num_adapter = shape.num_adapter_weights(args.lora_rank)
    base, adapter = shape.num_weights * BFLOAT16, num_adapter * FLOAT32
    training = TrainingBytes(
        weights=base * (2 if has_copy else 1) + adapter,
        gradients_to_come=adapter,
        optimizer_states_to_come=optimizer_state_bytes("adamw", {}, num_adapter, adapter),
    )
    total = int(args.total_gib * GIB)
    return MemoryModel(
        total_bytes=total,
        free_bytes=total - training.held,
        training=training,
        max_memory_percent=args.max_memory_percent,
        block_size=32,
        max_requests=devices.max_requests_per_batch(cuda),
        max_batch_tokens=devices.max_batch_tokens(cuda),
        bytes_per_token=shape.bytes_per_token,
        bytes_per_sequence=0,
        workspace_bytes_per_request=workspace_bytes_per_request(shape.vocab_size),
        gathered_bytes_per_token=shape.gathered_bytes_per_token,
        history_factor=MAX_GATHER_RATIO,
        max_sequence_tokens=shape.max_position_embeddings,
    )


def lines(shape: Shape, args: argparse.Namespace) -> list[str]:
    """Return the table."""
    model = memory_model(shape, args, has_copy=False)
    base, adapter = shape.num_weights * BFLOAT16, shape.num_adapter_weights(args.lora_rank)
    needed = devices.FREE_PER_COPY * base
    is_merged = needed <= model.free_bytes - model.training.reserve
    plan = create_memory_plan(memory_model(shape, args, is_merged))
    num_prompts = args.batch_size // args.num_generations
    of_completions = args.batch_size * args.max_completion_length
    num_loss_tokens = num_prompts * args.prompt_length + of_completions
    num_cached = plan.num_blocks * plan.block_size
    training = plan.training
    found = [
        ("total", plan.total_bytes, "assumed"),
        ("weights", base, f"{shape.num_weights:,} in bfloat16"),
        ("adapters", adapter * FLOAT32, f"{adapter:,} in float32, rank {args.lora_rank}"),
        ("gradients", training.gradients_to_come, "of the adapters"),
        ("AdamW states", training.optimizer_states_to_come, "of the adapters"),
        ("merged copy", base * is_merged, f"if {needed / GIB:.1f} GiB are free before it"),
        ("forward workspace", plan.forward_bytes, f"{plan.max_requests} rows of logits; keys"),
        (
            "KV cache at most",
            plan.kv_bytes,
            f"{num_cached:,} tokens of {shape.bytes_per_token:,} B",
        ),
        ("activations", shape.activation_bytes(num_loss_tokens), f"{num_loss_tokens:,} tokens"),
    ]
    held = sum(size for name, size, _ in found[1:6])
    rolling, learning = held + plan.forward_bytes + plan.kv_bytes, held + found[-1][1]
    found += [
        ("in a rollout", rolling, f"{(plan.total_bytes - rolling) / GIB:.1f} GiB left"),
        ("in the loss", learning, f"{(plan.total_bytes - learning) / GIB:.1f} GiB left"),
    ]
    return [f"{name:<18}{size / GIB:>8.2f} GiB  {note}" for name, size, note in found]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--total-gib", type=float, default=78, help="of the GPU, less its driver's")
    parser.add_argument("--max-memory-percent", type=float, default=0.4)
    parser.add_argument("--batch-size", type=int, default=32, help="completions a micro-batch")
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--prompt-length", type=int, default=200)
    parser.add_argument("--max-completion-length", type=int, default=512)
    parser.add_argument("--lora-rank", type=int, default=16)
    args = parser.parse_args()
    print("\n".join(lines(Shape(), args)))


if __name__ == "__main__":
    main()
