"""Wait for what another thread or process does."""

import threading
from collections.abc import Callable


def wait_until(is_true: Callable[[], object], seconds: float = 300.0) -> None:
    """Return once `is_true` is; fail after `seconds`."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if is_true():
            return
        pause.wait(0.02)
    raise AssertionError(f"it did not become true in {seconds:.0f} s")
