"""Generate completions from a model in training: `RolloutGenerator` and `generate_batch`.

Owns one rollout from prompts to outputs and metrics, and the weight sync between rollouts. Leaves
the steps of the engine to `ContinuousBatchingManager`, and the writing of records to `recording/`.
Called from the training thread.
"""

import inspect
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from math import inf
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

import torch

from cb_rollout.compat.accelerate import require_launched_together
from cb_rollout.compat.transformers import generation_config_of
from cb_rollout.config.call_arguments import require_arguments
from cb_rollout.config.combinations import refused
from cb_rollout.config.compilation import require_compiled_so, with_compile_settings
from cb_rollout.config.enums import InFlight, ReleaseCache
from cb_rollout.config.hf import as_rollout_config
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.decode.path import ExecutionPath
from cb_rollout.engine.memory.plan import MemoryPlan
from cb_rollout.engine.memory.training import OptimizerOrName
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.interrupts import interrupts_deferred
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.engine.service.pause_controller import PauseReason
from cb_rollout.errors import ConfigurationError, InvalidRequestError, RolloutError
from cb_rollout.metrics.registry import ROLLOUT, SLEEP, SYNC, rollout_metrics, status_metrics
from cb_rollout.packing.text_scores import Text, score_texts
from cb_rollout.rollout import batches
from cb_rollout.rollout.batches import BatchArguments
from cb_rollout.rollout.distributed import create_group_watch
from cb_rollout.rollout.kept import keep_generator, kept_by
from cb_rollout.rollout.progress import PROGRESS_SECONDS, ProgressBar
from cb_rollout.rollout.prompts import (
    Padding,
    Prompt,
    encoded,
    padding_of,
    refuse_padding,
    require_tokenizer,
)
from cb_rollout.rollout.verification import DriftReport, FirstRollout, rollout_drift
from cb_rollout.types import GenerationOutput, ScoredText, SyncReport
from cb_rollout.weights import create_weight_sync, require_equal

if TYPE_CHECKING:
    from cb_rollout.rollout.recording.loop import LoopRecords
    from cb_rollout.server import ServerHandle


