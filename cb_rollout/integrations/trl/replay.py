"""Replay the rollout in the trainer's forwards: its sampling masks, and its experts.

"Keep Sampling Mask" and "Keep Routing" in DeepSeek-V3.2's report. Over a sampling mask TRL's own
forward never has logits, so the model's is run instead: a micro-batch's logits of the completion
exist whole. Experts are replayed in any forward: the policy's, the old policy's, the reference's.
The record of a row travels in the batch, which the trainer shuffles and splits.

B: rows, S: prompt and completion, T: completion, V: vocabulary, N: B x T, L: routers, K: experts of
a token.
"""

from array import array
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.config.combinations import refused
from cb_rollout.engine.model.routers import Disagreement, Replay, Routers, joined_routes
from cb_rollout.engine.sampling.mask import SamplingMask, masked_logprobs
from cb_rollout.integrations.trl.context import RolloutRow
from cb_rollout.integrations.trl.images import COUNTS, of_rows


def kept_token_ids(row: RolloutRow) -> list[Any]:
    """Return the sampling mask of each completion token, an `array("i")` of ids.

    A token that was not sampled is its own only id: its log-probability is 0 and has no gradient,
    and no loss counts it.
    """
    kept: list[Any] = [array("i", [token]) for token in row.completion_ids]
    for start, num_tokens, output in row.spans:
        if output.kept_token_ids is not None:
            kept[start : start + num_tokens] = output.kept_token_ids[:num_tokens]
    return kept


def replayed_logprobs(
    trainer: Any,
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    kept: Sequence[list[Any]],
    batch_size: int | None = None,
    compute_aux_loss: bool = False,
    images: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute TRL's `_get_per_token_logps_and_entropies` over each token's sampling mask.

    Args:
        trainer: its temperature and precision are used.
        model: the policy, or the reference.
        input_ids: (B, S), int64: prompts, left-padded, and completions, right-padded.
        attention_mask: (B, S), int64.
        logits_to_keep: T.
        kept: for each row, as many `array("i")` of ids as its completion has tokens.
        batch_size: rows in one forward; None: all.
        compute_aux_loss: also return the load-balancing loss of a mixture of experts.
        images: what TRL passes for the images of all rows; None: there are none.

    Returns:
        Log-probabilities and entropies, both (B, T), float32, in nats, 0 in the padding; and the
        load-balancing loss, or None.
    """
    num_rows = input_ids.shape[0]
    batch_size = batch_size or num_rows
    logprobs, entropies, aux_losses = [], [], []
    for start in range(0, num_rows, batch_size):
        rows = slice(start, start + batch_size)
        given = of_rows(images or {}, range(num_rows)[rows])
        given = {name: value for name, value in given.items() if name not in COUNTS}
        outputs = _forward(
            trainer,
            model,
            input_ids[rows],
            attention_mask[rows],
            logits_to_keep,
            compute_aux_loss,
            given,
        )
        logits_BTV = outputs.logits[:, -logits_to_keep - 1 : -1]
        tokens_BT = input_ids[rows, -logits_to_keep:]
        padded = [array("i", [token]) for token in tokens_BT.flatten().tolist()]
        for number, ids in enumerate(kept[rows]):
            first = number * logits_to_keep
            padded[first : first + len(ids)] = ids
        logprobs_N, entropies_N = masked_logprobs(
            logits_BTV.reshape(-1, logits_BTV.shape[-1]),
            tokens_BT.flatten(),
            SamplingMask.joined(padded),
            trainer.temperature,
        )
        is_padding_BT = attention_mask[rows, -logits_to_keep:] == 0
        logprobs.append(logprobs_N.view_as(tokens_BT).masked_fill(is_padding_BT, 0))
        entropies.append(entropies_N.view_as(tokens_BT).masked_fill(is_padding_BT, 0))
        if compute_aux_loss:
            aux_losses.append(outputs.aux_loss)
    aux_loss = torch.stack(aux_losses).mean() if compute_aux_loss else None
    return torch.cat(logprobs), torch.cat(entropies), aux_loss


def _forward(
    trainer: Any,
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    compute_aux_loss: bool,
    images: Mapping[str, Any],
) -> Any:
    """Run the model, with logits of the completion alone where it can leave out the rest."""
    settings: dict[str, Any] = {"use_cache": False, **images}
    if "logits_to_keep" in hf_compat.forward_argument_names(hf_compat.unwrap(model)):
        settings["logits_to_keep"] = logits_to_keep + 1
    if compute_aux_loss:
        settings["output_router_logits"] = True
    with trainer.accelerator.autocast():
        return model(input_ids=input_ids, attention_mask=attention_mask, **settings)


class RouterReplay:
    """The recorded experts of one trainer's rollouts."""

    def __init__(self, trainer: Any, routers: Routers) -> None:
        """Keep the routers of the model that generates; the trained one has them too.

        Raises:
            ConfigurationError: the trainer compiles its model, which would pass over the record.
        """
        if getattr(trainer.args, "torch_compile", False):
            raise refused("router replay, compiled")
        self.routers = routers
        self.disagreement = Disagreement()

    def replaying(
        self,
        model: torch.nn.Module,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        routes: Sequence[Any],
        counts: Disagreement | None,
    ) -> AbstractContextManager[None]:
        """Have one forward of the trainer's padded rows take the recorded experts.

        Args:
            model: the policy or the reference, wrapped or not.
            attention_mask: (B, S), int64: prompts are left-padded, completions right-padded.
            logits_to_keep: tokens of the padded completions.
            routes: the record of each row.
            counts: counts choices that differ; None: they are not counted.
        """
        B, S = attention_mask.shape
        first = S - logits_to_keep
        paddings = (first - attention_mask[:, :first].sum(1)).tolist()
        parts = [(record, padding, S) for record, padding in zip(routes, paddings, strict=True)]
        routes_NLK = joined_routes(parts, self.routers.spec.shape, attention_mask.device)
        assert routes_NLK is not None, f"none of {B} rows has a record"
        return self.routers.replaying(hf_compat.unwrap(model), Replay(routes_NLK, counts))


def routes_of(row: RolloutRow) -> Any:
    """Return the experts that a row's tokens took, `(tokens, L, K)`, from its first token on.

    A token that a later turn computed again keeps the experts of the turn that sampled it.
    """
    parts: list[Any] = []
    num_known = 0
    for _, _, output in row.spans:
        record = output.routed_experts
        if record is None:
            break
        parts.append(record[num_known:])
        num_known = max(num_known, len(record))
    return np.concatenate(parts)[: len(row.prompt_ids) + len(row.completion_ids)]
