"""A copy of a module of Triton kernels with one fault, to see that a comparison refuses it."""

import importlib.util
from pathlib import Path


def with_fault(module, right, wrong, folder):
    """Return a module whose source is that of `module` with one place changed."""
    source = Path(module.__file__).read_text()
    assert source.count(right) == 1, f"{source.count(right)} places are {right!r}"
    path = folder / f"{module.__name__.rpartition('.')[2]}_with_fault.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    return faulty
