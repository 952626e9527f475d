"""Reach past the public API of Triton (3.6 to 3.9): launches that are reported, not run."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

# Called with a kernel's name, its arguments, and its compile-time arguments and launch options.
Report = Callable[[str, tuple[Any, ...], Mapping[str, Any]], None]


@contextmanager
def launches_reported(report: Report) -> Iterator[None]:
    """Report the launches of all Triton kernels inside, in place of running them."""
    # Triton is an optional dependency.
    from triton.runtime.jit import KernelInterface

    def launcher(kernel: Any, grid: object) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            report(kernel.fn.__name__, args, options)

        return launch

    with patch.object(KernelInterface, "__getitem__", launcher):
        yield
