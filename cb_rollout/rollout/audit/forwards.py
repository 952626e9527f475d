"""Run the trainer's model on recorded sequences, with one thing changed.

Owns the changes that a hypothesis may make. Parameters are passed to the forward, and never
written. Sequences run one at a time, without padding.

T: completion tokens, V: vocabulary.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import functional

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.fsdp import is_sharded
from cb_rollout.compat.moe import without_router_logits
from cb_rollout.compat.multimodal import image_argument_names, keeping_position_offsets
from cb_rollout.compat.rope import forget_longer_rows
from cb_rollout.compat.torch import compute_dtype
from cb_rollout.config.combinations import refused
from cb_rollout.engine.model.eval_mode import eval_mode
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.engine.model.routers import Routers, find_routers, joined_routes
from cb_rollout.errors import ConfigurationError, abbreviated
from cb_rollout.packing.batch import RowPiece, arguments_of_rows
from cb_rollout.packing.logprobs import rows_of_outputs
from cb_rollout.packing.rows import PackedRow
from cb_rollout.types import GenerationOutput

Weights = Mapping[str, torch.Tensor]
"""Tensors by name, which replace the transformers model's own tensors of these names."""

# Prefixes of names in the state dicts of wrappers.
WRAPPERS = re.compile(r"^(?:_orig_mod\.|module\.|base_model\.model\.)+")
ADAPTER_NAME = re.compile(r"(lora_(?:embedding_)?[AB])\.default")


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between a forward and the trainer's own."""

    weights: Weights = field(default_factory=dict)
    rows: Sequence[PackedRow] | None = None
    """Rows that the engine read instead, with other tokens, images or positions; None: as
    recorded."""
    cached_weights: Weights | None = None
    """Weights that computed the keys of the first tokens; None: none are cached."""
    num_cached: Sequence[int] = ()
    """Number of tokens of each sequence with these keys: fewer than prompt and completion have.
    A number that would cut an image is lowered."""
    head_dtype: torch.dtype | None = None
    """Dtype in which the head is computed; None: the model's own."""
    replays_routes: bool = False
    longest: int = 0
    """Length of another sequence in the batch, by which RoPE is scaled; 0: there is none."""


