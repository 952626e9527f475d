"""An agent of smolagents, unchanged, trains the model it runs on: SmolLM2-135M-Instruct by GRPO.

The agent is Hugging Face's `CodeAgent`. It asks a model for Python, runs it, and shows it what was
printed or why it failed, until the code calls `final_answer`. It knows a base URL and no more.
cb_rollout serves the policy at a URL for each session, and TRL's GRPOTrainer trains on the tokens
that were sampled there. The task is to answer sums of reasoning-gym by code.

Install:  pip install smolagents reasoning-gym 'cb_rollout[server]'
Launch:   python recipes/agent_smolagents.py --model HuggingFaceTB/SmolLM2-135M-Instruct
Hardware: two CPU cores, 6 GiB of memory
Minutes:  about ten
Prints last: the mean reward of the first and of the last three steps.
"""

import argparse
import warnings
from pathlib import Path
from statistics import mean

import reasoning_gym
from datasets import Dataset
from smolagents import CodeAgent, LogLevel, OpenAIModel
from smolagents.agents import EMPTY_PROMPT_TEMPLATES
from trl import GRPOConfig, GRPOTrainer

import cb_rollout

# trl 1.16 reads a name of transformers that it deprecates.
warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
warnings.filterwarnings("ignore", "You are using 'rollout_func'", UserWarning)

TASK = {"name": "chain_sum", "min_terms": 2, "max_terms": 3, "min_digits": 2, "max_digits": 3}
INSTRUCTIONS = """\
You answer with Python code and nothing else. Give the result to final_answer.

Task: What is 21 + 4 - 9?
<code>
final_answer(21 + 4 - 9)
</code>

Task: What is 130 - 77?
<code>
final_answer(130 - 77)
</code>"""
PROMPTS = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": INSTRUCTIONS}
MAX_STEPS, MAX_TOKENS = 2, 40


def draw_problems(count: int, seed: int) -> list[dict]:
    """Draw problems as chats; an answer is the last number of a chat's text."""
    entries = reasoning_gym.create_dataset(**TASK, size=count, seed=seed)
    texts = [entry["metadata"]["expression"] for entry in entries]
    return [{"prompt": [{"role": "user", "content": f"What is {text}?"}]} for text in texts]


def answer_of(question: str) -> int:
    terms = question.removeprefix("What is ").removesuffix("?").replace(" - ", " + -").split(" + ")
    return sum(map(int, terms))


def run_agent(base_url: str, prompt: list[dict]) -> float:
    """Let an agent answer one problem; return its reward."""
    question = prompt[-1]["content"]
    model = OpenAIModel(
        model_id="policy", api_base=base_url, api_key="none", max_tokens=MAX_TOKENS,
        flatten_messages_as_text=True,
    )  # fmt: skip
    agent = CodeAgent(
        tools=[], model=model, prompt_templates=PROMPTS, max_steps=MAX_STEPS,
        verbosity_level=LogLevel.OFF,
    )  # fmt: skip
    answer = agent.run(question)
    if not isinstance(answer, int | float):
        # The agent gave up, and asked the model for words.
        return 0.0
    return 1.0 if answer == answer_of(question) else 0.1


def create_trainer(args: argparse.Namespace) -> GRPOTrainer:
    return GRPOTrainer(
        model=args.model,
        reward_funcs=cb_rollout.agent_reward,
        rollout_func=cb_rollout.make_agent_rollout(run_agent, num_threads=args.batch_size),
        train_dataset=Dataset.from_list(draw_problems(args.max_steps * args.batch_size, args.seed)),
        args=GRPOConfig(
            output_dir=str(args.output_dir), seed=args.seed, max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size, num_generations=8,
            max_completion_length=256, learning_rate=args.learning_rate, use_cpu=True, bf16=False,
            logging_steps=1, save_strategy="no", report_to="none",
        ),
    )  # fmt: skip


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/smolagents"))
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="sessions of a step")
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    return parser.parse_args()


def main() -> None:
    args = parsed_arguments()
    trainer = create_trainer(args)
    with cb_rollout.attach(trainer):
        trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"\nmean reward {mean(rewards[:3]):.2f} -> {mean(rewards[-3:]):.2f}")


if __name__ == "__main__":
    main()
