"""Train a tiny random model by GRPO for two steps, attached; `check_wheel.sh` runs it.

Fails if a module is loaded that only another task needs: a trainer that reports to nobody needs no
wandb. TRL itself imports wandb where it is installed.
"""

import sys
from tempfile import TemporaryDirectory

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import cb_rollout

WORDS = ["<pad>", "<eos>", *"0123456789+="]
INTEGRATIONS = ("wandb", "xgrammar")
UNUSED = {"cb_rollout.server", *(f"cb_rollout.integrations.{name}" for name in INTEGRATIONS)}


def create_trainer(output_dir: str) -> GRPOTrainer:
    """Create a trainer whose reward is the length of a completion."""
    vocabulary = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>")
    tokenizer = Tokenizer(vocabulary)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return GRPOTrainer(
        Qwen3ForCausalLM(config),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=GRPOConfig(
            output_dir=output_dir,
            max_steps=2,
            num_generations=4,
            per_device_train_batch_size=4,
            max_completion_length=8,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{n}+{n}="} for n in range(8)]),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
        ),
    )


def main() -> None:
    """Train, print a line of what was logged, and fail if an unused package is loaded."""
    with TemporaryDirectory() as output_dir:
        trainer = create_trainer(output_dir)
        cb_rollout.attach(trainer, cb_rollout.RolloutConfig(max_memory_percent=0.4, seed=0))
        trainer.train()
        (*_, logged) = (row for row in trainer.state.log_history if "rollout/tokens" in row)
        tokens, drift = logged["rollout/tokens"], logged["rollout/logprob_drift_max"]
        print(f"{tokens:.0f} tokens a step, largest log-probability difference {drift:.1e}")
    loaded = UNUSED & set(sys.modules)
    if loaded:
        sys.exit(f"loaded, but not used: {', '.join(sorted(loaded))}")


if __name__ == "__main__":
    main()
