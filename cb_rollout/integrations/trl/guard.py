"""Holds the sampled log-probabilities against the trainer's own forward, now and then.

Owns when, how many, the figures that are logged, and what follows when they differ too much.
Called by the trainer, on its thread; with several processes all of them call it together.

B: rows of a batch, T: tokens of a completion.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cb_rollout.config.enums import OldLogps, OnLogprobDrift
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.errors import LogprobDriftError
from cb_rollout.integrations.trl.rows import Row
from cb_rollout.rollout.verification import DriftReport, drift


class LogprobGuard:
    """Says whether sampled log-probabilities may stand for the trainer's."""

    def __init__(self, trainer: Any, config: RolloutConfig, are_comparable: bool) -> None:
        """Trust them until they are found to differ.

        Args:
            trainer: whose forward is the measure.
            config: how often, how many, how much, and what then.
            are_comparable: whether sampled and recomputed ones are of one distribution at all.
        """
        self._trainer, self._config = trainer, config
        self._are_comparable = are_comparable
        self._num_rollouts = 0
        self.is_due = False
        """Whether this rollout is to be checked, and has not been."""
        self.is_trusted = config.old_logps == OldLogps.ROLLOUT
        """Whether the sampled ones are used as the old ones."""

    def begin_rollout(self, is_training: bool) -> None:
        """Another rollout is about to be scored."""
        every = self._config.verify_every_steps
        self.is_due = False
        if is_training and every and self._are_comparable:
            self.is_due = self._num_rollouts % every == 0
            self._num_rollouts += 1

    def check(
        self,
        rows: Sequence[Row],
        policy_version: int,
        mask_BT: torch.Tensor,
        recompute: Callable[[list[int]], torch.Tensor],
    ) -> None:
        """Compare some rows, if it is time to, and has not been done for this rollout.

        Args:
            rows: what was sampled.
            policy_version: the trainer's; tokens of older ones are passed over.
            mask_BT: 0 where the trainer's forward leaves tokens out.
            recompute: the trainer's log-probabilities of the rows of these numbers, `[rows, T]`.

        Raises:
            LogprobDriftError: they differ by more than `max_logprob_drift`.
        """
        if not self.is_due or any(row.logprobs is None for row in rows):
            return
        self.is_due = False
        num_chosen = self._config.verify_num_sequences
        stride = max(1, len(rows) // num_chosen)
        # Others each time, so that none is passed over for ever.
        first = (self._num_rollouts - 1) // self._config.verify_every_steps % stride
        chosen = list(range(first, len(rows), stride))[:num_chosen]
        recomputed = recompute(chosen).float().tolist()
        sampled: dict[str, list[float]] = {}
        trained: dict[str, list[float]] = {}
        places: dict[str, tuple[Row, list[int]]] = {}
        masks = mask_BT[chosen].tolist()
        for number, values, mask in zip(chosen, recomputed, masks, strict=True):
            row = rows[number]
            versions = row.token_versions
            positions = [
                t
                for t, own in enumerate(row.is_sampled)
                if own and mask[t] and versions[t] in (None, policy_version)
            ]
            name = f"row {number}, {row.name}"
            sampled[name] = [row.logprobs[t] for t in positions]  # type: ignore[index]
            trained[name] = [values[t] for t in positions]
            places[name] = row, positions
        report = drift(sampled, trained)
        if report.num_tokens:
            self._log(report, places)
        self._act(report, places)

    def _log(self, report: DriftReport, places: dict[str, tuple[Row, list[int]]]) -> None:
        figures = {
            "rollout/logprob_drift_max": report.max,
            "rollout/logprob_drift_mean": report.mean,
            "rollout/logprob_drift_k1": report.k1,
            "rollout/logprob_drift_k3": report.k3,
            "rollout/logprob_drift_chi_squared": report.chi_squared,
            "rollout/logprob_drift_effective_sample_size": report.effective_sample_size,
        }
        if report.first_position is not None:
            _, positions = places[report.request_id]
            figures["rollout/logprob_drift_first_token"] = positions[report.first_position]
        for name, value in figures.items():
            self._trainer._metrics["train"][name].append(value)

    def _act(self, report: DriftReport, places: dict[str, tuple[Row, list[int]]]) -> None:
        """Raise, or trust them no longer, where the difference is beyond what is allowed."""
        allowed = self._config.max_logprob_drift
        if allowed is None:
            return
        # Every process acts alike: what follows has forwards that they share.
        accelerator = self._trainer.accelerator
        largest = torch.tensor([report.max], device=accelerator.device)
        if float(accelerator.gather(largest).max()) <= allowed:
            return
        said = self._description(report, places) if report.max > allowed else "on another process"
        said += f", max_logprob_drift={allowed:.3g}; "
        if self._config.on_logprob_drift == OnLogprobDrift.RAISE:
            said += "raise it, or look for what changes the forward between rollout and loss."
            raise LogprobDriftError(said)
        if self.is_trusted:
            said += "old log-probabilities are recomputed by the trainer from now on."
            warnings.warn(said, stacklevel=2)
        self.is_trusted = False

    def _description(self, report: DriftReport, places: dict[str, tuple[Row, list[int]]]) -> str:
        """Which sequence and token, by how much, and where the sequence began to differ."""
        row, positions = places[report.request_id]
        position = positions[report.position]
        text = self._trainer.processing_class.decode([row.completion_ids[position]])
        said = f"{report.request_id}, generated token {position} ({text!r}): sampled "
        said += f"log-probability is {report.max:.3g} nats from the trainer's forward"
        if report.first_position is not None and report.first_position < report.position:
            said += f", the first difference at token {positions[report.first_position]}"
        return said
