"""Use private APIs of torch (2.11 to 2.13): wrappers, hooks, groups and OpenMP workers."""

import ctypes
import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules import module as _module
from torch.nn.modules.dropout import _DropoutNd

from cb_rollout.compat.patching import replacing

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # torch 2.11 may be built without it
    varlen_attn: Any = None

Module = TypeVar("Module", bound=torch.nn.Module)
_signature = cache(inspect.signature)


def plain_class(model: Module) -> type[Module]:
    """Return a module's class before torch 2.13's `fully_shard` replaced it with a subclass."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def wrapped_layer(module: Any) -> torch.nn.Module | None:
    """Return the layer inside a torch 2.13 wrapper; None if the module is not a wrapper.

    The wrappers are those of compilation, checkpointing and FSDP1.
    """
    inner = vars(module).get("_modules", {})
    for name in ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"):
        if name in inner:
            return inner[name]
    return None


def as_in_evaluation(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """Return attributes for `replacing` that make a model run uncompiled in evaluation mode.

    `Module.compile()` compiles modules in place (torch 2.11 to 2.13).
    """
    modules: list[Any] = list(model.modules())
    attributes: list[tuple[torch.nn.Module, str, Any]] = []
    for module in modules:
        if module.training:
            attributes.append((module, "training", False))
        if module._compiled_call_impl:
            attributes.append((module, "_compiled_call_impl", None))
    return attributes


def compute_dtype(model: torch.nn.Module, mixed_precision: str = "no") -> torch.dtype:
    """Return the dtype of forwards: bfloat16, or the first floating-point parameter's.

    `mixed_precision`: accelerate's setting; bfloat16 stands for float16 too, which rounds less.
    """
    if mixed_precision != "no":
        return torch.bfloat16
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def rounds_float32_products(device: torch.device) -> bool:
    """Return whether the device multiplies float32 matrices in fewer bits, as TF32 or bfloat16."""
    backends: Any = torch.backends
    products = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    return products.fp32_precision in ("tf32", "bf16")


@contextmanager
def exact_float32_products() -> Iterator[None]:
    """Compute float32 products and convolutions in full float32 (torch 2.11 to 2.13)."""
    backends: Any = torch.backends
    operations = (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
    )
    own = [operation.fp32_precision for operation in operations]
    try:
        for operation in operations:
            operation.fp32_precision = "ieee"
        yield
    finally:
        for operation, precision in zip(operations, own, strict=True):
            operation.fp32_precision = precision


@cache
def multiplies_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 matrix instructions (torch 2.11 to 2.13).

    Without them torch's bfloat16 products take far longer than float32 products, or are emulated.
    """
    emulates = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and not emulates


class DropoutSite(NamedTuple):
    """A dropout rate, and the attribute that stores it."""

    name: str
    """Name of the module within the model, or of its attribute."""
    module: torch.nn.Module
    attribute: str
    rate: float


def dropout_sites(model: torch.nn.Module) -> Iterator[DropoutSite]:
    """Yield every dropout rate, zeros included: of modules, or stored for a forward to pass on."""
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd):
            yield DropoutSite(name, module, "p", float(module.p))
            continue
        # OPT, Falcon and others pass a number stored on the module to torch's function.
        for attribute, rate in vars(module).items():
            if "drop" in attribute and isinstance(rate, float):
                yield DropoutSite(f"{name}.{attribute}", module, attribute, rate)


def dropout_rate(model: torch.nn.Module) -> float:
    """Return the highest dropout rate."""
    return max((site.rate for site in dropout_sites(model)), default=0.0)


