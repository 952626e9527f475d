"""The token ids of some sequences on the logits' device, kept from step to step.

Owns that copy. It follows from the sequences' own token ids, so nothing is lost by preemption. A
step costs the new tokens; only a sequence that joins is copied whole.

R: rows, C: places, T: tokens of the longest row.
"""

from collections.abc import Sequence

import torch

from cb_rollout.engine import device as devices
from cb_rollout.engine.request import Request

NUM_SPARE_PLACES = 256
# So that the copy is enlarged every few hundred steps, at no more than 2 KiB a row.


class History:
    """Token ids by row, right-padded."""

    def __init__(
        self, requests: Sequence[Request], device: torch.device, previous: "History | None" = None
    ) -> None:
        """Take over what `previous` holds of these sequences; `update()` copies the rest."""
        self._requests = list(requests)
        self._device = device
        self._num_known = [0] * len(requests)
        num_prompt = [len(request.prompt_ids) for request in requests]
        self.num_prompt = devices.sent(num_prompt, device)
        """Tokens of each prompt (int64, R)."""
        self.num_tokens = self.num_prompt
        """Tokens of each row, at the last update (int64, R)."""
        self._ids_RC = self._places(max(request.num_tokens for request in requests))
        self.ids = self._ids_RC
        """Token ids at the last update (int64, `[R, T]`); past `num_tokens` they mean nothing."""
        if previous is not None:
            self._take_over(previous)

    def _places(self, num_tokens: int) -> torch.Tensor:
        shape = (len(self._requests), num_tokens + NUM_SPARE_PLACES)
        return torch.zeros(shape, dtype=torch.int64, device=self._device)

    def _take_over(self, previous: "History") -> None:
        old_rows = {id(request): row for row, request in enumerate(previous._requests)}
        kept = [row for row, request in enumerate(self._requests) if id(request) in old_rows]
        sources = [old_rows[id(self._requests[row])] for row in kept]
        for row, source in zip(kept, sources, strict=True):
            self._num_known[row] = previous._num_known[source]
        width = max((self._num_known[row] for row in kept), default=0)
        target_index = devices.sent(kept, self._device)
        source_index = devices.sent(sources, self._device)
        self._ids_RC[target_index, :width] = previous._ids_RC[source_index, :width]

    def update(self) -> None:
        """Copy what was sampled since the last update."""
        longest = max(request.num_tokens for request in self._requests)
        if longest > self._ids_RC.shape[1]:
            old_RC, self._ids_RC = self._ids_RC, self._places(longest)
            self._ids_RC[:, : old_RC.shape[1]] = old_RC
        rows, places, tokens = [], [], []
        for row, (request, known) in enumerate(zip(self._requests, self._num_known, strict=True)):
            new = request.token_ids[known:]
            rows += [row] * len(new)
            places += range(known, known + len(new))
            tokens += new
            self._num_known[row] = known + len(new)
        triple = devices.sent([rows, places, tokens], self._device)
        self._ids_RC[triple[0], triple[1]] = triple[2]
        self.num_tokens = devices.sent(self._num_known, self._device)
        self.ids = self._ids_RC[:, :longest]
