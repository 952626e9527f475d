"""Use private APIs of torch (2.11 to 2.13) to compile C++, and to trace and compile graphs.

`torch.utils.cpp_extension` needs ninja, Python's headers and torch's headers; inductor's
`CppBuilder` knows the compiler, the CPU's flags and torch's OpenMP. `torch.export` needs every
input named and every mutation declared; `make_fx`, on which it builds, records what runs.
`torch.compile` would trace the graph again and check guards at each call; `standalone_compile` does
neither.

Compiled code is stored in the user's `cache_folder` and loaded from there, so a folder or a file
that another user made or may write to is refused. Torch's default folder is in the temporary folder
and named after the user, and any user of the machine could create it first.
"""

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import cpp_builder, standalone_compile
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.overrides import TorchFunctionMode

from cb_rollout.compat.patching import replacing
from cb_rollout.errors import ConfigurationError

# Multiply and add in one instruction, which inductor forbids in its own kernels.
CONTRACT_FLAG = "-ffp-contract=fast"

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder(name: str = "") -> Path:
    """Return `$XDG_CACHE_HOME/cb_rollout`, else `~/.cache/cb_rollout`, or a folder in it.

    The folder is created if missing, accessible to this user only. Raises `ConfigurationError` if
    another user made the folder or may write to it, or if it cannot be written.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (caches / "cb_rollout", caches / "cb_rollout" / name):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            require_own(folder)
            folder.chmod(0o700)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError("it cannot be written")
        except OSError as error:
            raise ConfigurationError(
                f"{folder} cannot be used as a cache ({error}); set XDG_CACHE_HOME to a folder of "
                "your own."
            ) from error
    # Links are resolved here, because another user could redirect a link later.
    return folder.resolve()


def require_own(path: Path) -> None:
    """Raise `ConfigurationError` if another user made a file or folder or may write to it."""
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & WRITABLE_BY_OTHERS:
        raise ConfigurationError(
            f"{path} belongs to user {status.st_uid} and has mode "
            f"{stat.S_IMODE(status.st_mode):o}, so another user may have written the code in it; "
            "remove it, or set XDG_CACHE_HOME to a folder of your own."
        )


def compiler_obstacle() -> str | None:
    """Return why C++ cannot be compiled on this machine; None if it can (torch 2.11 to 2.13)."""
    try:
        cpp_builder.get_cpp_compiler()
    except Exception:  # noqa: BLE001  whatever it raises, there is none
        compilers = inductor_config.cpp.cxx
        names = compilers if isinstance(compilers, list | tuple) else [compilers]
        return f"tried {', '.join(str(name) for name in names if name)}"
    return None


def compile_library(
    source: str, *, contracts: bool = True, approve: Callable[[Path], None] | None = None
) -> ctypes.CDLL:
    """Load C++ source, compiled now or by an earlier process (torch 2.11 to 2.13).

    Args:
        source: the C++ source.
        contracts: let the compiler fuse products and sums, which it does in some loops and not in
            others.
        approve: called with the library's path before this process loads it; its exceptions are
            passed on.

    Raises:
        ConfigurationError: another user may have written the library.
        Exception: what the compiler raises.
    """
    with own_folder() as folder:
        options = cpp_builder.CppTorchDeviceOptions(
            vec_isa=pick_vec_isa(),
            device_type="cpu",
            extra_flags=(CONTRACT_FLAG,) if contracts else (),
        )
        command = cpp_builder.CppBuilder("o", "i", options).get_command_line()
        path = folder / f"{hashlib.sha256(f'{command} {source}'.encode()).hexdigest()}.so"
        if not path.exists():
            # Several processes may compile it at once: each moves a complete file into place.
            with tempfile.TemporaryDirectory(dir=folder) as build:
                text = Path(build) / "kernel.cpp"
                text.write_text(source)
                builder = cpp_builder.CppBuilder("kernel", str(text), options, build)
                builder.build()
                built = Path(builder.get_target_file_path())
                # The umask may let the user's group write to new files.
                built.chmod(0o700)
                built.replace(path)
        require_own(path)
    if approve is not None:
        approve(path)
    return ctypes.CDLL(str(path))


# Inductor reads its folder from an environment variable, which all threads share.
_COMPILING = threading.RLock()
_FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def own_folder() -> Iterator[Path]:
    """Make inductor compile into, and load from, this user's cache folder; yield the folder."""
    with _COMPILING:
        try:
            folder = cache_folder(f"compiled-{machine_hash()}")
        except ConfigurationError as error:
            folder = _temporary_folder(str(error))
        before = os.environ.get(_FOLDER_VARIABLE)
        os.environ[_FOLDER_VARIABLE] = str(folder)
        try:
            yield folder
        finally:
            del os.environ[_FOLDER_VARIABLE]
            if before is not None:
                os.environ[_FOLDER_VARIABLE] = before


@cache
def machine_hash() -> str:
    """Hash what compiled code depends on: different machines may share a home directory."""
    described = [platform.machine(), *platform.libc_ver(), torch.__version__]
    cpus = Path("/proc/cpuinfo")
    if cpus.exists():
        names = ("model name", "flags", "Features", "CPU part")
        lines = cpus.read_text().splitlines()
        described += sorted({line for line in lines if line.startswith(names)})
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]


