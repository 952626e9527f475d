"""Draw the progress bar of a rollout with tqdm, in the thread that waits for the outputs."""

import sys
from contextlib import suppress
from typing import Any

# Text in notebooks too: each widget of tqdm.auto 4.70 leaves an empty line there.
from tqdm import tqdm
from tqdm.utils import ObjectWrapper

from cb_rollout.engine.request import Request

# Longest time between two updates of a bar.
PROGRESS_SECONDS = 0.25


class ProgressBar(tqdm):
    """Bar of finished sequences, with tokens per second and the length of the longest sequence."""

    def __init__(
        self, manager: Any, requests: list[Request], finished: dict[str, Any], is_shown: bool | None
    ) -> None:
        """Draw if `is_shown`; None: in a terminal or a notebook, and erase it at the end."""
        self._manager = manager
        self._requests = requests
        self._finished = finished
        self._tokens_before = manager.counters.tokens_generated
        is_drawn = _is_watched() if is_shown is None else is_shown
        super().__init__(
            desc="rollout",
            unit="seq",
            total=len(requests),
            file=_Stderr(sys.stderr),
            leave=bool(is_shown),
            disable=not is_drawn,
            dynamic_ncols=True,
            # With a number above 1, tqdm would also draw in another thread.
            miniters=1,
        )

    @property
    def format_dict(self) -> dict[str, Any]:
        fields = dict(super().format_dict)
        num_tokens = self._manager.counters.tokens_generated - self._tokens_before
        rate = num_tokens / fields["elapsed"] if fields["elapsed"] else 0
        # A pool's requests grow only on its workers, so its outputs count too.
        lengths = [len(output.generated_tokens) for output in self._finished.values()]
        lengths += [request.num_generated for request in self._requests]
        longest = max(lengths, default=0)
        return fields | {"postfix": f"tokens/s={rate:,.0f}, longest={longest:,}"}


class _Stderr(ObjectWrapper):
    """Standard error whose writes never raise: tqdm 4.70 would raise with its lock held."""

    def write(self, text: str) -> None:
        with suppress(AttributeError, OSError, ValueError):
            self._wrapped.write(text)

    def flush(self) -> None:
        with suppress(AttributeError, OSError, ValueError):
            self._wrapped.flush()


def _is_watched() -> bool:
    """Return whether stderr goes to a terminal or to a notebook; False: it is closed or missing."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    with suppress(AttributeError, ValueError):
        if get_ipython is not None and get_ipython():
            return True
        return sys.stderr.isatty()
    return False
