import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st

from cb_rollout import FinishReason, RequestStatus, SamplingParams
from cb_rollout.engine.request import Request
from cb_rollout.engine.spec_decode.ngram import (
    MAX_DRAFT_ROWS,
    MAX_DRAFT_TOKENS,
    NGRAM_SIZES,
    NgramIndex,
    NgramProposer,
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


def test_the_tokens_after_the_longest_matching_ngram_are_predicted():
    ngram_index = NgramIndex()
    ngram_index.add([1, 2, 3, 4, 5, 9, 3, 4, 6, 7], 0)
    assert ngram_index.predict([8, 3, 4], 3) == [6, 7]
    assert ngram_index.predict([2, 3, 4], 3) == [5, 9, 3]
    assert ngram_index.predict([4, 3], 3) == []


def test_the_latest_occurrence_of_an_ngram_counts():
    ngram_index, text = NgramIndex(), [1, 2, 3]
    ngram_index.add(text, 0)
    assert ngram_index.predict([1, 2], 2) == [3]
    text += [1, 2, 7]
    assert ngram_index.predict([1, 2], 2) == [7]


texts_of_few_tokens = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=4)


@given(texts_of_few_tokens, st.integers(1, 5))
def test_every_predicted_token_followed_the_same_ngram_before(texts, count):
    ngram_index, size = NgramIndex(), min(NGRAM_SIZES)
    for text in texts:
        ngram_index.add(text, 0)
    said = {tuple(text[end - size : end + 1]) for text in texts for end in range(size, len(text))}
    for text in texts:
        expected = ngram_index.predict(text, count)
        whole = [*text, *expected]
        assert len(expected) <= count
        for end in range(len(text), len(whole)):
            assert tuple(whole[end - size : end + 1]) in said
        has_follower = any(tuple(text[-size:]) == run[:-1] for run in said)
        assert bool(expected) == has_follower


def test_a_loop_is_predicted_to_go_on():
    ngram_index = NgramIndex()
    ngram_index.add([1, 2, 3] * 4, 0)
    assert ngram_index.predict([1, 2, 3] * 4, 7) == [1, 2, 3, 1, 2, 3, 1]


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
    known = weakref.ref(first.ngram_index)
    first.end(RequestStatus.CANCELLED, FinishReason.CANCELLED)
    assert first.ngram_index is None
    assert proposer.propose([second]) == [[6, 7]]
    second.end(RequestStatus.CANCELLED, FinishReason.CANCELLED)
    gc.collect()
    assert known() is None
    proposer.track([first])
    assert first.ngram_index is None


def test_a_draft_leaves_room_for_the_last_token_and_is_no_longer_than_asked():
    loop = [1, 2, 3] * 4
    short, long = request(loop, max_new_tokens=3), request(loop, max_new_tokens=50)
    proposer = NgramProposer(6)
    proposer.track([short, long])
    long.ngram_index.acceptance_rate = short.ngram_index.acceptance_rate = 1.0
    assert [len(draft) for draft in proposer.propose([short, long])] == [2, 6]


def test_streaming_and_adjusted_sequences_get_no_drafts():
    loop = [1, 2, 3] * 4
    plain = request(loop)
    streaming = request(loop, is_streaming=True)
    proposer = NgramProposer(None)
    proposer.track([plain, streaming])
    plain.ngram_index.acceptance_rate = 1.0
    draft, none = proposer.propose([plain, streaming])
    assert (len(draft), none) == (min(MAX_DRAFT_TOKENS, MAX_DRAFT_ROWS // 2 - 1), [])
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
    assert lengths[0] == 2
    assert 0 < sum(lengths[20:]) < 40
    for _ in range(20):
        proposer.record(looping, 4, 4)
    assert len(proposer.propose([looping])[0]) == 4
