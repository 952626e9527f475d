"""numerics="bitwise" over architectures: sampled in any way, the bits are the trainer's."""

import pytest
from bitwise_rollouts import TYPES, compare_rollouts
from nightly import some_slow

# Sequences of each engine; scripts/chaos/bitwise.py compares thousands.
NUM_SEQUENCES = 8

# Is compared with the quick tests too.
QUICK = "llama"


MARKED = some_slow(TYPES, [QUICK])


@pytest.mark.parametrize("model_type", MARKED)
def test_rollouts_are_the_trainers_forward_in_every_bit(model_type):
    rollouts = compare_rollouts(model_type, NUM_SEQUENCES)
    assert rollouts.num_compared >= 3 * NUM_SEQUENCES - 6
    assert rollouts.num_preemptions > 0
