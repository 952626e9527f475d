"""A kernel form that is wrong, or raises, on its device is left for another rung."""

import pytest
import torch
from fast_path import Playback, graphs_of, pretend_cuda
from kernel_faults import with_fault
from tiny import plain_logprobs, tiny_model

from cb_rollout import ConfigurationError, RolloutConfig, RolloutGenerator, SamplingParams
from cb_rollout.compat import inductor
from cb_rollout.engine.cuda_graphs import graphs, ladder, proof, selection
from cb_rollout.engine.cuda_graphs.ladder import Rung

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu does this on a GPU")

SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
PROMPT = [9, 8, 7, 6]
# Positions beyond those that the check of a model, and the trial of a trace, run.
FAR = 20


def run_by_operators(graph):
    """In place of inductor: a list of operators, compiled at once."""
    return torch.fx.GraphModule({}, graph).forward


@pytest.fixture
def proved(monkeypatch):
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(selection, "COMPILED_DEVICES", {"cpu"})
    monkeypatch.setattr(ladder, "PROVED_DEVICES", {"cpu"})
    monkeypatch.setattr(inductor, "compile_graph", run_by_operators)
    # Long enough to be cut, and no longer: an interpreter runs each key.
    monkeypatch.setattr(proof, "LONG_TOKENS", 300)
    monkeypatch.setattr(proof, "SHARED_TOKENS", 64)


def engine_of(model, **settings):
    config = RolloutConfig(seed=1, **{"block_size": 16, "max_requests_per_batch": 2} | settings)
    return RolloutGenerator(model, config)


def wrong_compiled_forward(monkeypatch, act):
    def compiled(graph):
        module = run_by_operators(graph)

        def run(tokens_B1, positions_B1, *weights):
            logits_BV = module(tokens_B1, positions_B1, *weights)
            is_far_B1 = positions_B1 > FAR
            return (
                torch.where(is_far_B1, act(logits_BV), logits_BV) if is_far_B1.any() else logits_BV
            )

        return run

    monkeypatch.setattr(inductor, "compile_graph", compiled)


def wrong_launch(name, applies):
    """Plant a fault in what a launch of attention has written."""

    def plant(monkeypatch, act):
        from cb_rollout.engine.attention.triton import launch

        inner = getattr(launch, name)

        def faulty(buffers, layer, *rest, **given):
            inner(buffers, layer, *rest, **given)
            if applies(rest, given):
                is_whole = buffers.partials is None or name == "_launch_join"
                written = buffers.outputs_BHE if is_whole else buffers.partials
                written.copy_(act(written))

        monkeypatch.setattr(launch, name, faulty)

    return plant


def wrong_cut(monkeypatch, act):
    from cb_rollout.engine.attention.triton import launch

    def faulty(metadata, window, inner=launch.cut):
        work = inner(metadata, window)
        work.own_O.copy_(act(work.own_O))
        return work

    monkeypatch.setattr(launch, "cut", faulty)


def whole_rows_are_far(rest, given):
    metadata, _, work = rest[:3]
    return work is None and bool((metadata.lengths_B > FAR).any())


def wrong_sampling(right, wrong):
    def plant(monkeypatch, act, tmp_path):
        from cb_rollout.engine.cuda_graphs import sampling_kernels

        faulty = with_fault(sampling_kernels, right, wrong, tmp_path)
        for name in ("measure_kernel", "truncate_kernel", "draw_kernel"):
            monkeypatch.setattr(sampling_kernels, name, getattr(faulty, name))

    return plant


def wrong_replay(monkeypatch, act):
    class Stale(Playback):
        """A graph that does not run what it captured."""

        def __call__(self, step):
            kept = step()
            return lambda: act(kept)

    monkeypatch.setattr(graphs, "CudaCapture", Stale)


def wrong(states):
    return torch.full_like(states, -1) if states.dtype == torch.int32 else states.roll(1, -1) * 1.5


def raises(states):
    raise RuntimeError("no kernel image is available")


def is_shared(rest, given):
    return given["is_shared"]


def is_cut(rest, given):
    return rest[2] is not None and not given["is_shared"]


