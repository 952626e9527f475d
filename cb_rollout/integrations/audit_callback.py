"""Audit the rollouts of a stock TRL trainer, whichever engine samples them.

The result of TRL 1.16's `_generate_and_score_completions` has the token ids and, of vLLM and of a
`rollout_func`, the reported log-probabilities. The method is replaced while the trainer trains.
Called by the trainer, on its thread; of several processes, the main one audits its own rows.

B: rows of a rollout, T: tokens of a completion.
"""

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from cb_rollout.compat.patching import replacing
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError
from cb_rollout.rollout.audit import drift_audit
from cb_rollout.rollout.audit.readouts import CAUSES
from cb_rollout.types import GenerationOutput

if TYPE_CHECKING:
    from cb_rollout.rollout.audit.report import AuditReport

SCORING = "_generate_and_score_completions"

KEPT_VERSIONS = ("the first rollout", "the rollout before")


@dataclass(kw_only=True, eq=False)
class audit_callback(TrainerCallback):
    """Callback for a stock trainer that audits the rollouts of its engine, vLLM or any other.

    An audit takes four sequences and 128 tokens of each, of the first rollout and then of one each
    `every_steps`. It warns where rounding does not explain the numbers, and logs `audit/alarm` (0
    or 1) and `audit/evidence` (nats a token for the cause, over rounding). Tokens without
    log-probabilities are tested as draws alone. Rollouts with images are not audited.

    Raises:
        ConfigurationError: the trainer does not score rollouts as TRL 1.16, or shards or splits its
            model.
        InvalidRequestError: its truncation or penalties cannot be read.
    """

    trainer: Any = field(kw_only=False)
    """A `GRPOTrainer` or `RLOOTrainer`, with `use_vllm=True` or not."""
    every_steps: int = 50
    versions: dict[Any, Any] = field(default_factory=dict)
    """Earlier weights, as of `audit`."""
    keep_versions: bool = False
    """Hold copies, on the CPU, of the trainable weights of the first rollout and of the one before,
    as versions: twice their bytes, and a copy each rollout."""
    report: "AuditReport | None" = None

    def __post_init__(self) -> None:
        trainer, self._installed, self.versions = self.trainer, ExitStack(), {**self.versions}
        can_audit = hasattr(trainer, SCORING) and drift_audit.holds_whole_model(trainer)
        if not can_audit or self.every_steps < 1:
            raise ConfigurationError(
                f"audit_callback(every_steps={self.every_steps}) takes steps from 1, and a GRPO or "
                f"RLOO trainer of trl 1.16 with a whole model; {type(trainer).__name__} is another "
                "or shards or splits it (FSDP, ZeRO-3, tensor parallelism): take cb-rollout audit "
                "for a checkpoint."
            )
        given = trainer.args.generation_kwargs or {}
        pairs = [(name, given.get(name, getattr(trainer, name, None))) for name in CAUSES]
        # vLLM's -1 is off.
        known = {n: v for n, v in pairs if v is not None and (n, v) != ("top_k", -1)}
        self._params = SamplingParams(**known)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Replace the method that scores rollouts."""
        self._installed.close()
        self._due_step = 0
        for name in KEPT_VERSIONS if self.keep_versions else ():
            self.versions.pop(name, None)
        trainer, score = self.trainer, getattr(self.trainer, SCORING)

        def scored(inputs: Any) -> Any:
            batch, step = score(inputs), trainer.state.global_step
            if trainer.model.training and trainer.accelerator.is_main_process:
                if step >= self._due_step and "pixel_values" not in batch:
                    self._due_step = step + self.every_steps
                    self._audit(batch, step + 1)
                if self.keep_versions:
                    named = trainer.model.named_parameters()
                    own = {n: p.detach().to("cpu", copy=True) for n, p in named if p.requires_grad}
                    first, before = KEPT_VERSIONS
                    self.versions.setdefault(first, own)
                    self.versions[before] = own
            return batch

        self._installed.enter_context(replacing([(trainer, SCORING, scored)]))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Put the method back."""
        self._installed.close()

    def _audit(self, batch: Mapping[str, Any], step: int) -> None:
        """Audit a rollout; the trainer counts `step` once it is done."""
        trainer = self.trainer
        outputs = _outputs(batch, trainer.temperature)
        report = drift_audit.audit_drift(
            outputs[:: -(-len(outputs) // drift_audit.MAX_SEQUENCES) or 1],
            trainer,
            versions=self.versions,
            sampling_params=self._params,
        )
        if report is not None:
            self.report = report
            trainer._metrics["train"]["audit/alarm"].append(float(not report))
            evidence = report.evidence[0].nats_per_token
            trainer._metrics["train"]["audit/evidence"].append(evidence)
            if not report:
                warnings.warn(f"audit of step {step:,}: {report.sentence}", stacklevel=2)


def _outputs(batch: Mapping[str, Any], temperature: float) -> list[GenerationOutput]:
    """Return the sequences of a scored rollout, each up to the first token that no model sampled.

    That is a tool's, padding, or a token whose number TRL lost (NaN).
    """
    is_sampled_BT = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
    logprobs_BT = batch.get("sampling_per_token_logps")
    if logprobs_BT is not None:
        is_sampled_BT = is_sampled_BT & ~logprobs_BT.isnan()
    outputs = []
    for row, length in enumerate(is_sampled_BT.long().cumprod(1).sum(1).tolist()):
        length = min(length, drift_audit.MAX_TOKENS)
        prompt_ids = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
        tokens = batch["completion_ids"][row, :length].tolist()
        logprobs = [] if logprobs_BT is None else logprobs_BT[row, :length].tolist()
        own = GenerationOutput(f"row {row}", prompt_ids, tokens, logprobs, temperature=temperature)
        outputs += [own] * bool(tokens)
    return outputs
