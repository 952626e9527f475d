"""The order of an engine's steps, while one thread adds to it and another takes it."""

import threading
from collections import deque

from cb_rollout.metrics.live_metrics import Durations


def test_a_step_is_added_whole_while_another_thread_takes_the_timeline():
    durations, taken = Durations(), []
    takers = []

    class Taken(deque):
        """Spans that another thread takes as soon as they were looked at."""

        def __bool__(self):
            is_filled = len(self) > 0
            takers.append(
                threading.Thread(target=lambda: taken.extend(durations.take_timeline()[0]))
            )
            takers[-1].start()
            takers[-1].join(0.05)
            return is_filled

    durations._spans = Taken()
    for _ in range(3):
        durations.add_span("decode", 0.0)
    for taker in takers:
        taker.join()
    spans = [*taken, *durations.take_timeline()[0]]
    assert sum(span.number for span in spans) == 3
