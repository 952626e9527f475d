import threading

import pytest
from tiny import plain_logprobs, tiny_model

from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.core import Engine
from cb_rollout.engine.request import Request
from cb_rollout.engine.service.loop import EngineLoop
from cb_rollout.engine.service.output_queue import OutputQueue
from cb_rollout.engine.service.pause_controller import PauseReason
from cb_rollout.errors import EngineDeadError, InvalidRequestError, QueueFullError, RolloutError
from cb_rollout.types import CancelResult, FinishReason, RequestStatus

# Seconds after which a wait that should have ended fails the test.
LONG = 30.0

# Seconds for a start() that does not wait for the old thread.
A_MOMENT = 1.0


class WatchedEngine(Engine):
    """Count steps that overlap a pause, and raise `fault` where it is set."""

    is_held = False
    num_overlaps = 0
    fault = None

    def step(self):
        self.num_overlaps += self.is_held
        if self.fault is not None:
            raise self.fault
        touched = super().step()
        self.num_overlaps += self.is_held
        return touched


class Handler(OutputQueue):
    """Queue that first calls `on_output` with each output, on the loop's thread."""

    def __init__(self, on_output):
        super().__init__()
        self._on_output = on_output

    def put(self, output):
        self._on_output(output)
        super().put(output)


@pytest.fixture
def create_loop():
    loops = []

    def create(**settings):
        engine = WatchedEngine(tiny_model("llama"), RolloutConfig(seed=0, **settings))
        loop = EngineLoop(engine)
        loops.append(loop)
        return loop

    yield create
    for loop in loops:
        loop.halt()
        assert not loop.is_running()
        assert loop.engine.num_blocks_used == 0


@pytest.fixture
def loop(create_loop):
    return create_loop()


def request_of(name, max_new_tokens=6, is_streaming=False):
    return Request(
        request_id=name,
        prompt_ids=[5, 6, 7],
        params=SamplingParams(),
        max_new_tokens=max_new_tokens,
        stop_tokens=frozenset(),
        seed=len(name),
        is_streaming=is_streaming,
    )


def endless(name, is_streaming=False):
    return request_of(name, 100_000, is_streaming)


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def ended(thread):
    thread.join(LONG)
    return not thread.is_alive()


def test_a_request_is_delivered_once_with_its_tokens_and_their_logprobs(loop):
    output_queue = OutputQueue()
    loop.submit([request_of("a"), request_of("bb", 3)], output_queue)
    loop.start()
    for name, count in (("a", 6), ("bb", 3)):
        output = output_queue.take(name, LONG)
        assert (output.status, output.finish_reason) == (
            RequestStatus.FINISHED,
            FinishReason.LENGTH,
        )
        assert len(output.generated_tokens) == count
        expected = plain_logprobs(loop.engine.model, output.prompt_ids, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)
        assert output_queue.take(name, 0) is None


def test_logprobs_are_left_out_when_nobody_wants_them(create_loop):
    loop, output_queue = create_loop(return_logprobs=False), OutputQueue()
    loop.submit([request_of("a")], output_queue)
    loop.start()
    output = output_queue.take("a", LONG)
    assert (len(output.generated_tokens), output.logprobs) == (6, [])


def test_a_streaming_request_delivers_after_every_step_and_ends_once(loop):
    output_queue = OutputQueue()
    loop.submit([request_of("a", is_streaming=True)], output_queue)
    loop.start()
    outputs = [output_queue.take("a", LONG)]
    while not outputs[-1].is_finished():
        outputs.append(output_queue.take("a", LONG))
    assert [len(o.generated_tokens) for o in outputs] == [1, 2, 3, 4, 5, 6]
    assert output_queue.take("a", 0) is None


def test_nothing_steps_inside_a_pause(loop):
    output_queue, engine = OutputQueue(), loop.engine
    loop.submit([request_of("a", 2000, is_streaming=True)], output_queue)
    loop.start()
    for _ in range(30):
        assert output_queue.take("a", LONG)
        with loop.paused():
            engine.is_held = True
            assert loop.is_live("a"), "the pause came after everything was done"
            before = engine.counters.tokens_generated
            plain_logprobs(engine.model, [5, 6], [7])
            assert engine.counters.tokens_generated == before
            engine.is_held = False
    assert engine.num_overlaps == 0


