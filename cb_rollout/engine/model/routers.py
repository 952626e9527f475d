"""Find the routers of a mixture of experts, record the experts that they choose, and replay them.

A router chooses experts by `torch.topk` over each token's scores; a small observed forward shows
these calls. A replay gives the router the recorded experts with its own scores for them, so that
gradients still reach it.

B: rows, S: tokens of a row, N: tokens of a forward, L: routers, K: experts of a token.
"""

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from cb_rollout.compat import transformers as hf_compat
from cb_rollout.engine.kv_cache.layout import TensorSpec
from cb_rollout.engine.memory import device as devices
from cb_rollout.errors import ConfigurationError

TOPK = (torch.topk, torch.Tensor.topk)

# Stands for a token without a record: its router chooses for itself.
UNKNOWN = -1

# Rows and tokens of the two watched forwards. They differ, so that scores over keys, as in a sparse
# attention, have different last sizes.
WATCHED_SIZES = ((2, 4), (1, 5))

# Gets a router's number, its scores, and what `torch.topk` returned for them; returns the same or
# another choice.
Choose = Callable[[int, torch.Tensor, Any], Any]

# Runs the model on (B, S) token ids; returns logits.
WatchedForward = Callable[[torch.Tensor], torch.Tensor]


class RouterSite(NamedTuple):
    """The `torch.topk` call with which a router chooses experts."""

    module: str
    """Name of the module within the unwrapped model."""
    call: int
    """Number of `torch.topk` calls before it in one forward of the module."""


class _TopK(NamedTuple):
    site: RouterSite
    num_experts: int
    num_chosen: int


@dataclass(frozen=True, slots=True)
class Routers:
    """The routers of a model, in the order in which a forward runs them."""

    sites: tuple[RouterSite, ...]
    num_experts: int
    """Number of experts of the router with the most."""
    num_chosen: int
    """Experts of a token, K."""

    @property
    def spec(self) -> TensorSpec:
        """Return shape and dtype of one token's record: `(L, K)`, in the smallest integer dtype."""
        dtype = torch.uint8 if self.num_experts <= 256 else torch.int16
        return TensorSpec((len(self.sites), self.num_chosen), dtype)

    @contextmanager
    def choosing(self, model: torch.nn.Module, choose: Choose) -> Iterator[None]:
        with ExitStack() as stack:
            for number, site in enumerate(self.sites):
                try:
                    module: Any = model.get_submodule(site.module)
                except AttributeError as error:
                    raise ConfigurationError(
                        f"the model has no module {site.module}, which is a router of the model "
                        "that generates; replay needs both to be of one architecture."
                    ) from error
                forward = _intercepting(module.forward, site.call, partial(choose, number))
                stack.enter_context(hf_compat.replacing_forward(module, forward))
            yield

    def replaying(
        self,
        model: torch.nn.Module,
        routes_NLK: torch.Tensor | None,
        counts: "Disagreement | None" = None,
    ) -> AbstractContextManager[None]:
        """Make a forward of an unwrapped model use recorded experts, even when it is recomputed.

        `routes_NLK` comes from `joined_routes`; `counts` counts the router choices that differ from
        it.
        """
        if routes_NLK is None:
            return nullcontext()

        def replay(number: int, scores: torch.Tensor, found: Any) -> Any:
            routes_NK = routes_NLK[:, number]
            if counts is not None:
                counts.add(routes_NK, found.indices.reshape(routes_NK.shape))
            return _replaced(scores, found, routes_NK)

        return hf_compat.repeated_in_checkpoints(model, partial(self.choosing, model, replay))


def _intercepting(
    own: Callable[..., Any], call: int, choose: Callable[[torch.Tensor, Any], Any]
) -> Callable[..., Any]:
    def forward(*arguments: Any, **named: Any) -> Any:
        calls = itertools.count()

        def passed(found: Any, input: torch.Tensor, *_: Any, **__: Any) -> Any:
            return choose(input, found) if next(calls) == call else found

        with _PassedTopK(passed):
            return own(*arguments, **named)

    return forward


class _PassedTopK(TorchFunctionMode):
    """Pass each `torch.topk` call's result and arguments through a function."""

    def __init__(self, passed: Callable[..., Any]) -> None:
        super().__init__()
        self._passed = passed

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        result = func(*args, **named)
        return self._passed(result, *args, **named) if func in TOPK else result


