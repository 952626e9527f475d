import math
import re

import numpy as np
import pytest
import torch

from cb_rollout import GenerationOutput, InvalidRequestError, RequestStatus
from cb_rollout.rollout.recording.arguments import recorded_batch

NAN = math.nan


def an_output(name="a", num_tokens=3, **changes):
    tokens = list(range(5, 5 + num_tokens))
    logprobs = [-0.5] * num_tokens
    status = RequestStatus.FINISHED
    fields = {"status": status, "policy_versions": [(1, num_tokens)]} | changes
    return GenerationOutput(name, [3, 4], tokens, fields.pop("logprobs", logprobs), **fields)


OUTPUTS = [an_output("a", 3), an_output("b", 1), an_output("c", 2)]
LISTS = [[-1.0, -2.0, -3.0], [-4.0], [-5.0, -6.0]]
PADDED = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0], [-5.0, -6.0, NAN]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0]])
# As a forward of prompt and completion gives them, shifted by one.
WHOLE = torch.nn.functional.pad(PADDED, (1, 0), value=-9.0)
WHOLE_MASK = torch.nn.functional.pad(MASK, (1, 0))


@pytest.mark.parametrize(
    ("values", "mask"),
    [
        (LISTS, None),
        ([torch.tensor(row) for row in LISTS], None),
        ([torch.tensor(row, dtype=torch.bfloat16, requires_grad=True) for row in LISTS], None),
        (tuple(np.array(row) for row in LISTS), None),
        (PADDED, MASK),
        (PADDED, MASK.bool()),
        (PADDED.clone().requires_grad_(), MASK.float()),
        (PADDED.numpy(), MASK.numpy()),
        (WHOLE, WHOLE_MASK),
        (PADDED.flip(1), MASK.flip(1)),
    ],
)
def test_the_trainers_values_are_those_of_the_generated_tokens(values, mask):
    batch = recorded_batch(OUTPUTS, None, None, values, mask)
    flipped = isinstance(values, torch.Tensor) and values[0, 0] == -3
    assert batch.trainer_logprobs == ([row[::-1] for row in LISTS] if flipped else LISTS)


def test_columns_of_outputs_of_one_length_need_no_mask():
    outputs = [an_output("a", 2), an_output("b", 2)]
    values = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    assert recorded_batch(outputs, trainer_logprobs=values).trainer_logprobs == values.tolist()


@pytest.mark.parametrize(
    "rewards",
    [
        [1, True, 0.5],
        torch.tensor([1.0, 1.0, 0.5]),
        np.array([1, 1, 0.5]),
        list(torch.tensor([1.0, 1.0, 0.5])),
    ],
)
def test_rewards_are_a_number_for_each_output(rewards):
    batch = recorded_batch({output.request_id: output for output in OUTPUTS}, rewards)
    assert batch.rewards == [1.0, 1.0, 0.5]
    assert batch.advantages == [None] * 3
    assert batch.trainer_logprobs is None
    assert batch.outputs == OUTPUTS


def test_a_sequence_without_a_reward_is_none():
    assert recorded_batch(OUTPUTS, [1.0, None, 0.0]).rewards == [1.0, None, 0.0]


