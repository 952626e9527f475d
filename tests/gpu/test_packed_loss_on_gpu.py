"""The packed forward on the device it is for; `scripts/gpu_check.sh` runs it."""

import pytest
import torch
from device_laws import assert_unpadded
from tiny import tiny_model

from cb_rollout import GenerationOutput, RequestStatus, packed_logprobs

pytestmark = pytest.mark.gpu

LENGTHS = [(40, 3), (40, 70), (40, 12), (7, 1), (7, 33), (90, 20)]


def outputs():
    draws = torch.Generator().manual_seed(0)
    rows = []
    for number, (prompt, new) in enumerate(LENGTHS):
        ids = torch.randint(3, 200, (new,), generator=draws).tolist()
        output = GenerationOutput(f"row_{number}", [3 + prompt % 50] * prompt)
        output.generated_tokens, output.status = ids, RequestStatus.FINISHED
        rows.append(output)
    return rows


def plain(model, output):
    ids = torch.tensor([output.prompt_ids + output.generated_tokens], device="cuda")
    first = len(output.prompt_ids)
    logprobs = (
        model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1].float().log_softmax(-1)
    )
    return logprobs.gather(1, ids[0, first:, None])[:, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mistral"])
def test_scores_and_gradients_are_those_of_the_plain_forward(family, dtype):
    model = tiny_model(family).cuda().to(dtype)
    rows = outputs()
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    gradients = []
    scores = [packed_logprobs(model, rows), [plain(model, row) for row in rows]]
    for logprobs in scores:
        total = sum((torch.linspace(1, 2, len(p), device="cuda") * p).sum() for p in logprobs)
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients.append(torch.autograd.grad(total, parameters, materialize_grads=True))
    for ours, other in zip(*scores, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=tolerance)
    for ours, other in zip(*gradients, strict=True):
        assert float((ours - other).norm()) <= tolerance * max(1.0, float(other.norm()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_packed_and_shared(dtype, monkeypatch):
    assert_unpadded(torch.device("cuda", 0), dtype, monkeypatch)
