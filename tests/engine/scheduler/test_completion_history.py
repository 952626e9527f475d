from cb_rollout.engine.scheduler import completion_history
from cb_rollout.engine.scheduler.completion_history import MAX_COMPLETIONS, CompletionHistory


def test_the_expected_length_is_the_mean_over_the_completions_of_a_prompt():
    history = CompletionHistory()
    assert history.expected_length([1, 2]) is None
    for length in (10, 20, 60):
        history.add([1, 2], length)
    history.add([1, 2, 3], 7)
    assert history.expected_length((1, 2)) == 30
    assert history.expected_length([1]) is None


def test_a_prompt_keeps_its_newest_completions():
    history = CompletionHistory()
    for length in range(MAX_COMPLETIONS + 3):
        history.add([1], length)
    assert history.expected_length([1]) == sum(range(3, MAX_COMPLETIONS + 3)) / MAX_COMPLETIONS


def test_the_prompts_that_waited_longest_are_dropped(monkeypatch):
    monkeypatch.setattr(completion_history, "MAX_PROMPTS", 2)
    history = CompletionHistory()
    for prompt in (1, 2, 1, 3):
        history.add([prompt], 5)
    assert [history.expected_length([prompt]) for prompt in (1, 2, 3)] == [5, None, 5]
