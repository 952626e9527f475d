"""LoRA adapters of many clients on one base model: their training, and sampling with any of them.

Owns the model, one generator over it, and each adapter's optimizer. The active adapter is not used:
every sample and every loss names its adapter, so samples of several adapters can share a batch.
Called by one thread.

N: tokens of a datum.
"""

import math
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from cb_rollout.compat.transformers import unwrap
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError, InvalidRequestError
from cb_rollout.packing.logprobs import score_rows
from cb_rollout.packing.rows import PackedRow, with_rope_sides
from cb_rollout.rollout.generator import RolloutGenerator
from cb_rollout.server.tinker.losses import LOSSES, checked_loss
from cb_rollout.server.tinker.wire import Datum
from cb_rollout.types import GenerationOutput, ScoredText
from cb_rollout.weights.adapters import (
    adapter_weights,
    add_lora,
    with_identity_adapter,
    write_adapter_weights,
)

# The API has no setting for alpha; Tinker's own service trains with this value.
LORA_ALPHA = 32

# An adapter that changes nothing: the base model as a policy.
BASE = "base"

# An adapter of this rank is as large as a layer; a larger one would be a mistake, or an attack.
MAX_RANK = 1024

# Maximum number of sampling adapters in memory; others are read again from their checkpoints.
MAX_SAMPLERS = 8

# Maximum number of tokens whose activations exist at a time, unless one datum is longer.
MAX_BACKWARD_TOKENS = 8192

_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)

State = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The adapter that a client requests."""

    rank: int = 32
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """One step of AdamW, with the client's defaults."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    """Decay rate of the running mean of gradients."""
    beta2: float = 0.95
    """Decay rate of the running mean of squared gradients."""
    eps: float = 1e-12
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_norm: float = 0.0
    """Maximum norm, to which larger gradients are scaled down; 0: no limit."""

    def check(self) -> None:
        """Raise `InvalidRequestError` for a setting that would make the weights invalid."""
        ranges = {
            "learning_rate": ("at least 0", self.learning_rate >= 0),
            "beta1": ("in [0, 1)", 0 <= self.beta1 < 1),
            "beta2": ("in [0, 1)", 0 <= self.beta2 < 1),
            # At 0 a weight without a gradient would become 0 / 0.
            "eps": ("above 0", self.eps > 0),
            "weight_decay": ("at least 0", self.weight_decay >= 0),
            "max_norm": ("at least 0", self.max_norm >= 0),
        }
        for name, (wanted, is_held) in ranges.items():
            value = getattr(self, name)
            if not is_held or not math.isfinite(value):
                client_name = "grad_clip_norm" if name == "max_norm" else name
                raise InvalidRequestError(
                    f"{client_name}={value} is no setting of Adam; send a finite number {wanted}."
                )


@dataclass(slots=True)
class _Policy:
    """A client's adapter in training."""

    lora: LoraSettings
    parameters: list[torch.nn.Parameter]
    optimizer: torch.optim.AdamW | None = None
    """None before the first step."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request for completions of one prompt."""

    prompt_ids: list[int]
    params: SamplingParams
    num_samples: int
    prompt_top_k: int | None = None
    """Number of likeliest tokens per prompt position; None: no prompt scores requested."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Completions of one prompt, and its scores."""

    outputs: list[GenerationOutput]
    scores: ScoredText | None


@dataclass(frozen=True, slots=True)
class LossResult:
    """A loss's outputs for each datum, and its sum over all data."""

    outputs: list[dict[str, torch.Tensor]]
    total: float


@dataclass(slots=True)
class Checkpoint:
    """The saved state of an adapter."""

    lora: LoraSettings
    weights: State
    optimizer: dict[str, Any] | None = field(default=None)
    """None: the weights are only for sampling, or no step was taken yet."""


