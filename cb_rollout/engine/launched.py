"""A decode step that a device was given, and whose results are on their way to the host."""

from collections.abc import Sequence

import torch

from cb_rollout.engine.request import Request
from cb_rollout.types import RequestStatus


class Launched:
    """One step of some sequences; read once."""

    def __init__(
        self,
        requests: Sequence[Request],
        rows: Sequence[int],
        results_N3: torch.Tensor,
        device: torch.device,
    ) -> None:
        """Mark the place in the calling thread's stream, behind all that it was given so far.

        Args:
            requests: the sequences.
            rows: each one's row of the results.
            results_N3: float64, on the host, being written to: token ids, log-probabilities, and
                whether each is valid.
            device: what runs the step.
        """
        self._rows = dict(zip(requests, rows, strict=True))
        self._results_N3, self._device = results_N3, device
        self._end = torch.cuda.Event() if device.type == "cuda" else None
        if self._end is not None:
            self._end.record(torch.cuda.current_stream(device))

    def current(self) -> list[Request]:
        """Its sequences that still run."""
        return [r for r in self._rows if r.status is RequestStatus.DECODING]

    def precede(self) -> None:
        """Have what the calling thread gives the device from now on come after the step."""
        if self._end is not None:
            torch.cuda.current_stream(self._device).wait_event(self._end)

    def wait(self) -> None:
        """Return when it is done.

        Raises:
            RuntimeError: the device failed.
        """
        if self._end is not None:
            self._end.synchronize()

    def read(self, requests: Sequence[Request]) -> tuple[list[int], list[float], list[bool]]:
        """Token ids, log-probabilities and validity of some of its sequences, once it is done."""
        self.wait()
        rows = [self._rows[request] for request in requests]
        tokens, logprobs, is_valid = self._results_N3[rows].unbind(1)
        return tokens.long().tolist(), logprobs.tolist(), is_valid.bool().tolist()
