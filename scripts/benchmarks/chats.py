"""SmolLM2-135M-Instruct answers problems in its own lengths: the workloads `chats` and like it.

Problems are reasoning-gym's, in the model's chat template. In a first rollout the model ends each
completion itself; every contender then gives completions of these lengths. A workload runs once
before its turn only in part: a rollout of real weights takes a minute.
"""

import random
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import reasoning_gym
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from benchmarks.harness.contenders import Contender, generate, ours, transformers_batching
from benchmarks.rollout import race
from benchmarks.sizes import Setup
from benchmarks.step import QUIET, GenerationPath, bench_batch
from cb_rollout import RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.tools.bench import SEED, Workload
from smollm2 import smollm2_folder

TASKS = (
    *("chain_sum", "leg_counting", "word_sorting", "spell_backward", "gsm_symbolic"),
    *("time_intervals", "letter_counting", "syllogism"),
)

# Problems with their answers that precede the question of a long prompt.
LONG_PROMPT_TOKENS = 1000

# Prompts and the tokens of each, completions of a prompt, and the most tokens of one.
CHATS = "64 chats"
LONG_PROMPTS = "4 prompts of 1,000 tokens, 16 chats each"
LONG_TAILS = "16 chats to 1,024 tokens"
SHAPES = {
    CHATS: (64, 0, 1, 256),
    LONG_PROMPTS: (4, LONG_PROMPT_TOKENS, 16, 64),
    LONG_TAILS: (16, 0, 1, 1024),
}

# Completions of a step, of at most this many tokens.
STEP_SIZES, STEP_TOKENS = (16, 64, 128), 64
GROUP_SIZE = 8

# Tokens of a warm-up run. Our trace and vLLM's compilation are made before it.
WARM_UP_TOKENS = 80

PATHS = {
    "cb_rollout": GenerationPath("its defaults, without records", rollout=QUIET),
    "TRL generate": GenerationPath("its defaults: all completions are one batch"),
}


def bench_chats(setup: Setup) -> dict[str, Any]:
    """Return tokens per second of 64 chats that end themselves."""
    return _race(setup, CHATS)


def bench_chats_long(setup: Setup) -> dict[str, Any]:
    """Return tokens per second of chats with long prompts, each for a group."""
    return _race(setup, LONG_PROMPTS)


def bench_chats_tail(setup: Setup) -> dict[str, Any]:
    """Return tokens per second of few chats, of which some are long."""
    return _race(setup, LONG_TAILS)


def _race(setup: Setup, name: str) -> dict[str, Any]:
    tokenizer, model = load(setup.device)
    workload = _own_lengths(model, tokenizer, *_shape(setup, name))
    contenders = _contenders(setup.batch_size or len(workload.prompts))
    if name != CHATS:
        # It was ended after eight minutes of LONG_PROMPTS, of which ours took 21 seconds.
        del contenders["transformers CB"]
    # One more run of each contender would double the minutes.
    uncounted = replace(setup, sizes=replace(setup.sizes, counts_forwards=False))
    few_tokens = partial(_few_tokens, count=4)
    return race(model, {name: (workload, contenders)}, uncounted, few_tokens)


def bench_chat_step(setup: Setup) -> dict[str, Any]:
    """Return the seconds of one stock GRPO step of 16, 64 and 128 completions, by both paths."""
    sizes = STEP_SIZES if setup.sizes.num_sequences > GROUP_SIZE else (GROUP_SIZE,)
    return {
        f"chat_step, {size} completions": bench_batch(
            f"{size} completions",
            setup.repetitions,
            PATHS,
            partial(create_step_trainer, setup, size),
        )
        for size in sizes
    }


def _shape(setup: Setup, name: str) -> tuple[int, int, int, int]:
    """Return a shape; few short completions for tests."""
    shape = SHAPES[name]
    return shape if setup.sizes.num_sequences > GROUP_SIZE else (2, shape[1], 2, 4)


