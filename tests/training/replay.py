"""Replay an attached training in a stock trainer: the oracle of every setting.

An attached trainer trains, and each call of its generator is recorded. A trainer of the same class,
settings, data and seed, to which nothing is attached, trains too: `generate` of its model returns
the recorded completions of the prompts that it is given. Everything else is TRL's own: masks,
scores, old log-probabilities, losses, optimizer. Final weights and all metrics that both log are
compared.
"""

import copy
import math
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, get_peft_model
from playback import Counter, double, with_tools
from tiny import EOS, char_tokenizer, tiny_model
from tiny_trainer import PROBLEMS, in_own_names, share_of_sevens
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from cb_rollout import (
    RolloutConfig,
    SamplingParams,
    SavedRollouts,
    attach,
    detach,
    make_rollout_func,
)
from cb_rollout.integrations.trl.strategies import use_strategy
from cb_rollout.strategies import Plain
from pages.replay_table import SGD, Replay

DEFAULTS = {
    **SGD,
    "max_steps": 3,
    "per_device_train_batch_size": 8,
    "per_device_eval_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 8,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "save_strategy": "no",
    "activation_checkpointing": False,
}

# Names of metrics that say how long something took, and how fast it was.
TIMINGS = ("runtime", "samples_per_second", "steps_per_second", "step_time")

# Prefixes of metrics that only an attached trainer logs: of its rollouts, and of the correction,
# which TRL has for generation outside of the trainer.
ATTACHED_ALONE = ("rollout/", "sampling/", "eval_rollout/", "eval_sampling/")

Turn = Any
"""Prompts and completions of a call of the generator; or the columns of a rollout_func."""


@dataclass
class Training:
    """What came out of a training."""

    turns: list[Turn] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    """The weights before."""
    last: dict[str, torch.Tensor] = field(default_factory=dict)

    def change(self) -> float:
        """Return the largest change of a weight."""
        return max(float((self.last[n] - self.first[n]).abs().max()) for n in self.last)

    def distance(self, other: "Training") -> float:
        """Return the largest difference of a weight, divided by the largest change of a weight."""
        assert self.last.keys() == other.last.keys()
        largest = max(float((self.last[n] - other.last[n]).abs().max()) for n in self.last)
        return largest / self.change() if largest else 0.0

    def metric_distances(self, other: "Training") -> dict[str, float]:
        """Return the largest difference of each metric, relative where it is above `UNIT`."""
        found: dict[str, float] = {}
        assert len(self.logs) == len(other.logs)
        for ours, theirs in zip(self.logs, other.logs, strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours:
                found[name] = max(found.get(name, 0.0), _difference(ours[name], theirs[name]))
        return found


def _difference(one: float | None, other: float | None) -> float:
    """Return infinity where only one of two numbers is missing."""
    missing = [value is None or math.isnan(value) for value in (one, other)]
    if any(missing):
        return 0.0 if all(missing) else math.inf
    return abs(one - other) / max(abs(one), abs(other), UNIT)


@dataclass(frozen=True)
class Tolerance:
    """Differences between two trainings that rounding explains."""

    weights: float
    """Of `Training.distance`."""
    metrics: float
    """Of each metric, as `Training.metric_distances` has them."""

    @classmethod
    def of_layouts(
        cls, setting: Replay, theirs: Training, create: Callable[..., Any]
    ) -> "Tolerance":
        """Return twice what padding moves weights or metrics of a stock trainer of a setting.

        Weights alone show it where a loss takes its own log-probabilities as the old ones: its
        value is then the mean advantage, whatever the rounding.
        """
        moved = [FLOAT32.weights]
        for multiple in (8, 16, 32):
            padded = replace(setting, trainer=setting.trainer | {"pad_to_multiple_of": multiple})
            other = train_stock(create(padded), padded, theirs.turns)
            moved += [theirs.distance(other), *theirs.metric_distances(other).values()]
        return cls(2 * max(moved), 2 * max(moved))


# A stock trainer whose batches are padded to another width ends up to 5e-6 of the largest change
# away: one rounding of the largest float32 weight. Its metrics move by up to 1e-5.
FLOAT32 = Tolerance(weights=2e-5, metrics=5e-5)

# Metrics below it are compared in this unit.
UNIT = 0.1


def assert_equal_trainings(
    ours: Training, theirs: Training, tolerance: Tolerance = FLOAT32
) -> None:
    assert ours.turns
    assert theirs.distance(ours) <= tolerance.weights
    distances = theirs.metric_distances(ours)
    assert {"loss", "grad_norm", "entropy", "reward", "num_tokens"} <= distances.keys()
    assert not {name: d for name, d in distances.items() if d > tolerance.metrics}


class Averaged(TrainerCallback):
    """Evaluates the average of the weights of all steps."""

    def __init__(self) -> None:
        self.average: list[torch.Tensor] = []
        self.own: list[torch.Tensor] = []

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **_):
        parameters = list(model.parameters())
        if not self.average:
            self.average = [parameter.clone() for parameter in parameters]
        self.own = [parameter.clone() for parameter in parameters]
        for average, parameter in zip(self.average, parameters, strict=True):
            average.lerp_(parameter, 0.5)
            parameter.copy_(average)

    @torch.no_grad()
    def on_evaluate(self, args, state, control, model=None, **_):
        for own, parameter in zip(self.own, model.parameters(), strict=True):
            parameter.copy_(own)


