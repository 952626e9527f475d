import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st

from cb_rollout import FinishReason, RequestStatus, SamplingParams
from cb_rollout.engine.request import Request
from cb_rollout.engine.spec_decode.ngram import (
    INITIAL_RATE,
    MAX_DRAFT_ROWS,
    MAX_DRAFT_TOKENS,
    NGRAM_SIZES,
    GroupDrafts,
    NgramProposer,
    StepCost,
)


def request(prompt_ids, said=(), group=None, max_new_tokens=100, **settings):
    streaming = settings.pop("is_streaming", False)
    made = Request(
        request_id=str(prompt_ids),
        prompt_ids=list(prompt_ids),
        params=SamplingParams(**settings),
        max_new_tokens=max_new_tokens,
        stop_tokens=frozenset(),
        seed=0,
        group=group,
        is_streaming=streaming,
    )
    for token in said:
        made.append(token, 0.0, 0)
    return made


def predicted(ngram_index, token_ids, count):
    """What follows the longest n-gram at the end of a text."""
    return ngram_index.predict(token_ids, count)


def trust(*requests):
    for request in requests:
        request.drafts.rate = 1.0


def test_the_tokens_after_the_longest_matching_ngram_are_predicted():
    ngram_index = GroupDrafts()
    ngram_index.add([1, 2, 3, 4, 5, 9, 3, 4, 6, 7])
    assert predicted(ngram_index, [8, 3, 4], 3) == [6, 7]
    assert predicted(ngram_index, [2, 3, 4], 3) == [5, 9, 3]
    assert predicted(ngram_index, [4, 3], 3) == []


def test_a_draft_ends_before_a_token_that_is_never_sampled():
    proposer, one = NgramProposer(3, never_sampled=(9,)), request([1, 2, 3, 9, 9, 1, 2], said=[3])
    two = request([1, 2, 4, 5, 9, 1], said=[2])
    proposer.track([one, two])
    trust(one, two)
    assert proposer.propose([one, two]) == [[], [4, 5]]


def test_the_latest_occurrence_of_an_ngram_counts():
    ngram_index, text = GroupDrafts(), [1, 2, 3]
    ngram_index.add(text)
    assert predicted(ngram_index, [1, 2], 2) == [3]
    text += [1, 2, 7]
    assert predicted(ngram_index, [1, 2], 2) == [7]


texts_of_few_tokens = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=4)


@given(texts_of_few_tokens, st.integers(1, 5))
def test_every_predicted_token_followed_the_same_ngram_before(texts, count):
    ngram_index, size = GroupDrafts(), min(NGRAM_SIZES)
    for text in texts:
        ngram_index.add(text)
    said = {tuple(text[end - size : end + 1]) for text in texts for end in range(size, len(text))}
    for text in texts:
        expected = predicted(ngram_index, text, count)
        whole = [*text, *expected]
        assert len(expected) <= count
        for end in range(len(text), len(whole)):
            assert tuple(whole[end - size : end + 1]) in said
        has_follower = any(tuple(text[-size:]) == run[:-1] for run in said)
        assert bool(expected) == has_follower


