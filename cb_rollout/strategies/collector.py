"""Collect complete, scored groups from a persistent engine, as a strategy decides.

Owns the groups carried from one step to the next, and counts every submitted completion as kept,
dropped, cancelled, failed, or in flight. Called from one thread.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from cb_rollout.errors import (
    ConfigurationError,
    IncompleteRolloutError,
    InvalidRequestError,
    RolloutError,
    error_text,
)
from cb_rollout.strategies.base import Group, Plain, Strategy
from cb_rollout.strategies.groups_in_flight import (
    CompletionStats,
    GroupsInFlight,
    PendingGroup,
    restored_group,
    saved_group,
)
from cb_rollout.strategies.request_stream import RequestStream
from cb_rollout.types import GenerationOutput, RequestStatus

# Version of the layout of a `state_dict`.
STATE_FORMAT = 1

Reward = Callable[[Any, list[GenerationOutput]], Sequence[float | None]]
"""Called with a prompt as the source gave it, and some of its completions; returns a number for
each completion, or None if it cannot be scored."""


class GroupCollector:
    """Collects complete groups for each training step."""

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
            sampler: a sampler that only this collector uses.
            prompts: token ids, text or chats; or mappings with "prompt", its "images" and columns
                for the reward. May be endless; each is taken when it is submitted.
            reward: see `Reward`.
            strategy: None: `Plain()`.
            num_generations: completions per group.
            runs_while_training: continue carried groups between two calls of `collect`. False: the
                engine sleeps between calls, as it must if it runs the training module.

        Raises:
            ConfigurationError: `num_generations` does not fit the strategy, or a type is wrong.
        """
        self.strategy = strategy or Plain()
        _require_kinds(prompts, reward, self.strategy)
        least = self.strategy.min_group_size or 1
        if num_generations < least:
            raise ConfigurationError(
                f"num_generations={num_generations} is below {least}, the smallest group that the "
                "strategy accepts; raise it, or lower min_group_size."
            )
        self.stats = CompletionStats()
        self._sampler = sampler
        self._reward = reward
        self._prompts: Iterator[Any] = iter(prompts)
        self._num_generations = num_generations
        self._runs_while_training = runs_while_training
        self._in_flight = GroupsInFlight(sampler, self.stats)
        self._returned_prompts: deque[Any] = deque()
        self._kept: list[Group] = []
        self._last_metrics: dict[str, float] = {}

    @property
    def num_in_flight(self) -> int:
        """Number of completions in groups that are neither returned nor given up."""
        return sum(len(group.outputs) for group in self._kept) + self._in_flight.num_sequences()

    @property
    def prompts_held(self) -> list[Any]:
        """Prompts of groups that are neither returned nor given up."""
        kept = [group.prompt for group in self._kept]
        in_flight = [pending.group.prompt for pending in self._in_flight]
        return [*kept, *in_flight, *self._returned_prompts]

    def collect(self, num_groups: int) -> list[Group]:
        """Return the next complete groups, in the order of their prompts.

        Returns fewer than `num_groups`, and finally none, when the prompts run out. After an
        exception, nothing is in flight, and only the failed group is lost.

        Raises:
            IncompleteRolloutError: a completion failed and the strategy allows no more tries.
            RolloutError: a group could not be scored, and no more groups may be replaced.
            Exception: the reward's own exception, if the strategy does not retry.
        """
        if num_groups < 1:
            raise ConfigurationError(f"collect({num_groups}): ask for at least one group.")
        before = replace(self.stats)
        started = time.perf_counter()
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
        groups = self._kept[:num_groups]
        self._kept = self._kept[num_groups:]
        for group in groups:
            self.stats.groups_kept += 1
            self.stats.end("kept", group.outputs)
        self._last_metrics = self._step_metrics(groups, before, time.perf_counter() - started)
        return sorted(groups, key=lambda group: group.number)

    def metrics(self) -> dict[str, float]:
        return self._last_metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the groups in flight, with the state of their sequences, for `torch.save`.

        "prompts" has the items of the prompt source, in the order of `prompts_held`. Save the
        position in the source yourself; the generator's state has the random state.

        Raises:
            RolloutError: an unfinished sequence is sampled under a grammar, or by a pool.
        """
        return {
            "format": STATE_FORMAT,
            "settings": self._settings(),
            "policy_version": self._sampler.policy_version,
            "stats": asdict(self.stats),
            "prompts": self.prompts_held,
            "kept": [saved_group(group) for group in self._kept],
            "in_flight": self._in_flight.state_dict(),
            "sequences": self._sampler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the groups of a `state_dict`; call it before the first `collect`.

        Load the weights of that step first. If the generator's policy versions are higher, the
        saved versions are renumbered, so that each token keeps its age.

        Raises:
            InvalidRequestError: the state is from another version of cb_rollout, or another
                strategy.
            RolloutError: groups are in flight, or sequences are sampled by a pool.
        """
        obstacle = self.obstacle_to(state)
        if obstacle is not None:
            raise InvalidRequestError(f"{obstacle}; begin anew, or load it as it was saved.")
        if self.num_in_flight:
            raise RolloutError(
                f"{self.num_in_flight} completions are in flight; load a state before the first "
                "collect(), or after close()."
            )
        if not self._runs_while_training:
            self._sampler.sleep()
        num_versions = self._sampler.policy_version - state["policy_version"]
        prompts = list(state["prompts"])
        num_kept = len(state["kept"])
        num_held = num_kept + len(state["in_flight"]["groups"])
        for saved, prompt in zip(state["kept"], prompts[:num_kept], strict=True):
            self._kept.append(restored_group(saved, prompt, num_versions))
        self._in_flight.load_state_dict(
            state["in_flight"], prompts[num_kept:num_held], num_versions
        )
        self._returned_prompts.extend(prompts[num_held:])
        for name, count in state["stats"].items():
            setattr(self.stats, name, count)
        self._sampler.load_state_dict(state["sequences"], num_versions)

    def obstacle_to(self, state: Any) -> str | None:
        """Return why a state cannot be loaded, as a clause; None: it can."""
        found = state.get("format") if isinstance(state, Mapping) else None
        if found != STATE_FORMAT:
            return f"the state of the strategy has format {found!r}, and {STATE_FORMAT} is read"
        if state["settings"] != self._settings():
            return (
                f"the state is of {state['settings']}, and the strategy now is {self._settings()}"
            )
        return None

    def _settings(self) -> dict[str, Any]:
        """Return the settings that decide what is submitted."""
        return self.strategy.decisions() | {"num_generations": self._num_generations}

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
            is_scored = self._is_scored(group, may_drop)
            if is_scored and (self.strategy.keeps(group) or not may_drop):
                self._kept.append(group)
            else:
                num_dropped += 1
                self.stats.groups_dropped += 1
                self.stats.end("dropped", group.outputs)

    def _submit_up_to(self, num_groups: int) -> None:
        """Submit groups until `num_groups` are in flight, or no prompts are left."""
        num_sequences = self._num_generations + self.strategy.num_extra_members
        num_retries = self.strategy.max_retries * self._num_generations
        while len(self._in_flight) < num_groups:
            if self._returned_prompts:
                prompt = self._returned_prompts.popleft()
            else:
                try:
                    prompt = next(self._prompts)
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
            outputs = {ended.request_id: ended for ended in group.outputs}
            outputs[output.request_id] = output
            self._in_flight.cancel([pending])
            raise IncompleteRolloutError(
                f"{output.request_id} of group {group.number} could not be produced: "
                f"{output.error or output.status.value} (The strategy Retrying tries again, or "
                "continues without it.)",
                outputs,
            )

    def _is_scored(self, group: Group, may_drop: bool) -> bool:
        """Score a group, and drop its outputs without a reward."""
        outputs = group.outputs
        try:
            rewards, cause = self._rewards(group.prompt, outputs)
        except BaseException:
            self.stats.end("dropped", outputs)
            raise
        least = self.strategy.min_group_size or self._num_generations
        if len(rewards) >= least:
            scored = []
            unscored = []
            for output in outputs:
                if output.request_id in rewards:
                    scored.append(output)
                else:
                    unscored.append(output)
            self.stats.end("dropped", unscored)
            group.outputs = scored
            group.rewards = [rewards[output.request_id] for output in scored]
            return True
        if may_drop:
            return False
        self.stats.end("dropped", outputs)
        raised = f"; the reward last raised {error_text(cause)}" if cause else ""
        raise RolloutError(
            f"{len(rewards)} of {self._num_generations} completions of group {group.number} could "
            f"be generated and scored, and the strategy needs {least}{raised}. The strategy "
            "Retrying can try again (max_retries), accept smaller groups (min_group_size), or move "
            "on to other prompts (max_dropped_groups)."
        ) from cause

    def _rewards(
        self, prompt: Any, outputs: Sequence[GenerationOutput]
    ) -> tuple[dict[str, float], Exception | None]:
        """Return rewards by request id, after up to `max_retries` retries, and the last error."""
        rewards: dict[str, float] = {}
        cause: Exception | None = None
        missing = list(outputs)
        for num_tries in range(self.strategy.max_retries + 1):
            if not missing:
                break
            if num_tries:
                self.stats.retries += 1
            try:
                returned = self._reward(prompt, missing)
            except Exception as error:
                if not self.strategy.max_retries:
                    raise
                cause = error
                continue
            numbers = _numbers(returned, len(missing))
            for output, number in zip(missing, numbers, strict=True):
                if not math.isnan(number):
                    rewards[output.request_id] = number
            missing = [output for output in missing if output.request_id not in rewards]
        return rewards, cause

    def _renew_stale(self) -> None:
        """Restart groups that are too old: carried groups, and those kept by a call that raised."""
        if self.strategy.max_staleness is None:
            return
        oldest = self._sampler.policy_version - self.strategy.max_staleness
        self._restart([pending for pending in self._in_flight if pending.policy_version < oldest])
        fresh = []
        stale = []
        for group in self._kept:
            version = group.policy_version
            if version is None or version >= oldest:
                fresh.append(group)
            else:
                stale.append(group)
        self._kept = fresh
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
        staleness: list[int] = []
        for group in groups:
            staleness += group.token_staleness(version)
        if not staleness:
            staleness = [0]
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
    """Return a reward's numbers, one per completion, with NaN for None."""
    try:
        numbers = [math.nan if value is None else float(value) for value in returned]
        if len(numbers) == num_outputs:
            return numbers
        cause = None
    except (TypeError, ValueError) as error:
        cause = error
    raise RolloutError(
        f"the reward gave {returned!r:.60} for {num_outputs} completions of one prompt; return a "
        "list with one number per completion, or None for one that cannot be scored."
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
            f"strategy={strategy!r} is not a strategy; pass an instance, such as DynamicSampling()."
        )