def test_two_threads_never_hold_the_engine_at_once(loop):
    inside, overlaps = [], []

    def pause_often():
        for _ in range(200):
            with loop.paused():
                inside.append(1)
                overlaps.append(len(inside) > 1)
                inside.pop()

    output_queue = OutputQueue()
    loop.submit([request_of("a", 400)], output_queue)
    loop.start()
    threads = [in_thread(pause_often) for _ in range(3)]
    assert all(ended(thread) for thread in threads)
    assert not any(overlaps)
    assert output_queue.take("a", LONG).is_finished()


def test_the_engine_is_held_until_the_last_pause_ends(loop):
    with loop.paused():
        with loop.paused():
            assert loop.pauses.is_paused
        assert loop.pauses.is_paused
    assert not loop.pauses.is_paused


def test_a_handler_that_would_pause_its_own_loop_is_refused(loop):
    errors = []

    def pause(output):
        try:
            with loop.paused():
                pytest.fail("paused inside a step")
        except RolloutError as error:
            errors.append(str(error))

    output_queue = Handler(pause)
    loop.submit([request_of("a")], output_queue)
    loop.start()
    assert output_queue.take("a", LONG).is_finished()
    assert errors == [
        "a logits processor or a model's hook cannot pause the engine during its step."
    ]


def test_a_cancelled_request_delivers_what_it_had(loop):
    seen = []

    def cancel_the_third(output):
        seen.append(len(output.generated_tokens))
        if len(seen) == 3:
            assert loop.cancel(["a"]) == [CancelResult.LIVE]

    output_queue = Handler(cancel_the_third)
    loop.submit([endless("a", is_streaming=True)], output_queue)
    loop.start()
    *_, last = [output_queue.take("a", LONG) for _ in range(4)]
    assert (last.status, last.finish_reason) == (RequestStatus.CANCELLED, FinishReason.CANCELLED)
    assert seen == [1, 2, 3, 3]
    expected = plain_logprobs(loop.engine.model, last.prompt_ids, last.generated_tokens)
    assert last.logprobs == pytest.approx(expected, abs=1e-5)
    assert loop.cancel(["a", "nobody"]) == [CancelResult.FINISHED, CancelResult.UNKNOWN]
    assert not loop.is_live("a")


def test_cancelling_twice_changes_nothing(loop):
    output_queue = OutputQueue()
    loop.submit([endless("a")], output_queue)
    loop.cancel(["a"])
    loop.cancel(["a"])
    loop.start()
    assert output_queue.take("a", LONG).status is RequestStatus.CANCELLED


def test_cancelling_an_unknown_id_leaves_a_later_request_of_that_id_alone(loop):
    output_queue = OutputQueue()
    assert loop.cancel(["a"]) == [CancelResult.UNKNOWN]
    loop.submit([request_of("a")], output_queue)
    loop.start()
    assert output_queue.take("a", LONG).status is RequestStatus.FINISHED


def test_an_id_in_use_is_refused_and_nothing_is_queued(loop):
    output_queue = OutputQueue()
    loop.submit([request_of("a")], output_queue)
    with pytest.raises(InvalidRequestError, match="request_id='a' is in use"):
        loop.submit([request_of("b"), request_of("a")], output_queue)
    assert loop.cancel(["b"]) == [CancelResult.UNKNOWN]


def test_a_full_queue_refuses_all_of_what_is_too_many(create_loop):
    loop, output_queue = create_loop(max_queue_size=2), OutputQueue()
    loop.submit([request_of("a")], output_queue)
    with pytest.raises(
        QueueFullError, match="1 requests are waiting, and 2 more would exceed max_queue_size=2"
    ):
        loop.submit([request_of("b"), request_of("c")], output_queue)
    loop.submit([request_of("d")], output_queue)
    loop.start()
    loop.stop(drain=True)
    loop.join(LONG)
    assert [output_queue.take(timeout=0).request_id for _ in range(2)] == ["a", "d"]
    assert output_queue.take(timeout=0) is None


