import threading

import pytest

from cb_rollout.delivery import Mailbox
from cb_rollout.errors import EngineDeadError
from cb_rollout.types import GenerationOutput

LONG = 30.0
# Seconds after which a wait that should have ended fails the test.


def output_of(request_id, *tokens):
    return GenerationOutput(request_id, generated_tokens=list(tokens))


def in_thread(function):
    """Run `function` in a thread; returns the thread and the list that its result goes to."""
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
    mailbox = Mailbox()
    mailbox.put(output_of("a"))
    assert mailbox.take("a").request_id == "a"
    assert mailbox.take("a", timeout=0) is None


def test_nothing_comes_before_the_time_is_over():
    assert Mailbox().take(timeout=0) is None
    assert Mailbox().take("a", timeout=0.01) is None


def test_the_outputs_of_another_request_stay():
    mailbox = Mailbox()
    mailbox.put(output_of("a"))
    assert mailbox.take("b", timeout=0) is None
    assert mailbox.take(timeout=0).request_id == "a"


def test_the_outputs_of_one_request_come_in_order():
    mailbox = Mailbox()
    for token in range(3):
        mailbox.put(output_of("a", token))
    assert [mailbox.take("a").generated_tokens for _ in range(3)] == [[0], [1], [2]]


def test_the_outputs_of_any_request_come_first_delivered_first():
    mailbox = Mailbox()
    for name in "cab":
        mailbox.put(output_of(name))
    assert [mailbox.take().request_id for _ in range(3)] == ["c", "a", "b"]


def test_the_outputs_of_streaming_requests_come_first_delivered_first_too():
    mailbox = Mailbox()
    for name in "aba":
        mailbox.put(output_of(name))
    assert [mailbox.take().request_id for _ in range(3)] == ["a", "b", "a"]


def test_a_waiter_gets_what_comes_later():
    mailbox = Mailbox()
    waiter = in_thread(lambda: mailbox.take("b"))
    mailbox.put(output_of("a"))
    mailbox.put(output_of("b"))
    assert finished(*waiter).request_id == "b"


def test_many_takers_get_everything_exactly_once():
    mailbox = Mailbox()
    names = [f"r{i}" for i in range(300)]

    def take_all():
        taken = []
        while (output := mailbox.take()).request_id != "end":
            taken.append(output.request_id)
        return taken

    takers = [in_thread(take_all) for _ in range(3)]
    for name in names:
        mailbox.put(output_of(name))
    for _ in takers:
        mailbox.put(output_of("end"))
    taken = [name for taker in takers for name in finished(*taker)]
    assert sorted(taken) == sorted(names)


def test_a_waiter_hears_that_nothing_more_will_come():
    mailbox = Mailbox()
    error = EngineDeadError("gone")
    waiters = [in_thread(mailbox.take), in_thread(lambda: mailbox.take("a"))]
    mailbox.close(error)
    assert [finished(*waiter) for waiter in waiters] == [error, error]


def test_what_was_delivered_before_the_end_can_still_be_taken():
    mailbox = Mailbox()
    mailbox.put(output_of("a"))
    mailbox.close(EngineDeadError("gone"))
    assert mailbox.take().request_id == "a"
    with pytest.raises(EngineDeadError, match="gone"):
        mailbox.take(timeout=0)


def test_a_reopened_mailbox_waits_again():
    mailbox = Mailbox()
    mailbox.close(EngineDeadError("gone"))
    mailbox.reopen()
    assert mailbox.take(timeout=0) is None
