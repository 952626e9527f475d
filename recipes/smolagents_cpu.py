r"""An agent of the package index trains a real language model: smolagents' CodeAgent, SmolLM2-135M.

The agent is the framework's own, unmodified. It asks an OpenAI base URL for a piece of Python, runs
it in the framework's interpreter, shows the model what came out, and asks again, three times at
most. It knows nothing of the training: the server keeps the tokens that the policy samples, and
`make_agent_rollout` gives them to a stock GRPOTrainer. Problems are sums of reasoning-gym.

Install:  pip install 'smolagents[openai]' reasoning-gym
Launch:   python recipes/smolagents_cpu.py --model HuggingFaceTB/SmolLM2-135M-Instruct
Hardware: two CPU cores, 6 GiB of memory, no account
Minutes:  about ten
Prints last: mean reward of the first and the last five steps.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from datasets import Dataset
from smolagents import CodeAgent, LogLevel, OpenAIModel
from smollm2_cpu import draw_problems
from trl import GRPOConfig, GRPOTrainer

import cb_rollout

INSTRUCTIONS = "You answer with one line of Python code, and nothing else."
EXAMPLES = [
    f"Question: {terms} =\nAnswer: <code>final_answer({terms})</code>"
    for terms in ("7 - 12", "31 + 5", "4 + 60")
]
MAX_TURNS = 2
MAX_COMPLETION = 64
NUM_GENERATIONS = 8


def make_agent(problems: list[dict]) -> Callable[[str, list[dict]], float]:
    """Return an agent that answers a problem's chat over a base URL, and its reward."""
    answers = {problem["prompt"][0]["content"]: problem["answer"] for problem in problems}

    def solve(base_url: str, prompt: list[dict]) -> float:
        question = prompt[0]["content"]
        model = OpenAIModel(
            "policy", api_base=base_url, api_key="none", flatten_messages_as_text=True
        )
        agent = CodeAgent([], model, max_steps=MAX_TURNS, verbosity_level=LogLevel.OFF)
        agent.prompt_templates["system_prompt"] = INSTRUCTIONS
        sum_of_question = question.rpartition(": ")[2]
        task = "\n".join([*EXAMPLES, f"Question: {sum_of_question}\nAnswer:"])
        return float(str(agent.run(task)) == answers[question])

    return solve


def create_trainer(args: argparse.Namespace) -> GRPOTrainer:
    problems = draw_problems(1000, args.seed, held_out=False)
    return GRPOTrainer(
        model=args.model,
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
    parser.add_argument("--max-steps", type=int, default=20)
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
