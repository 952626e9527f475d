"""Collects complete, scored groups from a persistent engine, as a strategy decides.

Owns the groups carried from a step to the next, and the count of every completion: each that was
submitted is kept, dropped, cancelled, failed, or in flight. Called from one thread.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from cb_rollout.errors import ConfigurationError, IncompleteRolloutError, RolloutError, error_text
from cb_rollout.strategies.base import Group, Plain, Strategy
from cb_rollout.strategies.groups_in_flight import CompletionStats, GroupsInFlight, PendingGroup
from cb_rollout.strategies.request_stream import RequestStream
from cb_rollout.types import GenerationOutput, RequestStatus

Reward = Callable[[Any, list[GenerationOutput]], Sequence[float | None]]
"""Called with a prompt as the source gave it, and some of its completions; gives a number for each,
or None for one that cannot be scored."""


class GroupCollector:
    """Collector of complete groups, for one training step after another."""

    def __init__(
        self,
        sampler: RequestStream,
        prompts: Iterable[Any],
        reward: Reward,
        strategy: Strategy | None = None,
        *,
        num_generations: int = 8,
        runs_while_training: bool = False,
    ) -> None:
        """Submit nothing before `collect`.

        Args:
            sampler: samples, for this collector alone.
            prompts: token ids, text or chats; or mappings with "prompt", its "images" and what the
                reward needs. May be endless; each is taken when it is submitted.
            reward: see `Reward`.
            strategy: None: `Plain()`.
            num_generations: completions of a group.
            runs_while_training: let carried groups go on between two calls of `collect`; if not,
                the engine sleeps then, as it must where it runs the training module.

        Raises:
            ConfigurationError: `num_generations` does not fit the strategy; a wrong type.
        """
        self.strategy = strategy or Plain()
        _require_kinds(prompts, reward, self.strategy)
        least = self.strategy.min_group_size or 1
        if num_generations < least:
            raise ConfigurationError(
                f"num_generations={num_generations} is below {least}, the fewest completions that "
                "the strategy takes for a group; raise it, or lower min_group_size."
            )
        self.stats = CompletionStats()
        self._sampler, self._reward = sampler, reward
        self._prompts: Iterator[Any] = iter(prompts)
        self._num_generations = num_generations
        self._runs_while_training = runs_while_training
        self._in_flight = GroupsInFlight(sampler, self.stats)
        self._returned_prompts: deque[Any] = deque()
        self._kept: list[Group] = []
        self._last_metrics: dict[str, float] = {}

    @property
    def num_in_flight(self) -> int:
        """Count the completions of groups that are neither returned nor given up."""
        return sum(len(group.outputs) for group in self._kept) + self._in_flight.num_sequences()

    @property
    def prompts_held(self) -> list[Any]:
        """Prompts of groups that are neither returned nor given up."""
        kept = [group.prompt for group in self._kept]
        in_flight = [pending.group.prompt for pending in self._in_flight]
        return [*kept, *in_flight, *self._returned_prompts]

    def collect(self, num_groups: int) -> list[Group]:
        """Return the next complete groups, in the order of their prompts.

        Fewer than `num_groups`, at last none, where the prompts come to an end. After an exception
        nothing is in flight; only the group that failed is lost.

        Raises:
            IncompleteRolloutError: a completion failed and the strategy allows no more tries.
            RolloutError: a group could not be scored, and no more may be replaced.
            Exception: whatever the reward raised, where the strategy does not retry it.
        """
        if num_groups < 1:
            raise ConfigurationError(f"collect({num_groups}): ask for at least one group.")
        before, started = replace(self.stats), time.perf_counter()
        try:
            self._sampler.wake()
            self._renew_stale()
            self._fill(num_groups)
            if not self.strategy.carries:
                self._in_flight.cancel(list(self._in_flight))
            elif not self._runs_while_training:
                self._sampler.sleep()
        except BaseException:
            self._restart(list(self._in_flight))
            raise
        groups, self._kept = self._kept[:num_groups], self._kept[num_groups:]
        for group in groups:
            self.stats.groups_kept += 1
            self.stats.end("kept", group.outputs)
        self._last_metrics = self._step_metrics(groups, before, time.perf_counter() - started)
        return sorted(groups, key=lambda group: group.number)

    def metrics(self) -> dict[str, float]:
        return self._last_metrics

    def close(self) -> None:
        """Cancel all groups in flight; prompts that were taken from the source are given up."""
        if len(self._in_flight):
            self._sampler.wake()
        self._in_flight.cancel(list(self._in_flight))
        for group in self._kept:
            self.stats.end("dropped", group.outputs)
        self._kept = []
        self._returned_prompts.clear()

    def _fill(self, num_groups: int) -> None:
        """Keep groups until there are `num_groups`, or no prompts are left."""
        num_dropped = 0
        while len(self._kept) < num_groups:
            self._submit_up_to(num_groups - len(self._kept) + self.strategy.num_extra_groups)
            if not len(self._in_flight):
                return
            group = self._next_complete()
            if group is None:
                continue
            may_drop = num_dropped < self.strategy.max_dropped_groups
            if self._is_scored(group, may_drop) and (self.strategy.keeps(group) or not may_drop):
                self._kept.append(group)
            else:
                num_dropped += 1
                self.stats.groups_dropped += 1
                self.stats.end("dropped", group.outputs)

    def _submit_up_to(self, num_groups: int) -> None:
        """Submit groups until `num_groups` are in flight, or no prompts are left."""
        strategy, returned = self.strategy, self._returned_prompts
        num_sequences = self._num_generations + strategy.num_extra_members
        num_retries = strategy.max_retries * self._num_generations
        while len(self._in_flight) < num_groups:
            try:
                prompt = returned.popleft() if returned else next(self._prompts)
            except StopIteration:
                return
            self._in_flight.submit(prompt, num_sequences, num_retries)

    def _next_complete(self) -> Group | None:
        """Wait for a complete group; None if one was cancelled from outside meanwhile."""
        while True:
            pending, output = self._in_flight.next_output()
            if output.status is RequestStatus.FINISHED:
                pending.group.outputs.append(output)
            elif output.status is RequestStatus.CANCELLED and self.strategy.carries:
                # The weights changed under a carried group with in_flight="abort".
                self.stats.end("cancelled", [output])
                self._restart([pending])
                return None
            else:
                self.stats.end("failed", [output])
                self._replace_failed(pending, output)
            if len(pending.group.outputs) == self._num_generations or not pending.pending:
                return self._in_flight.complete(pending)

    def _replace_failed(self, pending: PendingGroup, output: GenerationOutput) -> None:
        group = pending.group
        if len(group.outputs) + len(pending.pending) >= self._num_generations:
            return
        if pending.num_retries_left:
            pending.num_retries_left -= 1
            self.stats.retries += 1
            self._in_flight.submit_more(pending, 1)
        elif self.strategy.min_group_size is None:
            outputs = {ended.request_id: ended for ended in [*group.outputs, output]}
            self._in_flight.cancel([pending])
            raise IncompleteRolloutError(
                f"{output.request_id} of group {group.number} could not be produced: "
                f"{output.error or output.status.value} (The strategy Retrying tries again, or "
                "does without.)",
                outputs,
            )

    def _is_scored(self, group: Group, may_drop: bool) -> bool:
        """Score a group, and leave outputs without a reward out of it."""
        outputs = group.outputs
        try:
            rewards, cause = self._rewards(group.prompt, outputs)
        except BaseException:
            self.stats.end("dropped", outputs)
            raise
        least = self.strategy.min_group_size or self._num_generations
        if len(rewards) >= least:
            self.stats.end("dropped", [o for o in outputs if o.request_id not in rewards])
            group.outputs = [o for o in outputs if o.request_id in rewards]
            group.rewards = [rewards[o.request_id] for o in group.outputs]
            return True
        if may_drop:
            return False
        self.stats.end("dropped", outputs)
        raised = f"; the reward last raised {error_text(cause)}" if cause else ""
        raise RolloutError(
            f"{len(rewards)} of {self._num_generations} completions of group {group.number} could "
            f"be generated and scored, and the strategy needs {least}{raised}. The strategy "
            "Retrying tries again (max_retries), takes smaller groups (min_group_size) and other "
            "prompts (max_dropped_groups)."
        ) from cause

    def _rewards(
        self, prompt: Any, outputs: Sequence[GenerationOutput]
    ) -> tuple[dict[str, float], Exception | None]:
        """Return rewards by request id, after up to `max_retries`, and the last exception."""
        rewards: dict[str, float] = {}
        cause: Exception | None = None
        missing = list(outputs)
        for num_tries in range(self.strategy.max_retries + 1):
            if not missing:
                break
            self.stats.retries += num_tries > 0
            try:
                returned = self._reward(prompt, missing)
            except Exception as error:
                if not self.strategy.max_retries:
                    raise
                cause = error
                continue
            for output, number in zip(missing, _numbers(returned, len(missing)), strict=True):
                if not math.isnan(number):
                    rewards[output.request_id] = number
            missing = [output for output in missing if output.request_id not in rewards]
        return rewards, cause

    def _renew_stale(self) -> None:
        """Restart groups that are too old, carried or kept since a call that raised."""
        if self.strategy.max_staleness is None:
            return
        oldest = self._sampler.policy_version - self.strategy.max_staleness
        self._restart([pending for pending in self._in_flight if pending.policy_version < oldest])
        versions = [(group, group.policy_version) for group in self._kept]
        stale = [group for group, version in versions if version is not None and version < oldest]
        self._kept = [group for group in self._kept if group not in stale]
        for group in stale:
            self.stats.groups_cancelled += 1
            self.stats.end("cancelled", group.outputs)
        self._returned_prompts.extendleft(group.prompt for group in reversed(stale))

    def _restart(self, groups: list[PendingGroup]) -> None:
        self._returned_prompts.extendleft(pending.group.prompt for pending in reversed(groups))
        self._in_flight.cancel(groups)

    def _step_metrics(
        self, groups: list[Group], before: CompletionStats, seconds: float
    ) -> dict[str, float]:
        added = self.stats.since(before)
        version = self._sampler.policy_version
        staleness = [age for group in groups for age in group.token_staleness(version)] or [0]
        return {
            "rollout/seconds": seconds,
            "rollout/useful_tokens_per_second": added.tokens_kept / seconds,
            "rollout/tokens_discarded": added.tokens_discarded,
            "rollout/groups_kept": added.groups_kept,
            "rollout/groups_dropped": added.groups_dropped,
            "rollout/groups_cancelled": added.groups_cancelled,
            "rollout/groups_carried": len(self._in_flight),
            "rollout/retries": added.retries,
            "rollout/staleness_mean": fmean(staleness),
            "rollout/staleness_max": max(staleness),
        }


def _numbers(returned: Any, num_outputs: int) -> list[float]:
    """Return a reward's numbers, one a completion, NaN for None."""
    try:
        numbers = [math.nan if value is None else float(value) for value in returned]
        if len(numbers) == num_outputs:
            return numbers
        cause = None
    except (TypeError, ValueError) as error:
        cause = error
    raise RolloutError(
        f"the reward gave {returned!r:.60} for {num_outputs} completions of one prompt; it must "
        "give a list of one number for each, None for one that cannot be scored."
    ) from cause


def _require_kinds(prompts: Any, reward: Any, strategy: Any) -> None:
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise ConfigurationError(
            f"prompts is a {type(prompts).__name__}; pass a list or an iterator of prompts or rows."
        )
    if not callable(reward):
        raise ConfigurationError(
            f"reward={reward!r} cannot be called; pass a function of a prompt and its completions."
        )
    if not isinstance(strategy, Strategy):
        raise ConfigurationError(
            f"strategy={strategy!r} is no strategy; make one, as DynamicSampling()."
        )
