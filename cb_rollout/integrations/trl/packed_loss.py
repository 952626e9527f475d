"""Compute the trainer's log-probabilities and entropies over packed batches.

Replaces TRL 1.16's forward of the padded batch in the loss and in scoring, for the policy and the
reference. The loss itself is TRL's, computed from the same (B, T) tensors. Called by the trainer,
on its thread; with several processes all of them call it together.

B: rows of a batch, T: tokens of a completion, K: scored tokens, R: completion tokens of all rows.
"""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.accelerate import shards_models
from cb_rollout.compat.module_state import forward_identity, with_moved_adapters
from cb_rollout.compat.multimodal import image_argument_names, is_processor
from cb_rollout.compat.rope import RowRope
from cb_rollout.compat.torch import compute_dtype, noting_saved_bytes, without_dropout
from cb_rollout.config.combinations import refused
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.device import to_device
from cb_rollout.engine.memory.training import TrainingMemory
from cb_rollout.engine.model.routers import Routers
from cb_rollout.engine.numerics.agreement import is_measurable, references
from cb_rollout.engine.numerics.higher_precision import higher_precision
from cb_rollout.engine.sampling.mask import masked_logprobs
from cb_rollout.errors import ConfigurationError, error_text
from cb_rollout.integrations.trl import images
from cb_rollout.integrations.trl.images import IMAGE_ARGUMENTS
from cb_rollout.integrations.trl.rows.loss_rows import Forward, LossBatch, Result
from cb_rollout.packing.batch import (
    PackedBatch,
    PackedRow,
    PackingLayout,
    num_tree_tokens,
    pack,
    representative,
    with_rope_sides,
)
from cb_rollout.packing.forward import Scores, differing_gradients, score_batches
from cb_rollout.packing.logprobs import first_layout, warn_of_padding
from cb_rollout.rollout.distributed import largest_of_all

# Reasons not to pack a batch, the graver one last.
NO_ROWS, OTHER_INPUTS = 1, 2

# The reason of a process that has found none itself.
ELSEWHERE = "so found another process"


@dataclass(frozen=True, slots=True)
class LossTokens:
    """Counts of a forward."""

    loss_tokens_computed: int = 0
    """Tokens that went through the model, padding included."""
    loss_tokens_useful: int = 0
    """Tokens that the scores need: completions without the last, each common prefix once."""
    prompts_shared: int = 0
    """Completions that used a prompt computed for another completion."""
    rows_left_out: int = 0
    """Rows without a gradient: they have no advantage, or are masked."""


def padded_tokens(batch: LossBatch) -> LossTokens:
    """Return the counts of the trainer's own forward."""
    rows, num_tokens = batch.unpadded(), batch.input_ids.numel()
    return LossTokens(num_tokens, num_tree_tokens(rows) if rows else num_tokens)


