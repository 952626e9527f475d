"""A prompt of a wrong type is refused with what to pass in its place."""

import pytest

from cb_rollout import InvalidRequestError
from cb_rollout.rollout.prompts import encoded


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({5, 6}, "input 1 is a set, which has no order; pass a list"),
        (7, r"input 1 is a single number; .*\[\[5, 6, 7\]\]"),
        (b"text", "input 1 is bytes; decode it"),
        ({"role": "user"}, "input 1 is a dict of role; a chat is a list of messages"),
        ("text", "input 1 is text; pass token ids, or make a RolloutGenerator with tokenizer="),
    ],
)
def test_a_prompt_of_a_wrong_type_is_refused(prompt, said):
    with pytest.raises(InvalidRequestError, match=said):
        encoded([[5, 6], prompt], None)