REFUSED = [
    ({"rewards": [1.0]}, "rewards has 1 numbers for 3 outputs; pass one for each"),
    ({"rewards": torch.zeros(3, 1)}, r"shape (3, 1), and there are 3 outputs; pass rewards.flat"),
    ({"advantages": torch.zeros(2, 3)}, r"shape (2, 3), and there are 3 outputs; pass one number"),
    ({"advantages": torch.tensor(1.0)}, r"advantages has shape ()"),
    ({"rewards": [1.0, NAN, 0.0]}, "rewards[1] is nan; pass a finite number, or a list with None"),
    ({"rewards": torch.tensor([1.0, 0.0, math.inf])}, "rewards[2] is inf"),
    ({"advantages": [0.0, 0.0, -math.inf]}, "advantages[2] is -inf"),
    ({"advantages": [torch.zeros(3)] * 3}, "advantages holds a Tensor, not one number"),
    ({"rewards": ["good", "bad", "bad"]}, "rewards holds a str, not one number"),
    ({"rewards": 1.0}, "rewards is a float; pass a list or a 1-d tensor"),
    ({"rewards": {"a": 1.0, "b": 1.0, "c": 1.0}}, "rewards is a dict; pass a list"),
    ({"rewards": {1.0, 0.0, 0.5}}, "rewards is a set; pass a list"),
    ({"trainer_logprobs": LISTS[:2]}, "trainer_logprobs has 2 tensors for 3 outputs"),
    ({"trainer_logprobs": [[-1.0] * 5, *LISTS[1:]]},
     "trainer_logprobs[0], a: 5 numbers for 3 generated tokens; pass one per generated token"),
    ({"trainer_logprobs": PADDED},
     "has 3 columns, and outputs have 1 to 3 tokens, so it is unclear which columns are padding. "
     "Pass completion_mask"),
    ({"trainer_logprobs": torch.zeros(6)}, "trainer_logprobs has shape (6,), and there are 3"),
    ({"trainer_logprobs": torch.zeros(2, 3), "completion_mask": MASK}, "has shape (2, 3)"),
    ({"trainer_logprobs": torch.zeros(3, 3, 2)}, "has shape (3, 3, 2)"),
    ({"trainer_logprobs": PADDED, "completion_mask": WHOLE_MASK},
     "completion_mask has shape (3, 4), and trainer_logprobs (3, 3)"),
    ({"trainer_logprobs": PADDED, "completion_mask": MASK * 2}, "numbers other than 0 and 1"),
    ({"trainer_logprobs": WHOLE, "completion_mask": WHOLE_MASK | 1},
     "trainer_logprobs[0], a: 4 numbers for 3 generated"),
    ({"trainer_logprobs": LISTS, "completion_mask": MASK}, "not for a list of tensors; leave"),
    ({"completion_mask": MASK}, "completion_mask without trainer_logprobs; pass both"),
    ({"trainer_logprobs": [torch.zeros(1, 3), *LISTS[1:]]}, "holds a tensor of shape (1, 3)"),
    ({"trainer_logprobs": [[-1.0, NAN, -1.0], *LISTS[1:]]},
     "trainer_logprobs[0], a: nan at token 1 is not a log-probability"),
    ({"trainer_logprobs": [LISTS[0], [-math.inf], LISTS[2]]}, "[1], b: -inf at token 0"),
    # Probabilities.
    ({"trainer_logprobs": [LISTS[0], LISTS[1], [0.5, 0.9]]}, "[2], c: 0.5 at token 0"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "sentence"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_fits_no_output_is_refused_with_its_numbers(arguments, sentence):
    with pytest.raises(InvalidRequestError, match=re.escape(sentence)):
        recorded_batch(OUTPUTS, **arguments)


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (an_output("bad", 0, status=RequestStatus.FAILED, error="out of memory"),
         "outputs[1], bad, failed (out of memory): it is not a sample of the policy. Leave it out"),
        (an_output(status=RequestStatus.DECODING), "is decoding; record it once it has ended"),
        (an_output(logprobs=[]), "has 0 log-probabilities for 3 tokens; sample with return_log"),
        (an_output(logprobs=[-0.5]), "has 1 log-probabilities for 3 tokens"),
        (an_output(policy_versions=[(1, 2)]), "policy versions for 2 of its 3 tokens"),
        ("req_0", "outputs[1] is a str; pass the outputs of generate_batch"),
    ],
)  # fmt: skip
def test_an_output_that_is_no_sample_is_refused_by_its_name(output, sentence):
    with pytest.raises(InvalidRequestError, match=re.escape(sentence)):
        recorded_batch([OUTPUTS[0], output])


def test_a_cancelled_output_is_a_sample_and_so_is_one_without_tokens():
    outputs = [an_output(status=RequestStatus.CANCELLED), an_output("none", 0, policy_versions=[])]
    assert recorded_batch(outputs, trainer_logprobs=[[-1.0] * 3, []]).outputs == outputs


@pytest.mark.parametrize("outputs", [None, 3, "outputs", OUTPUTS[0]])
def test_what_is_no_list_of_outputs_is_refused(outputs):
    with pytest.raises(InvalidRequestError, match=r"^outputs is .*; pass .*outputs"):
        recorded_batch(outputs)