class Forwards:
    """Forwards of a model over recorded sequences."""

    def __init__(self, model: torch.nn.Module, outputs: Sequence[GenerationOutput]) -> None:
        facts = ModelFacts.of(model)
        self.inner = facts.module
        hf_compat.refuse_what_cannot_generate(self.inner)
        hf_compat.refuse_sharded(self.inner)
        if is_sharded(self.inner):
            raise ConfigurationError(
                "audit needs a model whose parameters are not sharded; under FSDP or ZeRO-3, save "
                "a checkpoint and run cb-rollout audit on it."
            )
        if any(output.adapter is not None for output in outputs):
            raise refused("audit, adapter named")
        self.rows = rows_of_outputs(self.inner, outputs)
        self.device = next(self.inner.parameters()).device
        self.argument_names = facts.argument_names
        self.image_names = image_argument_names(self.inner)

    @cached_property
    def _routers(self) -> Routers:
        def logits(ids: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=ids, use_cache=False).logits

        return find_routers(self.inner, logits)

    def compute_dtype(self) -> torch.dtype:
        """Return the dtype that forwards round to here, autocast included."""
        if torch.is_autocast_enabled(self.device.type):
            return torch.get_autocast_dtype(self.device.type)
        return compute_dtype(self.inner)

    @torch.no_grad()
    def logits(self, number: int, change: Change) -> torch.Tensor:
        """Return the logits of the completion tokens of a row, `[T, V]`, float32."""
        row = (change.rows or self.rows)[number]
        # No logits follow the last token.
        ids = [*row.prompt_ids, *row.completion_ids[:-1]]
        ids_1S = torch.tensor([ids], device=self.device)
        T = len(row.completion_ids)
        S = len(ids)
        settings: dict[str, Any] = without_router_logits(self.inner)
        forget_longer_rows(self.inner)
        if change.longest:
            ids_1S = ids_1S.expand(2, -1)
            positions_2S = torch.arange(S, device=self.device).repeat(2, 1)
            positions_2S[1, -1] = change.longest - 1
            settings["position_ids"] = positions_2S
        if change.rows is not None or change.longest:
            # Padding is attended to, like any other token.
            settings["attention_mask"] = torch.ones_like(ids_1S)
        with ExitStack() as stack:
            stack.enter_context(eval_mode(self.inner))
            stack.enter_context(keeping_position_offsets(self.inner))
            if change.head_dtype is not None:
                self._replace_head(stack, change.head_dtype)
            if change.replays_routes:
                routes_NLK = joined_routes([(row.routes, 0, S)], self.device)
                stack.enter_context(self._routers.replaying(self.inner, routes_NLK))
            if change.cached_weights is not None:
                return self._with_old_keys(ids_1S, number, change, settings)[-T:].float()
            if "logits_to_keep" in self.argument_names:
                settings["logits_to_keep"] = T
            settings["use_cache"] = False
            settings |= self._arguments_of(row, 0, S)
            output = self._call(change.weights, ids_1S, **settings)
            return output.logits[0][-T:].float()

    def _arguments_of(self, row: PackedRow, start: int, stop: int) -> dict[str, torch.Tensor]:
        """Return a row's positions and images, if it has any, as arguments of a forward."""
        arguments = arguments_of_rows([RowPiece(row, start, stop)], self.image_names, dim=1)
        if not arguments:
            return {}
        # Without a mask, a jump of positions would begin another packed row.
        mask_1S = torch.ones(1, stop, dtype=torch.int64, device=self.device)
        return {"attention_mask": mask_1S, **arguments}

    def _call(self, weights: Weights, ids_1S: torch.Tensor, **settings: Any) -> Any:
        return functional_call(self.inner, dict(weights), (), {"input_ids": ids_1S, **settings})

    def _with_old_keys(
        self, ids_1S: torch.Tensor, number: int, change: Change, settings: dict[str, Any]
    ) -> torch.Tensor:
        """Return logits, `[S, V]`: the cached tokens' from the old weights, then the rest."""
        row = self.rows[number]
        S = ids_1S.shape[1]
        num_cached = row.num_shareable(change.num_cached[number])
        pieces = [(change.cached_weights, 0, num_cached), (change.weights, num_cached, S)]
        cache = None
        logits: list[torch.Tensor] = []
        for weights, start, stop in pieces:
            if start >= stop:
                continue
            arguments = {**settings, "past_key_values": cache, "use_cache": True}
            arguments |= self._arguments_of(row, start, stop)
            output = self._call(weights or {}, ids_1S[:, start:stop], **arguments)
            logits.append(output.logits[0])
            cache = output.past_key_values
        return torch.cat(logits)

    def _replace_head(self, stack: ExitStack, dtype: torch.dtype) -> None:
        head: Any = self.inner.get_output_embeddings()

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            bias = None if head.bias is None else head.bias.to(dtype)
            return functional.linear(hidden.to(dtype), head.weight.to(dtype), bias)

        stack.enter_context(hf_compat.replacing_forward(head, forward))

    def weights_of(self, version: Weights | Callable[[], Weights]) -> Weights:
        """Return a version's tensors by the names of the inner model.

        Raises `ConfigurationError` if a tensor has no place in the model, or there is no tensor.
        """
        state = version() if callable(version) else version
        targets = dict(self.inner.named_parameters()) | dict(self.inner.named_buffers())
        name_in_model = {_spelled(name): name for name in targets}
        weights: dict[str, torch.Tensor] = {}
        unknown: list[str] = []
        for name, tensor in state.items():
            target_name = name_in_model.get(_spelled(name))
            if target_name is not None and targets[target_name].shape == tensor.shape:
                weights[target_name] = tensor.detach().to(targets[target_name])
            elif not name.endswith("lm_head.weight"):
                # A tied head may be saved too; it follows the embedding.
                unknown.append(name)
        if not any("lora_" in name for name in state):
            # The state is that of a merged copy, or of a base model.
            weights |= without_adapters(self.inner)
        if unknown or not weights:
            raise ConfigurationError(
                f"a state dict in versions= has tensors that {type(self.inner).__name__} does not "
                f"have: {abbreviated(unknown) or 'none at all'}; pass a state dict of the model."
            )
        return weights


def without_adapters(model: torch.nn.Module) -> Weights:
    """Return tensors that disable the LoRA adapters: zeros for one factor of each product."""
    zeros: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name and "_B" in name:
            zeros[name] = torch.zeros_like(parameter)
    return zeros


def _spelled(name: str) -> str:
    """Return a tensor's canonical name, whichever parts wrappers or PEFT add or omit."""
    name = WRAPPERS.sub("", name).replace(".base_layer.", ".")
    return ADAPTER_NAME.sub(r"\1", name)
