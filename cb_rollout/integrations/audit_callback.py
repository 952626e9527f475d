"""Audit the rollouts of a stock TRL trainer, whichever engine samples them.

The result of TRL 1.16's `_generate_and_score_completions` has the token ids and, with vLLM or a
`rollout_func`, the reported log-probabilities. The method is replaced while the trainer trains.
Called by the trainer, on its thread; of several processes, only the main process audits, and only
its own rows.

B: rows of a rollout, T: tokens of a prompt or of a completion.
"""

import math
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
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

# Names of the kept versions in a report.
FIRST_VERSION = "the first rollout"
LAST_VERSION = "the rollout before"


@dataclass(kw_only=True, eq=False)
class audit_callback(TrainerCallback):
    """Trainer callback that audits the rollouts of a stock trainer's engine, vLLM or any other.

    It audits the first rollout, and then one rollout every `every_steps` steps: four sequences, and
    128 tokens of each. It warns if rounding does not explain the numbers, and logs `audit/alarm` (0
    or 1) and `audit/evidence` (nats per token in favour of the cause over rounding). If there are
    no log-probabilities, it only tests whether the tokens fit the distribution. Rollouts with
    images are not audited.

    Raises:
        ConfigurationError: the trainer does not score rollouts as TRL 1.16 does, or it shards or
            splits its model.
        InvalidRequestError: the trainer's truncation or penalties cannot be read.
    """

    trainer: Any = field(kw_only=False)
    """A `GRPOTrainer` or `RLOOTrainer`, with `use_vllm=True` or not."""
    every_steps: int = 50
    versions: dict[Any, Any] = field(default_factory=dict)
    """Earlier weights, in the form that `audit` takes."""
    keep_versions: bool = False
    """Keep the trainable weights of the first rollout and of the previous rollout as versions, on
    the CPU. This takes twice the weights' bytes, and one copy per rollout."""
    report: "AuditReport | None" = None

    def __post_init__(self) -> None:
        trainer = self.trainer
        self.versions = dict(self.versions)
        self._installed = ExitStack()
        can_audit = hasattr(trainer, SCORING) and drift_audit.holds_whole_model(trainer)
        if not can_audit or self.every_steps < 1:
            raise ConfigurationError(
                f"audit_callback(every_steps={self.every_steps}) needs every_steps >= 1, and a "
                "GRPO or RLOO trainer of trl 1.16 whose model is not sharded or split (FSDP, "
                f"ZeRO-3, tensor parallelism), which this {type(trainer).__name__} is not; "
                "otherwise run cb-rollout audit on a checkpoint."
            )
        self._params = _sampling_params(trainer)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Replace the method that scores rollouts."""
        self._installed.close()
        self._due_step = 0
        if self.keep_versions:
            self.versions.pop(FIRST_VERSION, None)
            self.versions.pop(LAST_VERSION, None)
        trainer = self.trainer
        score = getattr(trainer, SCORING)

        def scored(inputs: Any) -> Any:
            batch = score(inputs)
            if trainer.model.training and trainer.accelerator.is_main_process:
                self._see(batch)
            return batch

        self._installed.enter_context(replacing([(trainer, SCORING, scored)]))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Put the method back."""
        self._installed.close()

    def _see(self, batch: Mapping[str, Any]) -> None:
        """Audit a training rollout if one is due, and keep the weights that sampled it."""
        step = self.trainer.state.global_step
        if step >= self._due_step and "pixel_values" not in batch:
            self._due_step = step + self.every_steps
            self._audit(batch, step + 1)
        if self.keep_versions:
            weights = _trainable_weights(self.trainer.model)
            self.versions.setdefault(FIRST_VERSION, weights)
            self.versions[LAST_VERSION] = weights

    def _audit(self, batch: Mapping[str, Any], step: int) -> None:
        """Audit a rollout; the trainer counts `step` once it is done."""
        outputs = _outputs(batch, self.trainer.temperature)
        # Every n-th sequence, so that at most `MAX_SEQUENCES` are left.
        stride = max(1, math.ceil(len(outputs) / drift_audit.MAX_SEQUENCES))
        report = drift_audit.audit_drift(
            outputs[::stride],
            self.trainer,
            versions=self.versions,
            sampling_params=self._params,
        )
        if report is None:
            return
        self.report = report
        metrics = self.trainer._metrics["train"]
        metrics["audit/alarm"].append(float(not report))
        metrics["audit/evidence"].append(report.evidence[0].nats_per_token)
        if not report:
            warnings.warn(f"audit of step {step:,}: {report.sentence}", stacklevel=2)


def _sampling_params(trainer: Any) -> SamplingParams:
    """Return the truncation and the penalties that a trainer asks of its engine."""
    generation_kwargs = trainer.args.generation_kwargs or {}
    fields: dict[str, Any] = {}
    for name in CAUSES:
        value = generation_kwargs.get(name, getattr(trainer, name, None))
        # In vLLM, -1 switches top-k off.
        is_off = name == "top_k" and value == -1
        if value is not None and not is_off:
            fields[name] = value
    return SamplingParams(**fields)


def _trainable_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy the trainable parameters of a model to the CPU, by name."""
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            weights[name] = parameter.detach().to("cpu", copy=True)
    return weights


def _outputs(batch: Mapping[str, Any], temperature: float) -> list[GenerationOutput]:
    """Return the sequences of a scored rollout, each up to the first token that no model sampled.

    Such a token is a tool's, padding, or a token whose log-probability TRL lost (NaN).
    """
    is_sampled_BT = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
    logprobs_BT = batch.get("sampling_per_token_logps")
    if logprobs_BT is not None:
        is_sampled_BT = is_sampled_BT & ~logprobs_BT.isnan()
    # The product is 1 up to the first 0, so its sum counts the tokens before that.
    lengths_B = is_sampled_BT.long().cumprod(1).sum(1)
    outputs: list[GenerationOutput] = []
    for row, num_sampled in enumerate(lengths_B.tolist()):
        length = min(num_sampled, drift_audit.MAX_TOKENS)
        if length == 0:
            continue
        is_prompt_T = batch["prompt_mask"][row].bool()
        logprobs = [] if logprobs_BT is None else logprobs_BT[row, :length].tolist()
        outputs.append(
            GenerationOutput(
                request_id=f"row {row}",
                prompt_ids=batch["prompt_ids"][row][is_prompt_T].tolist(),
                generated_tokens=batch["completion_ids"][row, :length].tolist(),
                logprobs=logprobs,
                temperature=temperature,
            )
        )
    return outputs
