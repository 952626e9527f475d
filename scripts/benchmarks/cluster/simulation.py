"""Predict the steps of a training run on engines: seconds, age of tokens, and idle time.

Simulates events, not tokens: between two events every running sequence of an engine gets a token
each decode step, whose time depends on their number. Draws lengths and failures from one seed.
"""

import bisect
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

# First steps, which are left out of the means: engines fill.
NUM_WARM_UPS = 2


class Mode(StrEnum):
    """Order of sampling and training."""

    WAITING = "waiting"
    """A rollout, then a step: colocated, or a pool whose loop waits."""
    OVERLAPPING = "overlapping"
    """Groups are sampled while the trainer trains on earlier ones."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Times of one engine."""

    steps: Sequence[tuple[int, float]]
    """(Running sequences, seconds of their decode step), by ascending number."""
    prefill: float
    """Seconds of a prompt token."""
    num_slots: int
    """Sequences that run together."""

    def step(self, num_rows: int) -> float:
        """Return the seconds of a decode step, between and beyond the points on straight lines."""
        if len(self.steps) == 1:
            return self.steps[0][1]
        rows = [count for count, _ in self.steps]
        at = min(max(1, bisect.bisect_left(rows, num_rows)), len(rows) - 1)
        (low, low_seconds), (high, high_seconds) = self.steps[at - 1 : at + 1]
        slope = (high_seconds - low_seconds) / (high - low)
        return max(low_seconds + slope * (num_rows - low), self.steps[0][1] / 2)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training run."""

    mode: Mode
    speeds: Speeds
    num_engines: int
    num_groups: int
    """Groups of a step."""
    group_size: int
    prompt_tokens: float
    draw_length: Callable[[random.Random], int]
    train: float
    """Seconds of the trainer's part of a step."""
    rollout_overhead: float = 0.0
    """Seconds of a rollout beside its forwards, as from the last token to the caller."""
    sync: float = 0.0
    """Seconds until the engines have new weights."""
    pause: float = 0.0
    """Seconds of them in which an engine samples nothing."""
    max_staleness: int = 1
    """Versions that may be made while a group is on its way; for overlapping runs."""
    failures_per_hour: float = 0.0
    """Ends of each engine."""
    restart: float = 60.0
    """Seconds until an engine that ended runs again."""

    @property
    def max_groups(self) -> int:
        """Return the most groups in flight or waiting to be trained on."""
        return self.num_groups * (max(1, self.max_staleness) if self.mode != Mode.WAITING else 1)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Means over the steps of a simulated run."""

    step_seconds: float
    tokens_per_second: float
    trainer_idle: float
    """Share of the time in which the trainer waits."""
    engines_idle: float
    """Share of the engines' time in which they have no sequence."""
    staleness_mean: float
    """Versions between a token's sampling and its training, mean over tokens."""
    staleness_max: int


@dataclass(slots=True, eq=False)
class _Sequence:
    group: "_Group"
    length: int
    versions: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Group:
    sequences: list[_Sequence]
    num_missing: int
    homes: set[int] = field(default_factory=set)
    """Numbers of the engines that have the prompt's keys."""


