"""How much an optimizer, known by its name, keeps of its parameters. Arithmetic only."""

from collections.abc import Mapping
from typing import Any

TENSORS_PER_PARAMETER = {
    "sgd": 0,  # momentum, where asked for, is counted beside
    "schedule_free_sgd": 1,  # the point that it averages
    "adafactor": 0,  # a row and a column of factors for each matrix
    "lomo": 0,  # steps each parameter in the backward pass, and keeps nothing
    "lion": 1,  # the momentum whose sign it steps along
    "muon": 0,  # likewise
    "adagrad": 1,  # the sum of squares
    "rmsprop": 1,  # the mean of squares
    "ademamix": 3,  # a fast and a slow first moment, and a second
}
# Parts of the names of torch's, bitsandbytes' and torchao's classes, and of the trainer's `optim`.

OTHERWISE = 2
# Adam and its kin keep a first and a second moment; what is not known is taken for one of them.

TENSOR_SETTINGS = ("momentum", "amsgrad", "centered", "beta1")
# Each adds a tensor where it is on: SGD's and RMSprop's, Adam's, RMSprop's, Adafactor's.

BYTES_PER_ELEMENT = {
    "8bit": 1 + 4 / 256,  # with a float32 scale for every 256
    "fp8": 1 + 4 / 256,
    "4bit": 0.5 + 4 / 128,
    "32bit": 4.0,
}
# Parts of names that say how states are stored; otherwise in their parameter's dtype.


def optimizer_state_bytes(
    name: str, settings: Mapping[str, Any], num_elements: int, num_bytes: int
) -> int:
    """Size of the states that an optimizer keeps.

    Args:
        name: its class's, or the trainer's word for it.
        settings: its defaults, as torch's optimizers hold them.
        num_elements: of all parameters that it steps.
        num_bytes: what these take.
    """
    name = name.lower().replace("-", "_")
    known = [part for part in TENSORS_PER_PARAMETER if part in name]
    num_tensors = TENSORS_PER_PARAMETER[max(known, key=len)] if known else OTHERWISE
    num_tensors += sum(bool(settings.get(setting)) for setting in TENSOR_SETTINGS)
    for part, width in BYTES_PER_ELEMENT.items():
        if part in name:
            return int(num_tensors * width * num_elements)
    return num_tensors * num_bytes
