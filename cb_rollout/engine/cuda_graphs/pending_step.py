"""A decode step that a device was given, and whose results are on their way to the host.

Used by the thread that steps the engine.
"""

from collections.abc import Sequence

import torch

from cb_rollout.engine.memory import device as devices
from cb_rollout.engine.request import Request
from cb_rollout.types import RequestStatus


class PendingStep:
    """One step of some sequences."""

    def __init__(
        self,
        requests: Sequence[Request],
        rows: Sequence[int],
        results_N3: torch.Tensor,
        device: torch.device,
    ) -> None:
        """Mark the step's end in the calling thread's stream.

        Args:
            requests: the sequences.
            rows: each one's row of the results.
            results_N3: float64, on the host, being written to: token ids, log-probabilities, and
                whether each is valid.
            device: what runs the step.
        """
        self._rows = dict(zip(requests, rows, strict=True))
        self._results_N3, self._end = results_N3, devices.record_event(device)

    def current(self) -> list[Request]:
        """Its sequences that still run."""
        return [r for r in self._rows if r.status is RequestStatus.DECODING]

    def read(self, requests: Sequence[Request]) -> tuple[list[int], list[float], list[bool]]:
        """Token ids, log-probabilities and validity of some of its sequences, once it is done.

        Raises:
            RuntimeError: the device failed.
        """
        if self._end is not None:
            self._end.synchronize()
        rows = [self._rows[request] for request in requests]
        tokens, logprobs, is_valid = self._results_N3[rows].unbind(1)
        return tokens.long().tolist(), logprobs.tolist(), is_valid.bool().tolist()
