import threading

import pytest

from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.errors import EngineDeadError
from cb_rollout.types import GenerationOutput

# Seconds after which a wait that should have ended fails the test.
LONG = 30.0


def output_of(request_id, *tokens):
    return GenerationOutput(request_id, generated_tokens=list(tokens))


def in_thread(function):
    """Run a function in a thread; return the thread and the list that receives its result."""
    results = []

    def run():
        try:
            results.append(function())
        except EngineDeadError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def finished(thread, results):
    thread.join(LONG)
    assert not thread.is_alive(), "a wait did not end"
    return results[0]


def test_an_output_is_taken_once():
    output_queue = OutputQueue()
    output_queue.put(output_of("a"))
    assert output_queue.take("a").request_id == "a"
    assert output_queue.take("a", timeout=0) is None


def test_nothing_comes_before_the_time_is_over():
    assert OutputQueue().take(timeout=0) is None
    assert OutputQueue().take("a", timeout=0.01) is None


def test_the_outputs_of_another_request_stay():
    output_queue = OutputQueue()
    output_queue.put(output_of("a"))
    assert output_queue.take("b", timeout=0) is None
    assert output_queue.take(timeout=0).request_id == "a"


def test_the_outputs_of_one_request_come_in_order():
    output_queue = OutputQueue()
    for token in range(3):
        output_queue.put(output_of("a", token))
    assert [output_queue.take("a").generated_tokens for _ in range(3)] == [[0], [1], [2]]


def test_the_outputs_of_any_request_come_first_delivered_first():
    output_queue = OutputQueue()
    for name in "cab":
        output_queue.put(output_of(name))
    assert [output_queue.take().request_id for _ in range(3)] == ["c", "a", "b"]


def test_the_outputs_of_streaming_requests_come_first_delivered_first_too():
    output_queue = OutputQueue()
    for name in "aba":
        output_queue.put(output_of(name))
    assert [output_queue.take().request_id for _ in range(3)] == ["a", "b", "a"]


def test_a_waiter_gets_what_comes_later():
    output_queue = OutputQueue()
    waiter = in_thread(lambda: output_queue.take("b"))
    output_queue.put(output_of("a"))
    output_queue.put(output_of("b"))
    assert finished(*waiter).request_id == "b"


def test_many_takers_get_everything_exactly_once():
    output_queue = OutputQueue()
    names = [f"r{i}" for i in range(300)]

    def take_all():
        taken = []
        while (output := output_queue.take()).request_id != "end":
            taken.append(output.request_id)
        return taken

    takers = [in_thread(take_all) for _ in range(3)]
    for name in names:
        output_queue.put(output_of(name))
    for _ in takers:
        output_queue.put(output_of("end"))
    taken = [name for taker in takers for name in finished(*taker)]
    assert sorted(taken) == sorted(names)


def test_a_waiter_hears_that_nothing_more_will_come():
    output_queue = OutputQueue()
    error = EngineDeadError("gone")
    waiters = [in_thread(output_queue.take), in_thread(lambda: output_queue.take("a"))]
    output_queue.close(error)
    assert [finished(*waiter) for waiter in waiters] == [error, error]


def test_what_was_delivered_before_the_end_can_still_be_taken():
    output_queue = OutputQueue()
    output_queue.put(output_of("a"))
    output_queue.close(EngineDeadError("gone"))
    assert output_queue.take().request_id == "a"
    with pytest.raises(EngineDeadError, match="gone"):
        output_queue.take(timeout=0)


def test_a_reopened_queue_waits_again():
    output_queue = OutputQueue()
    output_queue.close(EngineDeadError("gone"))
    output_queue.reopen()
    assert output_queue.take(timeout=0) is None
