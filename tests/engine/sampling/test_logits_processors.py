import dataclasses

import pytest
import torch
from documented import block, run
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)

from cb_rollout.config.sampling import SamplingParams
from cb_rollout.engine.request import Request
from cb_rollout.engine.sampling import logits_processors
from cb_rollout.engine.sampling.logits_processors import create_processing
from cb_rollout.errors import InvalidRequestError

CPU = torch.device("cpu")
VOCAB_SIZE = 12
EOS = (1, 7)
WORDS = ((3,), (4, 5), (5, 6, 8), (9, 2))
MANY = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(repetition_penalty=0.7),
    SamplingParams(bad_words=WORDS),
    SamplingParams(bad_words=((2, 3, 4, 5), (6, 7))),
    SamplingParams(logit_bias={3: 1.5, 8: -2.0, 11: float("-inf")}),
    SamplingParams(min_new_tokens=3),
    SamplingParams(min_length=9),
    SamplingParams(begin_suppress_tokens=(3, 4)),
    SamplingParams(forced_eos_token_id=7),
    SamplingParams(repetition_penalty=1.3, bad_words=WORDS, logit_bias={3: 4.0}, min_new_tokens=4),
    SamplingParams(sequence_bias={(3, 4): 2.0, (2, 5): -3.0, (6,): 1.0, (4, 7, 8): 9.0}),
    SamplingParams(no_repeat_ngram_size=1),
    SamplingParams(no_repeat_ngram_size=2),
    SamplingParams(no_repeat_ngram_size=3),
    SamplingParams(
        repetition_penalty=1.3,
        sequence_bias={(3, 4): 2.0, (2, 5): -3.0},
        no_repeat_ngram_size=2,
    ),
]


def sample(request, *tokens):
    """Give a request tokens, however many it asked for."""
    request.token_ids = [*request.token_ids, *tokens]