class _Engine:
    """Running sequences of one engine; `progress` is the decode steps that it has made."""

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds
        self.progress = self.debt = self.busy = self.now = 0.0
        self.down_until = 0.0
        self.fails_at = math.inf
        self._numbers = itertools.count()
        self.running: list[tuple[float, int, float, _Sequence]] = []
        """Heap by the progress at the end: (end, number, start, sequence)."""
        self.marks: list[tuple[float, int]] = [(0.0, 0)]
        """(Progress, version) at each change of the weights."""

    @property
    def num_free(self) -> int:
        return self.speeds.num_slots - len(self.running) if self.now >= self.down_until else 0

    def advance(self, now: float) -> None:
        passed, self.now = now - self.now, now
        if not self.running:
            return
        self.busy += passed
        paid = min(self.debt, passed)
        self.debt -= paid
        self.progress += (passed - paid) / self.speeds.step(len(self.running))

    def next_end(self) -> float:
        if not self.running:
            return math.inf
        steps = max(0.0, self.running[0][0] - self.progress)
        return self.now + self.debt + steps * self.speeds.step(len(self.running))

    def add(self, sequence: _Sequence, prefilled: float) -> None:
        self.debt += self.speeds.prefill * prefilled
        end = self.progress + sequence.length
        heapq.heappush(self.running, (end, next(self._numbers), self.progress, sequence))

    def pop_ended(self) -> list[_Sequence]:
        ended = []
        while self.running and self.running[0][0] <= self.progress + 1e-9:
            end, _, start, sequence = heapq.heappop(self.running)
            self._note(sequence, start, end)
            ended.append(sequence)
        return ended

    def pop_all(self) -> list[_Sequence]:
        """End the engine, and return its sequences, which begin again elsewhere."""
        found = [sequence for *_, sequence in self.running]
        self.running, self.debt = [], 0.0
        return found

    def _note(self, sequence: _Sequence, start: float, end: float) -> None:
        """Note the versions of the tokens that a sequence got between two points of progress."""
        marks = [*self.marks, (math.inf, -1)]
        for (begin, version), (stop, _) in itertools.pairwise(marks):
            count = min(end, stop) - max(start, begin)
            if count > 0:
                sequence.versions.append((version, count))

    def take_weights(self, version: int, prompt_tokens: float) -> None:
        """Begin a version: what runs has its keys computed again."""
        self.marks.append((self.progress, version))
        for _, _, start, _ in self.running:
            tokens = prompt_tokens + self.progress - start
            self.debt += self.speeds.prefill * tokens


