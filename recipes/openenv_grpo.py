"""An OpenEnv server as TRL's `environment_factory`, rolled out by cb_rollout.

multi_turn_grpo.py's game behind a server: each conversation has a session of its own there, and the
sessions of a turn are stepped at the same time. Without `--url` the recipe serves the game itself;
for another server, change `Game` to its actions. The chat template must support tools, as those of
Qwen3 and Llama 3.1 do.

Install:  pip install openenv-core
Launch:   accelerate launch recipes/openenv_grpo.py --model Qwen/Qwen3-0.6B --max-steps 200
          accelerate launch recipes/openenv_grpo.py --model ./checkpoint --url http://host:8000
Hardware: one GPU, or several as data-parallel processes; a CPU for tiny checkpoints
Prints last: where the report lies
"""

import argparse
import contextlib
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import uvicorn
from datasets import Dataset
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import cb_rollout
from cb_rollout.tools.report import write_report

RULES = "Find the secret number between 1 and 100 with the guess tool, in as few calls as you can."
MAX_GUESSES = 8


class Guess(Action):
    """What the server takes."""

    number: int


class Answer(Observation):
    """What the server answers."""

    text: str


class GuessingServer(Environment):
    """The game of one session, on the server's side."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_) -> Answer:
        """Start a game."""
        self._secret = random.Random(seed).randint(1, 100)
        self._num_guesses = 0
        return Answer(text="The game has started.")

    def step(self, action: Guess, timeout_s: float | None = None, **_) -> Answer:
        """Answer a guess; the reward is 1 for the first, less for each that was needed."""
        self._num_guesses += 1
        if action.number == self._secret:
            return Answer(text="correct", reward=1 - self._num_guesses / 10, done=True)
        return Answer(text="higher" if action.number < self._secret else "lower", reward=0.0)

    @property
    def state(self) -> State:
        """Return the number of guesses."""
        return State(step_count=self._num_guesses)


class Game:
    """One session; its public methods, except `reset` and `get_reward`, are the model's tools."""

    def __init__(self, url: str) -> None:
        self._client = GenericEnvClient(base_url=url).sync()

    def reset(self, seed: int = 0, **_) -> str:
        """Start a game on the server."""
        self._reward, self._is_over = 0.0, False
        return " " + self._client.reset(seed=seed).observation["text"]

    def guess(self, number: int) -> str:
        """Guess the secret number.

        Args:
            number: between 1 and 100.

        Returns:
            "higher", "lower" or "correct".
        """
        if self._is_over:
            return "the game is over"
        result = self._client.step({"number": number})
        self._reward, self._is_over = self._reward + float(result.reward or 0), result.done
        return result.observation["text"]

    def get_reward(self) -> float:
        """Return what the server gave."""
        return self._reward


@contextlib.contextmanager
def served_game() -> Iterator[str]:
    """Serve the game on a free port of this machine, and yield its address."""
    app = create_fastapi_app(GuessingServer, Guess, Answer, max_concurrent_envs=4096)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="websockets-sansio"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while thread.is_alive() and not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or local directory")
    parser.add_argument("--url", help="of a running OpenEnv server (one is started)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/openenv"))
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="completions a process and step")
    parser.add_argument("--max-completion-length", type=int, default=1024, help="of all turns")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--report-to", default="none", help="wandb, tensorboard, ...")
    return parser.parse_args()


def main() -> int:
    args = parsed_arguments()
    with contextlib.nullcontext(args.url) if args.url else served_game() as url:
        return train(args, url)


def train(args: argparse.Namespace, url: str) -> int:
    has_gpu = torch.cuda.is_available()
    row = {"prompt": [{"role": "user", "content": RULES}]}
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.bfloat16 if has_gpu else torch.float32
        ),
        environment_factory=partial(Game, url),
        train_dataset=Dataset.from_list(
            [row | {"seed": seed} for seed in range(args.max_steps * args.batch_size)]
        ),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        args=GRPOConfig(
            output_dir=str(args.output_dir),
            max_steps=args.max_steps,
            per_device_train_batch_size=args.batch_size,
            num_generations=args.num_generations,
            max_completion_length=args.max_completion_length,
            max_tool_calling_iterations=MAX_GUESSES,
            learning_rate=args.learning_rate,
            beta=0.0,
            vllm_importance_sampling_mode="token_truncate",
            bf16=has_gpu,
            use_cpu=not has_gpu,
            logging_steps=1,
            save_strategy="no",
            report_to=args.report_to,
        ),
    )
    trainer.accelerator.print(f"processes: {trainer.accelerator.num_processes}", flush=True)
    with cb_rollout.attach(trainer, cb_rollout.RolloutConfig(tool_timeout_seconds=60)):
        trainer.train()
    trainer.save_model()
    if trainer.accelerator.is_main_process:
        print(f"report {write_report(args.output_dir / 'cb_rollout')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