def load(device: str) -> tuple[PreTrainedTokenizerBase, Any]:
    """Return SmolLM2's tokenizer, and its model in float32, which ends no completion by itself."""
    folder = smollm2_folder()
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model = model.to(device).eval()
    # A contender must not end a completion by itself.
    model.generation_config = GenerationConfig(pad_token_id=0)
    return AutoTokenizer.from_pretrained(folder), model


def _contenders(batch_size: int) -> dict[str, Contender]:
    return {
        "cb_rollout": ours(),
        "transformers CB": transformers_batching(),
        "model.generate": generate(batch_size),
    }


def _few_tokens(workload: Workload, count: int) -> Workload:
    """Return a few short completions of reversed prompts, whose keys no other prompt shares."""
    prompts = [prompt[::-1] for prompt in workload.prompts[:count]]
    return Workload(prompts, [WARM_UP_TOKENS] * len(prompts))


def _own_lengths(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    prompt_tokens: int,
    num_completions: int,
    longest: int,
) -> Workload:
    """Return chats with the number of tokens after which the model ended each, EOS included."""
    chats = chats_of(tokenizer, num_prompts, prompt_tokens)
    prompts = [chat for chat in chats for _ in range(num_completions)]
    with RolloutGenerator(model, RolloutConfig(seed=SEED), tokenizer=tokenizer) as generator:
        params = SamplingParams(temperature=1.0, max_new_tokens=longest)
        outputs = generator.generate_batch(prompts, sampling_params=params).values()
    return Workload(prompts, [len(output.generated_tokens) for output in outputs])


def chats_of(
    tokenizer: PreTrainedTokenizerBase, num_prompts: int, prompt_tokens: int = 0
) -> list[list[int]]:
    """Return token ids of chats, each of `prompt_tokens` at least."""
    solved = random.Random(SEED)
    problems = _problems(num_prompts)
    chats = []
    for problem in problems:
        text, ids = problem["question"], []
        while not ids or len(ids) < prompt_tokens:
            message = [{"role": "user", "content": text}]
            ids = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=False
            )
            other = solved.choice(problems)
            text = f"{other['question']}\n{other['answer']}\n\n{text}"
        chats.append(list(ids))
    return chats


def _problems(count: int) -> list[dict[str, Any]]:
    """Return problems of every task in turns."""
    size = -(-count // len(TASKS))
    sets = [reasoning_gym.create_dataset(name, size=size, seed=SEED) for name in TASKS]
    return [problems[index] for index in range(size) for problems in sets][:count]


class StopAfter(TrainerCallback):
    """End a training after a few steps of the many that it was planned for."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop after the last of these steps."""
        control.should_training_stop = state.global_step >= self._num_steps


def create_step_trainer(
    setup: Setup,
    size: int,
    path: GenerationPath,
    folder: str,
    num_steps: int = 2,
    max_steps: int = 100,
) -> GRPOTrainer:
    """Create a trainer of `size` completions a step that stops before its planned `max_steps`."""
    is_cpu = setup.device == "cpu"
    rows = [
        {"prompt": [{"role": "user", "content": problem["question"]}]}
        for problem in _problems(2 * size // GROUP_SIZE)
    ]
    is_long = setup.sizes.num_sequences > GROUP_SIZE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GRPOTrainer(
            model=str(smollm2_folder()),
            reward_funcs=lambda completions, **_: [len(c[0]["content"]) % 7 for c in completions],
            args=GRPOConfig(
                output_dir=folder, max_steps=max_steps, report_to=[],
                use_cpu=is_cpu, bf16=not is_cpu,
                per_device_train_batch_size=size, num_generations=GROUP_SIZE,
                max_completion_length=STEP_TOKENS if is_long else 4, disable_tqdm=True,
                save_strategy="no", logging_strategy="no", **path.trl,
            ),
            train_dataset=Dataset.from_list(rows),
            callbacks=[StopAfter(num_steps)],
        )  # fmt: skip
