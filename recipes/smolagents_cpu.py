r"""An agent of the package index trains a real language model: smolagents' CodeAgent, SmolLM2-135M.

The agent is the framework's own, unmodified. It asks an OpenAI base URL for a piece of Python, runs
it in the framework's interpreter, shows the model what came out, and asks again, twice at most. It
knows nothing of the training: the server keeps the tokens that the policy samples, and
`make_agent_rollout` gives them to a stock GRPOTrainer. Problems are sums of reasoning-gym. So small
a model writes no Python by itself, so a few supervised steps show it the form first.

Install:  pip install 'smolagents[openai]' reasoning-gym
Launch:   python recipes/smolagents_cpu.py --model HuggingFaceTB/SmolLM2-135M-Instruct
Hardware: two CPU cores, 6 GiB of memory, no account
Minutes:  about eight
Prints last: mean reward of the first and of the last five steps

    reward 56.2% -> 99.4%
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch
from datasets import Dataset
from smolagents import CodeAgent, LogLevel, OpenAIModel
from smollm2_cpu import draw_problems
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import cb_rollout

INSTRUCTIONS = "You answer with one line of Python code, and nothing else."
MAX_TURNS = 2
MAX_COMPLETION = 32
NUM_GENERATIONS = 8
SUPERVISED_ROWS = 8


def task_of(prompt: list[dict]) -> str:
    """Return the sum of a problem's chat, as in "7 - 12 ="."""
    return prompt[0]["content"].rpartition(": ")[2]


def make_agent(problems: list[dict]) -> Callable[[str, list[dict]], float]:
    """Return a function that has an agent answer a problem over a base URL, and its reward."""
    answers = {task_of(problem["prompt"]): problem["answer"] for problem in problems}

    def solve(base_url: str, prompt: list[dict]) -> float:
        model = OpenAIModel(
            "policy", api_base=base_url, api_key="none", flatten_messages_as_text=True
        )
        agent = CodeAgent([], model, max_steps=MAX_TURNS, verbosity_level=LogLevel.OFF)
        agent.prompt_templates["system_prompt"] = INSTRUCTIONS
        task = task_of(prompt)
        return float(str(agent.run(task)) == answers[task])

    return solve


def warm_start(model, tokenizer, problems: list[dict], num_steps: int, rate: float) -> None:
    """Show the model the form of an answer, as the agent asks for it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(num_steps):
        for problem in problems[step * SUPERVISED_ROWS : (step + 1) * SUPERVISED_ROWS]:
            task = task_of(problem["prompt"])
            chat = [
                {"role": "system", "content": INSTRUCTIONS},
                {"role": "user", "content": f"New task:\n{task}"},
            ]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            prompt = tokenizer(text)["input_ids"]
            answer = tokenizer(f"<code>\nfinal_answer({task.rstrip(' =')})\n</code>")["input_ids"]
            ids = torch.tensor([prompt + answer])
            labels = torch.tensor([[-100] * len(prompt) + answer])
            (model(input_ids=ids, labels=labels).loss / SUPERVISED_ROWS).backward()
        optimizer.step()
        optimizer.zero_grad()


def create_trainer(args: argparse.Namespace) -> GRPOTrainer:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    problems = draw_problems(1000, args.seed, held_out=False)
    warm_start(model, tokenizer, problems, args.supervised_steps, args.learning_rate)
    return GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=cb_rollout.agent_reward,
        rollout_func=cb_rollout.make_agent_rollout(make_agent(problems)),
        train_dataset=Dataset.from_list(problems),
        args=GRPOConfig(
            output_dir=str(args.output_dir),
            seed=args.seed,
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            num_generations=NUM_GENERATIONS,
            max_completion_length=MAX_COMPLETION,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
    )


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/smolagents"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--supervised-steps", type=int, default=8)
    parser.add_argument("--max-steps", type=int, default=12, help="GRPO steps")
    parser.add_argument("--batch-size", type=int, default=32, help="sessions of a step")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    return parser.parse_args()


def main() -> int:
    trainer = create_trainer(parsed_arguments())
    with cb_rollout.attach(trainer):
        trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"reward {fmean(rewards[:5]):.1%} -> {fmean(rewards[-5:]):.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