@dataclass
class PackedScores:
    """Scores of a batch of rows by a model."""

    trainer: Any
    model: torch.nn.Module
    rows: list[PackedRow]
    layout: PackingLayout
    batch: LossBatch
    """The same rows with padding."""
    routers: Routers | None
    has_images: bool
    """True: any process's batch has images."""

    def __post_init__(self) -> None:
        self.tokens = LossTokens()
        self._batches: list[PackedBatch] = []

    @property
    def key(self) -> tuple[Any, ...]:
        """Forwards with equal keys share a comparison with the trainer's own."""
        identity = forward_identity(hf_compat.unwrap(self.model))
        return identity, self.layout, torch.is_grad_enabled(), self.has_images

    def scores(
        self, trained: Sequence[int], max_tokens: int | None, max_kept_tokens: int = 0
    ) -> list[Scores]:
        """Run the rows at `trained` with gradients, and the others without.

        Where batches with gradients have at most `max_kept_tokens` together, nothing is computed
        again in the backward pass.
        """
        device, inner = next(self.model.parameters()).device, hf_compat.unwrap(self.model)
        others = sorted(set(range(len(self.rows))) - set(trained))
        names = image_argument_names(inner)
        has_gradient, layout = torch.is_grad_enabled(), self.layout

        def packed(numbers: Sequence[int]) -> list[PackedBatch]:
            return pack(self.rows, numbers, layout, device, max_tokens, names)

        with_gradient = packed(trained)
        is_kept = sum(batch.num_tokens for batch in with_gradient) <= max_kept_tokens
        keeps = is_kept or not has_gradient or not hf_compat.checkpointed_layers(inner)
        if layout is PackingLayout.FORKED_STATES and not keeps:
            # Layers that are computed again take no states.
            layout = PackingLayout.PADDED
            with_gradient = packed(trained)
        without = packed(others)
        self._batches = with_gradient + without
        self.tokens = LossTokens(
            sum(batch.num_tokens for batch in self._batches),
            num_tree_tokens(self.rows),
            sum(batch.num_shared_prompts for batch in self._batches),
            len(self.rows) - sum(bool(self.rows[number].completion_ids) for number in trained),
        )
        keeping = hf_compat.keeping_activations(inner) if keeps else nullcontext()
        with self.trainer.accelerator.autocast(), keeping:
            return score_batches(
                self.model,
                self._batches,
                self._head,
                num_trained=len(with_gradient),
                recompute=len(with_gradient) > 1 and not is_kept,
                routers=self.routers,
                counts=self.batch.counts,
            )

    def unpacked(self, scores: list[Scores]) -> Result:
        """Return scores as TRL's forward does: (B, T), and 0 in the padding."""
        T = self.batch.logits_to_keep
        indices: list[int] = []
        for batch in self._batches:
            for row, length in zip(batch.rows, batch.lengths, strict=True):
                indices += range(row * T, row * T + length)
        device = scores[0].logprobs_K.device
        indices_R = to_device(indices, device)

        def spread(parts: list[torch.Tensor]) -> torch.Tensor:
            values_R = torch.cat(parts).float()
            flat = torch.zeros(len(self.rows) * T, device=device)
            return flat.index_copy(0, indices_R, values_R).view(-1, T)

        entropies = [part.entropies_K for part in scores if part.entropies_K is not None]
        return (
            spread([part.logprobs_K for part in scores]),
            spread(entropies) if entropies else None,
            scores[0].aux_loss,
        )

    def _head(
        self, own_forward: Callable[..., Any], batch: PackedBatch, arguments: dict[str, Any]
    ) -> Scores:
        has_aux_loss = self.batch.has_aux_loss
        if has_aux_loss:
            arguments = arguments | {"output_router_logits": True}
        if any(row.sampling_mask is not None for row in self.rows):
            output = own_forward(**arguments, use_cache=False)
            kept = [(self.rows[number].sampling_mask or ())[t] for number, t in batch.scored]
            logits_KV, temperature = output.logits[0], self.trainer.temperature
            found = masked_logprobs(logits_KV, batch.labels_K, kept, temperature)
            return Scores(*found, output.aux_loss if has_aux_loss else None)
        output = own_forward(**arguments, shift_labels=batch.labels_K[None], fused_lm_head=True)
        entropies = None if output.entropy is None else output.entropy[0]
        return Scores(output.log_probs[0], entropies, output.aux_loss)