FORMS = {
    "nothing": (None, Rung.COMPILED),
    "compiled forward": (wrong_compiled_forward, Rung.OWN_FORWARD),
    "shared tile": (wrong_launch("_launch_attend", is_shared), Rung.NO_SHARED_TILES),
    "stretch": (wrong_launch("_launch_attend", is_cut), Rung.NO_STRETCHES),
    "join": (wrong_launch("_launch_join", lambda *_: True), Rung.NO_STRETCHES),
    "cut": (wrong_cut, Rung.NO_STRETCHES),
    "replay": (wrong_replay, Rung.NO_GRAPH),
}
CASES = [("nothing", wrong)]
CASES += [(form, act) for form in FORMS if form != "nothing" for act in (wrong, raises)]
FAST = {("shared tile", wrong), ("nothing", wrong)}


def rung_of(generator):
    return generator.manager.engine.paged_model.decode_path._ladder.rung(graphs_of(generator))


def proof_line(generator):
    (line,) = [line for line in generator.paths if line.part == "decode proof"]
    return line


def assert_right(generator, model):
    params = SamplingParams(ignore_eos=True, max_new_tokens=3)
    (output,) = generator.generate_batch([PROMPT], sampling_params=params).values()
    expected = plain_logprobs(model, PROMPT, output.generated_tokens)
    assert output.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("form", "act"),
    [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES],
    ids=[f"{form}-{act.__name__}" for form, act in CASES],
)
def test_a_planted_fault_ends_on_the_rung_without_it_and_one_warning_says_so(
    form, act, proved, monkeypatch, caplog
):
    plant, expected = FORMS[form]
    if plant is not None:
        plant(monkeypatch, act)
    model = tiny_model("qwen3", **SMALL)
    with engine_of(model) as generator:
        rung, line = rung_of(generator), proof_line(generator)
        print(f"| {form} | {act.__name__} | {rung} | {line} |")  # noqa: T201  the table
        assert rung is expected
        assert_right(generator, model)
    warnings = [r for r in caplog.records if "decode proof" in r.getMessage()]
    assert len(warnings) == (form != "nothing")
    if form != "nothing":
        assert "(on cpu; " in warnings[0].getMessage()
        assert ("no kernel image" in line.obstacle) is (act is raises)


