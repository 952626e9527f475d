"""Run the trainer's own forward of its padded rows, with what the rollout recorded of them.

"Keep Sampling Mask" and "Keep Routing" in DeepSeek-V3.2's report. Over a sampling mask TRL's own
forward never has logits, so the model's is run instead: a micro-batch's logits of the completion
exist whole. Experts are replayed in any forward: the policy's, the old policy's, the reference's.
Called by the trainer, on its thread. Imports no trl.

B: rows, S: prompt and completion, T: completion, V: vocabulary, N: B x T, L: routers, K: experts of
a token.
"""

from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.model.routers import Replay, Routers, joined_routes
from cb_rollout.engine.sampling.mask import SamplingMask, masked_logprobs
from cb_rollout.integrations.trl.images import COUNTS, image_arguments
from cb_rollout.integrations.trl.loss_rows import LossBatch
from cb_rollout.packing.comparison import Result

Forward = Callable[[Any, LossBatch], Result]
"""Computes TRL's `_get_per_token_logps_and_entropies` by a model."""


class OwnForward:
    """The forward that the trainer would run, by whose values every other one is judged."""

    def __init__(self, trainer: Any, routers: Routers | None) -> None:
        """Keep the trainer's own method, which the caller replaces afterwards.

        Args:
            trainer: its temperature and precision are used.
            routers: of the model that generates; the trained one has them too. None: routers choose
                for themselves.
        """
        self._trainer, self._routers = trainer, routers
        self._logprobs = trainer._get_per_token_logps_and_entropies

    def __call__(self, model: Any, batch: LossBatch) -> Result:
        """Return log-probabilities, entropies, both (B, T), and the load-balancing loss, or None.

        Log-probabilities and entropies are float32, in nats. Over a sampling mask they are 0 in the
        padding.
        """
        if not (batch.is_masked or batch.is_routed):
            return self.plain(model, batch)
        found = []
        for part in batch.forwards():
            with self._replaying(model, part):
                found.append((self._masked if part.is_masked else self.plain)(model, part))
        logprobs, entropies, aux_losses = zip(*found, strict=True)
        return (
            torch.cat(logprobs),
            None if entropies[0] is None else torch.cat(entropies),
            None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
        )

    def plain(self, model: Any, batch: LossBatch) -> Result:
        """Run TRL's forward, over the whole vocabulary, by the routers' own choice."""
        return self._logprobs(
            model,
            batch.input_ids,
            batch.attention_mask,
            batch.logits_to_keep,
            batch.batch_size,
            **batch.settings,
        )

    def _masked(self, model: Any, batch: LossBatch) -> Result:
        """Run the model, and take log-probabilities over each token's sampling mask."""
        T = batch.logits_to_keep
        settings: dict[str, Any] = {"use_cache": False, **image_arguments(batch.settings)}
        for name in COUNTS:
            settings.pop(name, None)
        if "logits_to_keep" in hf_compat.forward_argument_names(hf_compat.unwrap(model)):
            settings["logits_to_keep"] = T + 1
        if batch.has_aux_loss:
            settings["output_router_logits"] = True
        ids, mask = batch.input_ids, batch.attention_mask
        with self._trainer.accelerator.autocast():
            outputs = model(input_ids=ids, attention_mask=mask, **settings)
        logits_BTV, tokens_BT = outputs.logits[:, -T - 1 : -1], ids[:, -T:]
        padded = [array("i", [token]) for token in tokens_BT.flatten().tolist()]
        for number, row in enumerate(batch.rows or ()):
            kept = row.sampling_mask or ()
            padded[number * T : number * T + len(kept)] = kept
        found = masked_logprobs(
            logits_BTV.reshape(-1, logits_BTV.shape[-1]),
            tokens_BT.flatten(),
            SamplingMask.joined(padded),
            self._trainer.temperature,
        )
        is_padding_BT = batch.completion_mask == 0
        logprobs_BT, entropies_BT = (
            values_N.view_as(tokens_BT).masked_fill(is_padding_BT, 0) for values_N in found
        )
        return logprobs_BT, entropies_BT, outputs.aux_loss if batch.has_aux_loss else None

    def _replaying(self, model: Any, batch: LossBatch) -> AbstractContextManager[None]:
        """Have one forward of the padded rows take the recorded experts."""
        if self._routers is None or not batch.is_routed:
            return nullcontext()
        S = batch.input_ids.shape[1]
        first = S - batch.logits_to_keep
        paddings = (first - batch.attention_mask[:, :first].sum(1)).tolist()
        parts = [
            (row.routes, padding, S)
            for row, padding in zip(batch.rows or (), paddings, strict=True)
        ]
        shape = self._routers.spec.shape
        routes_NLK = joined_routes(parts, shape, batch.attention_mask.device)
        assert routes_NLK is not None
        return self._routers.replaying(hf_compat.unwrap(model), Replay(routes_NLK, batch.counts))
