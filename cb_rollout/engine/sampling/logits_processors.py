"""What is done to logits before the temperature, in the order of transformers' `generate`.

Bias, penalties, what is forbidden or forced, custom processors, then the grammar. Made for a
batch's rows and kept until they change; a row that asks for nothing keeps its logits bit for bit.

B: rows, V: vocabulary, T: tokens of a row, G: rows with a grammar.
"""

import math
from collections.abc import Sequence

import torch

from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling.penalties import (
    Change,
    History,
    Rows,
    create_bad_words,
    create_bias,
    create_early_bans,
    create_forced_end,
    create_penalties,
)


class LogitsProcessing:
    """Changes the logits of the rows that ask for it."""

    def __init__(
        self,
        requests: Sequence[Request],
        vocab_size: int,
        device: torch.device,
        previous: "LogitsProcessing | None" = None,
    ) -> None:
        """Gather what `requests` ask for, one row each; their history comes from `previous`."""
        remembering = [row for row, request in enumerate(requests) if _needs_history(request)]
        self._history: History | None = None
        if remembering:
            known = None if previous is None else previous._history
            self._history = History([requests[row] for row in remembering], device, known)
        places = {row: place for place, row in enumerate(remembering)}
        rows = Rows(requests, vocab_size, device, self._history, places)
        created = (
            create_bias(rows),
            create_penalties(rows),
            create_bad_words(rows),
            create_early_bans(rows),
            create_forced_end(rows),
            _create_custom(rows),
            _create_grammars(rows),
        )
        self._changes = [change for change in created if change is not None]

    # Custom processors may hold parameters.
    @torch.no_grad()
    def __call__(self, logits_BV: torch.Tensor, indices_B: torch.Tensor) -> torch.Tensor:
        """The changed logits; a sequence whose own processor or grammar raises has failed.

        Args:
            logits_BV: float32; left as they are.
            indices_B: int64, how many tokens each row has sampled before.
        """
        logits_BV = logits_BV.clone()
        if self._history is not None:
            self._history.update()
        for change in self._changes:
            change(logits_BV, indices_B)
        return logits_BV


def _needs_history(request: Request) -> bool:
    params = request.params
    return params.is_penalized or bool(params.bad_words or params.logits_processors)


def _create_custom(rows: Rows) -> Change | None:
    """`logits_processors`, each row's by itself."""
    custom = [row for row, r in enumerate(rows.requests) if r.params.logits_processors]
    if not custom or (history := rows.history) is None:
        return None

    def process(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        for row in custom:
            request, place = rows.requests[row], rows.places[row]
            input_ids = history.ids[place : place + 1, : request.num_tokens].clone()
            scores = logits_BV[row : row + 1].clone()
            for processor in request.params.logits_processors:
                with request.failing_with(f"logits processor {_name(processor)}"):
                    scores = processor(input_ids, scores)
                    if scores.shape != (1, rows.vocab_size):
                        raise ValueError(
                            f"it returned scores of shape {list(scores.shape)}, not "
                            f"[1, {rows.vocab_size}]"
                        )
                if request.status.is_final:
                    break
            else:
                logits_BV[row] = scores[0]

    return process


def _name(processor: object) -> str:
    return getattr(processor, "__name__", type(processor).__name__)


def _create_grammars(rows: Rows) -> Change | None:
    """All but what each row's grammar allows forbidden."""
    matchers = {row: r.matcher for row, r in enumerate(rows.requests) if r.matcher is not None}
    if not matchers:
        return None

    rows_G = rows.integers(list(matchers))

    def constrain(logits_BV: torch.Tensor, indices_B: torch.Tensor) -> None:
        allowed_GV = torch.zeros(len(matchers), rows.vocab_size, dtype=torch.bool)
        for allowed_V, (row, matcher) in zip(allowed_GV, matchers.items(), strict=True):
            with rows.requests[row].failing_with("the grammar"):
                matcher.fill_allowed_tokens(allowed_V)
        is_out_GV = ~devices.moved(allowed_GV, rows.device)
        kept_GV = logits_BV[rows_G].masked_fill_(is_out_GV, -math.inf)
        logits_BV.index_copy_(0, rows_G, kept_GV)

    return constrain
