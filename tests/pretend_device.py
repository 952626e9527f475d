"""A CUDA device without one: tensors that say they are there, and lie in host memory.

Tensors of two devices in one operator are refused. Where the host would wait for the device is
counted, and what it reads without waiting is not there yet: a copy to the host that is not awaited
arrives when an event behind it is. A capture refuses every wait and every copy to the host.
Numbers are those of the CPU, under autocast too.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import torch
from fast_path import Playback, run_few_rows
from plain_attention import varlen_attn_of_grouped_heads
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

from cb_rollout.compat import torch as torch_compat
from cb_rollout.engine.cuda_graphs import graphs, qualification, selection

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
GIB = 1 << 30
MIB = 1 << 20

BYTES_PER_ROW = 10 * MIB
# Of a captured step, in the pool of its graph.

MOVES = {aten._to_copy.default, aten.copy_.default}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
# Operators that take tensors of two devices; indices may come from the host, which then waits.

WAITS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default),
    *(aten.masked_select.default, aten._unique2.default, aten.unique_dim.default),
    *(aten.unique_consecutive.default, aten.bincount.default, aten.repeat_interleave.Tensor),
}
# Operators whose result the host has to wait for.

UNORDERED = {
    *(aten.cumsum.default, aten.cumsum_.default, aten.histc.default, aten.bincount.default),
    *(aten.kthvalue.default, aten.median.dim, aten.put.default, aten.put_.default),
}
# Operators of floats whose threads add, or write, in any order.

GROUPED = {"aten::_grouped_mm", "transformers::grouped_mm_fallback"}
# Products of groups, which read on the host where each group ends, unless a kernel takes them.

FAST_GROUPED_CAPABILITIES = (9, 10)
# The first numbers of those that torch 2.13 has such a kernel for, in bfloat16.

CAST = {
    *("linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm"),
    *("conv1d", "scaled_dot_product_attention"),
}
# Functions whose numbers autocast casts, on a CPU and on a device.

NOT_THERE_YET = -1
# What a host reads before a copy has come.


ANSWERS = {
    aten._fused_sdp_choice.default: lambda query: 0,
    aten._pin_memory.default: lambda tensor: Pretended.pin(tensor.clone()),
    aten.is_pinned.default: lambda tensor: Pretended.is_pinned(tensor),
}


class OnDevice(torch.Tensor):
    """A tensor on the device."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args, kwargs = args, kwargs or {}
        if getattr(func, "__name__", None) in CAST and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            args, kwargs = tree_map_only(OnDevice, lambda t: _cast(t, dtype), (args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            # Torch's own code would ask a device for a guard; a meta tensor has one.
            device="meta",
        )

    @property
    def device(self):
        return DEVICE

    @property
    def is_cuda(self):
        return True

    @property
    def is_meta(self):
        return False

    def __init__(self, held):
        self.held = held

    def __getitem__(self, index):
        return super().__getitem__(_there(index))

    def __setitem__(self, index, value):
        super().__setitem__(_there(index), value)

    def data_ptr(self):
        return self.held.data_ptr()

    def tolist(self):
        Pretended.wait()
        return self.held.tolist()

    def __repr__(self):
        return f"OnDevice({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """Do an operator on host memory, and give back what it gives on the device that it runs on."""
    refuse_if_unordered(func, args)
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [tensor for tensor in given if isinstance(tensor, OnDevice)]
    here = [tensor for tensor in given if not isinstance(tensor, OnDevice) and tensor.dim()]
    assert not any(t.is_meta for t in here), f"torch lost what {func} takes"
    if there and here and func not in MOVES | INDEXED:
        raise RuntimeError(f"{func} takes tensors of cuda:0 and of the cpu")
    if func in ANSWERS:
        return ANSWERS[func](args[0])
    device, is_copied = kwargs.get("device"), func is aten.copy_.default
    lands_there = isinstance(args[0], OnDevice) if is_copied else _is_there(device)
    lands_here = not lands_there if is_copied else _is_cpu(device)
    is_moved = func in MOVES and bool((lands_there and here) or (lands_here and there))
    is_asked = kwargs.get("non_blocking") or (is_copied and args[2:] == (True,))
    is_free = is_asked and all(map(Pretended.is_pinned, here))
    is_mask = func in INDEXED and any(
        t.dtype == torch.bool for t in tree_leaves(args[1]) if isinstance(t, torch.Tensor)
    )
    is_awaited = (is_moved and not is_free) or (there and func in WAITS)
    if is_awaited or (there and func in INDEXED and (here or is_mask)):
        Pretended.wait()
    if there and func.name() in GROUPED and not _has_fast_product(there[0]):
        Pretended.wait()
    if is_copied and lands_here and there and is_free:
        Pretended.refuse_in_capture()
        Pretended.unread[Pretended.num_copies] = args[0], args[1].held.clone()
        Pretended.num_copies += 1
        return args[0].fill_(NOT_THERE_YET)
    own = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if device is not None:
        own["device"] = torch.device("cpu")
    own_args, own = tree_map_only(OnDevice, lambda tensor: tensor.held, (args, own))
    if func is aten.histc.default:
        # A device counts integers too.
        own_args = (own_args[0].float(), *own_args[1:])
    result = func(*own_args, **own)
    if kwargs.get("pin_memory"):
        Pretended.pin(result)
    if lands_here or not (there or lands_there):
        return args[0] if is_copied else result
    wrapped = tree_map_only(torch.Tensor, OnDevice, result)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if there else wrapped


def refuse_if_unordered(func, args):
    """What torch 2.11 to 2.13 refuses on a device under `use_deterministic_algorithms(True)`."""
    if not torch.are_deterministic_algorithms_enabled() or func not in UNORDERED:
        return
    is_float = isinstance(args[0], OnDevice) and args[0].dtype.is_floating_point
    if is_float:
        raise RuntimeError(f"{func} does not have a deterministic implementation")


def _has_fast_product(states):
    is_known = torch.cuda.get_device_capability()[0] in FAST_GROUPED_CAPABILITIES
    return is_known and states.dtype == torch.bfloat16


def _cast(tensor, dtype):
    """What autocast gives a function of `CAST`."""
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if is_cast else tensor


def _there(index):
    """Lists among indices as tensors: torch itself would put them where nothing is kept."""
    if isinstance(index, tuple):
        return tuple(map(_there, index))
    return torch.tensor(index, device=DEVICE) if isinstance(index, list) else index


def _is_there(device):
    return device is not None and torch.device(device).type in {"cuda", "meta"}


def _is_cpu(device):
    return device is not None and torch.device(device).type == "cpu"


class Pretended(TorchDispatchMode):
    """Within, what is made for the device is made there."""

    # What keeps torch from looking for a device to initialise.
    _mode_key = torch._C._TorchDispatchModeKey.FAKE
    num_waits = 0
    is_capturing = False

    num_copies = 0
    """To the host that it did not wait for."""
    unread: ClassVar = {}
    """Those that have not arrived, by their numbers: where to, and what."""
    pinned: ClassVar = set()
    """Addresses of pinned memory."""

    def __enter__(self):
        torch._C._ensureCUDADeviceGuardSet()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *raised):
        torch._C._set_only_lift_cpu_tensors(False)
        return super().__exit__(*raised)

    @classmethod
    def refuse_in_capture(cls):
        if cls.is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    @classmethod
    def wait(cls):
        cls.refuse_in_capture()
        cls.num_waits += 1
        cls.arrive(cls.num_copies)

    @classmethod
    def arrive(cls, num_copies):
        """The first so many copies do."""
        for number in [number for number in cls.unread if number < num_copies]:
            target, held = cls.unread.pop(number)
            target.copy_(held)

    @classmethod
    def pin(cls, tensor):
        cls.pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    @classmethod
    def is_pinned(cls, tensor):
        return tensor.untyped_storage().data_ptr() in cls.pinned

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class CurrentDevice:
    """What `torch.cuda.device` does; kernels of Triton launch on the current device.

    The thread's own is another one, as where a model is served from cuda:3.
    """

    index = 1

    def __init__(self, device):
        self.entered = torch.device(device).index

    def __enter__(self):
        self.before, CurrentDevice.index = CurrentDevice.index, self.entered

    def __exit__(self, *raised):
        CurrentDevice.index = self.before

    @classmethod
    def require(cls):
        at = f"a kernel is launched on cuda:{cls.index}, and its tensors are on {DEVICE}"
        assert cls.index == DEVICE.index, at


class Stream:
    """Work in order; it follows the work of another stream up to what it waited for."""

    current: ClassVar = None
    every: ClassVar = []

    def __init__(self, device=None, priority=0):
        self.num_launched, self.priority = 0, priority
        self.followed = {}
        """Launches of other streams that this one waited for."""
        Stream.every.append(self)

    def launch(self):
        self.num_launched += 1

    def follows(self, stream):
        """Whether what is launched here runs after all that was launched there."""
        return self is stream or self.followed.get(stream, 0) >= stream.num_launched

    def synchronize(self):
        Pretended.wait()
        for one in Stream.every:
            one.followed[self] = self.num_launched

    def wait_event(self, event):
        assert event.num_copies is not None
        for stream, count in event.launched.items():
            self.followed[stream] = max(count, self.followed.get(stream, 0))


@contextmanager
def on_stream(stream):
    """What `torch.cuda.stream` does."""
    before, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = before


def finish():
    """Wait for all streams: whatever is launched later runs after what was launched so far."""
    Pretended.wait()
    for one in Stream.every:
        one.followed |= {other: other.num_launched for other in Stream.every}


class Event:
    """A mark in the stream; waiting for it is what reading results is for, and not counted."""

    num_copies = None

    def record(self, stream):
        self.num_copies = Pretended.num_copies
        self.launched = stream.followed | {stream: stream.num_launched}

    def query(self):
        Pretended.arrive(self.num_copies)
        return True

    synchronize = query


class Allocator:
    """What torch's allocator took from the device, in bytes, and what others did."""

    def __init__(self):
        self.others = GIB
        self.tensors = 0
        self.gaps = 0
        """Between tensors of one segment: free, and of no use to a large tensor."""
        self.unused = 0
        """Whole segments, which `empty_cache` gives back."""
        self.pool = 0
        """Of CUDA graphs: nobody else's while one of them lives."""
        self.largest = 0
        """Of the captures in the pool; a larger one finds no room in what they freed."""

    @property
    def reserved(self):
        return self.tensors + self.gaps + self.unused + self.pool

    def snapshot(self):
        """Its segments, as `torch.cuda.memory_snapshot` lists them."""
        common = self.reserved - self.pool
        return [_segment((0, 0), common, self.tensors), _segment((0, 1), self.pool, 0)]

    def empty_cache(self):
        self.unused = 0

    def capture(self, num_rows):
        num_bytes = num_rows * BYTES_PER_ROW
        if num_bytes > self.largest:
            self.pool, self.largest = self.pool + num_bytes, num_bytes

    def drop_graphs(self):
        self.unused += self.pool
        self.pool = self.largest = 0


def _segment(pool, total_size, allocated_size):
    return {
        "device": DEVICE.index,
        "segment_pool_id": pool,
        "total_size": total_size,
        "allocated_size": allocated_size,
    }


class CapturedThere(Playback):
    """Captures steps of the device, into a pool of its memory.

    What waits may run beforehand, not in a capture.
    """

    def __init__(self, device):
        assert device == DEVICE

    def start_over(self):
        Pretended.allocator.drop_graphs()

    def __call__(self, step):
        CurrentDevice.require()
        step()

        def captured():
            Pretended.is_capturing = True
            try:
                return step()
            finally:
                Pretended.is_capturing = False

        replay = super().__call__(captured)
        Pretended.allocator.capture(self.num_rows)
        return replay


def pretend_device(monkeypatch, capability=(8, 0)):
    """Have torch.cuda speak of the device, and Triton's interpreter take its tensors."""
    from triton.runtime import interpreter

    Stream.every.clear()
    Stream.current = Stream()
    Pretended.allocator = Allocator()
    spoken = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "device": CurrentDevice,
        "current_stream": lambda device=None: Stream.current,
        "current_device": lambda: CurrentDevice.index,
        "Event": Event,
        "Stream": Stream,
        "stream": on_stream,
        "synchronize": lambda device=None: finish(),
        "empty_cache": lambda: Pretended.allocator.empty_cache(),
        "get_device_name": lambda device=None: "pretended",
        "mem_get_info": lambda device=None: (
            2 * GIB - Pretended.allocator.others - Pretended.allocator.reserved,
            2 * GIB,
        ),
        "memory_reserved": lambda device=None: Pretended.allocator.reserved,
        "memory_allocated": lambda device=None: Pretended.allocator.tensors,
        "memory_snapshot": lambda: Pretended.allocator.snapshot(),
        "get_allocator_backend": lambda: "native",
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: SimpleNamespace(
            multi_processor_count=2, total_memory=2 * GIB, major=capability[0], minor=capability[1]
        ),
    }
    for name, said in spoken.items():
        monkeypatch.setattr(torch.cuda, name, said)
    monkeypatch.setattr(graphs, "CudaCapture", CapturedThere)
    monkeypatch.setattr(torch_compat, "varlen_attn", varlen_attn_of_grouped_heads)
    # A child process would look for the device.
    monkeypatch.setattr(qualification, "TRIED_DEVICES", set())
    # Inductor would compile for a device that is not there.
    monkeypatch.setattr(selection, "COMPILED_DEVICES", set())
    run_few_rows(monkeypatch)
    launch = interpreter.GridExecutor.__call__

    def launched(self, *args, **kwargs):
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        assert all(isinstance(t, OnDevice) for t in tensors), "a kernel got a tensor of the host"
        CurrentDevice.require()
        args, kwargs = tree_map_only(OnDevice, lambda t: t.held, (args, kwargs))
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
