"""Compute the trainer's log-probabilities and entropies over packed batches.

Replaces TRL 1.16's forward of the padded batch in the loss and in scoring, for the policy and the
reference. The loss itself is TRL's, computed from the same (B, T) tensors. Called by the trainer,
on its thread; with several processes all of them call it together. Imports no trl.

B: rows of a batch, T: tokens of a completion.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.multimodal import is_processor
from cb_rollout.compat.rope import RowRope
from cb_rollout.compat.torch import SavedBytes, without_dropout
from cb_rollout.compat.zero3 import shards_models
from cb_rollout.config.combinations import refused
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.memory.plan import TrainingBytes
from cb_rollout.engine.model.routers import Disagreement
from cb_rollout.errors import ConfigurationError, error_text
from cb_rollout.integrations.trl.images import (
    IMAGE_ARGUMENTS,
    PIXELS,
    image_arguments,
    rows_with_images,
)
from cb_rollout.integrations.trl.packed_scores import LossTokens, PackedScores, rows_of
from cb_rollout.integrations.trl.replay import RouterReplay
from cb_rollout.packing.batch import PackedRow, PackingLayout, representative, with_rope_sides
from cb_rollout.packing.comparison import LossComparison, Result
from cb_rollout.rollout.distributed import largest_of_all

# Activations may take this share of the memory that is free when the first loss is computed.
ACTIVATION_SHARE = 0.5

# Reasons not to pack a batch, the graver one last.
NO_ROWS, OTHER_INPUTS = 1, 2

# The reason of a process that has found none itself.
ELSEWHERE = "so found another process"

OwnForward = Callable[..., Result]


class ComparisonKey(NamedTuple):
    """The kind of forwards that one comparison stands for."""

    model: Any
    """`forward_identity` of the transformers model."""
    layout: PackingLayout
    has_gradient: bool
    has_images: bool


class PackedLoss:
    """The packed forward of one trainer's models."""

    def __init__(
        self,
        trainer: Any,
        config: RolloutConfig,
        training: TrainingBytes,
        replay: RouterReplay | None = None,
        *,
        can_pack: bool,
    ) -> None:
        """Keep what the forwards need.

        Args:
            trainer: its accelerator, temperature and arguments are used.
            config: its `loss_tokens_per_forward` is used.
            training: the memory plan's part of training, before the first step.
            replay: replays the experts of the rollout; None: routers choose for themselves.
            can_pack: rows may stand one after the other: no layer carries a state along them.
        """
        self._trainer, self._replay, self._can_pack = trainer, replay, can_pack
        self._bytes_to_come = training.gradients_to_come + training.optimizer_states_to_come
        self._is_sharded = shards_models(trainer.accelerator)
        # Of batches without images and with some; None: the trainer's own forward computes them.
        first = PackingLayout.SHARED_PROMPTS if can_pack else PackingLayout.PADDED
        self._layouts: dict[bool, PackingLayout | None] = dict.fromkeys((False, True), first)
        self._takes_images = is_processor(trainer.processing_class)
        self._compared: set[ComparisonKey] = set()
        self._has_compared_gradients = False
        self._max_tokens: int | None = None
        if not isinstance(config.loss_tokens_per_forward, str):
            self._max_tokens = config.loss_tokens_per_forward
            self._require_one_process()
        self.tokens = LossTokens()
        if getattr(trainer.args, "torch_compile", False):
            self._give_up("torch_compile=True compiles the trainer's own forward", False)
            self._layouts[True] = None

    def _require_one_process(self) -> None:
        """Refuse a number of tokens where a batch is one forward, whatever its size."""
        reason = None
        if self._is_sharded:
            reason = "FSDP or ZeRO-3, whose processes enter as many forwards together"
        elif getattr(self._trainer, "aux_loss_enabled", False):
            reason = "a router loss, which is balanced over the whole batch"
        if reason:
            raise refused("loss tokens, one forward", tokens=self._max_tokens, reason=reason)

    def logprobs(
        self,
        own_forward: OwnForward,
        model: torch.nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *,
        batch_size: int | None = None,
        kept: Sequence[list[Any]] | None = None,
        routes: Sequence[Any] | None = None,
        counts: Disagreement | None = None,
        advantages: torch.Tensor | None = None,
        compute_aux_loss: bool = False,
        **settings: Any,
    ) -> Result | None:
        """Compute TRL's `_get_per_token_logps_and_entropies`.

        Args:
            own_forward: the trainer's own, of the rows at `numbers` by the model given.
            model: the policy, or the reference.
            input_ids: (B, S), int64: prompts, left-padded, and completions, right-padded.
            attention_mask: (B, S), int64.
            logits_to_keep: T.
            batch_size: rows in one forward of the trainer; None: all.
            kept: for each row, the sampling mask of its tokens; None: the whole vocabulary.
            routes: for each row, the experts of its first tokens; None: the routers choose.
            counts: counts choices of routers that differ from those; None: they are not counted.
            advantages: (B,): rows at 0 have no gradient; None: all rows have one.
            compute_aux_loss: also return the load-balancing loss of a mixture of experts.
            settings: TRL's other arguments.

        Returns:
            Log-probabilities and entropies, both (B, T), float32, in nats, 0 in the padding; and
            the load-balancing loss, or None. None where the trainer's own forward is needed.
        """
        has_images = self._has_images(settings)
        layout = self._layouts[has_images]
        if layout is None:
            return None
        if compute_aux_loss:
            if not self._can_pack:
                return None
            layout = PackingLayout.WHOLE_ROWS
        rows, reason = _rows_of_batch(
            hf_compat.unwrap(model),
            rows_of(input_ids, attention_mask, logits_to_keep, routes),
            settings,
            logits_to_keep,
            has_images=has_images,
        )
        if not self._are_fit(rows, reason, _key(model, layout, has_images)):
            return None
        assert rows is not None
        run = PackedScores(
            self._trainer, model, rows, layout, kept, compute_aux_loss, self._replay, counts
        )
        run.padded_rope_side = RowRope(hf_compat.unwrap(model)).side(input_ids.shape[1])
        if not self._is_proved(run, own_forward, logits_to_keep):
            return None
        trained = list(range(len(rows)))
        if advantages is not None and not compute_aux_loss and not self._is_sharded:
            trained = _rows_with_gradient(rows, advantages.tolist())
        max_tokens = self._limit(input_ids, batch_size)
        if self._is_sharded or compute_aux_loss:
            # Every process enters as many forwards; and a load is balanced over the whole batch.
            max_tokens = None
        try:
            scores = run.scores(trained, max_tokens)
        except ConfigurationError as error:
            # Rows are longer than those compared, and than a window that attention is not told of.
            if self._is_sharded:
                raise
            _warn_of_batch(str(error))
            return None
        self.tokens = run.tokens
        return run.unpacked(scores, logits_to_keep)

    def compare_again(self) -> None:
        """Compare log-probabilities of the next batch of each kind with the trainer's own."""
        self._compared.clear()

    def _limit(self, input_ids: torch.Tensor, batch_size: int | None) -> int | None:
        """Return the tokens of one forward: those of the trainer's, until they are known."""
        if self._max_tokens is None and batch_size is not None:
            return batch_size * input_ids.shape[1]
        return self._max_tokens

    def _has_images(self, settings: dict[str, Any]) -> bool:
        """Return whether a batch has images, on any process: they compare two forwards together."""
        if not self._takes_images:
            return False
        own = settings.get(PIXELS) is not None
        return largest_of_all(self._trainer.accelerator, own) > 0

    def _are_fit(
        self, rows: list[PackedRow] | None, reason: str | None, key: ComparisonKey
    ) -> bool:
        """Return whether a batch can be packed, on every process where they wait for each other."""
        unfit = 0 if rows and any(row.completion_ids for row in rows) else NO_ROWS
        if reason:
            unfit = OTHER_INPUTS
        if self._is_sharded or key not in self._compared:
            unfit = largest_of_all(self._trainer.accelerator, unfit)
            if unfit == OTHER_INPUTS:
                self._give_up(reason or ELSEWHERE, key.has_images)
        elif reason:
            _warn_of_batch(reason)
        return not unfit

    def _is_proved(self, run: PackedScores, own_forward: OwnForward, logits_to_keep: int) -> bool:
        """Compare some rows of a first batch both ways; fall back until the two agree."""
        not_shared: str | None = None
        while True:
            key = _key(run.model, run.layout, run.has_images)
            if key in self._compared:
                break
            try:
                reason = self._difference(run, own_forward, logits_to_keep)
            except torch.OutOfMemoryError:
                raise
            except ConfigurationError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001 - any error is the reason
                reason = error_text(error)
            if not largest_of_all(self._trainer.accelerator, reason is not None):
                self._compared.add(key)
                break
            reason = reason or ELSEWHERE
            if run.layout is not PackingLayout.SHARED_PROMPTS or self._is_sharded:
                self._give_up(reason, run.has_images)
                return False
            not_shared, run.layout = reason, PackingLayout.PADDED
        if not_shared is not None:
            self._layouts[run.has_images] = run.layout
            warnings.warn(
                f"loss_forward='packed': prompts cannot be shared ({not_shared}); rows are sorted "
                "by length instead.",
                stacklevel=2,
            )
        return True

    def _give_up(self, reason: str, has_images: bool) -> None:
        if self._layouts[has_images] is not None:
            kind = " for batches with images" if has_images else ""
            warnings.warn(
                f"loss_forward='packed' is switched off{kind} ({reason}); the trainer's own "
                "forward is used.",
                stacklevel=2,
            )
        self._layouts[has_images] = None

    def _difference(
        self, run: PackedScores, own_forward: OwnForward, logits_to_keep: int
    ) -> str | None:
        """Return how some rows differ from the trainer's own forward; None: by rounding alone."""
        model = hf_compat.unwrap(run.model)
        numbers = representative(run.rows)
        compared = PackedScores(
            run.trainer,
            hf_compat.collective_forward(run.model),
            [run.rows[n]._replace(rope_side=run.padded_rope_side) for n in numbers],
            run.layout,
            None if run.kept is None else [run.kept[number] for number in numbers],
            has_aux_loss=False,
            replay=self._replay,
        )
        # Sharded gradients exist in the backward pass alone.
        has_gradient = (
            torch.is_grad_enabled() and not self._is_sharded and not self._has_compared_gradients
        )
        saved = SavedBytes(model)

        def packed_forward() -> Result:
            # Called in the model's own precision last, whose bytes count.
            saved.total = 0
            with saved:
                scores = compared.scores(range(len(numbers)), None)
            return compared.unpacked(scores, logits_to_keep)

        comparison = LossComparison(
            model,
            lambda: own_forward(compared.model, numbers),
            packed_forward,
            [len(compared.rows[index].completion_ids) for index in range(len(numbers))],
            sum(row.num_tokens for row in compared.rows),
            is_autocast=self._trainer.accelerator.mixed_precision != "no",
            can_raise_precision=not self._is_sharded,
        )
        with (
            without_dropout(model),
            hf_compat.keeping_one_layer(model),
            torch.set_grad_enabled(has_gradient),
        ):
            found = comparison.difference()
        self._has_compared_gradients |= has_gradient and found is None
        if found is None and has_gradient and self._max_tokens is None:
            self._max_tokens = self._budget(saved.total, compared.tokens.loss_tokens_computed)
        return found

    def _budget(self, saved_bytes: int, num_tokens: int) -> int:
        """Return the tokens whose activations fit beside gradients and optimizer states.

        Args:
            saved_bytes: activations of a forward, of one layer whole where gradient checkpointing
                computes layers again.
            num_tokens: tokens of that forward.
        """
        per_token = max(1, saved_bytes // max(1, num_tokens))
        free = devices.memory(self._trainer.accelerator.device).free_bytes
        left = max(0, free - self._bytes_to_come)
        return max(1, int(ACTIVATION_SHARE * left) // per_token)


def _rows_of_batch(
    model: Any,
    rows: list[PackedRow] | None,
    settings: Mapping[str, Any],
    logits_to_keep: int,
    *,
    has_images: bool,
) -> tuple[list[PackedRow] | None, str | None]:
    """Return the rows with their images; or None, and a reason if it is an input of the batch."""
    known = {"compute_entropy", *(IMAGE_ARGUMENTS if has_images else ())}
    given = {name: value for name, value in settings.items() if value is not None}
    if unknown := [name for name in given if name not in known]:
        return None, f"the batch has {', '.join(unknown)}"
    if rows is None:
        return None, None
    rows = with_rope_sides(model, rows)
    if not has_images:
        return rows, None
    try:
        return rows_with_images(model, rows, image_arguments(given), logits_to_keep), None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - any error is the reason
        return None, f"its images cannot be divided into rows: {error_text(error)}"


def _warn_of_batch(reason: str) -> None:
    """Say that one batch is not packed; Python shows an equal warning once."""
    warnings.warn(
        f"loss_forward='packed': a batch is left to the trainer's own forward ({reason}).",
        stacklevel=2,
    )


def _key(model: torch.nn.Module, layout: PackingLayout, has_images: bool) -> ComparisonKey:
    return ComparisonKey(
        hf_compat.forward_identity(hf_compat.unwrap(model)),
        layout,
        torch.is_grad_enabled(),
        has_images,
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