def requests_of(params, num_generated, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for row, wanted in enumerate(params):
        prompt = torch.randint(VOCAB_SIZE, (2 + row % 4,), generator=generator).tolist()
        made.append(Request(f"r{row}", prompt, wanted, 6, frozenset(EOS), seed=row))
        sampled = torch.randint(2, VOCAB_SIZE, (num_generated,), generator=generator)
        sample(made[-1], *sampled.tolist())
    return made


def random_logits(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB_SIZE, generator=generator) * 3


def reference(request, logits_1V):
    """What transformers' own processors make of the logits."""
    p, num_prompt = request.params, len(request.prompt_ids)
    longest = num_prompt + request.max_new_tokens
    chain = {
        lambda given: SequenceBiasLogitsProcessor(
            {(t,): v for t, v in given.items()}
        ): p.logit_bias,
        SequenceBiasLogitsProcessor: p.sequence_bias,
        RepetitionPenaltyLogitsProcessor: p.repetition_penalty != 1 and p.repetition_penalty,
        NoRepeatNGramLogitsProcessor: p.no_repeat_ngram_size,
        lambda given: NoBadWordsLogitsProcessor([list(word) for word in given]): p.bad_words,
        lambda given: MinLengthLogitsProcessor(given, list(EOS)): p.min_length,
        lambda given: MinNewTokensLengthLogitsProcessor(
            num_prompt, given, list(EOS)
        ): p.min_new_tokens,
        lambda given: ForcedBOSTokenLogitsProcessor(given[0]): p.forced_bos_token_id,
        lambda given: ForcedEOSTokenLogitsProcessor(longest, list(given)): p.forced_eos_token_id,
        lambda given: SuppressTokensAtBeginLogitsProcessor(
            given, num_prompt
        ): p.begin_suppress_tokens,
    }
    processors = LogitsProcessorList(create(given) for create, given in chain.items() if given)
    return processors(torch.tensor([request.token_ids]), logits_1V.clone())


def processed(requests, logits_BV, processing=None):
    processing = processing or create_processing(requests, VOCAB_SIZE, CPU)
    return processing(logits_BV)


@pytest.mark.parametrize("num_generated", range(6))
@pytest.mark.parametrize("seed", range(8))
def test_logits_are_changed_as_by_transformers_processors(num_generated, seed):
    requests = requests_of(MANY, num_generated, seed)
    logits_BV = random_logits(seed, len(MANY))
    expected_BV = torch.cat(
        [reference(r, logits_BV[row : row + 1]) for row, r in enumerate(requests)]
    )
    assert torch.equal(processed(requests, logits_BV), expected_BV)


def test_every_case_of_the_comparison_changes_something():
    changed = set()
    for num_generated in range(6):
        for seed in range(16):
            requests = requests_of(MANY, num_generated, seed)
            logits_BV = random_logits(seed, len(MANY))
            differs_B = (processed(requests, logits_BV) != logits_BV).any(-1)
            changed |= set(differs_B.nonzero()[:, 0].tolist())
    assert changed == set(range(1, len(MANY)))


@pytest.mark.parametrize("num_sampled", [0, 1, 5])
@pytest.mark.parametrize("prompt", [[3], [3, 4]])
def test_a_first_token_is_forced_after_a_single_one_as_in_transformers(prompt, num_sampled):
    params = SamplingParams(forced_bos_token_id=5, forced_eos_token_id=7)
    request = Request("r", prompt, params, 6, frozenset(EOS), seed=0)
    sample(request, *range(2, 2 + num_sampled))
    logits_1V = random_logits(0, 1)
    assert torch.equal(processed([request], logits_1V), reference(request, logits_1V))


def test_presence_and_frequency_count_the_completion_only():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    request = Request("r", [2, 3, 3], params, 9, frozenset(EOS), seed=0)
    sample(request, 4, 3, 4, 4)
    logits_1V = random_logits(0, 1)
    expected_1V = logits_1V.clone()
    expected_1V[0, 3] -= 0.5 + 0.25
    expected_1V[0, 4] -= 0.5 + 0.25 * 3
    torch.testing.assert_close(processed([request], logits_1V), expected_1V)


def test_a_new_parameter_is_a_field_and_a_change_of_logits(monkeypatch):
    names, name = run(block("Add a sampling parameter")), "prompt_penalty"
    kind = dataclasses.make_dataclass(
        "Newer",
        [(name, float, names[name])],
        bases=(SamplingParams,),
        frozen=True,
        kw_only=True,
        slots=True,
    )
    # Its place among the changes.
    monkeypatch.setattr(logits_processors, "_create_bias", names[f"_create_{name}"])
    assert not kind().is_adjusted
    params = kind(prompt_penalty=0.5)
    assert params.is_adjusted
    assert not params.can_be_graphed
    with pytest.raises(InvalidRequestError, match="prompt_penalty=inf is not finite"):
        kind(prompt_penalty=float("inf"))
    request = Request("r", [2, 3, 3], params, 9, frozenset(EOS), seed=0)
    logits_1V = random_logits(0, 1)
    expected_1V = logits_1V.clone()
    expected_1V[0, [2, 3]] -= 0.5
    torch.testing.assert_close(processed([request], logits_1V), expected_1V)


def test_penalties_follow_bias_and_come_in_vllms_order():
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={3: 5.0}
    )
    request = Request("r", [2], params, 9, frozenset(), seed=0)
    sample(request, 3, 3)
    logits_1V = torch.zeros(1, VOCAB_SIZE)
    assert processed([request], logits_1V)[0, 3] == 5.0 / 2.0 - 1.0 - 2 * 0.5


def test_the_models_logits_are_left_as_they_are():
    requests, logits_BV = requests_of(MANY, 3), random_logits(1, len(MANY))
    before_BV = logits_BV.clone()
    processed(requests, logits_BV)
    assert torch.equal(logits_BV, before_BV)


def test_rows_may_join_leave_and_come_back_between_steps():
    everyone = requests_of(MANY, 2)
    memberships = [everyone, everyone, everyone[3:], [*everyone[5:], everyone[1]], everyone[::-1]]
    processing, present = None, None
    for step, wanted in enumerate(memberships * 3):
        if wanted is not present:
            processing = create_processing(wanted, VOCAB_SIZE, CPU)
            present = wanted
        logits_BV = random_logits(step, len(wanted))
        kept_BV = processed(wanted, logits_BV, processing)
        assert torch.equal(kept_BV, processed(wanted, logits_BV))
        for request in wanted[::2]:
            sample(request, 2 + step % (VOCAB_SIZE - 2))


def test_a_stop_token_that_has_no_logit_is_passed_over():
    params = SamplingParams(min_new_tokens=2)
    request = Request("r", [2], params, 9, frozenset({1, 50_256}), seed=0)
    processed_1V = processed([request], random_logits(0, 1))
    assert processed_1V[0].isneginf().nonzero().tolist() == [[1]]