class RolloutGenerator:
    """Sample completions and their log-probabilities from a model in training."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: Any = None,
        *,
        tokenizer: Any = None,
        generation_config: Any = None,
        accelerator: Any = None,
        optimizer: OptimizerOrName | None = None,
    ) -> None:
        """Check the model and plan the memory.

        Args:
            model: a causal language model, plain or wrapped by PEFT, accelerate or torch.
            config: a `RolloutConfig`, or a transformers `ContinuousBatchingConfig`; None: the
                settings in the generation config.
            tokenizer: required for strings, chats and stop strings; pass a processor for images.
            generation_config: defaults of every request; None: the model's own. Engine settings in
                it apply where `config` has its default.
            accelerator: source of the rank and of the precision of the trainer's forward. None: the
                rank of `torch.distributed`'s process group, else of the environment's `RANK`, or 0.
            optimizer: the model's optimizer, its class, or the name of a known one, to plan memory
                for its states. None: Adam for a model in training mode, otherwise no states.

        Raises:
            ConfigurationError: a setting or the model is not supported, or the accelerator has
                fewer processes than the launcher was asked to start.
        """
        if accelerator is not None:
            require_launched_together(accelerator.num_processes)
        self.config = as_rollout_config(config, _generation_config_of(model, generation_config))
        require_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self._weights = create_weight_sync(model, self.config, accelerator, optimizer)
        if self.config.release_cache == ReleaseCache.WITH_WEIGHTS:
            # Refuses shared weights.
            self._weights.own_weights()
        self.manager = ContinuousBatchingManager(
            self._weights.module,
            generation_config,
            self.config,
            autocast_dtype=self._weights.autocast_dtype,
            rank=None if accelerator is None else accelerator.process_index,
            tokenizer=tokenizer,
            trained=self._weights.trained,
            optimizer=optimizer,
        )
        self.manager.weight_selection = self._weights.selection
        if self._weights.adapters is not None:
            self.manager.engine.runner.adapters = self._weights.adapters
        group = self.manager.group
        self._watch = None if group is None else create_group_watch(group)
        is_split = ModelFacts.of(model).is_split
        # Processes that train one split model have equal prompts.
        self._gathers_over = None if is_split else group
        self._servers: list[ServerHandle] = []
        self._last_rollout: list[Request] = []
        self._first_rollout = FirstRollout(
            self.manager, is_collective=self._weights.is_collective or group is not None
        )
        self._last_metrics: dict[str, float] = {}
        # Processes with one split model have the same outputs; their first one records them.
        self._is_duplicate = is_split and group is not None and group.group_rank != 0
        self._records: LoopRecords | None = None
        self._model = model

    def generate_batch(
        self,
        inputs: Iterable[Prompt],
        generation_config: Any = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_return_sequences: int | None = None,
        max_new_tokens: int | Sequence[int] | None = None,
        progress_bar: bool | None = False,
        record_timestamps: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        warmup: bool = False,
        prompt_logprobs: int | None = None,
    ) -> dict[str, GenerationOutput]:
        """Sample completions of many prompts together; prefill equal prompts once.

        Args:
            inputs: lists of token ids; with a tokenizer also strings, or chats (lists of messages).
                With a processor, chats may contain `{"type": "image", "image": ...}` parts, and
                an input may be `{"prompt": token ids or text, "images": [...]}`.
            generation_config: defaults of this call; None: the generator's.
            sampling_params: one for all inputs, or one per input; None: the generation config's.
            num_return_sequences: completions per input; None: the generation config's, else 1.
                Greedy completions of one input are equal, and cause a warning.
            max_new_tokens: one for all inputs, or one per input; overrides `sampling_params` and
                `generation_config`.
            progress_bar: draw a bar; None: in a terminal or a notebook, and erase it at the end.
            record_timestamps: record the time at which each token was sampled.
            on_error: "raise", or "return" failed sequences with `status=FAILED`, including those
                of a refused input (too long, empty, not encodable).
            warmup: see `ContinuousBatchingManager.warmup`.
            prompt_logprobs: also score the prompts' tokens, at each input's temperature, and report
                this many of the likeliest tokens at each position, as `score` does; None: no
                scores.

        Returns:
            Outputs by request id, in the order of `inputs`; completions of one input are adjacent.

        Raises:
            InvalidRequestError: an input or a sampling parameter is refused; nothing was generated.
            ConfigurationError: the model cannot run prompts with images.
            IncompleteRolloutError: a sequence failed; its `.outputs` holds all outputs.
            EngineDeadError: the engine stopped on an exception.
        """
        with batches.broadcast_refusal(self._gathers_over):
            if prompt_logprobs is not None:
                self._require_top_k("prompt_logprobs", prompt_logprobs)
            self.manager.follow_generation_config()
            require_compiled_so(self.manager.config, generation_config)
            batch = batches.batch_arguments(
                inputs,
                generation_config,
                tokenizer=self.tokenizer,
                defaults=self.manager.defaults,
                engine=self.config,
                padding=self._padding(generation_config),
                own_generation_config=self.manager.generation_config,
                sampling_params=sampling_params,
                num_return_sequences=num_return_sequences,
                max_new_tokens=max_new_tokens,
                record_timestamps=record_timestamps,
                on_error=on_error,
            )
        with self.manager.durations.timed(ROLLOUT, policy_version=self.policy_version) as span:
            of_ranks, rank = batches.gathered(self._gathers_over, batch)
            with interrupts_deferred():
                requests, outputs = self._roll_out(of_ranks, rank, progress_bar, warmup)
            span.set(
                sequences=len(requests),
                prompt_tokens=sum(len(request.prompt_ids) for request in requests),
                generated_tokens=sum(request.num_generated for request in requests),
            )
            if on_error == "raise":
                cause = next((r.cause for r in requests if r.cause is not None), None)
                batches.require_finished(outputs, cause)
        if prompt_logprobs is not None:
            self._score_prompts(requests, outputs, prompt_logprobs)
        return outputs

    def _score_prompts(
        self, requests: Sequence[Request], outputs: Mapping[str, GenerationOutput], top_k: int
    ) -> None:
        """Write the log-probabilities of the prompts' tokens into their outputs."""
        # Sequences of a group have one prompt and adapter; a refused input has none.
        texts: dict[tuple[int | None, float], Text] = {}
        for request in requests:
            if request.prompt_ids and request.cause is None:
                temperature = 1.0 if request.params.is_greedy else request.params.temperature
                adapter = request.params.adapter
                text = Text(request.prompt_ids, request.images, temperature, adapter)
                texts[request.group, temperature] = text
        scored = dict(zip(texts, self._score(list(texts.values()), top_k), strict=True))
        for request in requests:
            output = outputs[request.request_id]
            text_scores = scored.get((request.group, output.temperature))
            if text_scores is not None:
                output.prompt_logprobs = list(text_scores.logprobs)
                output.prompt_top_logprobs = text_scores.top_logprobs

    def score(
        self,
        inputs: Iterable[Prompt],
        top_k: int = 0,
        *,
        temperature: float = 1.0,
        adapter: str | None = None,
    ) -> list[ScoredText]:
        """Return the log-probability of every token of the given texts.

        Scores with the rollout weights: after a weight change, call `sync_weights()` first. Texts
        are packed without padding, and shared prefixes are computed once. There are no gradients
        (for these see `packed_logprobs`) and no KV cache, so a generator that only scores can hold
        a frozen teacher. The first call compares packed texts with a plain forward; if the numbers
        differ, each text gets a forward of its own. Sequences in flight wait, and no other thread
        may run the model during the call.

        Args:
            inputs: texts, lists of token ids or chats, as for `generate_batch`. The tokenizer adds
                its special tokens; a chat is scored without a generation prompt.
            top_k: number of the likeliest tokens to report at each position; 0: none.
            temperature: divides the logits, above 0.
            adapter: name of the PEFT adapter that scores; None: the active adapters.

        Returns:
            One record for each input, in order.

        Raises:
            InvalidRequestError: an input, `top_k`, `temperature` or `adapter` is refused; nothing
                was scored.
            ConfigurationError: the model cannot run the adapter.
            RolloutError: `sleep(level=2)` released the weights, or another thread trains the model.
        """
        with batches.broadcast_refusal(self._gathers_over):
            self._require_top_k("top_k", top_k)
            if not (isinstance(temperature, Real) and 0 < float(temperature) < inf):
                raise InvalidRequestError(
                    f"temperature={temperature!r} is not a finite number above 0; the trainer's "
                    "loss divides by its own, and 1 is the model's distribution."
                )
            self.manager.input_processor.require_adapter(adapter)
            refuse_padding(inputs, self._padding(None))
            texts: list[Text] = []
            prompts = encoded(inputs, self.tokenizer, add_generation_prompt=False)
            for index, prompt in enumerate(prompts):
                token_ids, images = self.manager.input_processor.text(prompt, index)
                texts.append(Text(token_ids, images, float(temperature), adapter))
        self.manager.pauses.require_module()
        self.manager.check_adapters([adapter])
        return self._score(texts, top_k)

    def _score(self, texts: list[Text], top_k: int) -> list[ScoredText]:
        """Score the texts of all processes that share a copy; return this rank's."""
        of_ranks, rank = batches.gathered(self._gathers_over, texts)
        all_texts = list(chain.from_iterable(of_ranks))
        start = sum(len(of_rank) for of_rank in of_ranks[:rank])
        self.manager.pauses.require_weights()
        with self.manager.loop.paused(runs_module=True):
            policy_version = self.policy_version
            max_tokens = self.manager.memory_plan.max_batch_tokens
            scores = score_texts(self.manager.engine, all_texts, top_k=top_k, max_tokens=max_tokens)
        results: list[ScoredText] = []
        own_scores = scores[start : start + len(texts)]
        for text, of_text in zip(texts, own_scores, strict=True):
            result = ScoredText(
                token_ids=list(text.token_ids),
                logprobs=[None, *of_text.logprobs],
                top_logprobs=[None, *of_text.top_logprobs] if top_k else None,
                policy_version=policy_version,
            )
            results.append(result)
        return results

    def _require_top_k(self, name: str, top_k: Any) -> None:
        """Raise `InvalidRequestError` unless `top_k` is a valid number of tokens per position."""
        vocab_size = self.manager.input_processor.limits.vocab_size()
        is_number = isinstance(top_k, int) and not isinstance(top_k, bool)
        if not is_number or not 0 <= top_k <= vocab_size:
            raise InvalidRequestError(
                f"{name}={top_k!r} is not a whole number from 0 to {vocab_size}, the size of the "
                "model's vocabulary."
            )

    def _padding(self, generation_config: Any) -> Padding | None:
        """Return a tokenizer's padding; None if it is unknown."""
        own = (
            generation_config_of(self.manager.engine.training_model.module),
            self.manager.model.config,
        )
        return padding_of(generation_config, self.tokenizer, *own)

    def _roll_out(
        self,
        of_ranks: Sequence[BatchArguments | None],
        rank: int,
        progress_bar: bool | None = False,
        warmup: bool = False,
    ) -> tuple[list[Request], dict[str, GenerationOutput]]:
        """Run the batches of all processes that share a copy; return this rank's outputs."""
        created = batches.create_requests(self.manager, of_ranks, self._gathers_over)
        served = batches.unfinished([created[rank]])
        self.wake()
        if warmup:
            self.manager.warmup()
        self.manager.start()
        watched = nullcontext() if self._watch is None else self._watch.watched()
        with watched, measured(self.manager) as metrics:
            finished = _run(self.manager, batches.unfinished(created), progress_bar)
        if self._first_rollout.is_wrong(served):
            return self._roll_out(of_ranks, rank, progress_bar)
        self._last_metrics = metrics
        if of_ranks[rank] is not None:
            self._last_rollout = served
        return created[rank], batches.outputs_of(created[rank], finished)

    def join(self) -> None:
        """Take part in the rollouts of the other processes until all have called this.

        Needed if processes share a copy (`tensor_parallel_size`): call it on every process after
        conversations, because processes may have different numbers of turns. `attach` does this.
        """
        if self._gathers_over is None:
            return
        while True:
            of_ranks, rank = batches.gathered(self._gathers_over, None)
            if not any(of_ranks):
                return
            self._roll_out(of_ranks, rank)

    @property
    def is_joint(self) -> bool:
        """True if other processes must roll out whenever this one does."""
        return self._gathers_over is not None

    @property
    def policy_version(self) -> int:
        return self.manager.policy_version

    @property
    def paths(self) -> list[ExecutionPath]:
        """Return how each part of a rollout runs now, and what was proved about it.

        Each record has the name of the `part`, how it `runs`, the `obstacle` to a faster path, and
        the `proof`: the result of its trial in a child process, its date, and whether it was
        stored.
        """
        return self.manager.paths

    def follow(self, model: torch.nn.Module) -> None:
        """Use this model as the source of weights, for example after it was wrapped again.

        Raises:
            ConfigurationError: the model's own forward and that of the generating module differ.
            WeightSyncError: the weights are shared, and the wrapper contains another model.
        """
        self._weights.follow(model)
        self.manager.engine.training_model.follow(self._weights.trained)

    def is_of(self, model: torch.nn.Module) -> bool:
        """Return whether this generator uses the module inside `model`, or a copy of it."""
        return self._weights.is_of(model)

    def set_generation_config(self, generation_config: Any) -> None:
        """Set the defaults of all requests from now on.

        Raises:
            ConfigurationError: a setting of the config cannot be honoured.
        """
        self.manager.set_generation_config(generation_config)

    def sync_weights(
        self, in_flight: Literal["keep", "recompute", "abort"] = "recompute"
    ) -> SyncReport:
        """Generate with the model's new weights from now on, under a new policy version.

        Call it after every weight change. With a sharded model, call it on every process.

        Args:
            in_flight: what to do with unfinished sequences; see `ContinuousBatchingManager.pause`.

        Returns:
            The new policy version, the seconds of the sync, and the bytes copied.

        Raises:
            WeightSyncError: the model and its copy no longer have the same tensors.
        """
        started = time.perf_counter()
        with (
            interrupts_deferred(),
            self.manager.durations.timed(SYNC, in_flight=str(in_flight)) as span,
            self.manager.paused(in_flight),
        ):
            num_bytes = self._weights.sync()
            self.manager.pauses.release(PauseReason.WEIGHTS)
            self.manager.loop.begin_policy_version(InFlight(in_flight))
            if self.config.verify_weight_sync:
                require_equal(self._weights)
            span.set(policy_version=self.policy_version, bytes_copied=num_bytes)
        return SyncReport(self.policy_version, time.perf_counter() - started, num_bytes)

    @property
    def is_asleep(self) -> bool:
        return PauseReason.SLEEP in self.manager.pauses.reasons

    def sleep(self, level: int = 1, *, release_graphs: bool = False) -> None:
        """Release memory and pause the engine; unfinished sequences wait.

        Args:
            level: 1: release the KV memory. 2: also release CUDA graphs and the weights of a copy.
                The next `sync_weights()` allocates and writes these weights; until then, `wake()`
                and rollouts raise `RolloutError`.
            release_graphs: release CUDA graphs too; `wake()` takes seconds to capture them again.

        Raises:
            ConfigurationError: `level` is neither 1 nor 2, or is 2 without a copy of the weights.
        """
        if isinstance(level, bool) or level not in (1, 2):
            raise ConfigurationError(f"level={level!r} of sleep() is not 1 or 2.")
        if level == 1 and self.is_asleep:
            return
        with (
            interrupts_deferred(),
            self.manager.durations.timed(SLEEP, level=level),
            self.manager.loop.paused(),
        ):
            if level == 2:
                self._weights.release()
                self.manager.pauses.hold(PauseReason.WEIGHTS)
            self.manager.sleep(release_graphs or level == 2)

    def wake(self) -> None:
        """Resume the engine after `sleep()` or `lend_to_trainer()`; its next step allocates memory.

        Raises:
            RolloutError: `sleep(level=2)` released the weights; call `sync_weights()` first.
        """
        with interrupts_deferred():
            self.manager.wake()

    def lend_to_trainer(self) -> None:
        """Hold the engine until `wake()` or the next rollout, if it runs the training module.

        `attach` calls this for its trainer, and `generate_batch` if the module is in training mode.
        """
        with interrupts_deferred():
            self.manager.lend_to_trainer()

    def memory_plan(self) -> MemoryPlan:
        """Return the size of the KV cache in blocks and bytes, and how it was computed."""
        return self.manager.memory_plan

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last rollout and of the engine now, by name."""
        return self._last_metrics | status_metrics(self.manager.status())

    def record(
        self,
        outputs: Iterable[GenerationOutput] | Mapping[str, GenerationOutput],
        rewards: Any = None,
        advantages: Any = None,
        trainer_logprobs: Any = None,
        *,
        completion_mask: Any = None,
        step: int | None = None,
        mode: Literal["train", "eval"] = "train",
        output_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Record a step of your own loop, as `attach` records a trainer's.

        Writes the step's metrics and its first `record_num_sequences` sequences, token by token, to
        `<output_dir>/cb_rollout/`, where `cb-rollout report`, `watch` and `audit` read them. If
        this process has a wandb run, its next row gets the table "rollout/tokens" and histograms of
        log-probabilities, drift and importance sampling ratios. Metrics named "rollout/..." are
        those of the last rollout. In a process group, every process must call this with its own
        outputs; each is recorded once, and the first process writes.

        Args:
            outputs: outputs of `generate_batch` that the step trains on. Consecutive outputs with
                the same prompt and the same images form a group, over all calls of a step.
            rewards: one number per output, (B,) or a list; None in a list means no reward.
            advantages: in the same form as `rewards`.
            trainer_logprobs: natural logarithms of the generated tokens from the loss's forward,
                under the weights before the update: a 1-d float tensor per output, as
                `packed_logprobs` returns, or a tensor (B, T) with `completion_mask`.
            completion_mask: (B, T), bool or 0 and 1: the columns of `trainer_logprobs` that are
                generated tokens. None: all columns; outputs must then have equal lengths.
            step: number of the optimizer step, from 1. Calls with the same number add up. A number
                below the last one begins a new run, as does a first number above 1 in a resumed
                loop; it continues the last run that reached the step before. None: the last number
                plus 1, or in evaluation the last number.
            mode: "eval" for outputs that you do not train on.
            output_dir: parent of the run's directory. None: as in the last call, else
                "trainer_output".

        Raises:
            InvalidRequestError: an output failed, has not ended, or has no log-probabilities; a
                list has too few or too many numbers; a number is not finite or is not a
                log-probability; a padded tensor has no mask; or processes record different
                steps. In each case, no process records anything.
        """
        arguments = {
            "outputs": outputs,
            "rewards": rewards,
            "advantages": advantages,
            "trainer_logprobs": trainer_logprobs,
            "completion_mask": completion_mask,
        }
        self._loop_records().record(
            arguments,
            self.tokenizer,
            step=step,
            mode=mode,
            output_dir=output_dir,
            last_rollout=self._last_metrics,
            status=status_metrics(self.manager.status()),
        )

    def _loop_records(self) -> "LoopRecords":
        """Return the recorder of this loop's steps; its module loads at the first step."""
        if self._records is None:
            from cb_rollout.rollout.recording.loop import LoopRecords
            from cb_rollout.rollout.recording.run_settings import engine_sections

            self._records = LoopRecords(
                self.manager.durations,
                self.config.record_num_sequences,
                is_duplicate=self._is_duplicate,
                describe_run=partial(engine_sections, self._model, self.config),
            )
        return self._records

    def verify(self, num_sequences: int) -> DriftReport:
        """Recompute log-probabilities of the last rollout with plain forwards, and compare.

        Sequences of an older policy version are skipped. With `logprobs_mode="processed"`,
        sequences that were sampled from changed logits are skipped too.

        Args:
            num_sequences: sequences to recompute, at least 1, evenly chosen from the rollout.

        Returns:
            The largest and the mean difference in nats, and estimates of the KL divergence.

        Raises:
            InvalidRequestError: no sequence can be compared: nothing was generated since the last
                `sync_weights()`, or all sequences are skipped.
        """
        is_collective = self._weights.is_collective
        return rollout_drift(self.manager, self._last_rollout, num_sequences, is_collective)

    def stale_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights of the copy that generates, by name, if a sync would change any.

        Empty if a sync would change none, or if one process cannot compare the shards.
        """
        return self._weights.stale_weights()

    def serve(self, **options: Any) -> "ServerHandle":
        """Serve the current policy to OpenAI clients, in a thread of this process.

        Requests share the engine with `generate_batch`, and continue through `sync_weights()`.
        If the engine runs a module in training mode, it is held from the end of a rollout until the
        next rollout or `wake()`. At other times, change shared weights only inside
        `manager.pause()`.

        Args:
            options: fields of `cb_rollout.server.ServerOptions`, such as `host`, `port`, `api_key`.

        Returns:
            The server, with the `base_url` for its clients. It runs until you close it or the
            generator.

        Raises:
            ConfigurationError: an option is invalid, the generator has no tokenizer, or the
                address cannot be bound.
        """
        from cb_rollout.server import ServerOptions, start_server

        if self.manager.group is not None:
            raise refused("served, tensor parallel")
        trained, settings = self._weights.trained, ServerOptions(**options)
        server = start_server(self.manager, self.tokenizer, settings, trained, self.sync_weights)
        self._servers = [s for s in self._servers if s.is_running()] + [server]
        return server

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to sample as this run would have.

        It holds the random state, the policy version, unfinished sequences with their tokens,
        log-probabilities and versions, and outputs that nobody has read. Save the model's weights
        separately. The state has only numbers, text, lists, dicts and tensors: write it with
        `torch.save` and read it with `torch.load(weights_only=True)`. Each process saves its own.

        Raises:
            RolloutError: an unfinished sequence is sampled under a grammar.
        """
        return self.manager.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; load the weights of that step into the model first.

        A copy of the weights is synced with the model. With a sharded model, call it on every
        process.

        Unfinished sequences continue with the random draws that they would have had; their keys are
        recomputed under the current weights. `manager.get_result()` returns them, and outputs that
        nobody had read. The policy version becomes the saved one, if that is higher.

        Raises:
            InvalidRequestError: the state is not from this version of cb_rollout.
            RolloutError: requests are in flight.
        """
        self.manager.load_state_dict(state, self._sync_stale_copy)

    def _sync_stale_copy(self) -> bool:
        """Write the model's present weights into a copy; return whether they may be others."""
        reasons = self.manager.pauses.reasons
        is_unknown = self._weights.is_collective or PauseReason.WEIGHTS in reasons
        if not is_unknown and not self._weights.differing():
            return False
        self._weights.sync()
        self.manager.pauses.release(PauseReason.WEIGHTS)
        return True

    def close(self) -> None:
        """Stop the servers and the background thread, and free the cache.

        The generator stays usable: the next `generate_batch` starts the thread and allocates the
        cache again.
        """
        while self._servers:
            self._servers.pop().close()
        with interrupts_deferred():
            self.manager.close()

    def __reduce__(self) -> NoReturn:
        raise RolloutError(
            "a RolloutGenerator owns a thread and a live model, so it cannot be pickled or copied; "
            "pickle its config and make a new generator from it."
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def measured(manager: Any) -> Iterator[dict[str, float]]:
    """Yield a dict that holds, after the block, the metrics of the engine's or pool's rollout."""
    before = manager.counters.copy()
    manager.counters.kv_blocks_peak = 0
    metrics: dict[str, float] = {}
    started = time.perf_counter()
    yield metrics
    seconds = time.perf_counter() - started
    metrics |= rollout_metrics(manager.counters.since(before), seconds)


def _run(
    manager: ContinuousBatchingManager, requests: list[Request], progress_bar: bool | None
) -> dict[str, GenerationOutput]:
    """Return the outputs by request id, in the order of `requests`; on an exception, abort all."""
    if not requests:
        return {}
    output_queue = OutputQueue()
    finished: dict[str, GenerationOutput] = {}
    manager.require_can_wait()
    with (
        ProgressBar(manager, requests, finished, progress_bar) as bar,
        interrupts_deferred() as interrupts,
    ):
        try:
            with manager.loop.stepping() as step_until:
                manager.submit(requests, output_queue)
                while len(finished) < len(requests):
                    interrupts.deliver()
                    refresh = time.monotonic() + PROGRESS_SECONDS
                    if step_until is not None:
                        step_until(
                            lambda at=refresh: output_queue.can_take or time.monotonic() > at,
                            PROGRESS_SECONDS,
                        )
                    output = output_queue.take(timeout=0.0 if step_until else PROGRESS_SECONDS)
                    if output is not None:
                        finished[output.request_id] = output
                        bar.update(1)
                    else:
                        bar.refresh()
        except BaseException:
            # The abort restores the model's training flags before the caller gets the exception.
            manager.loop.abort([request.request_id for request in requests])
            raise
        finally:
            manager.lend_to_trainer(in_training_only=True)
    return {request.request_id: finished[request.request_id] for request in requests}


def generate_batch(
    model: torch.nn.Module,
    inputs: Sequence[Prompt],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool | None = True,
    persistent_manager: bool = False,
    warmup: bool = False,
    tokenizer: Any = None,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Sample completions of many prompts together, in one call.

    Args:
        model: see `RolloutGenerator`.
        inputs: see `RolloutGenerator.generate_batch`, also for the arguments below.
        generation_config: defaults of this call; None: the model's own.
        continuous_batching_config: a `RolloutConfig`, or transformers' own; None: the settings in
            `generation_config`. Engine settings there apply where this argument has its default.
        record_timestamps: record the time at which each token was sampled.
        progress_bar: draw a bar; None: in a terminal or a notebook, and erase it at the end.
        persistent_manager: keep the engine for the next call on this model. That call syncs the
            weights, and reuses no keys of this call.
        warmup: see `ContinuousBatchingManager.warmup`.
        tokenizer: required for strings, chats and stop strings; pass a processor for images.
        kwargs: further arguments of `RolloutGenerator.generate_batch`.

    Returns:
        Outputs by request id, in the order of `inputs`.

    Raises:
        ConfigurationError: `kwargs` has an unknown name.
    """
    require_batch_arguments(kwargs)
    generation_config_held = _generation_config_of(model, generation_config)
    resolved = as_rollout_config(continuous_batching_config, generation_config_held)
    config = with_compile_settings(resolved, generation_config)
    with generator_of_call(model, config, tokenizer, persistent_manager) as generator:
        return generator.generate_batch(
            inputs,
            generation_config,
            record_timestamps=record_timestamps,
            progress_bar=progress_bar,
            warmup=warmup,
            **kwargs,
        )


def require_batch_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError` for an unknown keyword of `RolloutGenerator.generate_batch`."""
    known = list(inspect.signature(RolloutGenerator.generate_batch).parameters)[3:]
    require_arguments(arguments, known, "generate_batch", ConfigurationError)


def _generation_config_of(model: Any, given: Any) -> Any:
    """Return a call's generation config, else the model's; None if neither exists."""
    return generation_config_of(model) if given is None else given


def generator_of_call(
    model: torch.nn.Module, config: RolloutConfig, tokenizer: Any, is_persistent: bool
) -> AbstractContextManager[RolloutGenerator]:
    """Return the generator of one call: kept on the model, or closed at the end of the block."""
    if is_persistent:
        return nullcontext(_kept_generator(model, config, tokenizer))
    return RolloutGenerator(model, config, tokenizer=tokenizer)


def _kept_generator(
    model: torch.nn.Module, config: RolloutConfig, tokenizer: Any
) -> RolloutGenerator:
    """Return the generator kept on the model, or keep a new one.

    A kept generator is reused if its settings are equal, and if the wrapper still contains the same
    module. It gets the model's current generation config.
    """
    kept = kept_by(model).generator
    if kept is not None:
        has_settings = kept.config == config and kept.tokenizer is tokenizer
        if has_settings and kept.is_of(model):
            kept.set_generation_config(generation_config_of(model))
            kept.sync_weights()
            return kept
        kept.close()
    generator = RolloutGenerator(model, config, tokenizer=tokenizer)
    keep_generator(model, generator)
    return generator
