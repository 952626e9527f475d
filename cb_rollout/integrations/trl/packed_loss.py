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
from cb_rollout.engine.memory.training import TrainingMemory, forget_peaks
from cb_rollout.engine.model.facts import ModelFacts
from cb_rollout.engine.model.routers import Routers
from cb_rollout.engine.numerics.agreement import is_measurable, references
from cb_rollout.engine.numerics.higher_precision import higher_precision
from cb_rollout.engine.sampling.mask import masked_logprobs
from cb_rollout.errors import ConfigurationError, error_text
from cb_rollout.integrations.trl import images
from cb_rollout.integrations.trl.images import IMAGE_ARGUMENTS
from cb_rollout.integrations.trl.rows.loss_rows import Forward, LossBatch, Result
from cb_rollout.packing.batch import PackedBatch, PackingLayout, pack
from cb_rollout.packing.forward import Scores, differing_gradients, score_batches
from cb_rollout.packing.logprobs import first_layout, warn_of_padding
from cb_rollout.packing.prefix_tree import num_tree_tokens, representative
from cb_rollout.packing.rows import PackedRow, with_rope_sides
from cb_rollout.rollout.distributed import largest_of_all

# Reasons not to pack a batch, the more serious one last.
NO_ROWS = 1
OTHER_INPUTS = 2

# The reason that a process gives if only another process found one.
ELSEWHERE = "so found another process"


@dataclass(frozen=True, slots=True)
class LossTokens:
    """Counts of a forward."""

    loss_tokens_computed: int = 0
    """Tokens that went through the model, padding included."""
    loss_tokens_useful: int = 0
    """Tokens that the scores need: each shared prefix once, without last completion tokens."""
    prompts_shared: int = 0
    """Completions that used a prompt computed for another completion."""
    rows_left_out: int = 0
    """Rows without a gradient: they have no advantage, or are masked."""


def padded_tokens(batch: LossBatch) -> LossTokens:
    """Return the counts of the trainer's own forward."""
    num_tokens = batch.input_ids.numel()
    rows = batch.unpadded()
    num_useful = num_tree_tokens(rows) if rows else num_tokens
    return LossTokens(loss_tokens_computed=num_tokens, loss_tokens_useful=num_useful)