class Moved(TrainerCallback):
    """Moves the weights at the beginning of each step, and again before its optimizer's."""

    @torch.no_grad()
    def on_step_begin(self, args, state, control, model=None, **_):
        for parameter in model.parameters():
            parameter.mul_(1.01)

    on_pre_optimizer_step = on_step_begin


def lengths(completions: Sequence[Any], **_: Any) -> list[float]:
    return [float(len(str(completion))) for completion in completions]


def sevens(completions: Sequence[Any], **_: Any) -> list[float]:
    return share_of_sevens([str(completion) for completion in completions])


def letters(completions: Sequence[Any], **_: Any) -> list[float | None]:
    """None where a completion has no letter."""
    counts = [sum(map(str.isalpha, str(completion))) for completion in completions]
    return [float(count) if count else None for count in counts]


def mostly_none(completions: Sequence[Any], **_: Any) -> list[float | None]:
    return [float(len(c)) if number % 3 else None for number, c in enumerate(completions)]


def equal(completions: Sequence[Any], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def nearness(completions: Sequence[str], answer: list[int], weight: list[float], **_: Any):
    """A reward of two columns of the data set."""
    rows = zip(completions, answer, weight, strict=True)
    return [share * (len(c) - share) + wanted for c, wanted, share in rows]


def asked(rows: Sequence[dict[str, Any]], parts: Sequence[str]) -> list[dict[str, Any]]:
    """Return rows of a data set with the prompts and columns of some parts."""
    if "long prompts" in parts:
        rows = [{"prompt": row["prompt"] * (1 + i % 15)} for i, row in enumerate(rows)]
    if "columns" in parts:
        rows = [row | {"answer": i % 5, "weight": i / 7} for i, row in enumerate(rows)]
    if {"chats", "tools", "environment", "two environments"} & set(parts):
        rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    if "two environments" in parts:
        rows = [row | {"environment": ("count", "double")[i % 2]} for i, row in enumerate(rows)]
    return list(rows)


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("qwen3_moe", {}),
    "mistral": ("mistral", {}),
    "bloom": ("bloom", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"final_logit_softcapping": 2.0, "sliding_window": 8}),
    "granite": ("granite", {"logits_scaling": 3.0}),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "gpt_oss": ("gpt_oss", {}),
}


def saved_model(folder: Path, parts: Sequence[str]) -> Path:
    """Save a model, once for each family."""
    name = next((part for part in parts if part in FAMILIES), "qwen3")
    family, settings = FAMILIES.get(name, (name, {}))
    path = folder / name
    if not path.exists():
        model = tiny_model(family, vocab_size=len(char_tokenizer()), **settings)
        model.save_pretrained(path)
    return path


def create_model(folder: Path, parts: Sequence[str]) -> Any:
    """Load a model whose completions end at all lengths; random ones hardly ever do."""
    dtype = torch.bfloat16 if "bfloat16" in parts else torch.float32
    model = AutoModelForCausalLM.from_pretrained(saved_model(folder, parts), dtype=dtype)
    model.generation_config.eos_token_id = [EOS, *range(70, 80)]
    if "no end" in parts:
        model.generation_config.eos_token_id = [EOS]
        with torch.no_grad():
            model.lm_head.weight[EOS] = 0
    if "dropout" in parts:
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.2
    if "adapted" in parts:
        adapter = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        return get_peft_model(model, adapter)
    return model


def logging_reward(
    completions: Sequence[Any], log_metric: Any, log_extra: Any, trainer_state: Any, **_: Any
) -> list[float]:
    log_metric("longest", float(max(map(len, completions))))
    log_extra("number", list(range(len(completions))))
    return [len(completion) * (1.0 + trainer_state.global_step) for completion in completions]


