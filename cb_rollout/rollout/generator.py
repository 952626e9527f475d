"""`RolloutGenerator`: where model, manager, policy version and trainer meet.

Owns the life of a rollout: prompts in, groups folded, outputs back in order, and what happens to
the cache when the weights change. Called from the training thread.
"""

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from cb_rollout.config.enums import InFlight
from cb_rollout.config.hf import as_rollout_config, from_generation_config
from cb_rollout.config.sampling import SamplingParams, resolved
from cb_rollout.engine.memory.plan import MemoryPlan
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.errors import ConfigurationError, IncompleteRolloutError, InvalidRequestError
from cb_rollout.metrics.registry import status_metrics
from cb_rollout.rollout.prompts import Prompt, encoded, one_per_input, require_tokenizer
from cb_rollout.rollout.run import run_rollout
from cb_rollout.rollout.verification import DriftReport, verified
from cb_rollout.types import GenerationOutput, RequestStatus, SyncReport
from cb_rollout.weights import create_weight_sync, require_equal

if TYPE_CHECKING:
    from cb_rollout.engine.request import Request
    from cb_rollout.server import ServerHandle


class RolloutGenerator:
    """Samples completions from a model that is being trained, with their log-probabilities."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: Any = None,
        *,
        tokenizer: Any = None,
        generation_config: Any = None,
        accelerator: Any = None,
        optimizer: torch.optim.Optimizer | str | None = None,
    ) -> None:
        """Probe the model and plan the memory.

        Args:
            model: a causal language model, plain or wrapped by PEFT, accelerate or torch.
            config: a `RolloutConfig`, or a transformers `ContinuousBatchingConfig`.
            tokenizer: allows prompts that are strings or chats, and stop strings.
            generation_config: defaults of every request; None: the model's own.
            accelerator: tells the rank, and the precision that the trainer's forward computes in.
            optimizer: what will step the model, or its name, from which the memory it will take is
                estimated. None: like Adam for a model in training mode, nothing for any other.

        Raises:
            ConfigurationError: a setting or the model cannot be honoured.
        """
        self.config = as_rollout_config(config)
        require_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self._generation_config = generation_config
        self._weights = create_weight_sync(model, self.config, accelerator)
        self.manager = ContinuousBatchingManager(
            self._weights.module,
            generation_config,
            self.config,
            autocast_dtype=self._weights.autocast_dtype,
            rank=0 if accelerator is None else accelerator.process_index,
            tokenizer=tokenizer,
            trained=self._weights.trained,
            optimizer=optimizer,
        )
        self._is_asleep = False
        self._servers: list[ServerHandle] = []
        self._last_rollout: list[Request] = []
        self._last_metrics: dict[str, float] = {}

    def generate_batch(
        self,
        inputs: Iterable[Prompt],
        generation_config: Any = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        num_return_sequences: int | None = None,
        max_new_tokens: int | Sequence[int] | None = None,
        progress_bar: bool = False,
        record_timestamps: bool = False,
        on_error: Literal["raise", "return"] = "raise",
    ) -> dict[str, GenerationOutput]:
        """Sample completions of many prompts together; equal prompts are computed once.

        Args:
            inputs: lists of token ids; with a tokenizer also strings, or chats (lists of messages).
            generation_config: defaults of this call; None: the generator's.
            sampling_params: one, or one per input; None: what the generation config says.
            num_return_sequences: completions of each input; None: the generation config's, else 1.
            max_new_tokens: one, or one per input; comes before what the others say.
            progress_bar: show sequences done and tokens per second.
            record_timestamps: note when each token was sampled.
            on_error: "raise", or "return" failed sequences with `status=FAILED`.

        Returns:
            Outputs by request id, in the order of `inputs`, the completions of one input adjacent.

        Raises:
            InvalidRequestError: an input could never be served; nothing was generated.
            IncompleteRolloutError: a sequence failed; the others are on its `.outputs`.
            EngineDeadError: the engine stopped on an exception.
        """
        if on_error not in ("raise", "return"):
            raise ConfigurationError(f"on_error={on_error!r} is neither 'raise' nor 'return'.")
        count = num_return_sequences
        if count is None:
            chosen = generation_config or self._generation_config
            count = getattr(chosen, "num_return_sequences", None)
        count = 1 if count is None else count
        if not isinstance(count, int) or count < 1:
            raise InvalidRequestError(f"num_return_sequences={count!r} is not a whole number >= 1.")
        prompts = encoded(inputs, self.tokenizer)
        params = self._params(len(prompts), generation_config, sampling_params, max_new_tokens)
        with self.manager.observers.span("rollout"):
            requests = self.manager.create_requests(
                [prompt for prompt in prompts for _ in range(count)],
                [wanted for wanted in params for _ in range(count)],
                members=[member for _ in prompts for member in range(count)],
                records_timestamps=record_timestamps,
            )
            self.wake()
            outputs, self._last_metrics = run_rollout(self.manager, requests, progress_bar)
            self._last_rollout = requests
        failed = [o for o in outputs.values() if o.status is not RequestStatus.FINISHED]
        if failed and on_error == "raise":
            raise IncompleteRolloutError(
                f"{len(failed)} of {len(outputs)} sequences could not be produced. The first, "
                f"{failed[0].request_id}: {failed[0].error or failed[0].status.value} "
                "(on_error='return' delivers the rest without raising.)",
                outputs,
            ) from next((r.cause for r in requests if r.cause is not None), None)
        return outputs

    def _params(
        self,
        num_inputs: int,
        generation_config: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        max_new_tokens: int | Sequence[int] | None,
    ) -> list[SamplingParams]:
        """How each input is sampled."""
        defaults = self.manager.defaults
        if generation_config is not None:
            defaults = from_generation_config(generation_config)
        many_params = one_per_input("sampling_params", sampling_params, num_inputs)
        many_lengths = one_per_input("max_new_tokens", max_new_tokens, num_inputs)
        return [
            resolved(params, defaults, length)
            for params, length in zip(many_params, many_lengths, strict=True)
        ]

    @property
    def policy_version(self) -> int:
        """The version that tokens are stamped with; 0 before the first sync."""
        return self.manager.policy_version

    def follow(self, model: torch.nn.Module) -> None:
        """The trainer has put the model into another wrapper since; sync from there."""
        self._weights.follow(model)
        self.manager.follow(self._weights.trained)

    def sync_weights(
        self, in_flight: Literal["keep", "recompute", "abort"] = "recompute"
    ) -> SyncReport:
        """The model's weights changed: every token from now on comes from the new ones.

        Every process of a sharded model calls it.

        Args:
            in_flight: what becomes of unfinished sequences; see `ContinuousBatchingManager.pause`.

        Raises:
            WeightSyncError: the model and its copy no longer have the same tensors.
        """
        started = time.perf_counter()
        with self.manager.observers.span("sync_weights"), self.manager.pause(in_flight):
            num_bytes = self._weights.sync()
            self.manager.begin_policy_version(InFlight(in_flight))
            if self.config.verify_weight_sync:
                require_equal(self._weights)
        return SyncReport(self.policy_version, time.perf_counter() - started, num_bytes)

    @property
    def is_asleep(self) -> bool:
        """Whether the KV memory was given back."""
        return self._is_asleep

    def sleep(self) -> None:
        """Give the KV memory back and hold the engine still; what is in flight waits."""
        if not self._is_asleep:
            with self.manager.observers.span("sleep"):
                self.manager.sleep()
            self._is_asleep = True

    def wake(self) -> None:
        """Let the engine run again; it takes the memory with the next step."""
        if self._is_asleep:
            self._is_asleep = False
            self.manager.wake()

    def memory_plan(self) -> MemoryPlan:
        """What the KV cache may take, and how that follows."""
        return self.manager.memory_plan

    def metrics(self) -> dict[str, float]:
        """Figures of the last rollout and of the engine now, by metric name."""
        return self._last_metrics | status_metrics(self.manager.status())

    def verify(self, num_sequences: int) -> DriftReport:
        """Recompute sequences of the last rollout with plain forwards, and compare.

        Takes sequences evenly over the rollout. Those whose log-probabilities are not the policy's
        (`logprobs_mode="processed"` where logits were changed) or whose weights have since changed
        are passed over.
        """
        is_collective = self._weights.is_collective
        return verified(self.manager, self._last_rollout, num_sequences, is_collective)

    def serve(self, **options: Any) -> "ServerHandle":
        """Let OpenAI clients talk to the policy as it is now, in this process.

        Requests share the engine with `generate_batch`, and go on through every `sync_weights()`.
        Weights that the engine shares with the trainer are to be changed inside `manager.pause()`.

        Args:
            **options: the fields of `cb_rollout.server.ServerOptions`: `host`, `port`, `api_key`...

        Returns:
            The server, with its `url`; it ends with its `close()`, or the generator's.

        Raises:
            ConfigurationError: an option, no tokenizer, or an address that cannot be bound.
        """
        from cb_rollout.server import ServerOptions, start_server

        server = start_server(self.manager, self.tokenizer, ServerOptions(**options))
        self._servers.append(server)
        return server

    def close(self) -> None:
        """End servers and the background thread, free the cache; generating starts it anew."""
        while self._servers:
            self._servers.pop().close()
        self.manager.close()
        self._is_asleep = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