def test_a_loop_is_predicted_to_go_on():
    ngram_index = GroupDrafts()
    ngram_index.add([1, 2, 3] * 4)
    assert predicted(ngram_index, [1, 2, 3] * 4, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_members_of_a_group_share_one_index():
    proposer = NgramProposer(4)
    prompt = [1, 2, 3]
    first, second = request(prompt, [4, 5, 6, 7], group=0), request(prompt, [4, 5], group=0)
    stranger = request(prompt, [4, 5], group=1)
    proposer.track([first, second, stranger])
    assert proposer.propose([second, stranger]) == [[6, 7], []]
    del first
    # The tokens of a member that is gone stay, as long as another runs.
    assert proposer.propose([second]) == [[6, 7]]


def test_a_sequence_that_ended_does_not_keep_its_groups_index_alive():
    proposer, prompt = NgramProposer(4), [1, 2, 3]
    first, second = request(prompt, [4, 5, 6, 7], group=0), request(prompt, [4, 5], group=0)
    proposer.track([first, second])
    known = weakref.ref(first.drafts)
    first.end(RequestStatus.CANCELLED, FinishReason.CANCELLED)
    assert first.drafts is None
    assert proposer.propose([second]) == [[6, 7]]
    second.end(RequestStatus.CANCELLED, FinishReason.CANCELLED)
    gc.collect()
    assert known() is None
    proposer.track([first])
    assert first.drafts is None


def test_a_draft_leaves_room_for_the_last_token_and_is_no_longer_than_asked():
    loop = [1, 2, 3] * 4
    short, long = request(loop, max_new_tokens=3), request(loop, max_new_tokens=50)
    proposer = NgramProposer(6)
    proposer.track([short, long])
    trust(short, long)
    assert [len(draft) for draft in proposer.propose([short, long])] == [2, 6]


def test_streaming_and_adjusted_sequences_get_no_drafts():
    loop = [1, 2, 3] * 4
    plain = request(loop)
    streaming = request(loop, is_streaming=True)
    proposer = NgramProposer(None)
    proposer.track([plain, streaming])
    trust(plain)
    draft, none = proposer.propose([plain, streaming])
    assert (len(draft), none) == (MAX_DRAFT_TOKENS, [])
    for adjusted in (request(loop, repetition_penalty=1.5), request(loop, top_logprobs=2)):
        assert proposer.propose([plain, adjusted]) == []
    assert proposer.propose([plain] * (MAX_DRAFT_ROWS // 2 + 1)) == []


def test_drafts_become_longer_with_the_acceptance_rate():
    proposer, looping = NgramProposer(4), request([1, 2, 3] * 4)
    proposer.track([looping])
    lengths = []
    for _ in range(100):
        drafts = proposer.propose([looping])
        lengths.append(len(drafts[0]) if drafts else 0)
        proposer.record(looping, lengths[-1], 0)
    assert lengths[0] == 4
    assert 0 < sum(lengths[20:]) < 40
    for _ in range(20):
        proposer.record(looping, 4, 4)
    assert len(proposer.propose([looping])[0]) == 4


def test_a_draft_that_did_not_run_is_compared_with_what_was_sampled():
    proposer = NgramProposer(4)
    proposer.cost = StepCost(step=48, drafted=10_000)
    looping = request([1, 2, 3] * 4)
    proposer.track([looping])
    for token in [1, 2, 3] * 4:
        assert proposer.propose([looping]) == []
        looping.append(token, 0.0, 0)
    assert proposer.propose([looping]) == []
    assert looping.drafts.rate > 0.9
    looping.append(9, 0.0, 0)
    proposer.propose([looping])
    assert looping.drafts.rate < 0.8


def test_drafts_together_are_worth_the_time_that_they_add_to_a_step():
    """A GPU's eight rows give up more by a step that is not launched ahead than one row does."""
    for num_rows, rate, is_worth in ((1, 0.5, True), (8, 0.5, False), (8, 0.95, True)):
        proposer = NgramProposer(7, device_type="cuda")
        running = [request([1, 2, 3] * 4 + [row]) for row in range(10, 17)]
        running = [request([1, 2, 3] * 4), *running][:num_rows]
        proposer.track(running)
        running[0].drafts.rate = rate
        assert bool(proposer.propose(running)) is is_worth


def test_later_groups_begin_with_the_runs_acceptance_rate():
    proposer = NgramProposer(4)
    first = request([1, 2, 3], said=[4, 5])
    proposer.track([first])
    proposer.record(first, 2, 0)
    assert proposer.rate == first.drafts.rate == 0.75 * INITIAL_RATE
    proposer.record(first, 2, 2)
    assert proposer.rate == 0.75 * 0.75 * INITIAL_RATE + 0.25
    second = request([1, 2, 4])
    second.append(5, 0.0, 0)
    proposer.track([second])
    assert second.drafts.rate == proposer.rate