class Policies:
    """Adapters of one base model, by name."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, config: RolloutConfig | None = None
    ) -> None:
        """Wrap a whole causal language model of transformers, and make its generator.

        Raises:
            ConfigurationError: the model is not supported, or has no linear layer.
        """
        model.eval().requires_grad_(False)
        self._layers = _linear_layers(model)
        every = [name for names in self._layers.values() for name in names]
        if not every:
            raise ConfigurationError(
                f"{type(model).__name__} has no torch.nn.Linear, which LoRA adapts; serve a model "
                "that is neither quantised nor made of other layers."
            )
        self.model = with_identity_adapter(model, every[0], BASE)
        self.generator = RolloutGenerator(self.model, config, tokenizer=tokenizer)
        # True if weights were written since the last sync.
        self._is_written = False
        self._policies: dict[str, _Policy] = {}
        self._samplers: OrderedDict[str, None] = OrderedDict()

    def create(self, name: str, lora: LoraSettings) -> None:
        """Add a client's adapter, which has no effect until it is trained.

        Raises:
            InvalidRequestError: the rank is not in [1, `MAX_RANK`], or nothing is to be trained.
        """
        self._add(name, lora)
        parameters = self._parameters(name)
        for parameter in parameters:
            parameter.requires_grad_(True)
        self._policies[name] = _Policy(lora, parameters)

    def _add(self, name: str, lora: LoraSettings) -> None:
        targets: list[str] = []
        for kind, is_wanted in (
            ("attn", lora.train_attn),
            ("mlp", lora.train_mlp),
            ("unembed", lora.train_unembed),
        ):
            targets += self._layers[kind] if is_wanted else []
        if not 1 <= lora.rank <= MAX_RANK or not targets:
            raise InvalidRequestError(
                f"lora_config has rank={lora.rank} for {len(targets)} layers; ask for a rank of 1 "
                f"to {MAX_RANK}, and for one of train_attn, train_mlp and train_unembed."
            )
        with torch.random.fork_rng():
            if lora.seed is not None:
                torch.manual_seed(lora.seed)
            add_lora(self.model, name, rank=lora.rank, alpha=LORA_ALPHA, layers=targets)
        self.model.eval()
        for parameter in self._parameters(name):
            parameter.requires_grad_(False)

    def remove(self, name: str) -> None:
        """Forget a client's adapter."""
        del self._policies[name]
        self.model.delete_adapter(name)

    def _parameters(self, name: str) -> list[torch.nn.Parameter]:
        mark = f".{name}."
        named = self.model.named_parameters()
        return [parameter for key, parameter in named if mark in f"{key}."]

    def forward_backward(
        self,
        name: str,
        data: Sequence[Datum],
        loss: str,
        settings: Mapping[str, Any],
        *,
        is_forward_only: bool,
    ) -> LossResult:
        """Compute a loss, and add its gradients to those of a client's adapter.

        Args:
            name: name of the adapter.
            data: sequences, whose losses are summed.
            loss: name of the loss.
            settings: settings of the loss.
            is_forward_only: compute no gradients.

        Raises:
            InvalidRequestError: a datum or a setting does not fit the loss, or the loss is not
                finite; no gradient was added.
        """
        for index, datum in enumerate(data):
            checked_loss(loss, settings, datum.inputs, len(datum.token_ids), index)
            self._check(datum, index)
        self.generator.manager.lend_to_trainer()
        outputs: list[dict[str, torch.Tensor]] = []
        total = 0.0
        with self._gradients_unless_failed(name), torch.set_grad_enabled(not is_forward_only):
            for part in _parts(data):
                losses = self._losses(name, part, loss, settings, outputs)
                if not is_forward_only:
                    losses.sum().backward()
                total += float(losses.detach().sum())
        return LossResult(outputs, total)

    @contextmanager
    def _gradients_unless_failed(self, name: str) -> Iterator[None]:
        """Restore an adapter's gradients if the block fails, so a request adds all or nothing."""
        parameters = self._parameters(name)
        before = [None if p.grad is None else p.grad.clone() for p in parameters]
        try:
            yield
        except BaseException:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
            raise

    def _losses(
        self,
        name: str,
        data: Sequence[Datum],
        loss: str,
        settings: Mapping[str, Any],
        outputs: list[dict[str, torch.Tensor]],
    ) -> torch.Tensor:
        """Return the loss of each datum, with gradients, and append its result for the client.

        Args:
            name: name of the adapter.
            data: sequences whose activations fit into memory together.
            loss: name of the loss.
            settings: settings of the loss.
            outputs: results of the data so far, which this call extends.

        Raises:
            InvalidRequestError: a loss is not finite.
        """
        device = next(self.model.parameters()).device
        losses: list[torch.Tensor] = []
        for datum, logprobs_N in zip(data, self._logprobs(name, data), strict=True):
            inputs = {key: value.to(device) for key, value in datum.inputs.items()}
            losses_N = LOSSES[loss][0](logprobs_N, inputs, settings)
            if not losses_N.isfinite().all():
                raise InvalidRequestError(
                    f"the loss of datum {len(outputs)} is not finite: its numbers are too large, "
                    "or the adapter's weights are no longer finite. No gradient was added."
                )
            losses.append(losses_N.sum())
            outputs.append({"logprobs": logprobs_N.detach(), "elementwise_loss": losses_N.detach()})
        return torch.stack(losses)

    def _check(self, datum: Datum, index: int) -> None:
        """Raise `InvalidRequestError` unless a forward can run on a datum's tokens."""
        limits = self.generator.manager.limits
        targets = datum.inputs.get("target_tokens", torch.zeros(0, dtype=torch.int64)).tolist()
        if not datum.token_ids:
            raise InvalidRequestError(f"datum {index} has no token.")
        for token in (*datum.token_ids, *targets):
            if not 0 <= token < limits.vocab_size():
                raise InvalidRequestError(
                    f"datum {index} holds token id {token}, outside the model's vocabulary of "
                    f"{limits.vocab_size()}."
                )
        longest = limits.max_positions
        if longest is not None and len(datum.token_ids) > longest:
            raise InvalidRequestError(
                f"datum {index} has {len(datum.token_ids)} tokens, and the model takes {longest}."
            )

    def _logprobs(self, name: str, data: Sequence[Datum]) -> list[torch.Tensor]:
        """Return the log-probabilities of the targets of each datum, (N,), with gradients.

        Args:
            name: the adapter's name; only this adapter gets gradients.
            data: sequences to score.
        """
        rows: list[PackedRow] = []
        for datum in data:
            targets = datum.inputs["target_tokens"].tolist()
            # Clients may fill the targets of a prompt with any tokens: the model runs on the input.
            row = PackedRow(
                prompt_ids=datum.token_ids[:1],
                completion_ids=[*datum.token_ids[1:], targets[-1]],
                labels=targets,
            )
            rows.append(row)
        scored = score_rows(self.model, with_rope_sides(unwrap(self.model), rows), name)
        return [scored[index] for index in range(len(data))]

    def step(self, name: str, adam: AdamSettings) -> dict[str, float]:
        """Take a step of AdamW with the gradients so far, and clear them.

        Args:
            name: name of a client's adapter.
            adam: settings of this step.

        Returns:
            The norm of the gradients, before they were scaled.

        Raises:
            InvalidRequestError: a setting is out of its range, or the gradients are not finite and
                were cleared; no step was taken.
        """
        adam.check()
        policy = self._policies[name]
        self.generator.manager.lend_to_trainer()
        # AdamW skips a parameter without a gradient, but a step without data must apply momentum.
        for parameter in policy.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        limit = adam.max_norm if adam.max_norm > 0 else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters, limit)
        if not norm.isfinite():
            for parameter in policy.parameters:
                parameter.grad = None
            raise InvalidRequestError(
                f"the gradients have a norm of {float(norm)}, so no step was taken, and they are "
                "forgotten; lower the advantages or the learning rate."
            )
        if policy.optimizer is None:
            policy.optimizer = torch.optim.AdamW(policy.parameters)
        for group in policy.optimizer.param_groups:
            group["lr"] = adam.learning_rate
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay
        policy.optimizer.step()
        policy.optimizer.zero_grad()
        self._is_written = True
        return {"grad_norm:mean": float(norm)}

    def checkpoint(self, name: str, *, with_optimizer: bool) -> Checkpoint:
        """Return a copy of a client's adapter, and of its optimizer's state."""
        policy = self._policies[name]
        weights = adapter_weights(self.model, name)
        optimizer = None
        if with_optimizer and policy.optimizer is not None:
            optimizer = policy.optimizer.state_dict()
        return Checkpoint(policy.lora, weights, optimizer)

    def load(self, name: str, checkpoint: Checkpoint, *, with_optimizer: bool) -> None:
        """Replace a client's adapter with a saved adapter of the same shape.

        Raises:
            InvalidRequestError: the saved adapter has another rank, or other layers.
        """
        policy = self._policies[name]
        own, saved = policy.lora, checkpoint.lora
        if (own.rank, own.train_attn, own.train_mlp, own.train_unembed) != (
            saved.rank, saved.train_attn, saved.train_mlp, saved.train_unembed
        ):  # fmt: skip
            raise InvalidRequestError(
                f"the checkpoint is of {saved}, and this training client of {own}; create one from "
                "the checkpoint."
            )
        self._write(name, checkpoint.weights)
        for parameter in policy.parameters:
            parameter.grad = None
        policy.optimizer = None
        if with_optimizer and checkpoint.optimizer is not None:
            policy.optimizer = torch.optim.AdamW(policy.parameters)
            policy.optimizer.load_state_dict(checkpoint.optimizer)

    def _write(self, name: str, weights: State) -> None:
        self.generator.manager.lend_to_trainer()
        write_adapter_weights(self.model, name, weights)
        self._is_written = True

    def has_sampler(self, name: str) -> bool:
        """Return whether a sampling adapter is in memory; this counts as a use of it."""
        if name in self._samplers:
            self._samplers.move_to_end(name)
            return True
        return name == BASE

    def add_sampler(self, name: str, checkpoint: Checkpoint) -> None:
        """Load a saved adapter for sampling; if there is no room, evict the least recently used."""
        while len(self._samplers) >= MAX_SAMPLERS:
            oldest, _ = self._samplers.popitem(last=False)
            self.model.delete_adapter(oldest)
        self._add(name, checkpoint.lora)
        self._write(name, checkpoint.weights)
        self._samplers[name] = None

    def sample(self, requests: Sequence[tuple[str, SampleRequest]]) -> list[Samples]:
        """Complete prompts together, each with `BASE` or an adapter for sampling.

        Args:
            requests: for each prompt, the name of its adapter, and what to sample.

        Raises:
            InvalidRequestError: a request is refused; nothing was sampled.
        """
        if self._is_written:
            self.generator.sync_weights()
            self._is_written = False
        adapters = [None if name == BASE else name for name, _ in requests]
        wanted = [request for _, request in requests]
        scores: dict[int, ScoredText] = {}
        for index, request in enumerate(wanted):
            if request.prompt_top_k is not None:
                (scores[index],) = self.generator.score(
                    [request.prompt_ids], request.prompt_top_k, adapter=adapters[index]
                )
        outputs: dict[int, list[GenerationOutput]] = {}
        for num_samples in sorted({request.num_samples for request in wanted}):
            same = [i for i, request in enumerate(wanted) if request.num_samples == num_samples]
            params = [replace(wanted[i].params, adapter=adapters[i]) for i in same]
            batch = self.generator.generate_batch(
                [wanted[i].prompt_ids for i in same],
                sampling_params=params,
                num_return_sequences=num_samples,
            )
            delivered = iter(batch.values())
            for i in same:
                outputs[i] = [next(delivered) for _ in range(num_samples)]
        return [Samples(outputs[i], scores.get(i)) for i in range(len(requests))]

    def close(self) -> None:
        """End the generator."""
        self.generator.close()


def _linear_layers(model: torch.nn.Module) -> dict[str, list[str]]:
    """Return the names of a model's linear layers, grouped as attention, head and all others."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    layers: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
    for name, module in model.named_modules():
        if module is head:
            layers["unembed"].append(name)
        elif isinstance(module, torch.nn.Linear):
            layers["attn" if _ATTENTION.search(name) else "mlp"].append(name)
    return layers


def _parts(data: Sequence[Datum]) -> Iterable[list[Datum]]:
    """Yield the data in parts of at most `MAX_BACKWARD_TOKENS`; a longer datum is its own part."""
    part: list[Datum] = []
    num_tokens = 0
    for datum in data:
        if part and num_tokens + len(datum.token_ids) > MAX_BACKWARD_TOKENS:
            yield part
            part, num_tokens = [], 0
        part.append(datum)
        num_tokens += len(datum.token_ids)
    if part:
        yield part
