import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import selective_log_softmax

from cb_rollout.engine.sampling.logprobs import chosen_logprobs


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 4),
    vocab_size=st.integers(1, 300),
    spread=st.floats(0, 20),
)
def test_chosen_logprobs_are_a_log_softmax_and_what_trl_recomputes(seed, rows, vocab_size, spread):
    generator = torch.Generator().manual_seed(seed)
    logits_BV = torch.randn(rows, vocab_size, generator=generator) * spread
    tokens_B = torch.randint(vocab_size, (rows,), generator=generator)
    logprobs_B, normalizers_B = chosen_logprobs(logits_BV, tokens_B)
    expected_B = logits_BV.double().log_softmax(-1).gather(1, tokens_B[:, None])[:, 0]
    torch.testing.assert_close(
        logprobs_B, expected_B.float(), rtol=0, atol=3e-7 * (10 + 8 * spread)
    )
    torch.testing.assert_close(normalizers_B, logits_BV.logsumexp(-1))
    torch.testing.assert_close(
        logprobs_B, selective_log_softmax(logits_BV, tokens_B), rtol=0, atol=0
    )


def test_a_row_that_makes_no_distribution_has_no_finite_normalizer():
    rows = [[0.0, torch.nan], [torch.inf, 0.0], [-torch.inf, -torch.inf], [-torch.inf, 0.0]]
    _, normalizers_B = chosen_logprobs(torch.tensor(rows), torch.zeros(4, dtype=torch.int64))
    assert normalizers_B.isfinite().tolist() == [False, False, False, True]
