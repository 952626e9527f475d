"""A rollout dealt over data-parallel processes, so that none waits long for another.

Owns which process generates what. Every process calls it together, with prompts of its own, and
gets the outputs of those prompts in their order; tokens are those that it would have sampled
itself, because a sequence's seed travels with it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from cb_rollout.engine.request import Request
from cb_rollout.engine.service.manager import ContinuousBatchingManager
from cb_rollout.rollout.run import run_rollout
from cb_rollout.types import GenerationOutput


@dataclass(slots=True)
class Parcel:
    """The sequences of one prompt, which are generated on one process."""

    requests: list[Request]
    cost: float
    """Tokens that it will take, as far as its home knows."""


def dealt(costs_by_home: Sequence[Sequence[float]]) -> list[list[tuple[int, int]]]:
    """Who generates what, so that the longest process is not much longer than the others.

    Parcels stay at home unless moving one from the fullest process to the emptiest shortens the
    fullest; the one that evens them out best moves first.

    Args:
        costs_by_home: the cost of each parcel of each process.

    Returns:
        For each process the parcels that it generates, as `(home, index)`.
    """
    held = [
        [(home, index) for index in range(len(costs))] for home, costs in enumerate(costs_by_home)
    ]
    loads = [sum(costs) for costs in costs_by_home]
    while True:
        fullest, emptiest = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[fullest] - loads[emptiest]
        movable = [(h, i) for h, i in held[fullest] if 0 < costs_by_home[h][i] < gap]
        if not movable:
            return held
        home, index = min(movable, key=lambda at: abs(gap / 2 - costs_by_home[at[0]][at[1]]))
        held[fullest].remove((home, index))
        held[emptiest].append((home, index))
        loads[fullest] -= costs_by_home[home][index]
        loads[emptiest] += costs_by_home[home][index]


class Balancer:
    """Runs rollouts over all processes of the default group, and learns how long prompts run."""

    def __init__(self, manager: ContinuousBatchingManager) -> None:
        """Know nothing of any prompt."""
        self._manager = manager
        self._rank, self._num_processes = dist.get_rank(), dist.get_world_size()
        self._mean_lengths: dict[int, float] = {}

    def run(
        self, requests: list[Request], progress_bar: bool
    ) -> tuple[dict[str, GenerationOutput], dict[str, float], list[Request]]:
        """Deal everybody's requests, run this process's share, and bring its own outputs home.

        Returns:
            Outputs of `requests` by id, in their order; the metrics of what ran here; and the
            requests that ran here.
        """
        own = self._parcels(requests)
        parcels: list[list[Parcel]] = self._exchanged([_portable(parcel) for parcel in own])
        plan = dealt([[parcel.cost for parcel in home] for home in parcels])
        share = {
            (home, index): own[index].requests
            if home == self._rank
            else self._manager.input_processor.adopted(parcels[home][index].requests, home)
            for home, index in plan[self._rank]
        }
        ran = [request for members in share.values() for request in members]
        ran_outputs, metrics = run_rollout(self._manager, ran, progress_bar)
        results = {
            place: [ran_outputs[member.request_id] for member in members]
            for place, members in share.items()
        }
        for foreign in self._exchanged({p: r for p, r in results.items() if p[0] != self._rank}):
            results |= foreign
        outputs = {}
        for index, parcel in enumerate(own):
            members = zip(parcel.requests, results[self._rank, index], strict=True)
            outputs |= {r.request_id: replace(o, request_id=r.request_id) for r, o in members}
        self._learn(own, outputs)
        moved = (members for (home, _), members in share.items() if home != self._rank)
        metrics["rollout/sequences_moved"] = float(sum(map(len, moved)))
        in_order = {request.request_id: outputs[request.request_id] for request in requests}
        return in_order, metrics, ran

    def _exchanged(self, value: Any) -> list[Any]:
        """Every process's value, by rank."""
        gathered: list[Any] = [None] * self._num_processes
        dist.all_gather_object(gathered, value)
        return gathered

    def _parcels(self, requests: list[Request]) -> list[Parcel]:
        known = self._mean_lengths
        average = sum(known.values()) / len(known) if known else math.inf
        parcels = []
        for members in _by_group(requests):
            prompt = members[0].prompt_ids
            # What its completions had on average last time, else any prompt's.
            length = known.get(hash(tuple(prompt)), average)
            cost = len(prompt) + sum(min(length, member.max_new_tokens) for member in members)
            parcels.append(Parcel(members, cost))
        return parcels

    def _learn(self, own: list[Parcel], outputs: dict[str, GenerationOutput]) -> None:
        for parcel in own:
            lengths = [len(outputs[m.request_id].generated_tokens) for m in parcel.requests]
            prompt = tuple(parcel.requests[0].prompt_ids)
            self._mean_lengths[hash(prompt)] = sum(lengths) / len(lengths)


def _by_group(requests: list[Request]) -> Iterator[list[Request]]:
    """Sequences of one prompt together, as the engine shares their prefill."""
    ordered = sorted(requests, key=lambda request: request.group or 0)
    for _, members in itertools.groupby(ordered, key=lambda request: request.group):
        yield list(members)


def _portable(parcel: Parcel) -> Parcel:
    """What another process needs; stop strings and grammars it makes itself."""
    members = [replace(request, stop_strings=None, matcher=None) for request in parcel.requests]
    return Parcel(members, parcel.cost)
