"""What `trl_sharded` does with loss_forward="packed": train twice on equal tokens, and compare.

One stock trainer samples and computes its loss packed, the other gets those tokens where TRL would
have called `generate`, and computes its loss as TRL does.
"""

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from playback import Watched, play_back, watched
from tiny_trainer import logged, share_of_sevens, tiny_trainer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from cb_rollout import RolloutConfig, attach
from cb_rollout.compat.accelerate import shards_models
from cb_rollout.compat.fsdp import local_part
from cb_rollout.engine.sampling import sampler
from cb_rollout.integrations.trl import packed_loss, scoring
from cb_rollout.integrations.trl.rows.loss_rows import LossRow
from cb_rollout.packing.batch import PackingLayout

SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "learning_rate": 0.05,
}


def is_last() -> bool:
    """Whether this process is the one in which something is out of order."""
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1


def equal_on_the_last(completions: list[str], **columns: Any) -> list[float]:
    """A reward that leaves the last process without an advantage."""
    return [0.5] * len(completions) if is_last() else share_of_sevens(completions)


def a_difference(*layouts: str) -> Any:
    """Have the last process find a difference in its first batch, in these layouts."""
    own = packed_loss.PackedLoss._difference

    def difference(self: Any, run: Any, *rest: Any) -> str | None:
        found = own(self, run, *rest)
        return "as the test has it" if is_last() and run.layout in layouts else found

    return replaced(packed_loss.PackedLoss, "_difference", difference)


def wrong_log_probabilities() -> Any:
    """Have the last process report log-probabilities that are not its model's."""
    own = sampler.sample

    def sample(*arguments: Any) -> Any:
        sampled = own(*arguments)
        return sampled._replace(logprobs_B=sampled.logprobs_B + 0.5) if is_last() else sampled

    return replaced(sampler, "sample", sample)


def an_older_version() -> Any:
    """Have the last process find, from the second rollout on, tokens of an older policy."""
    own = scoring.loss_rows

    def loss_rows(*arguments: Any, **named: Any) -> list[LossRow]:
        rows = own(*arguments, **named)
        if not is_last():
            return rows
        return [
            replace(row, versions=[v - 1 if v and v > 1 else v for v in row.versions])
            for row in rows
        ]

    return replaced(scoring, "loss_rows", loss_rows)


def rows_that_cannot_be_packed() -> Any:
    """Have the last process fail to find the rows in every other batch, from the first on."""
    own, calls = packed_loss._rows_of_batch, itertools.count()

    def rows_of_batch(*arguments: Any, **named: Any) -> Any:
        is_unfit = is_last() and next(calls) % 2 == 0
        return (None, None) if is_unfit else own(*arguments, **named)

    return replaced(packed_loss, "_rows_of_batch", rows_of_batch)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside."""
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def counting(num_trained: list[int]) -> Any:
    """Append the batches with gradients of each packed forward of a whole loss."""
    own = packed_loss.PackedScores.scores

    def scores(self: Any, *arguments: Any) -> Any:
        found = own(self, *arguments)
        if self.facts.module.training and torch.is_grad_enabled():
            num_trained.append(sum(part.logprobs_K.requires_grad for part in found))
        return found

    return replaced(packed_loss.PackedScores, "scores", scores)


@dataclass(frozen=True)
class Case:
    """What is trained, and what is out of order on the last process."""

    settings: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    out_of_order: Callable[[], Any] = nullcontext


# Cut after every row, where parameters are whole; the last process has but one row to train on.
UNEVEN, CUT = {"reward": equal_on_the_last}, {"loss_tokens_per_forward": 20}
LONGER = {"max_steps": 3}

CASES = {
    "equal": Case(),
    # A penalty on the distance to the reference, which is the model without its adapters.
    "penalised": Case({"beta": 0.04}),
    "uneven": Case(UNEVEN, CUT),
    "accumulated": Case(
        {**UNEVEN, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}, CUT
    ),
    "checkpointed": Case({**UNEVEN, "activation_checkpointing": True}, CUT),
    "reentrant": Case(
        {
            "activation_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": True},
        }
    ),
    "differs": Case(out_of_order=partial(a_difference, "shared_prefixes")),
    "differs_padded": Case(config=CUT, out_of_order=partial(a_difference, *PackingLayout)),
    "wrong": Case(LONGER, {"max_logprob_drift": None}, wrong_log_probabilities),
    "older": Case(LONGER, out_of_order=an_older_version),
    "unpacked": Case(LONGER, CUT, rows_that_cannot_be_packed),
}


def parts(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """This process's parts of the parameters, copied."""
    return {name: local_part(p).detach().clone() for name, p in model.named_parameters()}


def apart(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two tensors of one name."""
    assert own.keys() == other.keys()
    return max(float((own[name] - t).abs().max()) for name, t in other.items() if t.numel())


def gradients_apart(ours: Watched, theirs: Watched) -> list[float]:
    """The largest difference in each step; nothing under DeepSpeed, which shows no gradients."""
    steps = zip(ours.gradients, theirs.gradients, strict=True)
    local = [[{n: local_part(g) for n, g in part.items()} for part in step] for step in steps]
    return [apart(*step) for step in local if step[0]]


def figures_apart(ours: Any, theirs: Any) -> float:
    """The largest difference between what two trainers logged of the loss, as a share."""
    pairs = [
        pair
        for name in ("entropy", "grad_norm", "kl")
        for pair in zip(logged(ours, name), logged(theirs, name), strict=True)
    ]
    return max(abs(a - b) / max(1e-3, abs(b)) for a, b in pairs)


def new_trainer(output_dir: Path, settings: dict[str, Any]) -> Any:
    """A trainer whose model is made whole, whatever was trained before."""
    unset_hf_deepspeed_config()
    return tiny_trainer(output_dir, **(SETTINGS | settings))


def train_twice(output_dir: Path, settings: dict[str, Any], case: Case) -> dict[str, Any]:
    """Train packed and as TRL does, and return how far apart the two are on this process."""
    settings = settings | case.settings
    num_trained: list[int] = []
    ours = new_trainer(output_dir, settings)
    config = dict(case.config)
    if shards_models(ours.accelerator):
        # Refused there: processes enter as many forwards together.
        config.pop("loss_tokens_per_forward", None)
    generator = attach(ours, RolloutConfig(loss_forward="packed", **config))
    own = ours._get_per_token_logps_and_entropies.__self__
    record = watched(ours)
    with warnings.catch_warnings(record=True) as said, counting(num_trained), case.out_of_order():
        warnings.simplefilter("always")
        ours.train()
    layout, is_trusted = own._packed._layouts[False], own._guard.is_trusted
    generator.close()
    theirs = new_trainer(output_dir, settings)
    reference = play_back(theirs, record.turns)
    theirs.train()
    losses = zip(record.losses, reference.losses, strict=True)
    return {
        "losses": max(abs(a - b) for a, b in losses),
        "gradients": gradients_apart(record, reference),
        "weights": apart(parts(ours.model), parts(theirs.model)),
        "figures": figures_apart(ours, theirs),
        "norm": max(logged(theirs, "grad_norm")),
        "num_trained": num_trained,
        "layout": layout,
        "is_trusted": is_trusted,
        "said": [str(w.message) for w in said if "loss_forward" in str(w.message)],
    }
