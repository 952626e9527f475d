"""A trainer's generation backend, and the log and records of what it rolled out.

Called by the trainer, on its thread. Knows the trainer by its attributes only.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from cb_rollout.errors import InvalidRequestError, LogprobDriftError
from cb_rollout.generator import RolloutGenerator
from cb_rollout.records import RunRecorder, SequenceRecord, StepMetrics


class TrainerRollouts:
    """What the trainer takes for its generation backend; also keeps the rollout's records."""

    def __init__(self, trainer: Any, generator: RolloutGenerator) -> None:
        """Stand between the two."""
        self._trainer, self._generator = trainer, generator
        self._num_rollouts = 0
        self._outputs = []
        self._records: list[SequenceRecord] = []
        self._completion_lengths: list[int] = []
        self._seconds_this_step = 0.0
        self._recorder: RunRecorder | None = None
        if trainer.accelerator.is_main_process:
            self._recorder = RunRecorder(Path(trainer.args.output_dir) / "cb_rollout")

    @property
    def _mode(self) -> Any:
        return "train" if self._trainer.model.training else "eval"

    def forget_synced_step(self) -> None:
        """Have the trainer sync before it generates next, whatever its step count says."""
        self._trainer._last_loaded_step = -1

    def sync_weights(self) -> None:
        """Called by the trainer once per optimizer step, before it generates."""
        self._generator.follow(self._trainer.model_wrapped)
        self._generator.sync_weights()

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """One completion of every prompt, in order.

        Args:
            prompts: token ids; TRL has repeated each `num_generations` times already, and equal
                ones are computed once.
            images: must be None.
            num_generations: not needed.
            profiler: entered while generating.

        Returns:
            Prompt ids, completion ids, and for each token a list with the sampled one's
            log-probability, and a list with its id.
        """
        if images is not None:
            raise InvalidRequestError("images are not supported; train on text, or use vLLM.")
        with profiler or nullcontext():
            outputs = list(self._generator.generate_batch(prompts).values())
        self._outputs = outputs
        self._log_metrics()
        self._verify()
        completions = [output.generated_tokens for output in outputs]
        logprobs = [[[logprob] for logprob in output.logprobs] for output in outputs]
        return prompts, completions, logprobs, [[[t] for t in tokens] for tokens in completions]

    def _log_metrics(self) -> None:
        """Put the rollout's figures where the trainer's own logger finds them."""
        metrics = self._generator.metrics()
        for name, value in metrics.items():
            self._log(name, value)
        if self._mode == "train":
            self._seconds_this_step += metrics["rollout/seconds"]
            self._completion_lengths += [len(o.generated_tokens) for o in self._outputs]

    def _log(self, name: str, value: float) -> None:
        self._trainer._metrics[self._mode][name].append(value)

    def _verify(self) -> None:
        """Every `verify_every_steps` training rollouts, hold some sequences against a forward."""
        config = self._generator.config
        if self._mode != "train" or not config.verify_every_steps:
            return
        self._num_rollouts += 1
        if (self._num_rollouts - 1) % config.verify_every_steps:
            return
        report = self._generator.verify(config.verify_num_sequences)
        if not report.num_tokens:
            return
        self._log("rollout/logprob_drift_max", report.max)
        self._log("rollout/logprob_drift_mean", report.mean)
        if config.max_logprob_drift is not None and report.max > config.max_logprob_drift:
            raise LogprobDriftError(
                f"{report.request_id}, generated token {report.position}: sampled log-probability "
                f"is {report.max:.3g} nats from the trainer's forward, max_logprob_drift="
                f"{config.max_logprob_drift:.3g}; raise it, or look for what changes the forward "
                "between rollout and loss."
            )

    def sleeping_after(self, generate: Any) -> Any:
        """`generate`, then the KV memory given back for the training that follows."""

        def generate_and_sleep(*args: Any, **kwargs: Any) -> Any:
            try:
                return generate(*args, **kwargs)
            finally:
                self._generator.sleep()

        return generate_and_sleep

    def recording_rewards(self, calculate_rewards: Any) -> Any:
        """`calculate_rewards`, with the first sequences kept for the run's records."""

        def calculate_and_record(
            inputs: Any, prompts: Any, completions: Any, completion_ids: Any
        ) -> torch.Tensor:
            rewards = calculate_rewards(inputs, prompts, completions, completion_ids)
            self._record(completion_ids, rewards)
            return rewards

        return calculate_and_record

    def _record(self, completion_ids: list[list[int]], rewards_per_function: torch.Tensor) -> None:
        """Keep the first sequences of this process, when they are exactly what was generated."""
        outputs = self._outputs[: self._generator.config.record_num_sequences]
        if self._recorder is None or [o.generated_tokens for o in outputs] != [
            list(ids) for ids in completion_ids[: len(outputs)]
        ]:
            return
        weights = self._trainer.reward_weights.to(rewards_per_function.device)
        rewards = (rewards_per_function * weights).nansum(1).tolist()
        tokenizer = self._trainer.processing_class
        self._records = [
            SequenceRecord(
                step=self._trainer.state.global_step,
                mode=self._mode,
                request_id=output.request_id,
                prompt=tokenizer.decode(output.prompt_ids),
                tokens=[tokenizer.decode([token]) for token in output.generated_tokens],
                token_ids=output.generated_tokens,
                logprobs=output.logprobs,
                policy_versions=output.policy_versions,
                reward=reward,
                finish_reason=output.finish_reason,
            )
            for output, reward in zip(outputs, rewards, strict=False)
        ]
        for record in self._records:
            self._recorder.record_sequence(record)

    def end_step(self, seconds: float) -> None:
        """Log which share of an optimizer step of `seconds` went into rollouts."""
        self._trainer._metrics["train"]["rollout/step_share"].append(
            min(1.0, self._seconds_this_step / seconds)
        )
        self._seconds_this_step = 0.0

    def write_log(self, step: int, logs: dict[str, Any]) -> None:
        """Keep what the trainer logged, and send the token table where wandb is on."""
        if self._recorder is None:
            return
        is_eval = any(name.startswith("eval_") for name in logs)
        self._recorder.record_metrics(
            StepMetrics(
                step=step,
                mode="eval" if is_eval else "train",
                scalars={k: float(v) for k, v in logs.items() if isinstance(v, int | float)},
                completion_lengths=[] if is_eval else self._completion_lengths,
            )
        )
        if not is_eval:
            self._completion_lengths = []
        if "wandb" in self._trainer.args.report_to:
            from cb_rollout.integrations.wandb import log_token_table

            log_token_table(self._records, step)
        self._records = []