def test_members_of_a_group_wait_beside_each_other_groups_in_order_of_arrival(loop):
    requests = [request_of(name) for name in "abc"]
    requests[0].group = requests[2].group = 7
    requests[1].group = 3
    loop.submit(requests, OutputQueue())
    assert [request.request_id for request in loop._inbox] == ["a", "c", "b"]


def test_outputs_can_be_redirected_while_a_request_lives(loop):
    first, second = OutputQueue(), OutputQueue()
    loop.submit([request_of("a")], first)
    loop.redirect("a", second, first)
    loop.start()
    assert second.take("a", LONG).is_finished()
    assert first.take("a", 0) is None
    with pytest.raises(
        InvalidRequestError, match="request_id='a' has already ended and was delivered"
    ):
        loop.redirect("a", first, second)


def test_what_was_delivered_before_a_redirection_goes_along(loop):
    first, second = OutputQueue(), OutputQueue()
    loop.submit([request_of("a", 3, is_streaming=True)], first)
    loop.start()
    loop.stop(drain=True)
    loop.join(LONG)
    loop.redirect("a", second, first)
    outputs = [second.take("a", 0) for _ in range(3)]
    assert [len(output.generated_tokens) for output in outputs] == [1, 2, 3]
    assert first.take("a", 0) is None


def test_a_recipient_can_be_named_before_its_request(loop):
    first, second = OutputQueue(), OutputQueue()
    loop.redirect("a", second, first)
    loop.submit([request_of("a"), request_of("b")], first)
    loop.start()
    assert second.take("a", LONG).is_finished()
    assert first.take("b", LONG).is_finished()


def test_death_is_told_to_waiters_and_later_callers_and_start_starts_over(loop):
    output_queue, heard = OutputQueue(), []

    def wait():
        with pytest.raises(EngineDeadError) as raised:
            output_queue.take("a", LONG)
        heard.append(raised.value)

    waiter = in_thread(wait)
    loop.engine.fault = ZeroDivisionError("by a test")
    loop.submit([endless("a"), endless("b")], output_queue)
    loop.start()
    assert ended(waiter)
    loop.join(LONG)
    assert heard[0].__cause__ is loop.engine.fault
    assert "ZeroDivisionError: by a test" in str(heard[0])
    with pytest.raises(EngineDeadError) as raised:
        loop.submit([request_of("c")], output_queue)
    assert raised.value.__cause__ is loop.engine.fault
    assert not loop.is_live()
    loop.engine.fault = None
    output_queue.reopen()
    loop.start()
    loop.submit([request_of("a")], output_queue)
    assert output_queue.take("a", LONG).is_finished()


def test_whoever_hears_of_the_death_can_start_over_at_once(loop):
    class Restarting(OutputQueue):
        def close(self, error):
            restarts.append(in_thread(loop.start))
            restarts[0].join(A_MOMENT)
            super().close(error)

    restarts, output_queue = [], Restarting()
    loop.engine.fault = ZeroDivisionError("by a test")
    loop.submit([request_of("a")], output_queue)
    loop.start()
    with pytest.raises(EngineDeadError):
        output_queue.take("a", LONG)
    loop.engine.fault = None
    assert ended(restarts[0])
    later = OutputQueue()
    loop.submit([request_of("b")], later)
    assert later.take("b", LONG).is_finished()


def test_halting_cancels_what_is_in_flight(loop):
    output_queue = OutputQueue()
    loop.submit([endless("a"), endless("b")], output_queue)
    loop.start()
    loop.halt()
    assert not loop.is_running()
    for name in "ab":
        output = output_queue.take(name, 0)
        assert output.status is RequestStatus.CANCELLED
        assert len(output.logprobs) == len(output.generated_tokens)


