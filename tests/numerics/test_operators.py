"""Operators of numerics="bitwise": a row's bits depend on nothing but the row."""

import threading

import pytest
import torch
from torch.nn import functional

from cb_rollout.engine.numerics import kernels, operators
from cb_rollout.engine.numerics.operators import installed

ROWS = 21

# No multiple of a vector, and one that is.
WIDTHS = (37, 64)


def weight(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(19, width, generator=torch.Generator().manual_seed(width)).to(dtype)


OPERATORS = {
    "linear": lambda x: functional.linear(x, weight(x.shape[-1], x.dtype)),
    "linear with bias": lambda x: functional.linear(
        x, weight(x.shape[-1], x.dtype), torch.arange(19.0).to(x.dtype)
    ),
    "product": lambda x: x @ weight(x.shape[-1], x.dtype).t().contiguous(),
    "batched": lambda x: x[:, None] @ weight(x.shape[-1], x.dtype).t(),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": functional.softplus,
    "mish": functional.mish,
    "elu": functional.elu,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "cos": torch.cos,
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1e-3),
    "mean": lambda x: x.float().pow(2).mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1),
    "softmax": lambda x: x.softmax(-1),
    "softmax to float": lambda x: x.softmax(-1, dtype=torch.float32),
    "log-softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "layer norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: functional.rms_norm(x, x.shape[-1:]),
    "norm": lambda x: functional.normalize(x, dim=-1),
}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_a_row_the_same_bits_in_any_batch(name, dtype, threads):
    operator = OPERATORS[name]
    for width in WIDTHS:
        rows = (torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)) * 4).to(dtype)
        plain = operator(rows)
        with installed():
            alone = torch.cat([operator(row[None].clone()) for row in rows])
            for number in (1, 2):
                threads(number)
                for first, last in ((0, ROWS), (0, 4), (3, 5), (2, 19)):
                    assert torch.equal(operator(rows[first:last]), alone[first:last])
            spread = rows[:, None].repeat(1, 2, 1)[:, 1]
            assert torch.equal(operator(spread), alone)
        coarse = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
        torch.testing.assert_close(alone, plain, rtol=coarse, atol=coarse)


def test_large_tensors_are_the_same_bits_by_any_number_of_threads(threads):
    numbers = torch.randn(3, 33_333, generator=torch.Generator().manual_seed(0))
    names = ("silu", "sigmoid", "softmax", "logsumexp", "mean")
    with installed():
        for name in names:
            threads(1)
            alone = torch.cat([OPERATORS[name](row[None].clone()) for row in numbers])
            threads(3)
            assert torch.equal(OPERATORS[name](numbers), alone), name
            if name != "mean":
                # Hidden sizes stay below the 32768 numbers that torch sums by several threads.
                assert torch.equal(OPERATORS[name](numbers[1:2]), alone[1:2]), name


def test_a_grouped_product_computes_each_row_alone():
    rows, weights = torch.randn(9, 24), torch.randn(3, 24, 20)
    ends = torch.tensor([4, 4, 9], dtype=torch.int32)
    plain = torch._grouped_mm(rows, weights, offs=ends)
    with installed():
        found = torch._grouped_mm(rows, weights, offs=ends)
        alone = [row[None] @ weights[0 if index < 4 else 2] for index, row in enumerate(rows)]
    assert torch.equal(found, torch.cat(alone))
    torch.testing.assert_close(found, plain)


def test_softmax_and_products_ignore_zeros_on_both_sides():
    scores, values = torch.randn(4, 3, 11) * 3, torch.randn(4, 11, 6)
    pad = functional.pad
    with installed():
        alone = scores.softmax(-1) @ values
        padded = pad(scores, (5, 8), value=-torch.inf).softmax(-1) @ pad(values, (0, 0, 5, 8))
    assert torch.equal(padded, alone)


def test_gradients_are_those_of_torchs_own_operators():
    rows, matrix = torch.randn(7, 30, requires_grad=True), torch.randn(5, 30, requires_grad=True)

    def gradients() -> tuple[torch.Tensor, ...]:
        outputs = functional.silu(functional.linear(rows, matrix)).softmax(-1)
        return torch.autograd.grad(outputs.square().sum(), (rows, matrix))

    plain = gradients()
    with installed():
        found = gradients()
    for ours, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_operators_are_torchs_again_when_the_last_one_leaves():
    rows = torch.randn(5, 100)
    plain = functional.silu(rows)
    with installed():
        with pytest.raises(ZeroDivisionError), installed():
            1 / 0  # noqa: B018
        assert operators.are_installed()
        found = []
        thread = threading.Thread(target=lambda: found.append(functional.silu(rows)))
        inside = functional.silu(rows)
        thread.start()
        thread.join()
        assert torch.equal(found[0], inside)
    assert not operators.are_installed()
    assert torch.equal(functional.silu(rows), plain)