class RouteRecorder:
    """Records what the routers of one model choose in each forward."""

    def __init__(self, routers: Routers) -> None:
        self.routers = routers
        self._chosen: list[torch.Tensor] = []
        self._known: torch.Tensor | None = None

    @contextmanager
    def recording(self, model: torch.nn.Module) -> Iterator[None]:
        """Record the forward inside, which uses the experts from `expect` where they are set."""
        self._chosen = []
        try:
            with self.routers.choosing(model, self._choose):
                yield
        finally:
            self._known = None

    def expect(
        self,
        routes: Sequence[Any],
        num_new: Sequence[int],
        device: torch.device,
        *,
        is_padded: bool,
    ) -> None:
        """Set recorded experts for the first tokens of each row of the next forward.

        Args:
            routes: an array `[tokens, L, K]` or None for each row; empty: there are no arrays.
            num_new: tokens of each row in the forward.
            device: the model's.
            is_padded: rows are left-padded to the longest; False: they are concatenated.
        """
        if not routes:
            self._known = None
            return
        longest = max(num_new)
        parts: list[tuple[Any, int, int]] = []
        for record, new in zip(routes, num_new, strict=True):
            if is_padded:
                parts.append((record, longest - new, longest))
            else:
                parts.append((record, 0, new))
        self._known = joined_routes(parts, device)

    def take(self) -> torch.Tensor:
        """Return the experts of the last forward's tokens, `[N, L, K]`, in the record's dtype."""
        chosen = self._chosen
        self._chosen = []
        assert len(chosen) == len(self.routers.sites), "a router ran twice, or not at all"
        return torch.stack(chosen, 1)

    def _choose(self, number: int, scores: torch.Tensor, found: Any) -> Any:
        if self._known is not None:
            found = _replaced(scores, found, self._known[:, number])
        chosen_NK = found.indices.reshape(-1, self.routers.num_chosen)
        self._chosen.append(chosen_NK.to(self.routers.spec.dtype))
        return found


class Disagreement:
    """Counts router choices that differ from the recorded experts, ignoring their order."""

    def __init__(self) -> None:
        self._differing: torch.Tensor | int = 0
        self._compared: torch.Tensor | int = 0

    def add(self, routes_NK: torch.Tensor, own_NK: torch.Tensor) -> None:
        is_known_N = routes_NK[:, 0] != UNKNOWN
        same_NK = routes_NK.sort(-1).values == own_NK.sort(-1).values
        self._differing = self._differing + (is_known_N & ~same_NK.all(-1)).sum()
        self._compared = self._compared + is_known_N.sum()

    def take(self) -> float | None:
        """Return the share that differed since the last call; None: nothing was compared."""
        differing = int(self._differing)
        compared = int(self._compared)
        self._differing = 0
        self._compared = 0
        return differing / compared if compared else None


def _replaced(scores: torch.Tensor, found: Any, routes_NK: torch.Tensor) -> Any:
    """Return what `torch.topk` would return if it had chosen these experts."""
    own = found.indices
    if own.numel() != routes_NK.numel():
        raise ConfigurationError(
            f"a router chooses for {own.numel() // routes_NK.shape[1]} tokens, and the record is "
            f"of {len(routes_NK)}; router_replay needs forwards of whole sequences."
        )
    routes = routes_NK.view(own.shape).to(own.dtype)
    indices = torch.where(routes == UNKNOWN, own, routes)
    return torch.return_types.topk((scores.gather(-1, indices), indices))


def joined_routes(
    parts: Sequence[tuple[Any, int, int]], device: torch.device
) -> torch.Tensor | None:
    """Lay out the records of sequences for one forward; None: there are no records.

    Each part is (record or None, padding, length): the `[tokens, L, K]` record of a row's first
    tokens, the number of padding columns before them, and the total number of columns. Returns
    int16 `[N, L, K]`, with `UNKNOWN` for tokens without a record.
    """
    shapes = [record.shape[1:] for record, _, _ in parts if record is not None and len(record)]
    if not shapes:
        return None
    num_tokens = sum(length for _, _, length in parts)
    joined = np.full((num_tokens, *shapes[0]), UNKNOWN, np.int16)
    first = 0
    for record, padding, length in parts:
        if record is not None:
            known = record[: length - padding]
            joined[first + padding : first + padding + len(known)] = known
        first += length
    return devices.moved(torch.from_numpy(joined), device)