SAMPLING = {
    "a token": ("token = tl.minimum(token, vocab_size - 1)", "token = tl.minimum(token + 1, 9)"),
    "a log-probability": ("logprob -= own_normalizer", "logprob -= own_normalizer * 1.1"),
    "the next token": ("row, token.to(tl.int64))", "row, token.to(tl.int64) + 1)"),
    "the next length": ("row, length + 1)", "row, length)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", SAMPLING)
def test_a_fault_in_sampling_ends_without_graphs(fault, proved, monkeypatch, tmp_path):
    wrong_sampling(*SAMPLING[fault])(monkeypatch, wrong, tmp_path)
    model = tiny_model("qwen3", **SMALL)
    with engine_of(model) as generator:
        assert rung_of(generator) is Rung.NO_GRAPH
        assert "row" in proof_line(generator).obstacle
        assert_right(generator, model)


@pytest.mark.slow
def test_graphs_that_are_asked_for_and_fail_every_proof_are_refused(proved, monkeypatch):
    wrong_replay(monkeypatch, wrong)
    with pytest.raises(ConfigurationError, match=r"use_cuda_graph=True .* a proof failed"):
        engine_of(tiny_model("qwen3", **SMALL), use_cuda_graph=True)


@pytest.mark.slow
def test_kernels_without_graphs_are_proved_too(proved, monkeypatch):
    model = tiny_model("qwen3", **SMALL)
    with engine_of(model, use_cuda_graph=False) as generator:
        assert "no graph: kernels agree" in str(proof_line(generator))
    wrong_launch("_launch_join", lambda *_: True)(monkeypatch, wrong)
    with engine_of(model, use_cuda_graph=False) as generator:
        assert rung_of(generator) is Rung.NO_GRAPH
        assert_right(generator, model)
    wrong_launch("_launch_attend", whole_rows_are_far)(monkeypatch, wrong)
    with engine_of(model, use_cuda_graph=False) as generator:
        assert rung_of(generator) is Rung.GATHERED
        assert_right(generator, model)


@pytest.mark.slow
@pytest.mark.parametrize("act", [wrong, raises])
def test_a_form_that_steps_came_to_want_is_proved_when_it_is_captured(act, proved, monkeypatch):
    """Rows that need not be cut run the graph of rows that are, where their own is wrong."""
    model = tiny_model("qwen3", **SMALL)
    wrong_launch("_launch_attend", whole_rows_are_far)(monkeypatch, act)
    with engine_of(model) as generator:
        before = set(graphs_of(generator).keys)
        assert_right(generator, model)
        assert graphs_of(generator).is_wanting
        generator.manager.warmup()
        assert set(graphs_of(generator).keys) == before
        assert "a graph of 1 rows: " in proof_line(generator).obstacle
        assert generator.paths == generator.manager.engine.paged_model.paths
        assert_right(generator, model)
        assert not graphs_of(generator).is_wanting


@pytest.mark.slow
def test_graphs_of_a_replaced_forward_are_proved_though_their_sizes_were(proved, monkeypatch):
    model = tiny_model("qwen3", **SMALL)
    with engine_of(model, use_default_compile_configs=False) as generator:
        assert rung_of(generator) is Rung.OWN_FORWARD
        FORMS["shared tile"][0](monkeypatch, wrong)
        mlp = model.model.layers[0].mlp
        mlp.forward = lambda states: 2 * type(mlp).forward(mlp, states)
        assert_right(generator, model)
        assert rung_of(generator) is Rung.NO_SHARED_TILES


@pytest.mark.slow
def test_graphs_that_were_captured_before_memory_ran_out_are_proved(proved, monkeypatch):
    model = tiny_model("qwen3", **SMALL)
    capture = Playback.__call__

    def run_out(self, step):
        if Playback.num_captures:
            raise torch.OutOfMemoryError("none left")
        return capture(self, step)

    with engine_of(model) as generator:
        wrong_compiled_forward(monkeypatch, wrong)
        monkeypatch.setattr(Playback, "num_captures", 0)
        monkeypatch.setattr(Playback, "__call__", run_out)
        mlp = model.model.layers[0].mlp
        mlp.forward = lambda states: 2 * type(mlp).forward(mlp, states)
        assert_right(generator, model)
        assert "compiled forward: a graph of 2 rows" in proof_line(generator).obstacle


@pytest.mark.slow
def test_a_proof_leaves_the_engine_as_it_was(proved):
    model = tiny_model("qwen3", **SMALL)
    with engine_of(model) as generator:
        before = graphs_of(generator).keys
        assert generator.manager.engine.paged_model.prove() == []
        assert graphs_of(generator).keys == before
        assert not graphs_of(generator).is_wanting
        assert_right(generator, model)


@pytest.mark.slow
@pytest.mark.parametrize("act", [wrong])
def test_a_first_rollout_that_is_off_a_plain_forward_is_sampled_again_on_a_lower_rung(
    act, proved, monkeypatch, caplog
):
    """A fault that no proof meets: it needs as many steps as a rollout has."""
    model = tiny_model("qwen3", **SMALL)
    with engine_of(model) as generator:
        assert rung_of(generator) is Rung.COMPILED
        trace = generator.manager.engine.runner.attention_backend.traced_forward.trace
        inner = trace._compute
        trace._compute = lambda *inputs: act(inner(*inputs))
        monkeypatch.setattr(ladder.DecodeLadder, "settle", lambda self, graphs: None)
        params = SamplingParams(ignore_eos=True, max_new_tokens=3)
        (output,) = generator.generate_batch([PROMPT], sampling_params=params).values()
        assert rung_of(generator) is Rung.OWN_FORWARD
        assert "the first rollout is sampled again" in caplog.text
        assert "times the model's own noise" in proof_line(generator).obstacle
        expected = plain_logprobs(model, PROMPT, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_first_rollout_that_agrees_is_sampled_once(proved, monkeypatch):
    model = tiny_model("qwen3", **SMALL)
    with engine_of(model) as generator:
        rounds = []
        roll_out = type(generator)._roll_out
        monkeypatch.setattr(
            type(generator), "_roll_out", lambda *args: rounds.append(1) or roll_out(*args)
        )
        assert_right(generator, model)
        assert_right(generator, model)
        assert len(rounds) == 2
        assert rung_of(generator) is Rung.COMPILED
