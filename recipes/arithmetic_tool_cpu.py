"""A small model learns to use a calculator: TRL's tools, rolled out by cb_rollout.

The CPU demo with a tool. "37*46" is more than a model of 0.4 million parameters works out, but it
can call a calculator and copy its result. It first imitates examples of which most guess; only a
right final answer is rewarded, so GRPO teaches it to call. Each call is a turn: the tool's result
is appended, and the model continues after it, with the keys of the previous turn reused.

Launch:   python recipes/arithmetic_tool_cpu.py
Hardware: two CPU cores, 2 GiB of memory, no network, no account
Minutes:  about three
Prints last (means over the first and the last tenth of the steps):

    right answers     21.9% ->  39.1%
    calls per answer   0.29 ->   0.46
"""

import argparse
import os
import random
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import cb_rollout

# transformers 5.23 renamed the setting, and warns of its old name.
IS_RENAMED = hasattr(GRPOConfig, "activation_checkpointing")
CHECKPOINTING = "activation_checkpointing" if IS_RENAMED else "gradient_checkpointing"

USER, ASSISTANT, TOOL, CALL, END_CALL = "<user>", "<assistant>", "<tool>", "<calculate x=", "/>"
SPECIAL = ["<pad>", "<eos>", USER, ASSISTANT, TOOL, CALL, END_CALL]
WORDS = [*SPECIAL, *"0123456789*"]
PAD, EOS = 0, 1
# Share of the warm start's examples that guess instead of calling the tool.
GUESS_RATE = 0.7

CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
    "{% elif m.role == 'tool' %}<tool>{{ m.content }}{% else %}<assistant>"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}"
    "{% for key, value in call.function.arguments.items() %} {{ key }}={{ value }}{% endfor %}/>"
    "{% endfor %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# transformers parses calls out of the model's tokens with this template.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ASSISTANT,
    "fields": {
        "tool_calls": {
            "open": CALL,
            "close": END_CALL,
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "calculate", "arguments": {"x": "{content}"}},
            },
        },
        "content": {"close_pattern": r"<eos>|$", "content": "text"},
    },
}


def calculate(x: str) -> str:
    """Multiply two numbers.

    Args:
        x: The product to work out, as "37*46".

    Returns:
        The result.
    """
    left, right = x.split("*")
    return str(int(left) * int(right))


def draw_product(rng: random.Random) -> str:
    return f"{rng.randint(11, 99)}*{rng.randint(11, 99)}"


def reward(completions, answer, **_) -> list[float]:
    """Return 1 where the last turn is the product and nothing else."""
    return [
        float(turns[-1]["role"] == "assistant" and turns[-1]["content"] == wanted)
        for turns, wanted in zip(completions, answer, strict=True)
    ]


def create_tokenizer() -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        additional_special_tokens=SPECIAL[2:],
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def create_model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(WORDS), hidden_size=128, intermediate_size=384,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            max_position_embeddings=128, tie_word_embeddings=True, pad_token_id=PAD,
            eos_token_id=EOS, bos_token_id=None,
        )
    )  # fmt: skip


def warm_start(model, tokenizer, num_steps: int, rng: random.Random) -> None:
    """Train on examples that call the tool or guess; the tool's results are not learned."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in tqdm(range(num_steps), desc="warm start", unit="step"):
        rows, labels = [], []
        for _ in range(64):
            product = draw_product(rng)
            result = calculate(product)
            if rng.random() < GUESS_RATE:
                parts = [(f"{rng.randint(121, 9801)}<eos>", True)]
            else:
                parts = [
                    (f"{CALL}{product}{END_CALL}<eos>", True),
                    (f"{TOOL}{result}{ASSISTANT}", False),
                    (f"{result}<eos>", True),
                ]
            row = tokenizer(f"{USER}{product}{ASSISTANT}")["input_ids"]
            label = [-100] * len(row)
            for text, is_learned in parts:
                tokens = tokenizer(text)["input_ids"]
                row += tokens
                label += tokens if is_learned else [-100] * len(tokens)
            rows.append(torch.tensor(row))
            labels.append(torch.tensor(label))
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        wanted = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        cross_entropy(logits.flatten(0, 1), wanted[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def create_trainer(model, tokenizer, products: list[str], args) -> GRPOTrainer:
    rows = [
        {"prompt": [{"role": "user", "content": product}], "answer": calculate(product)}
        for product in products
    ]
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        tools=[calculate],
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=str(args.output_dir),
            seed=args.seed,
            max_steps=args.max_steps,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=32,
            max_tool_calling_iterations=2,
            temperature=1.0,
            learning_rate=1e-4,
            beta=0.0,
            vllm_importance_sampling_mode="token_truncate",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            **{CHECKPOINTING: False},
        ),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/arithmetic_tool"))
    parser.add_argument("--warmup-steps", type=int, default=600, help="supervised steps")
    parser.add_argument("--max-steps", type=int, default=40, help="GRPO steps")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer, model = create_tokenizer(), create_model()
    warm_start(model, tokenizer, args.warmup_steps, rng)
    trainer = create_trainer(model, tokenizer, [draw_product(rng) for _ in range(2048)], args)
    with cb_rollout.attach(trainer, cb_rollout.RolloutConfig(verify_every_steps=0)):
        trainer.train()

    steps = [logs for logs in trainer.state.log_history if "reward" in logs]
    few = max(1, len(steps) // 10)

    def mean(name: str, logs: list[dict]) -> float:
        return sum(log.get(name, 0.0) for log in logs) / len(logs)

    first, last = steps[:few], steps[-few:]
    print(f"right answers    {mean('reward', first):6.1%} -> {mean('reward', last):6.1%}")
    name = "tools/call_frequency"
    print(f"calls per answer {mean(name, first):6.2f} -> {mean(name, last):6.2f}")


if __name__ == "__main__":
    main()
