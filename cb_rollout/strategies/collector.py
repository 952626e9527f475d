"""Collects complete, scored groups from a persistent engine, as a strategy decides.

Owns what is carried from one step to the next, and the count of every completion: each that was
submitted is kept, dropped, cancelled, failed, or in flight. Called from one thread.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any

from cb_rollout.errors import ConfigurationError, IncompleteRolloutError, RolloutError, said
from cb_rollout.strategies.base import Strategy
from cb_rollout.strategies.completion_stats import CompletionStats
from cb_rollout.strategies.group import Group
from cb_rollout.strategies.groups_in_flight import FlyingGroup, GroupsInFlight
from cb_rollout.strategies.plain import Plain
from cb_rollout.strategies.request_stream import Sampler
from cb_rollout.strategies.scoring import Reward, scored
from cb_rollout.types import GenerationOutput, RequestStatus


class GroupCollector:
    """Complete groups for one training step after another."""

    def __init__(
        self,
        sampler: Sampler,
        prompts: Iterable[Any],
        reward: Reward,
        strategy: Strategy | None = None,
        *,
        num_generations: int = 8,
        runs_while_training: bool = False,
    ) -> None:
        """Ask for nothing yet.

        Args:
            sampler: generates: a `Flight` over a `RolloutGenerator`.
            prompts: token ids, text or chats; or mappings that hold one as "prompt", beside what
                the reward needs. May be endless; each is taken when it is submitted.
            reward: called with a prompt as the source gave it and a list of its outputs; gives one
                number each, or None for one that cannot be scored.
            strategy: what to submit, cancel and keep; None: `Plain()`.
            num_generations: completions of a group.
            runs_while_training: let carried groups go on between two calls of `collect`; if not,
                the engine sleeps then, as it must where it runs the training module.

        Raises:
            ConfigurationError: `num_generations` does not fit the strategy, or something is not
                what it should be.
        """
        self.strategy = Plain() if strategy is None else strategy
        _require_kinds(prompts, reward, self.strategy)
        least = self.strategy.min_group_size or 1
        if num_generations < least:
            raise ConfigurationError(
                f"num_generations={num_generations} is below {least}, the fewest completions that "
                "the strategy takes for a group; raise it, or lower min_group_size."
            )
        self.tally = CompletionStats()
        """Of every completion since the collector was made."""
        self._sampler, self._reward = sampler, reward
        self._prompts: Iterator[Any] = iter(prompts)
        self._num_generations = num_generations
        self._runs_while_training = runs_while_training
        self._in_flight = GroupsInFlight(sampler, self.tally)
        self._returned_prompts: deque[Any] = deque()
        self._kept: list[Group] = []
        self._last_metrics: dict[str, float] = {}

    @property
    def num_in_flight(self) -> int:
        """Completions of groups that are neither returned nor given up."""
        num_kept = sum(len(group.outputs) for group in self._kept)
        return num_kept + self._in_flight.num_sequences()

    def collect(self, num_groups: int) -> list[Group]:
        """The next complete groups, in the order of their prompts.

        After an exception nothing is in flight, and no prompt or finished group is lost but the one
        that it is about: the next call goes on with them.

        Returns:
            `num_groups` of them; fewer, at last none, where the prompts come to an end.

        Raises:
            IncompleteRolloutError: a completion failed and the strategy tries no more.
            RolloutError: a group could not be scored, and no more may be replaced.
            Exception: whatever the reward raised, where the strategy does not retry it.
        """
        if num_groups < 1:
            raise ConfigurationError(f"collect({num_groups}): ask for at least one group.")
        before, started = self.tally.copy(), time.perf_counter()
        try:
            self._sampler.let_go()
            self._renew_stale()
            self._fill(num_groups)
            if not self.strategy.carries:
                self._in_flight.cancel(list(self._in_flight))
            elif not self._runs_while_training:
                self._sampler.hold()
        except BaseException:
            self._restart(list(self._in_flight))
            raise
        groups, self._kept = self._kept[:num_groups], self._kept[num_groups:]
        for group in groups:
            self.tally.keep(group.outputs)
        self._last_metrics = self._figures(groups, before, time.perf_counter() - started)
        return sorted(groups, key=lambda group: group.number)

    def metrics(self) -> dict[str, float]:
        """Figures of the last `collect`, by metric name."""
        return self._last_metrics

    def close(self) -> None:
        """Cancel what is in flight; prompts that were taken from the source are given up."""
        self._sampler.let_go()
        self._in_flight.cancel(list(self._in_flight))
        for group in self._kept:
            self.tally.drop(group.outputs)
        self._kept = []
        self._returned_prompts.clear()

    def _fill(self, num_groups: int) -> None:
        """Have at least `num_groups` groups kept, as long as there are prompts."""
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
                self.tally.groups_dropped += 1
                self.tally.drop(group.outputs)

    def _submit_up_to(self, num_groups: int) -> None:
        """Have `num_groups` in flight, as far as there are prompts."""
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
        """Wait for a group with all it can get; None: one was cancelled from outside meanwhile."""
        while True:
            flying, output = self._in_flight.next_output()
            if output.status is RequestStatus.FINISHED:
                flying.group.outputs.append(output)
            elif output.status is RequestStatus.CANCELLED and self.strategy.carries:
                # The weights changed under a carried group with in_flight="abort".
                self.tally.cancel([output])
                self._restart([flying])
                return None
            else:
                self.tally.fail(output)
                self._replace_failed(flying, output)
            if len(flying.group.outputs) == self._num_generations or not flying.pending:
                return self._in_flight.complete(flying)

    def _replace_failed(self, flying: FlyingGroup, output: GenerationOutput) -> None:
        """Submit a failed completion again, or accept that it is missing, or give up."""
        group = flying.group
        if len(group.outputs) + len(flying.pending) >= self._num_generations:
            return
        if flying.num_retries_left:
            flying.num_retries_left -= 1
            self.tally.retries += 1
            self._in_flight.submit_more(flying, 1)
        elif self.strategy.min_group_size is None:
            outputs = {one.request_id: one for one in [*group.outputs, output]}
            self._in_flight.cancel([flying])
            raise IncompleteRolloutError(
                f"{output.request_id} of group {group.number} could not be produced: "
                f"{output.error or output.status.value} (The strategy 'retrying' tries again, or "
                "does without.)",
                outputs,
            )

    def _is_scored(self, group: Group, may_drop: bool) -> bool:
        """Give a group its rewards; outputs that have none are left out of it."""
        strategy, outputs = self.strategy, group.outputs
        try:
            scores = scored(self._reward, group.prompt, outputs, strategy.max_retries)
        except BaseException:
            self.tally.drop(outputs)
            raise
        self.tally.retries += max(0, scores.num_calls - 1)
        least = strategy.min_group_size or self._num_generations
        if len(scores.rewards) >= least:
            self.tally.drop([o for o in outputs if o.request_id not in scores.rewards])
            group.outputs = [o for o in outputs if o.request_id in scores.rewards]
            group.rewards = [scores.rewards[o.request_id] for o in group.outputs]
            return True
        if may_drop:
            return False
        self.tally.drop(outputs)
        raised = f"; the reward last raised {said(scores.cause)}" if scores.cause else ""
        raise RolloutError(
            f"{len(scores.rewards)} of {self._num_generations} completions of group "
            f"{group.number} could be generated and scored, and the strategy needs {least}"
            f"{raised}. The strategy 'retrying' tries again (max_retries), takes smaller groups "
            "(min_group_size) and other prompts (max_dropped_groups)."
        ) from scores.cause

    def _renew_stale(self) -> None:
        """Start groups that were carried for too long anew, or kept since a call that raised."""
        if self.strategy.max_staleness is None:
            return
        oldest = self._sampler.policy_version - self.strategy.max_staleness
        self._restart([flying for flying in self._in_flight if flying.policy_version < oldest])
        kept, self._kept, stale = self._kept, [], []
        for group in kept:
            version = group.policy_version
            is_stale = version is not None and version < oldest
            (stale if is_stale else self._kept).append(group)
        for group in stale:
            self.tally.groups_cancelled += 1
            self.tally.cancel(group.outputs)
        self._returned_prompts.extendleft(group.prompt for group in reversed(stale))

    def _restart(self, groups: list[FlyingGroup]) -> None:
        """Cancel groups; their prompts come before others."""
        prompts = [flying.group.prompt for flying in groups]
        self._returned_prompts.extendleft(reversed(prompts))
        self._in_flight.cancel(groups)

    def _figures(
        self, groups: list[Group], before: CompletionStats, seconds: float
    ) -> dict[str, float]:
        added = self.tally.since(before)
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
            f"strategy={strategy!r} is no strategy; make one, as DynamicSampling() or "
            "create_strategy('dynamic_sampling')."
        )