class PackedLoss:
    """The packed forward of a trainer's models."""

    def __init__(
        self,
        trainer: Any,
        config: RolloutConfig,
        routers: Routers | None = None,
        *,
        packing_obstacle: str,
        cuts_images: Mapping[tuple[bool, bool], bool] | None = None,
    ) -> None:
        """Pack what the trainer scores.

        `packing_obstacle`: the reason why rows would mix end to end; "": they would not. Routers
        replay the experts of the rollout; None: they choose for themselves. `cuts_images` says of
        which kinds of images a forward may begin between them.
        """
        self._cuts_images = {} if cuts_images is None else cuts_images
        self._trainer, self._routers, self._can_pack = trainer, routers, not packing_obstacle
        self._is_sharded = shards_models(trainer.accelerator)
        # Of batches without images and with some; None: the trainer's own forward computes them.
        first = first_layout(packing_obstacle)
        if packing_obstacle and self._is_sharded:
            # Layers are computed again, which take no states.
            first = PackingLayout.PADDED
            if trainer.accelerator.device.type == "cuda":
                _warn_of_padding(packing_obstacle)
        self._layouts: dict[bool, PackingLayout | None] = dict.fromkeys((False, True), first)
        self._takes_images = is_processor(trainer.processing_class)
        self._compared: set[tuple[Any, ...]] = set()
        self._bytes_per_token: int | None = None
        self._training: TrainingMemory | None = None
        self._max_tokens: int | None = None
        if not isinstance(config.loss_tokens_per_forward, str):
            self._max_tokens = config.loss_tokens_per_forward
            self._require_forwards_of_any_size()
        self.tokens = LossTokens()
        if getattr(trainer.args, "torch_compile", False):
            self._give_up("torch_compile=True compiles the trainer's own forward", False)
            self._layouts[True] = None
        if hf_compat.invocation_token_ids(trainer.model):
            self._give_up(hf_compat.ACTIVATED_LORA, False)
            self._layouts[True] = None

    def _require_forwards_of_any_size(self) -> None:
        reason = None
        if self._is_sharded:
            reason = "FSDP or ZeRO-3, whose processes enter as many forwards together"
        elif getattr(self._trainer, "aux_loss_enabled", False):
            reason = "a router loss, which is balanced over the whole batch"
        if reason:
            raise refused("loss tokens, one forward", tokens=self._max_tokens, reason=reason)

    def logprobs(self, model: torch.nn.Module, batch: LossBatch, own: Forward) -> Result | None:
        """Compute TRL's `_get_per_token_logps_and_entropies`; None: the trainer's own is needed.

        Log-probabilities and entropies are float32, in nats, and 0 in the padding. The first batch
        for each `PackedScores.key` is compared with `own`, the trainer's forward.
        """
        has_images = False
        if self._takes_images:
            # Processes compare two forwards together.
            own_images = batch.settings.get(images.PIXELS) is not None
            has_images = largest_of_all(self._trainer.accelerator, own_images) > 0
        layout = self._layouts[has_images]
        if layout is None:
            return None
        if batch.has_aux_loss:
            if not self._can_pack:
                return None
            layout = PackingLayout.WHOLE_ROWS
        cuts = self._cuts_images if has_images else None
        rows, reason = _rows_of_batch(hf_compat.unwrap(model), batch, cuts)
        run = PackedScores(
            self._trainer, model, rows or [], layout, batch, self._routers, has_images
        )
        if not self._is_fit(run, reason) or not self._is_proved(run, own):
            return None
        # Sharded, every process enters as many forwards; a router loss balances the whole batch.
        is_whole, trained = self._is_sharded or batch.has_aux_loss, list(range(len(run.rows)))
        if batch.advantages is not None and not is_whole:
            trained = _rows_with_gradient(run.rows, batch.advantages.tolist())
        try:
            limit = None if is_whole else self._max_tokens
            if not is_whole and limit is None and batch.batch_size is not None:
                # As many as in the trainer's own forward.
                limit = batch.batch_size * batch.input_ids.shape[1]
            scores = run.scores(trained, limit, self._max_kept_tokens(run))
        except ConfigurationError as error:
            # Rows are longer than those compared, and than a window that attention is not told of.
            if self._is_sharded:
                raise
            _warn_of_batch(str(error))
            return None
        self.tokens = run.tokens
        return run.unpacked(scores)

    def _max_kept_tokens(self, run: PackedScores) -> int:
        """Return the tokens whose activations take a quarter of the free memory; 0: none is kept.

        Processes that gather weights for each layer must compute the same layers again.
        """
        model = hf_compat.unwrap(run.model)
        if self._is_sharded or self._max_tokens is not None or not torch.is_grad_enabled():
            return 0
        if not hf_compat.checkpointed_layers(model):
            return 0
        if self._bytes_per_token is None:
            some = self._comparable(run)
            with noting_saved_bytes(model) as saved, without_dropout(model):
                some.scores(range(len(some.rows)), None, sys.maxsize)
            num_bytes = sum(saved.values())
            self._bytes_per_token = max(1, num_bytes // some.tokens.loss_tokens_computed)
        device = self._trainer.accelerator.device
        if self._training is None:
            self._training = TrainingMemory(model, model, device, self._trainer.optimizer, "auto")
        free = devices.memory(device).free_bytes - self._training.bytes_now().reserve
        return max(0, free) // devices.FREE_PER_COPY // self._bytes_per_token

    def compare_again(self) -> None:
        self._compared.clear()

    def _is_fit(self, run: PackedScores, reason: str | None) -> bool:
        """Return whether a batch can be packed, on every process where they wait for each other."""
        unfit = 0 if any(row.completion_ids for row in run.rows) else NO_ROWS
        if reason:
            unfit = OTHER_INPUTS
        if self._is_sharded or run.key not in self._compared:
            unfit = largest_of_all(self._trainer.accelerator, unfit)
            if unfit == OTHER_INPUTS:
                self._give_up(reason or ELSEWHERE, run.has_images)
        elif reason:
            _warn_of_batch(reason)
        return not unfit

    def _is_proved(self, run: PackedScores, own: Forward) -> bool:
        """Compare some rows of a first batch both ways; fall back until the two agree."""
        not_shared: str | None = None
        while run.key not in self._compared:
            try:
                reason = self._difference(run, own)
            except torch.OutOfMemoryError:
                raise
            except ConfigurationError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001 - any error is the reason
                reason = error_text(error)
            if not largest_of_all(self._trainer.accelerator, reason is not None):
                self._compared.add(run.key)
                break
            reason = reason or ELSEWHERE
            if run.layout is PackingLayout.PADDED or self._is_sharded:
                self._give_up(reason, run.has_images)
                return False
            not_shared, run.layout = reason, PackingLayout.PADDED
        if not_shared is not None:
            self._layouts[run.has_images] = run.layout
            _warn_of_padding(not_shared)
        return True

    def _give_up(self, reason: str, has_images: bool) -> None:
        if self._layouts[has_images] is not None:
            batches = " for batches with images" if has_images else ""
            warnings.warn(
                f"loss_forward='packed' is switched off{batches} ({reason}); the trainer's own "
                "forward is used.",
                stacklevel=2,
            )
        self._layouts[has_images] = None

    def _comparable(self, run: PackedScores) -> PackedScores:
        """Return some rows of a batch, without a wrapper that waits for other processes."""
        model, (numbers, rows) = hf_compat.unwrap(run.model), representative(run.rows)
        # The side at which the trainer's own forward computes every row is that of its width.
        side = RowRope(model).side(run.batch.input_ids.shape[1])
        return replace(
            run,
            model=hf_compat.trained_forward(run.model),
            rows=[row._replace(rope_side=side) for row in rows],
            # One forward of the trainer, for sharded processes enter as many as each other.
            batch=replace(run.batch.at(numbers, None), counts=None),
        )

    def _difference(self, run: PackedScores, own: Forward) -> str | None:
        """Return how some rows differ from the trainer's own forward; None: by rounding alone."""
        model, compared = hf_compat.unwrap(run.model), self._comparable(run)
        lengths = [len(row.completion_ids) for row in compared.rows]
        dtype = compute_dtype(model, self._trainer.accelerator.mixed_precision)

        def logprobs(result: Result) -> list[torch.Tensor]:
            return [row_T[:n] for row_T, n in zip(result[0], lengths, strict=True)]

        def packed() -> list[torch.Tensor]:
            return logprobs(compared.unpacked(compared.scores(range(len(lengths)), None)))

        def scored(rows: Sequence[PackedRow], layout: PackingLayout) -> list[torch.Tensor]:
            laid_out = replace(compared, rows=list(rows), layout=layout)
            return [own.logprobs_K for own in laid_out.scores(range(len(rows)), None)]

        # Without gradients, reentrant checkpoints warn that there will be none.
        moved = nullcontext() if self._is_sharded else with_moved_adapters(model)
        keeping = hf_compat.keeping_activations(model)
        with without_dropout(model), keeping, moved, torch.no_grad():
            expected = references(
                lambda: logprobs(own(compared.model, compared.batch)),
                dtype,
                is_coarse=dtype.itemsize < torch.float32.itemsize,
                is_measured=is_measurable(model, sum(row.num_tokens for row in compared.rows)),
                can_raise_precision=not self._is_sharded,
            )
            for reference in expected:
                if not (agreement := reference.compare(packed, higher_precision)):
                    return f"log-probabilities are off the trainer's forward by {agreement}"
            if run.layout is PackingLayout.FORKED_STATES:
                # Without gradients too: the rows may have no fork of the lengths that come later.
                return differing_gradients(model, compared.rows, scored, dtype)
        return None


def _rows_of_batch(
    model: Any, batch: LossBatch, cuts_images: Mapping[tuple[bool, bool], bool] | None
) -> tuple[list[PackedRow] | None, str | None]:
    """Return the rows with their images; or None, and a reason if it is an input of the batch.

    `cuts_images`: see `rows_with_images`; None: no process's batch has images.
    """
    arguments = () if cuts_images is None else IMAGE_ARGUMENTS
    packed = {"compute_entropy", "compute_aux_loss", *arguments}
    settings = [name for name, value in batch.settings.items() if value is not None]
    if others := [name for name in settings if name not in packed]:
        return None, f"the batch has {', '.join(others)}"
    rows = batch.unpadded()
    if rows is None:
        return None, None
    rows = with_rope_sides(model, rows)
    if cuts_images is None:
        return rows, None
    try:
        arguments = images.image_arguments(batch.settings)
        size = batch.logits_to_keep
        return images.rows_with_images(model, rows, arguments, size, cuts_images), None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - any error is the reason
        return None, f"its images cannot be divided into rows: {error_text(error)}"


def _warn_of_padding(reason: str) -> None:
    warn_of_padding("loss_forward='packed'", reason, "sorted by length")


def _warn_of_batch(reason: str) -> None:
    """Say that a batch is not packed; Python shows an equal warning once."""
    warnings.warn(
        f"loss_forward='packed': a batch is left to the trainer's own forward ({reason}).",
        stacklevel=2,
    )


def _rows_with_gradient(rows: list[PackedRow], advantages: list[float]) -> list[int]:
    """Return the rows with an advantage, or else the shortest: a backward pass needs one.

    A row with images is among them, if there is any: the vision tower's gradient is 0, not None.
    """
    scored = [number for number, row in enumerate(rows) if row.completion_ids]
    trained = [number for number in scored if advantages[number]]
    seeing = [number for number in scored if (own := rows[number].images) and own.images]
    if seeing and not set(seeing) & set(trained):
        trained.append(min(seeing, key=lambda n: rows[n].num_tokens))
    return sorted(trained) or [min(scored, key=lambda n: rows[n].num_tokens)]