async def awaited(completion_ids: Sequence[list[int]], **_: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def brought(completions: Sequence[Any], difficulty: list[float], **_: Any) -> list[float]:
    """A reward of a column that a rollout_func returned."""
    return [len(c) * share for c, share in zip(completions, difficulty, strict=True)]


class Doubler(Counter):
    """Another environment, with a tool of its own."""

    def reset(self, **_: Any) -> str:
        self.total = 1
        return " double"

    def twice(self, number: int) -> int:
        """Doubles the total, and adds.

        Args:
            number: how much.

        Returns:
            The total.
        """
        self.total = 2 * self.total + number
        return self.total


def reward_model() -> Any:
    """A tiny model that scores completions."""
    config = tiny_model(vocab_size=len(char_tokenizer())).config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config.num_labels = 1
        return AutoModelForSequenceClassification.from_config(config)


REWARDS: dict[str, Callable[[], Any]] = {
    "three rewards": lambda: [lengths, sevens, letters],
    "unscorable": lambda: mostly_none,
    "no advantage": lambda: equal,
    "columns": lambda: nearness,
    "tools": lambda: sevens,
    "environment": lambda: sevens,
    "two environments": lambda: sevens,
    "logging": lambda: logging_reward,
    "awaited": lambda: [awaited, lengths],
    "reward model": lambda: [reward_model(), lengths],
    "branching columns": lambda: brought,
}


def lora(**settings: Any) -> dict[str, Any]:
    defaults = {"r": 2, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return {"peft_config": LoraConfig(**(defaults | settings))}


def rollout_with_columns(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """A rollout_func of two turns: between them stands a token that was not sampled."""
    generate = make_rollout_func(SamplingParams(max_new_tokens=4))
    first = generate(prompts, trainer)
    told = [[*ids, ord("!")] for ids in first["completion_ids"]]
    asked = zip(first["prompt_ids"], told, strict=True)
    second = generate([[*prompt, *ids] for prompt, ids in asked], trainer)
    turns = zip(told, second["completion_ids"], strict=True)
    logprobs = zip(first["logprobs"], second["logprobs"], strict=True)
    masks = zip(first["completion_ids"], second["completion_ids"], strict=True)
    return {
        "prompt_ids": first["prompt_ids"],
        "completion_ids": [one + other for one, other in turns],
        "logprobs": [[*one, 0.0, *other] for one, other in logprobs],
        "env_mask": [[1] * len(one) + [0] + [1] * len(other) for one, other in masks],
        "difficulty": [float(number % 3) for number in range(len(prompts))],
    }


ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "lora": lora,
    "lora dropout": lambda: lora(lora_dropout=0.3),
    "dora": lambda: lora(use_dora=True),
    "lora and head": lambda: lora(modules_to_save=["lm_head"]),
    "lora of embeddings": lambda: lora(target_modules=["embed_tokens", "v_proj"]),
    "tools": lambda: {"tools": [double]},
    "environment": lambda: {"environment_factory": Counter},
    "two environments": lambda: {"environment_factory": {"count": Counter, "double": Doubler}},
    "rollout_func": lambda: {"rollout_func": make_rollout_func()},
    "branching columns": lambda: {"rollout_func": rollout_with_columns},
    "averaged": lambda: {"callbacks": [Averaged()]},
    "moved": lambda: {"callbacks": [Moved()]},
    "reward model": lambda: {"reward_processing_classes": [char_tokenizer(), None]},
}


def part_data(parts: Sequence[str]) -> dict[str, Any]:
    """Return the data sets of some parts."""
    problems = PROBLEMS[:7] if "few" in parts else PROBLEMS[:-4]
    rows: Any = Dataset.from_list(asked(problems, parts))
    evaluated: Any = Dataset.from_list(asked(PROBLEMS[-4:], parts))
    if "one prompt" in parts:
        rows = evaluated = rows.select([0] * 8)
    if "two evaluations" in parts:
        evaluated = {"first": evaluated, "last": rows.select(range(3))}
    if "iterable" in parts:
        rows = IterableDataset.from_generator(lambda: iter(asked(PROBLEMS, parts)))
    return {"train_dataset": rows, "eval_dataset": evaluated}


def create_trainer(setting: Replay, folder: Path, models: Path, monkeypatch: Any) -> Any:
    """Create a trainer of a setting; equal arguments give equal trainers."""
    parts = setting.parts
    tokenizer = char_tokenizer()
    if {"tools", "environment", "two environments"} & set(parts):
        with_tools(monkeypatch, tokenizer)
    rewards = next((REWARDS[part]() for part in parts if part in REWARDS), [lengths, sevens])
    arguments = [ARGUMENTS[part]() for part in parts if part in ARGUMENTS]
    is_rloo = "rloo" in parts
    trainer_class: Any = RLOOTrainer if is_rloo else GRPOTrainer
    config_class: Any = RLOOConfig if is_rloo else GRPOConfig
    config = DEFAULTS | {"output_dir": str(folder), "beta": 0.0} | setting.trainer
    torch.manual_seed(0)
    return trainer_class(
        model=create_model(models, parts),
        reward_funcs=rewards,
        args=config_class(**in_own_names(config_class, config)),
        processing_class=tokenizer,
        **part_data(parts),
        **ChainMap(*arguments),
    )


def trained(trainer: Any, setting: Replay, turns: list[Turn]) -> Training:
    """Train, and return what came out of it."""
    first = weights_of(trainer)
    torch.manual_seed(0)
    trainer.train()
    logs = list(trainer.state.log_history)
    if "twice" in setting.parts:
        trainer.train()
        logs += trainer.state.log_history
    if "resumed" in setting.parts:
        folder = f"{trainer.args.output_dir}/checkpoint-4"
        trainer.train(resume_from_checkpoint=folder)
        logs += trainer.state.log_history
    return Training(turns, [shared(row) for row in logs], first, weights_of(trainer))


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    parameters = trainer.model.named_parameters()
    return {name: p.detach().clone() for name, p in parameters if p.requires_grad}


def shared(row: dict[str, float]) -> dict[str, float]:
    """Return the metrics that a stock trainer logs too, without timings."""
    return {
        name: value
        for name, value in row.items()
        if not name.startswith(ATTACHED_ALONE) and not name.endswith(TIMINGS)
    }


def train_attached(trainer: Any, setting: Replay, generator: Any = None) -> Training:
    """Train with cb_rollout attached, and record each call of the generator or rollout_func.

    `generator`: what `attach` takes; None: the setting's `RolloutConfig`.
    """
    turns: list[Any] = []

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            turns.append(copy.deepcopy(result[:2] if isinstance(result, tuple) else result))
            return result

        return call

    with ignoring_advice():
        attach(trainer, generator or RolloutConfig(**setting.rollout))
        if "plain" in setting.parts:
            use_strategy(trainer, Plain())
        if getattr(trainer, "rollout_func", None) is not None:
            trainer.rollout_func = recording(trainer.rollout_func)
        else:
            trainer.vllm_generation.generate = recording(trainer.vllm_generation.generate)
        training = trained(trainer, setting, turns)
    detach(trainer)
    return training


@contextmanager
def ignoring_advice() -> Iterator[None]:
    """Ignore warnings of cb_rollout, which advise against some of the settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def train_from_saved(create: Callable[[Replay], Any], setting: Replay, folder: str) -> Training:
    """Train with what an attached training saved, and record each call."""
    train_attached(create(setting), setting, RolloutConfig(save_rollouts=folder))
    return train_attached(create(setting), setting, SavedRollouts(folder))


def train_stock(trainer: Any, setting: Replay, turns: list[Turn]) -> Training:
    """Train without cb_rollout on recorded completions, each of which is asked for again."""
    remaining = iter(turns)
    if getattr(trainer, "rollout_func", None) is not None:
        trainer.rollout_func = replaying_rollout_func(remaining)
    else:
        trainer.model.generate = replaying_generate(remaining, trainer._tokenizer.pad_token_id)
    training = trained(trainer, setting, turns)
    assert next(remaining, None) is None, "the stock trainer asked for fewer completions"
    assert not trainer.use_vllm
    return training


def replaying_generate(remaining: Iterator[Turn], pad_token_id: int) -> Callable[..., torch.Tensor]:
    """Return a `generate` whose completions are recorded, and padded on the right."""

    def generate(input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: Any) -> torch.Tensor:
        prompts, completions = next(remaining)
        masked = zip(input_ids, attention_mask.bool(), strict=True)
        assert [ids[own].tolist() for ids, own in masked] == prompts
        padded = torch.full((len(prompts), max(map(len, completions))), pad_token_id)
        for row, ids in zip(padded, completions, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        return torch.cat([input_ids, padded], dim=1)

    return generate


def replaying_rollout_func(remaining: Iterator[dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a `rollout_func` that returns recorded columns, without log-probabilities."""

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        columns = next(remaining)
        assert trainer._tokenize_prompts(prompts)[0] == columns["prompt_ids"]
        return columns | {"logprobs": [[0.0] * len(ids) for ids in columns["completion_ids"]]}

    return rollout
