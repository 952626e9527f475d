"""Audit the rollouts of a stock TRL trainer, whichever engine samples them.

TRL 1.16 scores a rollout in `_generate_and_score_completions`. Its result has the token ids and,
of vLLM and of a `rollout_func`, the reported log-probabilities; the model still is what should have
sampled. The method is replaced while the trainer trains. Called by the trainer, on its thread; of
several processes, the main one audits its own rows.

B: rows of a rollout, T: tokens of a completion.
"""

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from cb_rollout.compat.accelerate import shards_models
from cb_rollout.compat.patching import replacing
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError
from cb_rollout.rollout.audit.drift_audit import MAX_SEQUENCES, MAX_TOKENS, audit_drift
from cb_rollout.rollout.audit.readouts import CAUSES
from cb_rollout.types import GenerationOutput

if TYPE_CHECKING:
    from cb_rollout.rollout.audit.report import AuditReport

SCORING = "_generate_and_score_completions"


def audit_callback(
    trainer: Any,
    *,
    every_steps: int = 50,
    versions: Mapping[Any, Any] | None = None,
    keep_versions: bool = False,
) -> "AuditCallback":
    """Return a callback that audits a stock trainer's rollouts, of vLLM or any other engine.

    Pass it to `trainer.add_callback`. An audit takes four sequences and 128 tokens of each, of the
    first rollout and then of one each `every_steps`. It warns in one sentence where rounding does
    not explain the numbers, and logs `audit/alarm` (0 or 1) and `audit/evidence` (nats a token for
    the cause, over rounding); its `report` is the last. Tokens without log-probabilities, as of
    `generate`, are tested as draws alone. Rollouts with images are not audited.

    Args:
        trainer: a `GRPOTrainer` or `RLOOTrainer`, with `use_vllm=True` or not.
        every_steps: optimizer steps from one audit to the next.
        versions: earlier weights, as of `audit`.
        keep_versions: hold copies, on the CPU, of the trainable weights of the first rollout and of
            the one before, as versions: twice their bytes, and a copy each rollout.

    Raises:
        ConfigurationError: the trainer does not score rollouts as TRL 1.16, or shards its model.
    """
    if not hasattr(trainer, SCORING) or shards_models(trainer.accelerator) or every_steps < 1:
        raise ConfigurationError(
            f"audit_callback(every_steps={every_steps}) takes a GRPOTrainer or RLOOTrainer of trl "
            f"1.16 with a whole model on each process, and steps from 1; {type(trainer).__name__} "
            "is another, or shards by FSDP or ZeRO-3: save a checkpoint and use cb-rollout audit."
        )
    return AuditCallback(trainer, every_steps, dict(versions or {}), keep_versions)


class AuditCallback(TrainerCallback):
    """Callback of `audit_callback`."""

    def __init__(
        self, trainer: Any, every_steps: int, versions: dict[Any, Any], keep_versions: bool
    ) -> None:
        self.report: AuditReport | None = None
        """The last audit's; None: there was none."""
        self._trainer, self._every_steps = trainer, every_steps
        self._versions, self._keeps = versions, keep_versions
        self._due_step = 0
        self._installed = ExitStack()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Replace the method that scores rollouts."""
        self._installed.close()
        score = getattr(self._trainer, SCORING)

        def scored(inputs: Any) -> Any:
            batch = score(inputs)
            if self._trainer.model.training and self._trainer.accelerator.is_main_process:
                self._see(batch)
            return batch

        self._installed.enter_context(replacing([(self._trainer, SCORING, scored)]))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Put the method back."""
        self._installed.close()

    def _see(self, batch: Mapping[str, Any]) -> None:
        step = self._trainer.state.global_step
        if step >= self._due_step and "pixel_values" not in batch:
            self._due_step = step + self._every_steps
            self._audit(batch, step + 1)
        if self._keeps:
            weights = {
                name: p.detach().to("cpu", copy=True)
                for name, p in self._trainer.model.named_parameters()
                if p.requires_grad
            }
            self._versions.setdefault("the first rollout", weights)
            self._versions["the rollout before"] = weights

    def _audit(self, batch: Mapping[str, Any], step: int) -> None:
        """Audit a rollout; the trainer counts `step` once it is done."""
        trainer = self._trainer
        settings = {name: getattr(trainer, name, None) for name in CAUSES}
        settings |= trainer.args.generation_kwargs or {}
        known = {name: settings[name] for name in CAUSES if settings[name] is not None}
        # vLLM's -1 is off.
        known["top_k"] = max(0, known.get("top_k", 0))
        outputs = _outputs(batch, trainer.temperature)
        with trainer.accelerator.autocast():
            report = audit_drift(
                outputs[:: -(-len(outputs) // MAX_SEQUENCES) or 1],
                trainer.model,
                versions=self._versions,
                tokenizer=trainer.processing_class,
                sampling_params=SamplingParams(**known),
            )
        if report is None:
            return
        self.report = report
        metrics = trainer._metrics["train"]
        metrics["audit/alarm"].append(float(not report))
        metrics["audit/evidence"].append(report.evidence[0].nats_per_token)
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
        prompt_ids = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
        tokens_T = batch["completion_ids"][row, : min(length, MAX_TOKENS)]
        logprobs = [] if logprobs_BT is None else logprobs_BT[row, : len(tokens_T)].tolist()
        if length:
            outputs.append(
                GenerationOutput(
                    f"row {row}", prompt_ids.tolist(), tokens_T.tolist(), logprobs,
                    temperature=temperature,
                )
            )  # fmt: skip
    return outputs