def find_routers(model: torch.nn.Module, forward: WatchedForward) -> Routers:
    """Find a model's routers by small `forward`s in evaluation mode; `ConfigurationError`: none."""
    calls = _watched(model, forward, WATCHED_SIZES[0])
    others = _watched(model, forward, WATCHED_SIZES[1])
    common = {(call.site, call.num_experts) for call in others}
    last: dict[str, _TopK] = {}
    for call in calls:
        if (call.site, call.num_experts) in common:
            # Routers with groups of experts choose a group first, and then the experts.
            last[call.site.module] = call
    chosen = list(last.values())
    if not chosen:
        raise _refusal(model, "chooses no experts by torch.topk over the scores of each token")
    sizes = {call.num_chosen for call in chosen}
    if len(sizes) > 1:
        raise _refusal(model, f"chooses {sorted(sizes)} experts, and a record holds one number")
    for module in last:
        if sum(call.site == last[module].site for call in calls) > 1:
            raise _refusal(model, f"runs {module} more than once in a forward")
    num_experts = max(call.num_experts for call in chosen)
    routers = Routers(tuple(call.site for call in chosen), num_experts, chosen[0].num_chosen)
    _require_all_found(model, chosen)
    _require_effect(model, routers, forward, min(call.num_experts for call in chosen))
    return routers


def _watched(model: torch.nn.Module, forward: WatchedForward, size: tuple[int, int]) -> list[_TopK]:
    """Return each `torch.topk` over one row of scores per token, with its innermost module."""
    calls: list[_TopK] = []
    # The modules that run, each with its number of calls.
    modules: list[list[Any]] = []

    def record(found: Any, input: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Any:
        if modules:
            name, call = modules[-1]
            for module in modules:
                module[1] += 1
            width = input.shape[-1]
            is_last_dim = dim % input.dim() == input.dim() - 1 and width > 1
            if is_last_dim and input.numel() == width * size[0] * size[1]:
                calls.append(_TopK(RouterSite(name, call), width, k))
        return found

    def leave(*_: Any) -> None:
        modules.pop()

    with ExitStack() as hooks, _PassedTopK(record):
        for name, module in model.named_modules():
            enter = module.register_forward_pre_hook(lambda *_, at=name: modules.append([at, 0]))
            hooks.callback(enter.remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        forward(_token_ids(model, size))
    return calls


def _token_ids(model: Any, size: tuple[int, int]) -> torch.Tensor:
    """Return text token ids, `[B, S]` of these sizes, on the model's device."""
    num_rows, num_tokens = size
    text_ids = itertools.cycle(hf_compat.text_token_ids(model))
    ids = list(itertools.islice(text_ids, num_rows * num_tokens))
    return devices.to_device(ids, next(model.parameters()).device).view(size)


def _require_all_found(model: torch.nn.Module, chosen: Sequence[_TopK]) -> None:
    """Refuse a model with more expert layers than routers: some choose experts in another way."""
    sizes = {call.num_experts for call in chosen}
    num_stacks = sum(_is_stack_of_experts(module, sizes) for module in model.modules())
    if num_stacks > len(chosen):
        chosen_by = f"{len(chosen)} of them are chosen by torch.topk over the scores of each token"
        raise _refusal(model, f"has {num_stacks} stacks of experts, and {chosen_by}")


def _is_stack_of_experts(module: torch.nn.Module, sizes: Container[int]) -> bool:
    """Return whether a module holds one matrix per expert of a router."""
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        return False
    parameters = module.parameters(recurse=False)
    return any(p.dim() == 3 and p.shape[0] in sizes for p in parameters)


def _require_effect(
    model: torch.nn.Module, routers: Routers, forward: WatchedForward, least_experts: int
) -> None:
    """Refuse a model if replaying other experts has no effect, or replaying its own has one."""
    ids = _token_ids(model, WATCHED_SIZES[0])
    recorder = RouteRecorder(routers)
    with recorder.recording(model):
        expected = forward(ids)
    own_NLK = recorder.take().to(torch.int16)
    with routers.replaying(model, own_NLK):
        replayed = forward(ids)
    with routers.replaying(model, (own_NLK + 1) % least_experts):
        others = forward(ids)
    if not torch.equal(expected, replayed) or torch.equal(expected, others):
        raise _refusal(model, "does not compute with the experts that its top-k chooses")


def _refusal(model: torch.nn.Module, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"router_replay=True: {type(model).__name__} {reason}; leave it False."
    )
