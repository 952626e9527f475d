import importlib.util

import pytest
import torch

from cb_rollout.integrations.xgrammar import XGrammar, XGrammarMatcher, unpacked

needs_no_xgrammar = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is not None, reason="xgrammar is installed"
)


class EvenTokens:
    """Acts as an `xgrammar.GrammarMatcher` that allows even ids below a bound, three times."""

    def __init__(self, bound):
        self.bound, self.accepted = bound, []

    def fill_next_token_bitmask(self, bitmask, index=0):
        assert bitmask.dtype == torch.int32
        for token in range(bitmask.shape[1] * 32):
            is_allowed = token % 2 == 0 and token < self.bound
            word, bit = divmod(token, 32)
            value = (int(bitmask[index, word]) & 0xFFFFFFFF) & ~(1 << bit) | (is_allowed << bit)
            bitmask[index, word] = value - (1 << 32) if value >= 1 << 31 else value
        return True

    def accept_token(self, token_id):
        self.accepted.append(token_id)
        return token_id % 2 == 0

    def is_terminated(self):
        return len(self.accepted) == 3


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 64, 100])
def test_a_bit_a_token_becomes_a_truth_value_a_token(num_tokens):
    words = torch.tensor([0b101, -1, -(2**31), 0], dtype=torch.int32)
    expected = [i in (0, 2) or 32 <= i < 64 or i == 95 for i in range(num_tokens)]
    assert unpacked(words, num_tokens).tolist() == expected


def test_the_matcher_fills_accepts_and_ends():
    matcher = XGrammarMatcher(EvenTokens(bound=70))
    mask_V = torch.zeros(100, dtype=torch.bool)
    matcher.fill_allowed_tokens(mask_V)
    assert mask_V.nonzero()[:, 0].tolist() == list(range(0, 70, 2))
    assert [matcher.accept_token(token) for token in (4, 5, 6)] == [True, False, True]
    assert matcher.is_terminated()


@needs_no_xgrammar
def test_without_xgrammar_the_error_says_which_extra_to_install():
    with pytest.raises(ImportError, match=r"pip install 'cb_rollout\[grammar\]'"):
        XGrammar.from_regex("[0-9]+", tokenizer=None, vocab_size=10)
    with pytest.raises(ImportError, match=r"pip install 'cb_rollout\[grammar\]'"):
        XGrammar(compiled=None)


@pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="xgrammar is missing")
def test_a_regular_expression_is_obeyed():
    from tiny import char_tokenizer

    tokenizer = char_tokenizer()
    matcher = XGrammar.from_regex("[0-9]{2}", tokenizer, len(tokenizer)).matcher()
    mask_V = torch.zeros(len(tokenizer), dtype=torch.bool)
    matcher.fill_allowed_tokens(mask_V)
    assert tokenizer.decode(mask_V.nonzero()[:, 0].tolist()) == "0123456789"