def test_halting_inside_a_pause_returns(loop):
    output_queue = OutputQueue()
    loop.submit([endless("a")], output_queue)
    loop.start()
    with loop.paused():
        loop.halt()
        assert not loop.is_running()
        assert output_queue.take("a", 0).status is RequestStatus.CANCELLED


def test_draining_finishes_what_is_in_flight_and_a_stopped_loop_takes_no_more(loop):
    output_queue = OutputQueue()
    loop.submit([request_of("a", 50)], output_queue)
    loop.start()
    loop.stop(drain=True)
    loop.join(LONG)
    assert output_queue.take("a", 0).status is RequestStatus.FINISHED
    with pytest.raises(RolloutError, match=r"call start\(\)"):
        loop.submit([request_of("b")], output_queue)
    loop.start()
    loop.submit([request_of("b")], output_queue)
    assert output_queue.take("b", LONG).is_finished()


def test_starting_while_the_loop_drains_leaves_it_started(loop):
    loop.submit([request_of("a")], OutputQueue())
    loop.start()
    with loop.paused():
        loop.stop(drain=True)
        start = in_thread(loop.start)
        start.join(A_MOMENT)
    assert ended(start)
    output_queue = OutputQueue()
    loop.submit([request_of("b")], output_queue)
    assert output_queue.take("b", LONG).is_finished()


@pytest.mark.parametrize("end", ["halt", "cancel"])
def test_a_model_in_training_is_so_again_when_the_last_request_is_cancelled(loop, end):
    model = loop.engine.model.train()
    stepped = threading.Event()
    output_queue = Handler(lambda output: stepped.set())
    loop.submit([endless("a", is_streaming=True)], output_queue)
    loop.start()
    assert stepped.wait(LONG)
    if end == "cancel":
        loop.cancel(["a"])
        while not output_queue.take("a", LONG).is_finished():
            pass
        loop.stop(drain=True)
        loop.join(LONG)
    else:
        loop.halt()
    assert all(module.training for module in model.modules())


def test_a_model_in_training_is_so_again_when_waiting_requests_are_cancelled_too(create_loop):
    loop = create_loop(max_requests_per_batch=1)
    model = loop.engine.model.train()
    stepped = threading.Event()
    output_queue = Handler(lambda output: stepped.set())
    loop.submit([endless("a", is_streaming=True), endless("b")], output_queue)
    loop.start()
    assert stepped.wait(LONG)
    loop.halt()
    assert all(module.training for module in model.modules())


def test_pausing_again_and_again_leaves_the_engine_its_steps(loop):
    output_queue = OutputQueue()
    loop.submit([request_of("a")], output_queue)
    loop.start()
    while output_queue.take("a", 0.0) is None:
        with loop.paused():
            pass


def test_a_fault_while_requests_are_admitted_is_told_to_every_waiting_thread(loop, monkeypatch):
    def broken(self, request):
        raise ZeroDivisionError("no row")

    output_queue = OutputQueue()
    loop.start()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "add", broken)
        loop.submit([request_of("a")], output_queue)
        with pytest.raises(EngineDeadError, match="no row"):
            output_queue.take("a", LONG)
    with pytest.raises(EngineDeadError, match="no row"):
        loop.submit([request_of("b")], output_queue)
    loop.start()
    output_queue.reopen()
    loop.submit([request_of("c")], output_queue)
    assert output_queue.take("c", LONG).status is RequestStatus.FINISHED


def test_a_fault_of_a_cancel_under_a_hold_is_told_to_every_waiting_thread(loop, monkeypatch):
    def broken(self, request):
        raise ZeroDivisionError("no row")

    output_queue = OutputQueue()
    loop.submit([endless("a")], output_queue)
    loop.hold(PauseReason.CLIENT)
    loop.cancel(["a"])
    monkeypatch.setattr(Engine, "cancel", broken)
    with pytest.raises(ZeroDivisionError):
        loop.deliver_cancelled()
    with pytest.raises(EngineDeadError, match="no row"):
        output_queue.take("a", LONG)