class _Run:
    """One simulated run. An engine is advanced when something happens to it."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.draws = scenario, random.Random(seed)
        self.engines = [_Engine(scenario.speeds) for _ in range(scenario.num_engines)]
        self.now, self.version = 0.0, 0
        self.waiting: deque[_Sequence] = deque()
        self.complete: deque[_Group] = deque()
        self.num_in_flight = 0
        self._events: list[tuple[float, int, int]] = []
        """Heap of (time, state, engine's number); of an older state of the engine: void."""
        self._states = [0] * scenario.num_engines
        for number, engine in enumerate(self.engines):
            engine.fails_at = self._time_of_failure(0.0)
            self._expect(number)

    def _time_of_failure(self, start: float) -> float:
        rate = self.scenario.failures_per_hour / 3600
        return start + self.draws.expovariate(rate) if rate else math.inf

    def _expect(self, number: int) -> None:
        """Expect the engine's next event, after a change of its state."""
        engine = self.engines[number]
        self._states[number] += 1
        is_down = engine.down_until > self.now
        next_time = engine.down_until if is_down else min(engine.next_end(), engine.fails_at)
        if next_time < math.inf:
            heapq.heappush(self._events, (next_time, self._states[number], number))

    def submit(self, num_groups: int) -> None:
        """Queue groups for the engines with the most room."""
        for _ in range(num_groups):
            group = _Group([], self.scenario.group_size)
            group.sequences = [
                _Sequence(group, self.scenario.draw_length(self.draws))
                for _ in range(self.scenario.group_size)
            ]
            self.waiting.extend(group.sequences)
        self.num_in_flight += num_groups
        self._assign(range(len(self.engines)))

    def _assign(self, numbers: Iterable[int]) -> None:
        """Give waiting sequences to these engines, a group to one if it fits."""
        if not self.waiting:
            return
        room = []
        for number in numbers:
            self.engines[number].advance(self.now)
            room.append((-self.engines[number].num_free, number))
        heapq.heapify(room)
        changed = set()
        while self.waiting and room and room[0][0] < 0:
            number = room[0][1]
            self._fill(self.engines[number], number)
            changed.add(number)
            heapq.heapreplace(room, (-self.engines[number].num_free, number))
        for number in changed:
            self._expect(number)

    def _fill(self, engine: _Engine, number: int) -> None:
        """Give an engine what it has room for of the first waiting group."""
        group = self.waiting[0].group
        while self.waiting and self.waiting[0].group is group and engine.num_free > 0:
            sequence = self.waiting.popleft()
            prompt = 0.0 if number in group.homes else self.scenario.prompt_tokens
            group.homes.add(number)
            engine.add(sequence, prompt)

    def advance_to_next(self, until: float) -> None:
        """Advance to the next event, at most to a time."""
        while self._events and self._events[0][1] != self._states[self._events[0][2]]:
            heapq.heappop(self._events)
        if not self._events or self._events[0][0] > until:
            self.now = until
            return
        self.now, _, number = heapq.heappop(self._events)
        engine = self.engines[number]
        engine.advance(self.now)
        for sequence in engine.pop_ended():
            sequence.group.num_missing -= 1
            if not sequence.group.num_missing:
                self.complete.append(sequence.group)
                self.num_in_flight -= 1
        if engine.fails_at <= self.now:
            self._fail(engine)
        self._expect(number)
        self._assign([number])

    def _fail(self, engine: _Engine) -> None:
        self.waiting.extendleft(engine.pop_all())
        engine.down_until = self.now + self.scenario.restart
        engine.fails_at = self._time_of_failure(engine.down_until)
        self._assign(range(len(self.engines)))

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.now < end:
            self.advance_to_next(end)

    def wait_for(self, num_groups: int) -> None:
        """Let time pass until so many groups are complete."""
        while len(self.complete) < num_groups:
            self.advance_to_next(math.inf)

    def take_weights(self) -> None:
        """Begin a version on every engine."""
        self.version += 1
        for number, engine in enumerate(self.engines):
            engine.advance(self.now)
            engine.take_weights(self.version, self.scenario.prompt_tokens)
            engine.debt += self.scenario.pause
            self._expect(number)

    def busy_seconds(self) -> float:
        """Return the seconds that engines had sequences, added up."""
        for number, engine in enumerate(self.engines):
            engine.advance(self.now)
            self._expect(number)
        return sum(engine.busy for engine in self.engines)


def simulate(scenario: Scenario, num_steps: int = 10, seed: int = 0) -> Prediction:
    """Simulate a run, and return its means.

    Args:
        scenario: the run.
        num_steps: steps that count; `NUM_WARM_UPS` come before.
        seed: of lengths and failures.
    """
    run = _Run(scenario, seed)
    idle = 0.0
    tokens = stale = 0.0
    oldest = 0
    started, busy_before = 0.0, 0.0
    for step in range(NUM_WARM_UPS + num_steps):
        if step == NUM_WARM_UPS:
            started = run.now
            busy_before = run.busy_seconds()
            idle = tokens = stale = 0.0
            oldest = 0
        asked = run.now
        run.submit(scenario.max_groups - run.num_in_flight - len(run.complete))
        run.wait_for(scenario.num_groups)
        run.wait(scenario.rollout_overhead)
        groups = [run.complete.popleft() for _ in range(scenario.num_groups)]
        idle += run.now - asked
        for version, count in (v for g in groups for s in g.sequences for v in s.versions):
            tokens += count
            stale += (run.version - version) * count
            oldest = max(oldest, run.version - version)
        if scenario.mode == Mode.OVERLAPPING:
            run.submit(scenario.max_groups - run.num_in_flight - len(run.complete))
        run.wait(scenario.train)
        run.wait(scenario.sync)
        idle += scenario.sync
        run.take_weights()
    seconds = run.now - started
    busy = run.busy_seconds() - busy_before
    return Prediction(
        step_seconds=seconds / num_steps,
        tokens_per_second=tokens / seconds,
        trainer_idle=idle / seconds,
        engines_idle=1 - busy / (seconds * len(run.engines)),
        staleness_mean=stale / tokens,
        staleness_max=oldest,
    )
