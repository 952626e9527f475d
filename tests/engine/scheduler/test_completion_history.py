from cb_rollout.engine.scheduler.completion_history import MAX_COMPLETIONS, CompletionHistory


def test_completions_of_a_prompt_are_found_by_its_tokens():
    history = CompletionHistory()
    prompt = history.of([1, 2])
    assert prompt.expected_length() is None
    history.add(prompt, [3, 4])
    # Another request of the same prompt, made before the first completion ended.
    history.add(CompletionHistory().of([1, 2]), [5, 6, 7, 8])
    found = history.of((1, 2))
    assert [list(completion) for completion in found.completions] == [[3, 4], [5, 6, 7, 8]]
    assert not history.of([1, 2, 3]).completions


def test_the_expected_length_is_the_mean():
    history = CompletionHistory()
    prompt = history.of([1])
    for length in (10, 20, 60):
        history.add(prompt, [0] * length)
    assert prompt.expected_length() == 30


def test_memory_is_bounded_and_the_oldest_prompts_are_dropped():
    history = CompletionHistory(max_tokens=100)
    first, second = history.of([1]), history.of([2])
    for prompt in (first, second, first):
        history.add(prompt, [0] * 40)
    assert history.num_tokens == 80
    assert history.of([1]) is first
    assert not history.of([2]).completions


def test_a_dropped_prompt_that_a_request_holds_is_counted_from_nothing():
    history = CompletionHistory(max_tokens=100)
    first, second = history.of([1]), history.of([2])
    for prompt in (first, second, second, first):
        history.add(prompt, [0] * 40)
    assert history.num_tokens == first.num_tokens + second.num_tokens <= 100


def test_a_prompt_keeps_its_newest_completions():
    history = CompletionHistory()
    prompt = history.of([1])
    for index in range(MAX_COMPLETIONS + 3):
        history.add(prompt, [index])
    assert [list(c) for c in prompt.completions] == [[i] for i in range(3, MAX_COMPLETIONS + 3)]
    assert history.num_tokens == MAX_COMPLETIONS