@dataclass
class PackedScores:
    """Scores of a batch of rows by a model."""

    trainer: Any
    facts: ModelFacts
    """The model that scores."""
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
        identity = forward_identity(self.facts.module)
        return identity, self.layout, torch.is_grad_enabled(), self.has_images

    def scores(
        self, trained: Sequence[int], max_tokens: int | None, max_kept_tokens: int = 0
    ) -> list[Scores]:
        """Run the rows at `trained` with gradients, and the others without.

        If all batches with gradients together have at most `max_kept_tokens`, the backward pass
        recomputes nothing.
        """
        layout = self.layout
        with_gradient = self._packed(trained, layout, max_tokens)
        num_tokens = sum(batch.num_tokens for batch in with_gradient)
        is_kept = num_tokens <= max_kept_tokens
        computes_again = False
        if torch.is_grad_enabled() and not is_kept:
            computes_again = bool(hf_compat.checkpointed_layers(self.facts.module))
        if layout is PackingLayout.FORKED_STATES and computes_again:
            # Layers that the backward pass recomputes cannot start from a prompt's states.
            layout = PackingLayout.PADDED
            with_gradient = self._packed(trained, layout, max_tokens)
        others = sorted(set(range(len(self.rows))) - set(trained))
        self._batches = with_gradient + self._packed(others, layout, max_tokens)
        num_trained = 0
        for number in trained:
            if self.rows[number].completion_ids:
                num_trained += 1
        self.tokens = LossTokens(
            loss_tokens_computed=sum(batch.num_tokens for batch in self._batches),
            loss_tokens_useful=num_tree_tokens(self.rows),
            prompts_shared=sum(batch.num_shared_prompts for batch in self._batches),
            rows_left_out=len(self.rows) - num_trained,
        )
        keeping = nullcontext()
        if not computes_again:
            keeping = hf_compat.keeping_activations(self.facts.module)
        with self.trainer.accelerator.autocast(), keeping:
            return score_batches(
                self.facts.given,
                self._batches,
                self._head,
                num_trained=len(with_gradient),
                recompute=len(with_gradient) > 1 and not is_kept,
                routers=self.routers,
                counts=self.batch.counts,
            )

    def _packed(
        self, numbers: Sequence[int], layout: PackingLayout, max_tokens: int | None
    ) -> list[PackedBatch]:
        return pack(
            self.rows,
            numbers,
            layout,
            device=next(self.facts.module.parameters()).device,
            max_tokens=max_tokens,
            image_names=image_argument_names(self.facts.module),
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

        logprobs_BT = spread([part.logprobs_K for part in scores])
        entropies = [part.entropies_K for part in scores if part.entropies_K is not None]
        entropies_BT = spread(entropies) if entropies else None
        return logprobs_BT, entropies_BT, scores[0].aux_loss

    def _head(
        self, own_forward: Callable[..., Any], batch: PackedBatch, arguments: dict[str, Any]
    ) -> Scores:
        """Run a batch, and score its K tokens by TRL's fused head, or over the sampling masks."""
        if self.batch.has_aux_loss:
            arguments = arguments | {"output_router_logits": True}
        if any(row.sampling_mask is not None for row in self.rows):
            output = own_forward(**arguments, use_cache=False)
            return self._masked_scores(output, batch)
        output = own_forward(**arguments, shift_labels=batch.labels_K[None], fused_lm_head=True)
        entropies = None if output.entropy is None else output.entropy[0]
        return Scores(output.log_probs[0], entropies, output.aux_loss)

    def _masked_scores(self, output: Any, batch: PackedBatch) -> Scores:
        """Score each token of a batch over the token ids in its sampling mask."""
        kept = []
        for number, t in batch.scored:
            sampling_mask = self.rows[number].sampling_mask or ()
            kept.append(sampling_mask[t])
        logprobs_K, entropies_K = masked_logprobs(
            output.logits[0], batch.labels_K, kept, self.trainer.temperature
        )
        aux_loss = output.aux_loss if self.batch.has_aux_loss else None
        return Scores(logprobs_K, entropies_K, aux_loss)


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
        """Pack the rows that the trainer scores.

        Args:
            trainer: a GRPO or RLOO trainer.
            config: the config of its sampler.
            routers: replay the experts of the rollout; None: they choose for themselves.
            packing_obstacle: the reason why concatenated rows would mix; "": they would not.
            cuts_images: for each kind of images, whether a forward may begin between two of them.
        """
        self._cuts_images = {} if cuts_images is None else cuts_images
        self._trainer = trainer
        self._routers = routers
        self._can_pack = not packing_obstacle
        self._is_sharded = shards_models(trainer.accelerator)
        # Layout of batches without and with images; None: the trainer's own forward computes them.
        first = first_layout(packing_obstacle)
        if packing_obstacle and self._is_sharded:
            # Layers are recomputed, and then cannot start from a prompt's states.
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
        has_images = self._has_images(batch)
        layout = self._layout_of(batch, has_images)
        if layout is None:
            return None
        facts = ModelFacts.of(model)
        cuts_images = self._cuts_images if has_images else None
        rows, reason = _rows_of_batch(facts.module, batch, cuts_images)
        run = PackedScores(
            trainer=self._trainer,
            facts=facts,
            rows=rows or [],
            layout=layout,
            batch=batch,
            routers=self._routers,
            has_images=has_images,
        )
        if not self._is_fit(run, reason) or not self._is_proved(run, own):
            return None
        # Sharded processes must enter equally many forwards; a router loss covers the whole batch.
        is_whole = self._is_sharded or batch.has_aux_loss
        trained = list(range(len(run.rows)))
        limit = None
        if not is_whole:
            limit = self._limit(batch)
            if batch.advantages is not None:
                trained = _rows_with_gradient(run.rows, batch.advantages.tolist())
        try:
            scores = run.scores(trained, limit, self._max_kept_tokens(run))
        except ConfigurationError as error:
            # Rows are longer than the compared rows, and longer than a window that attention does
            # not get as an argument.
            if self._is_sharded:
                raise
            _warn_of_batch(str(error))
            return None
        self.tokens = run.tokens
        return run.unpacked(scores)

    def _has_images(self, batch: LossBatch) -> bool:
        """Return whether the batch of any process has images."""
        if not self._takes_images:
            return False
        # Processes compare two forwards together, so they must agree about images.
        has_images_here = batch.settings.get(images.PIXELS) is not None
        return largest_of_all(self._trainer.accelerator, has_images_here) > 0

    def _layout_of(self, batch: LossBatch, has_images: bool) -> PackingLayout | None:
        """Return how a batch is laid out; None if the trainer's own forward computes it."""
        layout = self._layouts[has_images]
        if layout is None or not batch.has_aux_loss:
            return layout
        return PackingLayout.WHOLE_ROWS if self._can_pack else None

    def _limit(self, batch: LossBatch) -> int | None:
        """Return the maximum tokens of one forward; None: no limit."""
        if self._max_tokens is None and batch.batch_size is not None:
            # As many as in the trainer's own forward.
            return batch.batch_size * batch.input_ids.shape[1]
        return self._max_tokens

    def _max_kept_tokens(self, run: PackedScores) -> int:
        """Return the number of tokens whose activations fit into a quarter of the free memory.

        0: activations are not kept. Processes that gather weights for each layer must all recompute
            the same layers.
        """
        model = run.facts.module
        if self._is_sharded or self._max_tokens is not None or not torch.is_grad_enabled():
            return 0
        if not hf_compat.checkpointed_layers(model):
            return 0
        if self._bytes_per_token is None:
            some = self._comparable(run)
            with noting_saved_bytes(model) as saved, without_dropout(model):
                some.scores(range(len(some.rows)), None, sys.maxsize)
            forget_peaks()
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
        """Return whether a batch can be packed, on all processes that wait for each other."""
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
        """Compare some rows of a first batch both ways; fall back until they agree."""
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
            finally:
                forget_peaks()
            if not largest_of_all(self._trainer.accelerator, reason is not None):
                self._compared.add(run.key)
                break
            reason = reason or ELSEWHERE
            if run.layout is PackingLayout.PADDED or self._is_sharded:
                self._give_up(reason, run.has_images)
                return False
            not_shared = reason
            run.layout = PackingLayout.PADDED
        if not_shared is not None:
            self._layouts[run.has_images] = run.layout
            _warn_of_padding(not_shared)
        return True

    def _give_up(self, reason: str, has_images: bool) -> None:
        if self._layouts[has_images] is not None:
            batches = " for batches with images" if has_images else ""
            warnings.warn(
                f"loss_forward='packed' is switched off{batches} ({reason}); the trainer's own "
                "forward is used. The loss is equally correct but slower: it computes padding, "
                "and each prompt once per completion. To choose this without a warning, set "
                "loss_forward='trainer'.",
                stacklevel=2,
            )
        self._layouts[has_images] = None

    def _comparable(self, run: PackedScores) -> PackedScores:
        """Return some rows of a batch, without a wrapper that waits for other processes."""
        numbers, rows = representative(run.rows)
        # In the trainer's own forward, the width of the batch decides the RoPE side of every row.
        side = RowRope(run.facts.module).side(run.batch.input_ids.shape[1])
        return replace(
            run,
            facts=ModelFacts.of(run.facts.outermost),
            rows=[row._replace(rope_side=side) for row in rows],
            # One forward of the trainer, because sharded processes must enter equally many.
            batch=replace(run.batch.at(numbers, None), counts=None),
        )

    def _difference(self, run: PackedScores, own: Forward) -> str | None:
        """Return how some rows differ from the trainer's own forward; None if only by rounding."""
        model = run.facts.module
        compared = self._comparable(run)
        lengths = [len(row.completion_ids) for row in compared.rows]
        dtype = compute_dtype(model, self._trainer.accelerator.mixed_precision)

        def without_padding(result: Result) -> list[torch.Tensor]:
            logprobs_BT, _, _ = result
            return [row_T[:n] for row_T, n in zip(logprobs_BT, lengths, strict=True)]

        def packed() -> list[torch.Tensor]:
            scores = compared.scores(range(len(lengths)), None)
            return without_padding(compared.unpacked(scores))

        def scored(rows: Sequence[PackedRow], layout: PackingLayout) -> list[torch.Tensor]:
            laid_out = replace(compared, rows=list(rows), layout=layout)
            scores = laid_out.scores(range(len(rows)), None)
            return [part.logprobs_K for part in scores]

        # Without gradients, reentrant checkpoints warn that there will be none.
        moved = nullcontext() if self._is_sharded else with_moved_adapters(model)
        keeping = hf_compat.keeping_activations(model)
        with without_dropout(model), keeping, moved, torch.no_grad():
            expected = references(
                lambda: without_padding(own(compared.facts.given, compared.batch)),
                dtype,
                is_coarse=dtype.itemsize < torch.float32.itemsize,
                is_measured=is_measurable(model, sum(row.num_tokens for row in compared.rows)),
                can_raise_precision=not self._is_sharded,
            )
            for reference in expected:
                agreement = reference.compare(packed, higher_precision)
                if not agreement:
                    return f"log-probabilities are off the trainer's forward by {agreement}"
            if run.layout is PackingLayout.FORKED_STATES:
                # Compared even if the caller needs no gradients: these rows may have no fork of
                # the lengths that come later.
                return differing_gradients(model, compared.rows, scored, dtype)
        return None


def _rows_of_batch(
    model: Any, batch: LossBatch, cuts_images: Mapping[tuple[bool, bool], bool] | None
) -> tuple[list[PackedRow] | None, str | None]:
    """Return the rows with their images, or None and the reason if an input prevents it.

    `cuts_images`: see `rows_with_images`; None: no process's batch has images.
    """
    packed = {"compute_entropy", "compute_aux_loss"}
    if cuts_images is not None:
        packed.update(IMAGE_ARGUMENTS)
    others = []
    for name, value in batch.settings.items():
        if value is not None and name not in packed:
            others.append(name)
    if others:
        return None, f"the batch has {', '.join(others)}"
    rows = batch.unpadded()
    if rows is None:
        return None, None
    rows = with_rope_sides(model, rows)
    if cuts_images is None:
        return rows, None
    try:
        with_images = images.rows_with_images(
            model,
            rows,
            arguments=images.image_arguments(batch.settings),
            logits_to_keep=batch.logits_to_keep,
            cuts_images=cuts_images,
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - any error is the reason
        return None, f"its images cannot be divided into rows: {error_text(error)}"
    return with_images, None


def _warn_of_padding(reason: str) -> None:
    warn_of_padding("loss_forward='packed'", reason, "sorted by length")


def _warn_of_batch(reason: str) -> None:
    """Warn that a batch is not packed; Python shows an equal warning once."""
    warnings.warn(
        f"loss_forward='packed': the trainer's own forward computes this batch ({reason}); the "
        "loss is equally correct but slower.",
        stacklevel=2,
    )


def _rows_with_gradient(rows: list[PackedRow], advantages: list[float]) -> list[int]:
    """Return the rows with an advantage, or else the shortest: a backward pass needs one.

    If any row has images, one such row is included, so that the vision tower gets a gradient of 0
    instead of None.
    """

    def length(number: int) -> int:
        return rows[number].num_tokens

    scored = [number for number, row in enumerate(rows) if row.completion_ids]
    trained = [number for number in scored if advantages[number]]
    seeing = [number for number in scored if _has_images(rows[number])]
    if seeing and set(seeing).isdisjoint(trained):
        trained.append(min(seeing, key=length))
    if not trained:
        return [min(scored, key=length)]
    return sorted(trained)


def _has_images(row: PackedRow) -> bool:
    return row.images is not None and bool(row.images.images)