@cache
def _temporary_folder(reason: str) -> Path:
    """Create a folder that lasts until this process ends, and warn why."""
    warnings.warn(
        "Compiled kernels are kept for this process only, so the next one compiles them again: "
        f"{reason}",
        stacklevel=2,
    )
    folder = tempfile.mkdtemp(prefix="cb_rollout-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


GROUPED = "cb_rollout::grouped_product"

torch.library.define(GROUPED, "(Tensor rows, Tensor weights, Tensor ends) -> Tensor")


def grouped_product(
    rows_BK: torch.Tensor, weights_GKN: torch.Tensor, ends_G: torch.Tensor
) -> torch.Tensor:
    """Multiply each row by its group's weight, `[B, N]`; `ends_G`: the end of each group's rows."""
    return torch._grouped_mm(rows_BK, weights_GKN, ends_G)


torch.library.impl(GROUPED, "CPU", grouped_product)


@torch.library.register_fake(GROUPED)
def _output_of_grouped_product(
    rows_BK: torch.Tensor, weights_GKN: torch.Tensor, ends_G: torch.Tensor
) -> torch.Tensor:
    return rows_BK.new_empty(rows_BK.shape[0], weights_GKN.shape[2])


class _AnyDtypeGrouped(TorchFunctionMode):
    """Trace torch's `_grouped_mm`, which transformers' experts call, as `grouped_product`.

    Its CPU kernel takes float32, but its shape function accepts only bfloat16 (torch 2.13).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch._grouped_mm and _is_plain_product(args, kwargs):
            rows_BK, weights_GKN = args
            return torch.ops.cb_rollout.grouped_product(rows_BK, weights_GKN, kwargs["offs"])
        return func(*args, **kwargs)


def _is_plain_product(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of `_grouped_mm` only multiplies rows by stacked weights."""
    if len(args) != 2 or kwargs.get("offs") is None:
        return False
    if kwargs.get("bias") is not None or kwargs.get("out_dtype") is not None:
        return False
    rows, weights = args
    return rows.dim() == 2 and weights.dim() == 3


def trace_graph(
    function: Callable[..., torch.Tensor], *examples: torch.Tensor
) -> tuple[fx.GraphModule, bool]:
    """Trace a function of tensors of any leading size (torch 2.11 to 2.13).

    Returns the graph of operators on inputs and weights, and whether it is valid for some sizes
    only. Raises an exception if the function reads the contents of a tensor.
    """
    # torch 2.13 logs an error for a forward that cannot be traced.
    quiet = replacing([(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)])
    with torch.no_grad(), quiet, _AnyDtypeGrouped():
        module = make_fx(function, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*examples)
    merge_casts(module.graph)
    shapes = module.shape_env
    assert shapes is not None
    return module, bool(shapes.guards or shapes.replacements or shapes.deferred_runtime_asserts)


def is_tracing() -> bool:
    """Return whether this thread is in `trace_graph` (torch 2.11 to 2.13)."""
    return get_proxy_mode() is not None


_MERGED = (
    torch.ops.aten._to_copy.default,
    torch.ops.aten.view.default,
    torch.ops.aten.sym_size.int,
)


def merge_casts(graph: fx.Graph) -> None:
    """Merge equal casts and views of a traced graph, in place, unless an operator writes to them.

    Under autocast each of a layer's products casts the same rows. torch's `fx_graph_cse` (2.13)
    would also merge tensors if a later operator writes to one of them.
    """
    written: set[object] = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            written.update(map(_storage, node.all_input_nodes))
    first: dict[object, fx.Node] = {}
    for node in graph.nodes:
        if node.target not in _MERGED:
            continue
        if _storage(node) in written or not written.isdisjoint(map(_storage, node.all_input_nodes)):
            continue
        equal = first.setdefault((node.target, node.args, node.kwargs), node)
        if equal is not node:
            node.replace_all_uses_with(equal)
            graph.erase_node(node)


def _storage(node: fx.Node) -> object:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


def fake_weight(graph: fx.Graph, weight: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of a weight's shape, for an input of a traced graph (torch 2.13)."""
    mode = graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    return mode.from_tensor(weight.detach(), static_shapes=True)


def call_function(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """Add an operator call to a traced graph, with its fake result (torch 2.11 to 2.13)."""
    node = graph.call_function(target, args)
    mode = graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    with mode:
        node.meta["val"] = target(*fx.map_arg(args, lambda argument: argument.meta["val"]))
    return node


def propagate_fake_tensors(graph: fx.Graph) -> None:
    """Recompute the fake result of each node of a rewritten graph (torch 2.11 to 2.13)."""
    examples = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    propagation = FakeTensorProp(fx.GraphModule({}, graph), examples[0].fake_mode)
    propagation.propagate_dont_convert_inputs(*examples)


def compile_graph(graph: fx.Graph) -> Callable[..., torch.Tensor]:
    """Compile a traced graph with one output, with inductor (torch 2.11 to 2.13)."""
    (output,) = graph.find_nodes(op="output")
    output.args = ((output.args[0],),)
    compiled = compile_outputs(graph)
    return lambda *inputs: compiled(*inputs)[0]


def compile_outputs(graph: fx.Graph) -> Callable[..., Sequence[torch.Tensor]]:
    """Compile a traced graph that returns a tuple, with inductor (torch 2.11 to 2.13)."""
    examples = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    # Compile in this process: workers would outlive a training run's forks. Round to 16 bits where
    # the model rounds, also inside of a fused kernel. A trace is tried before it is used, so its
    # calls skip the checks of sizes. The caller captures CUDA graphs itself.
    patches = {
        "compile_threads": 1,
        "emulate_precision_casts": True,
        "triton.cudagraphs": False,
        "size_asserts": False,
        "alignment_asserts": False,
    }
    with torch.no_grad(), own_folder():
        artifact = standalone_compile(
            fx.GraphModule({}, graph),
            examples,
            dynamic_shapes="from_graph",
            options={"config_patches": patches},
        )

    # A graph that calls this function needs a name for it.
    def compiled(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        return artifact(*inputs)

    return compiled