def without_dropout(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Set all rates of `dropout_sites` to 0, without changing the model's mode."""
    return replacing([(site.module, site.attribute, 0.0) for site in dropout_sites(model)])


# What torch 2.13's unpadded attention accepts; an earlier release may have no such attention.
VARLEN_DTYPES = (torch.float16, torch.bfloat16)
VARLEN_CAPABILITY = (8, 0)
VARLEN_MAX_HEAD = 256


def has_varlen(query: torch.Tensor, value: torch.Tensor, arguments: Mapping[str, Any]) -> bool:
    """Return whether `varlen_attn` can replace sdpa: on Ampere or later, in 16 bits."""
    if varlen_attn is None or not query.is_cuda or query.dtype not in VARLEN_DTYPES:
        return False
    size = query.shape[-1]
    return (
        torch.cuda.get_device_capability(query.device) >= VARLEN_CAPABILITY
        and value.shape[-1] == size <= VARLEN_MAX_HEAD
        and size % 8 == 0
        and not arguments.get("dropout")
    )


def varlen_of_grouped_heads(*segments: Any, **arguments: Any) -> torch.Tensor:
    """Call `varlen_attn` with fewer key heads than query heads.

    torch 2.12 requires `enable_gqa`; 2.11 has no such argument, and its kernel takes the heads as
    they are.
    """
    if "enable_gqa" in _signature(varlen_attn).parameters:
        arguments["enable_gqa"] = True
    return varlen_attn(*segments, **arguments)


@contextmanager
def noting_saved_bytes(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Record the bytes of tensors saved for the backward pass, by address, without weights."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


# Hooks that need not be called once a forward is captured, by where they are defined. transformers
# 5.23 hooks embeddings for gradient checkpointing under adapters, which does nothing without
# gradients; TRL 1.16 casts the embeddings of a model whose head is float32; `bitwise` gives
# positions to a forward that has none, but a step's forward has positions; transformers hooks every
# layer of a model that was once asked for hidden states, as LLaVA asks its vision tower, but these
# hooks do nothing unless a forward asks for hidden states.
CAPTURED_HOOKS = (
    "install_output_capuring_hook.<locals>.",
    "_position_hook.<locals>.",
    "PreTrainedModel.enable_input_require_grads",
    "GRPOTrainer.__init__.<locals>._cast_lm_head_to_fp32",
    "RLOOTrainer.__init__.<locals>._cast_lm_head_to_fp32",
)


def has_hooks(model: torch.nn.Module) -> bool:
    """Return whether a captured forward would skip a hook (torch 2.11 to 2.13)."""
    has_global = bool(_module._has_any_global_hook())
    return has_global or next(_uncaptured_hooks(model), None) is not None


# Libraries whose hooks and replaced forwards shard or watch a model, or compute the same.
_SAME_FORWARD = (
    "accelerate.",
    "cb_rollout.",
    "deepspeed.",
    "liger_kernel.",
    "peft.",
    "torch._dynamo.",
    "torch.distributed.",
    "transformers.distributed.",
    "transformers.integrations.",
    "trl.",
    "wandb.",
)


def own_forwards(model: torch.nn.Module) -> list[str]:
    """Return the names of modules whose `forward` is not their class's.

    Replacements by some known libraries are left out, and so is a wrapper around the whole model's
    forward.
    """
    class_forward = inspect.unwrap(type(model).forward)
    names = []
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if forward is None or _is_same(forward):
            continue
        wrapped = inspect.unwrap(getattr(forward, "__func__", forward))
        if module is model and wrapped is class_forward:
            continue
        names.append(name or "the model")
    return names


def own_hooks(model: torch.nn.Module) -> list[str]:
    """Return the names of modules with a forward hook that no known library installed."""
    return [name for name, _ in named_hooks(model)]


def named_hooks(model: torch.nn.Module) -> list[tuple[str, object]]:
    """Return the forward hooks that no known library installed, with their modules' names."""
    return [(name, hook) for name, hook in _uncaptured_hooks(model) if not _is_same(hook)]


def _uncaptured_hooks(model: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the hooks that a captured forward would not call, with their modules' names."""
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        for hook in hooks:
            if not getattr(hook, "__qualname__", "").startswith(CAPTURED_HOOKS):
                yield name or "the model", hook


def _is_same(function: Any) -> bool:
    """Return whether a module of `_SAME_FORWARD` defines a function, ignoring `__wrapped__`."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    names = getattr(function, "__globals__", None) or {"__name__": type(function).__module__}
    return f"{names['__name__']}.".startswith(_SAME_FORWARD)


def release_workers() -> bool:
    """End the calling thread's OpenMP workers; its next computation starts them again.

    Returns False if torch (2.11 to 2.13) does not use libgomp.
    """
    libgomp = _libgomp()
    # 1 is OpenMP 5.0's omp_pause_soft: keep settings, end threads.
    return libgomp is not None and libgomp.omp_pause_resource_all(1) == 0


@cache
def _libgomp() -> ctypes.CDLL | None:
    """Return the libgomp that torch loaded, if it is 10 or newer."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()}
    loaded = [path for path in paths if "/libgomp" in path]
    # If two are loaded, it is unclear which of them torch computes with.
    if len(loaded) != 1:
        return None
    library = ctypes.CDLL(loaded[0])
    return library if hasattr(library, "omp_pause_resource_all") else None


def default_group_timeout() -> timedelta | None:
    """Return the timeout of `init_process_group` (torch 2.11 to 2.13); None: unknown.

    torch gives other groups its default timeout, not the default group's.
    """
    group: Any = distributed.group.WORLD
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None


def empty_host_cache() -> None:
    """Give the pinned memory of freed tensors back to the system (torch 2.11 to 2.13)."""
    if not torch.cuda.is_initialized():
        return
    # torch 2.13 names the function after the accelerator, earlier releases after the host.
    for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):
        empty = getattr(torch._C, name, None)
        if empty is not None:
            empty()
            return


def without_values() -> AbstractContextManager[None]:
    """Give tensors shapes but no memory; modules only compute shapes (torch 2.11 to 2.13)."""
    mode: Any = FakeTensorMode()
    return mode


def clear_cublas_workspaces() -> None:
    """Free cuBLAS workspaces of all streams, as torch's own graphs do around a capture.

    Does what `torch._inductor.cudagraph_trees.clear_cublass_cache` does in torch 2.11 to 2.13.
    """
    # Only a build with CUDA has this function.
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def leave_failed_capture(device: torch.device, pool: tuple[int, int]) -> None:
    """Make a device's allocator and random generator forget a capture whose end raised.

    The allocator (torch 2.11 to 2.13) would treat the capture as still under way, and during a
    capture it never reuses memory that a second stream has used. Before torch 2.13, the generator
    would still belong to the capture, and drawing random numbers in training would raise.

    Args:
        device: a device with an index; the calling thread's current device.
        pool: the memory pool that the capture allocated in.
    """
    # This call raises if the end of the capture already did the same.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
    generator = torch.cuda.default_generators[device.index]
    try:
        offset = generator.get_offset()
        torch.rand(1, device=device, generator=generator)
        generator.set_offset(offset)
    except RuntimeError:
        generator.graphsafe_set_state(generator.clone_state())


# The pool of segments that belong to no CUDA graph.
_COMMON_POOL = (0, 0)


def unused_pool_bytes(device: torch.device) -> int:
    """Return the unused bytes in private pools, which serve captures of the pools' CUDA graphs.

    torch's own statistics (2.11 to 2.13) count these bytes as memory that any tensor may take.

    Args:
        device: a CUDA device, with an index.
    """
    if torch.cuda.get_allocator_backend() != "native":
        # Other allocators have no such pools, or do not report them.
        return 0
    num_bytes = 0
    for segment in torch.cuda.memory_snapshot():
        is_private = tuple(segment["segment_pool_id"]) != _COMMON_POOL
        if is_private and segment["device"] == device.index:
            num_bytes += segment["total_size"] - segment["allocated_size"]
    return num_bytes