def states(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (10, 5), (24, 40)])
def test_attention_is_the_same_bits_padded_chunked_and_in_any_heads(dtype, size, value_size):
    B, H, K, S = 2, 4, 2, 19
    query = states(B, H, S, size, dtype=dtype, seed=0)
    key = states(B, K, S, size, dtype=dtype, seed=1)
    value = states(B, K, S, value_size, dtype=dtype, seed=2)
    alone = kernels.attend(query, key, value, None, scale=0.3, is_causal=True)
    keys, values = (one.repeat_interleave(H // K, 1) for one in (key, value))
    plain = functional.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=0.3)
    coarse = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    torch.testing.assert_close(alone.transpose(1, 2), plain, rtol=coarse, atol=coarse)

    def padded(one: torch.Tensor, before: int, after: int) -> torch.Tensor:
        return functional.pad(one, (0, 0, before, after), value=0.7)

    for before, after in ((3, 0), (0, 5), (7, 2)):
        size_of_all = before + S + after
        mask = torch.ones(size_of_all, size_of_all, dtype=torch.bool).tril()
        mask[:, :before] = False
        added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        for given in (mask, added):
            found = kernels.attend(
                *(padded(one, before, after) for one in (query, key, value)),
                given[None, None],
                scale=0.3,
            )
            assert torch.equal(found[:, before : before + S], alone)
    for first, last in ((0, 1), (4, 11), (18, 19)):
        seen = key[:, :, :last], value[:, :, :last]
        mask = torch.ones(last, last, dtype=torch.bool).tril()[first:last]
        chunk = kernels.attend(query[:, :, first:last], *seen, mask[None, None], scale=0.3)
        assert torch.equal(chunk, alone[:, first:last])


def test_attention_has_caps_and_sinks():
    query, key, value = (states(1, 2, 9, 8, dtype=torch.float32, seed=n) for n in range(3))
    sinks = torch.tensor([0.5, -1.0])
    found = kernels.attend(query, key, value, None, scale=0.5, softcap=2.0, sinks_H=sinks)
    scores = torch.tanh(query @ key.transpose(2, 3) * 0.5 / 2) * 2
    with_sinks = torch.cat([scores, sinks.view(1, 2, 1, 1).expand(1, 2, 9, 1)], -1).softmax(-1)
    torch.testing.assert_close(found.transpose(1, 2), with_sinks[..., :-1] @ value)


def test_a_query_that_sees_nothing_has_the_output_zero():
    query, key, value = (states(1, 1, 3, 8, dtype=torch.float32, seed=n) for n in range(3))
    mask = torch.tensor([[[[True, False, False], [False] * 3, [True] * 3]]])
    found = kernels.attend(query, key, value, mask, scale=1.0)
    assert torch.equal(found[0, 1], torch.zeros(1, 8))
    assert torch.equal(found[0, 0], value[0, :, 0])


# torch has a fused kernel where keys and values are of one size, and products where they are not.
@pytest.mark.parametrize("value_size", [8, 12])
def test_attention_that_a_model_asks_of_torch_is_the_same_bits_padded(value_size):
    query, key = (states(2, 4, 19, 8, dtype=torch.float32, seed=n) for n in range(2))
    value = states(2, 4, 19, value_size, dtype=torch.float32, seed=2)
    size = 3 + 19 + 5
    mask = torch.ones(size, size, dtype=torch.bool).tril()
    mask[:, :3] = False

    def attended(*given: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        given = tuple(one.clone().requires_grad_() for one in given)
        found = functional.scaled_dot_product_attention(*given, is_causal=True)
        return found, torch.autograd.grad(found.square().sum(), given)

    expected, gradients = attended(query, key, value)
    with installed():
        alone, found = attended(query, key, value)
        padded = [functional.pad(one, (0, 0, 3, 5), value=0.7) for one in (query, key, value)]
        together = functional.scaled_dot_product_attention(*padded, attn_mask=mask[None, None])
        single = attended(query[:1], key[:1], value[:1])[0]
    assert torch.equal(together[:, :, 3 : 3 + 19], alone)
    assert torch.equal(single, alone[:1])
    torch.testing.assert_close(alone, expected)
    torch.testing.assert_close(found, gradients)
