"""Reach past the public API of torch (2.11 to 2.13): wrappers, hooks, groups and OpenMP workers."""

import ctypes
import inspect
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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
    """Return a module's class, from which torch 2.13's `fully_shard` derives one of its own."""
    return next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def wrapped_layer(module: Any) -> torch.nn.Module | None:
    """Return the layer inside a wrapper of torch 2.13; None: the module is no wrapper.

    The wrappers are those of compilation, checkpointing and FSDP1.
    """
    inner = vars(module).get("_modules", {})
    names = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    return next((inner[name] for name in names if name in inner), None)


def as_in_evaluation(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, Any]]:
    """Return the attributes, for `replacing`, that have a model run plainly in evaluation mode.

    `Module.compile()` compiles modules in place (torch 2.11 to 2.13).
    """
    modules: list[Any] = list(model.modules())
    training: list[Any] = [(module, "training", False) for module in modules if module.training]
    return training + [(m, "_compiled_call_impl", None) for m in modules if m._compiled_call_impl]


def compute_dtype(model: torch.nn.Module, mixed_precision: str = "no") -> torch.dtype:
    """Return the dtype of forwards: the first floating-point parameter's, or of 16 bits.

    `mixed_precision`: accelerate's; float16 rounds no more than bfloat16.
    """
    if mixed_precision != "no":
        return torch.bfloat16
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def rounds_float32_products(device: torch.device) -> bool:
    """Return whether float32 matrices are multiplied in fewer bits there, as TF32 or bfloat16."""
    backends: Any = torch.backends
    products = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    return products.fp32_precision in ("tf32", "bf16")


@contextmanager
def exact_float32_products() -> Iterator[None]:
    """Compute products and convolutions of float32 in float32 (torch 2.11 to 2.13)."""
    backends: Any = torch.backends
    cuda, cpu = backends.cuda.matmul, backends.mkldnn
    operations = (cuda, backends.cudnn.conv, cpu.matmul, cpu.conv)
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
    """Return whether this CPU has instructions for products in bfloat16 (torch 2.11 to 2.13).

    Without them torch's products take far longer than in float32, or emulate.
    """
    emulates = torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and not emulates


class DropoutSite(NamedTuple):
    """A rate of dropout, and where it is kept."""

    name: str
    """Name of the module within the model, or of its attribute."""
    module: torch.nn.Module
    attribute: str
    rate: float


def dropout_sites(model: torch.nn.Module) -> Iterator[DropoutSite]:
    """Yield every rate of dropout, 0 too: of modules, and numbers that a forward passes on."""
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd):
            yield DropoutSite(name, module, "p", float(module.p))
            continue
        # OPT, Falcon and others call torch's function with a number of the module.
        for attribute, rate in vars(module).items():
            if "drop" in attribute and isinstance(rate, float):
                yield DropoutSite(f"{name}.{attribute}", module, attribute, rate)


def dropout_rate(model: torch.nn.Module) -> float:
    """Return the highest rate of dropout."""
    return max((site.rate for site in dropout_sites(model)), default=0.0)


def without_dropout(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Set all rates of `dropout_sites` to 0; the model stays in its mode."""
    return replacing([(site.module, site.attribute, 0.0) for site in dropout_sites(model)])


# torch 2.13's unpadded attention takes these; an earlier release may have none.
VARLEN_DTYPES, VARLEN_CAPABILITY, VARLEN_MAX_HEAD = (torch.float16, torch.bfloat16), (8, 0), 256


def has_varlen(query: torch.Tensor, value: torch.Tensor, arguments: Mapping[str, Any]) -> bool:
    """Return whether `varlen_attn` computes what sdpa does: Ampere or later, in 16 bits."""
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

    torch 2.12 asks for `enable_gqa`; 2.11 has no such argument, and its kernel takes them as is.
    """
    if "enable_gqa" in _signature(varlen_attn).parameters:
        arguments["enable_gqa"] = True
    return varlen_attn(*segments, **arguments)


@contextmanager
def noting_saved_bytes(model: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Note what forwards inside keep for their backward pass: address to bytes; no weights."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


# Hooks that need no call of their own once a forward is captured, by where they are defined.
# transformers 5.23 hooks embeddings for gradient checkpointing under adapters, which does nothing
# without gradients; TRL 1.16 casts the embeddings of a model whose head is float32; `bitwise` gives
# positions where a forward has none, and a step's forward has its own; transformers hooks every
# layer of a model that was once asked for hidden states, as LLaVA asks its vision tower, and its
# hooks do nothing unless a forward asks.
CAPTURED_HOOKS = (
    "install_output_capuring_hook.<locals>.",
    "_position_hook.<locals>.",
    "PreTrainedModel.enable_input_require_grads",
    "GRPOTrainer.__init__.<locals>._cast_lm_head_to_fp32",
    "RLOOTrainer.__init__.<locals>._cast_lm_head_to_fp32",
)


def has_hooks(model: torch.nn.Module) -> bool:
    """Return whether a captured forward would leave out a call of a hook (torch 2.11 to 2.13)."""
    has_global = bool(_module._has_any_global_hook())
    return has_global or next(_uncaptured_hooks(model), None) is not None


# Libraries whose hooks and replaced forwards shard or watch a model, or compute the same.
_SAME_FORWARD = (
    *("accelerate.", "cb_rollout.", "deepspeed.", "liger_kernel.", "peft.", "trl.", "wandb."),
    *("torch._dynamo.", "torch.distributed.", "transformers.distributed."),
    "transformers.integrations.",
)


def own_forwards(model: torch.nn.Module) -> list[str]:
    """Return the names of modules that run another `forward` than their class's.

    Left out is what some libraries put there, and of the whole model what wraps its class's.
    """
    own = inspect.unwrap(type(model).forward)
    return [
        name or "the model"
        for name, module in model.named_modules()
        if (forward := vars(module).get("forward")) is not None
        and not _is_same(forward)
        and not (module is model and inspect.unwrap(getattr(forward, "__func__", forward)) is own)
    ]


def own_hooks(model: torch.nn.Module) -> list[str]:
    """Return the names of modules with a forward hook that none of some libraries put there."""
    return [name for name, hook in _uncaptured_hooks(model) if not _is_same(hook)]


def _uncaptured_hooks(model: torch.nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the hooks that a captured forward would not call, with their modules' names."""
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if not getattr(hook, "__qualname__", "").startswith(CAPTURED_HOOKS):
                yield name or "the model", hook


def _is_same(function: Any) -> bool:
    """Return whether a function's code, whatever it says to wrap, is of `_SAME_FORWARD`."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    names = getattr(function, "__globals__", None) or {"__name__": type(function).__module__}
    return f"{names['__name__']}.".startswith(_SAME_FORWARD)


def release_workers() -> bool:
    """End the calling thread's OpenMP workers, which its next computation starts again.

    Returns False where torch (2.11 to 2.13) computes without libgomp.
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
    # Of two, it is unclear which one torch computes with.
    if len(loaded) != 1:
        return None
    library = ctypes.CDLL(loaded[0])
    return library if hasattr(library, "omp_pause_resource_all") else None


def default_group_timeout() -> timedelta | None:
    """Return the timeout of `init_process_group` (torch 2.11 to 2.13); None: unknown.

    torch gives other groups a timeout of its own, however the default group was made.
    """
    group: Any = distributed.group.WORLD
    try:
        return group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):
        return None


def without_values() -> AbstractContextManager[None]:
    """Give tensors shapes and no memory; modules compute shapes only (torch 2.11 to 2.13)."""
    mode: Any = FakeTensorMode()
    return mode
