"""Log-probability arithmetic, in float32, on logits as the model gave them.

B: rows, V: vocabulary.
"""

import torch


def chosen_logprobs(
    logits_BV: torch.Tensor, token_ids_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log-softmax over the whole vocabulary, at the given tokens.

    On logits/temperature this is what TRL's loss recomputes (its `selective_log_softmax`).

    Args:
        logits_BV: float32, already divided by temperature.
        token_ids_B: int64.

    Returns:
        The log-probabilities (float32, B, natural logarithm) and each row's log-sum-exp, which is
        finite exactly when the row's logits make a distribution.
    """
    normalizers_B = logits_BV.logsumexp(-1)
    chosen_B = logits_BV.gather(1, token_ids_B[:, None])[:, 0]
    return chosen_B - normalizers_B, normalizers_B
