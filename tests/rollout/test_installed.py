"""A model's own continuous batching methods run here after `install`, as transformers runs them."""

import copy
import gc
import io
import pickle
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from tiny import char_tokenizer, plain_logprobs, tiny_model
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousMixin, RequestStatus
from transformers.generation.continuous_batching.utils import WorkloadHints

import cb_rollout
from cb_rollout import ConfigurationError, ContinuousBatchingManager, RolloutConfig, RolloutError
from cb_rollout.compat.model_methods import METHODS, route_of
from cb_rollout.compat.module_state import model_settings
from cb_rollout.rollout.kept import kept_by

# transformers warns of its own settings.
pytestmark = pytest.mark.filterwarnings("default")

QUESTIONS = [
    "What is 2 + 3?",
    "How many legs have 4 cats?",
    "A dog.",
    "A dog and a cat.",
    "1",
    "12",
]
TOKENIZER = char_tokenizer()
INPUTS = [TOKENIZER(question)["input_ids"] for question in QUESTIONS]
GREEDY = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0)
# Without sizes of its own transformers takes most of the machine's memory, and most of a minute.
SMALL = ContinuousBatchingConfig(
    num_blocks=32, block_size=16, max_batch_tokens=128, return_logprobs=True
)


OWN_METHODS = {name: vars(ContinuousMixin)[name] for name in METHODS}


def own_methods():
    return {name: vars(ContinuousMixin)[name] for name in METHODS}


def model_of_guide(**settings):
    return tiny_model(vocab_size=len(TOKENIZER), **settings)


@pytest.fixture(autouse=True)
def nothing_stays_installed():
    yield
    gc.collect()
    # Drops those that were deleted.
    cb_rollout.uninstall(tiny_model(num_hidden_layers=1))
    assert own_methods() == OWN_METHODS


@pytest.fixture
def installed():
    """Make models of the guide, installed until the test ends."""
    models = []

    def install(config=None, **settings):
        model = model_of_guide(**settings)
        cb_rollout.install(model, config)
        models.append(model)
        return model

    yield install
    for model in models:
        cb_rollout.uninstall(model)


def guided_generate_batch(model, tokenizer, simple_batch_inputs):
    """The guide's first example, from its generation config on."""
    generation_config = GenerationConfig(
        max_new_tokens=32,
        use_cuda_graph=False,  # Not supported for simple version
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
        max_batch_tokens=512,  # max number of tokens in a batch, this is just a default value
    )

    batch_outputs = model.generate_batch(
        inputs=simple_batch_inputs,
        generation_config=generation_config,
    )

    printed = {}
    for request_id, output in batch_outputs.items():
        generated_text = tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
        printed[request_id] = f"Request {request_id} output: {generated_text}"
    return printed, batch_outputs


def guided_manager(model, tokenizer, simple_batch_inputs, generation_config=GREEDY):
    """The guide's second example, whose loop over `get_result()` runs nowhere."""
    # initialize the manager, available method thanks to the `ContinuousMixin`
    manager = model.init_continuous_batching(generation_config=generation_config)

    # start the background thread
    manager.start()

    # this is for demonstration purposes only, in practice this is most useful to do concurrently
    for i, input in enumerate(simple_batch_inputs):
        request_id = manager.add_request(input_ids=input, request_id=f"request_{i}")
        assert request_id == f"request_{i}"

    printed, outputs = {}, {}
    for _ in simple_batch_inputs[:-1]:
        request = manager.get_result()
        generated_text = tokenizer.decode(request.generated_tokens, skip_special_tokens=True)
        printed[request.request_id] = f"Request output: {generated_text}"
        outputs[request.request_id] = request

    # you can also get results for a specific request id
    last = {f"request_{i}" for i in range(len(simple_batch_inputs))} - set(printed)
    result = manager.get_result(request_id=last.pop())
    outputs[result.request_id] = result

    # stop the background thread before exiting the process
    manager.stop()
    return printed, outputs


def guided_stream(model, tokenizer, input):
    """The guide's third example; transformers 5.17 named its `stream` `streaming`."""
    manager = model.init_continuous_batching(generation_config=GREEDY)
    manager.start()
    # or get results for a request that is streaming
    manager.add_request(
        input_ids=input,
        request_id="streaming_request",
        streaming=True,
    )
    texts = []
    for chunk in manager.request_id_iter(request_id="streaming_request"):
        generated_text = tokenizer.decode(chunk.generated_tokens, skip_special_tokens=True)
        texts.append(generated_text)
        # FIXME: stop iteration in `request_id_iter` when finished instead of doing it externally
        if chunk.status == RequestStatus.FINISHED:
            break

    # stop the background thread before exiting the process
    manager.stop()
    return texts, chunk


def of_transformers(model):
    """Give a model's own methods a small cache."""
    for name in ("generate_batch", "init_continuous_batching"):
        setattr(model, name, partial(getattr(model, name), continuous_batching_config=SMALL))
    return model


def require_equal(ours, theirs):
    """Compare tokens, statuses and log-probabilities, by request id."""
    assert set(ours) == set(theirs)
    for request_id, their in theirs.items():
        our = ours[request_id]
        assert our.request_id == their.request_id == request_id
        assert our.prompt_ids == their.prompt_ids
        assert our.generated_tokens == their.generated_tokens
        assert our.logprobs == pytest.approx(their.logprobs, abs=1e-5)
        assert our.status == their.status
        assert our.is_finished()
        assert our.error is their.error is None


def test_the_guides_generate_batch_runs_here(installed):
    model = installed()
    printed, outputs = guided_generate_batch(model, TOKENIZER, INPUTS)
    theirs = guided_generate_batch(of_transformers(model_of_guide()), TOKENIZER, INPUTS)
    assert list(printed.items()) == list(theirs[0].items())
    require_equal(outputs, theirs[1])
    for output in outputs.values():
        expected = plain_logprobs(model, output.prompt_ids, output.generated_tokens)
        assert output.logprobs == pytest.approx(expected, abs=1e-5)


def test_the_guides_manager_runs_here(installed):
    model = installed()
    _, outputs = guided_manager(model, TOKENIZER, INPUTS)
    theirs = guided_manager(of_transformers(model_of_guide()), TOKENIZER, INPUTS)
    require_equal(outputs, theirs[1])


def test_the_guides_stream_runs_here(installed):
    model = installed()
    texts, last = guided_stream(model, TOKENIZER, INPUTS[3])
    their_texts, their_last = guided_stream(of_transformers(model_of_guide()), TOKENIZER, INPUTS[3])
    assert texts == their_texts
    require_equal({"streaming_request": last}, {"streaming_request": their_last})


def test_a_polling_loop_over_statuses_of_transformers_ends(installed):
    model = installed()
    manager = model.init_continuous_batching(GREEDY)
    manager.start()
    manager.add_request(INPUTS[0], streaming=True, max_new_tokens=4, eos_token_id=-1)
    seen = dict.fromkeys(RequestStatus, 0)
    status = RequestStatus.PENDING
    while status not in {RequestStatus.FINISHED, RequestStatus.FAILED}:
        output = manager.get_result(timeout=1)
        if output is not None:
            status = output.status
            seen[status] += 1
    assert seen[RequestStatus.DECODING] == 3
    assert seen[RequestStatus.FINISHED] == 1
    assert len(seen) == len(RequestStatus)
    manager.stop()


def script_of_5_23(model, num_return_sequences=2):
    """A script for transformers 5.23's manager, which uses much of its surface."""
    generation_config = GenerationConfig(
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    # transformers refuses it in the constructor, where it would be of no use but here.
    generation_config.num_return_sequences = num_return_sequences
    hints = WorkloadHints(max_prompt_length=30, max_generated_length=10, num_requests=6)
    finished = {}
    with model.continuous_batching_context_manager(
        generation_config=generation_config,
        continuous_batching_config=SMALL,
        block=True,
        timeout=60,
        workload_hints=hints,
    ) as manager:
        assert manager.is_running()
        assert manager.warmed_up
        assert manager.num_return_sequences == num_return_sequences
        assert manager.generation_config.max_new_tokens == 10
        assert manager.continuous_batching_config.max_batch_tokens == 128
        assert manager.model is model
        ids = manager.add_requests(INPUTS[:4], record_timestamps=True)
        ids.append(manager.add_request(INPUTS[4], request_id="mine", max_new_tokens=3))
        # transformers 5.17 has no pause.
        with manager.pause() if hasattr(manager, "pause") else nullcontext():
            ids.append(manager.add_request(INPUTS[5], max_new_tokens=5, eos_token_id=-1))
        while len(finished) < len(ids) * num_return_sequences:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                finished[result.request_id] = result
        for output in finished.values():
            began, ended = output.lifespan
            assert output.created_time <= began <= ended
            assert output.status >= RequestStatus.FINISHED
    assert not manager.is_running()
    return ids, finished


def test_a_script_for_the_manager_of_transformers_runs_here():
    model = model_of_guide()
    with cb_rollout.install(model), pytest.warns(UserWarning, match="greedy decoding"):
        ids, outputs = script_of_5_23(model)
    their_ids, theirs = script_of_5_23(model_of_guide())
    assert ids == their_ids
    require_equal(outputs, theirs)


def test_further_sequences_have_the_ids_of_transformers():
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
    config.num_return_sequences = 3
    model = model_of_guide()
    with cb_rollout.install(model), pytest.warns(UserWarning, match="greedy decoding"):
        ours = model.generate_batch(INPUTS[:2], config, SMALL, record_timestamps=True)
    children = [f"__child#{number}" for number in range(2)]
    assert list(ours) == [
        f"{first}{end}" for first in ("req_0", "req_1") for end in ("", *children)
    ]
    theirs = model.generate_batch(INPUTS[:2], config, SMALL, record_timestamps=True)
    # transformers 5.17 loses the children.
    require_equal({request_id: ours[request_id] for request_id in theirs}, theirs)
    assert all(len(output.timestamps) == 4 for output in ours.values())


def test_a_generation_config_without_an_end_has_none_as_in_transformers(caplog):
    model = model_of_guide()
    config = GenerationConfig(max_new_tokens=40, do_sample=False)
    with cb_rollout.install(model):
        ours = model.generate_batch(INPUTS[:3], config, SMALL)
        assert "has no eos_token_id" in caplog.text
        assert config.eos_token_id is None
        limited = model.generate_batch(INPUTS[:1], config, SMALL, max_new_tokens=2)
    require_equal(ours, model.generate_batch(INPUTS[:3], config, SMALL))
    assert len(limited["req_0"].generated_tokens) == 2


@pytest.mark.parametrize("inputs", [[], torch.zeros(0, 3)])
def test_no_inputs_are_no_outputs(inputs, installed):
    model = installed()
    assert model.generate_batch(inputs) == {}


def test_a_request_that_cannot_run_is_returned_with_its_error(caplog, installed):
    model = installed()
    too_long = [3] * 600
    outputs = model.generate_batch([INPUTS[0], too_long], GREEDY)
    assert outputs["req_0"].status == RequestStatus.FINISHED
    assert outputs["req_1"].status == RequestStatus.FAILED
    assert "has 600 tokens" in outputs["req_1"].error
    assert "1 of 2 sequences failed. The first, req_1: " in caplog.text


MOVED = {
    "allow_block_sharing": False,
    "kv_padding_interval_size": 0,
    "max_queue_size": 7,
    "use_async_batching": False,
}


@pytest.mark.fast_cases("max_queue_size")
@pytest.mark.parametrize("name", MOVED)
def test_an_argument_that_moved_to_the_config_gets_there(name, caplog, installed):
    model = installed(RolloutConfig(block_size=16))
    manager = model.init_continuous_batching(**{name: MOVED[name]})
    assert getattr(manager.config, name) == MOVED[name]
    assert manager.config.block_size == 16
    assert f"{name}: moved to the continuous_batching_config" in caplog.text
    with model.continuous_batching_context_manager(**{name: MOVED[name]}) as entered:
        assert getattr(entered.config, name) == MOVED[name]


@pytest.mark.parametrize("name", ["max_cached_graphs", "q_padding_interval_size"])
def test_an_argument_that_moved_to_the_config_is_refused_where_that_is(name, installed):
    model = installed()
    with pytest.raises(ConfigurationError, match=f"{name}=3 needs a CUDA device"):
        model.generate_batch(INPUTS[:1], GREEDY, **{name: 3})


def test_arguments_that_moved_reach_generate_batch_too(installed):
    model = installed()
    model.generate_batch(INPUTS[:1], GREEDY, max_queue_size=7, persistent_manager=True)
    assert kept_by(model).generator.config.max_queue_size == 7
    cb_rollout.uninstall(model)


def test_an_unknown_argument_is_refused(installed):
    model = installed()
    for call in (model.generate_batch, model.init_continuous_batching):
        with pytest.raises(ConfigurationError, match=r"no argument 'max_que_size'"):
            call(INPUTS[:1] if call == model.generate_batch else None, max_que_size=7)


def test_a_config_inside_the_generation_config_is_taken_unless_another_is_given(installed):
    model = installed(RolloutConfig(block_size=64))
    inside = copy.deepcopy(GREEDY)
    inside.continuous_batching_config = SMALL
    assert model.init_continuous_batching(inside).config.block_size == 16
    given = model.init_continuous_batching(inside, RolloutConfig(block_size=8))
    assert given.config.block_size == 8
    assert model.init_continuous_batching(GREEDY).config.block_size == 64
    moved = copy.deepcopy(GREEDY)
    moved.page_size, moved.max_batch_tokens = 32, 96
    manager = model.init_continuous_batching(moved)
    assert (manager.config.block_size, manager.config.max_batch_tokens) == (32, 96)
    assert moved.page_size == 32


@pytest.mark.parametrize("config", [ContinuousBatchingConfig, RolloutConfig])
def test_a_generation_config_that_contradicts_the_config_is_refused(config, installed):
    model = installed()
    asks = copy.deepcopy(GREEDY)
    asks.max_batch_tokens = 96
    assert model.init_continuous_batching(asks, config(max_batch_tokens=96)).config
    with pytest.raises(ConfigurationError, match=r"max_batch_tokens is 64 .* and 96 in the gen"):
        model.init_continuous_batching(asks, config(max_batch_tokens=64))


def test_a_saved_config_in_the_generation_config_gives_way_to_the_argument(installed):
    model = installed()
    saved = copy.deepcopy(GREEDY)
    saved.continuous_batching_config = {"max_batch_tokens": 96}
    assert model.init_continuous_batching(saved).config.max_batch_tokens == 96
    given = model.init_continuous_batching(saved, RolloutConfig(max_batch_tokens=64))
    assert given.config.max_batch_tokens == 64


def test_uninstall_restores_exactly_what_was_there():
    first, second, other = (tiny_model(seed=seed, num_hidden_layers=1) for seed in range(3))
    attributes = [dict(vars(model)) for model in (first, second)]
    for _ in range(2):
        cb_rollout.install(first)
    cb_rollout.install(second)
    assert isinstance(first.init_continuous_batching(), ContinuousBatchingManager)
    assert isinstance(second.init_continuous_batching(), ContinuousBatchingManager)
    assert not isinstance(other.init_continuous_batching(GREEDY, SMALL), ContinuousBatchingManager)
    cb_rollout.uninstall(first)
    assert not isinstance(first.init_continuous_batching(GREEDY, SMALL), ContinuousBatchingManager)
    assert isinstance(second.init_continuous_batching(), ContinuousBatchingManager)
    cb_rollout.uninstall(second)
    cb_rollout.uninstall(second)
    assert own_methods() == OWN_METHODS
    assert [dict(vars(model)) for model in (first, second)] == attributes


def test_a_with_puts_back_the_installation_that_was_there():
    model = tiny_model(num_hidden_layers=1)
    cb_rollout.install(model, RolloutConfig(block_size=8))
    with cb_rollout.install(model, RolloutConfig(block_size=16)) as entered:
        assert entered is model
        assert model.init_continuous_batching().config.block_size == 16
    assert model.init_continuous_batching().config.block_size == 8
    cb_rollout.uninstall(model)
    installation = cb_rollout.install(model)
    with pytest.raises(ConfigurationError, match="generation_config is a dict"), installation:
        model.generate_batch(INPUTS, {"max_new_tokens": 3})
    assert own_methods() == OWN_METHODS


def test_two_models_generate_their_own_tokens(installed):
    models = [installed(seed=seed) for seed in range(2)]
    alone = [cb_rollout.generate_batch(m, INPUTS, GREEDY, progress_bar=False) for m in models]
    for model, expected in zip(models, alone, strict=True):
        require_equal(model.generate_batch(INPUTS, GREEDY), expected)


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_installed_model_can_be_deleted(is_kept):
    model = model_of_guide()
    installation = cb_rollout.install(model)
    model.generate_batch(INPUTS[:1], GREEDY, persistent_manager=is_kept)
    manager = model.init_continuous_batching(GREEDY)
    manager.start()
    manager.stop(keep_for_next_session=is_kept)
    forgotten = weakref.ref(model)
    del model, manager
    gc.collect()
    assert forgotten() is None
    with pytest.raises(RolloutError, match="was deleted; keep a reference"), installation:
        pass


def test_installing_changes_nothing_of_a_model(tmp_path):
    model = tiny_model(num_hidden_layers=1)
    attributes, settings = dict(vars(model)), model_settings(model)
    model.save_pretrained(tmp_path / "before")
    pickled = pickle.dumps(model)
    cb_rollout.install(model)
    assert dict(vars(model)) == attributes
    assert model_settings(model) == settings
    assert pickle.dumps(model) == pickled
    model.save_pretrained(tmp_path / "after")
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "after" / path.name).read_bytes()
    model.generate_batch(INPUTS[:1], GREEDY, persistent_manager=True)
    assert model_settings(model) == settings
    assert set(model.state_dict()) == set(tiny_model(num_hidden_layers=1).state_dict())


def reloaded(model):
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.fast_cases("deepcopy")
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), reloaded]
)
def test_a_copy_of_an_installed_model_has_its_own_methods(copied, installed):
    model = installed()
    expected = model.generate_batch(INPUTS, GREEDY, persistent_manager=True)
    twin = copied(model)
    assert route_of(twin) is None
    require_equal(twin.generate_batch(INPUTS, GREEDY, SMALL), expected)
    cb_rollout.install(twin)
    require_equal(twin.generate_batch(INPUTS, GREEDY, persistent_manager=True), expected)


def test_a_persistent_manager_is_used_again_and_follows_the_weights(installed):
    model = installed()
    arguments = {"persistent_manager": True, "continuous_batching_config": SMALL}
    model.generate_batch(INPUTS, GREEDY, **arguments)
    generator = kept_by(model).generator
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    again = model.generate_batch(INPUTS, GREEDY, **arguments)
    assert kept_by(model).generator is generator
    alone = cb_rollout.generate_batch(model, INPUTS, GREEDY, progress_bar=False)
    for our, expected in zip(again.values(), alone.values(), strict=True):
        assert our.generated_tokens == expected.generated_tokens
        assert our.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    model.destroy_cached_continuous_batching_manager()
    assert generator.manager.status().kv_bytes == 0
    assert not generator.manager.is_running()
    assert not [name for name in vars(model) if "cb_rollout" in name]
    model.destroy_cached_continuous_batching_manager()


def test_a_kept_manager_is_given_again_with_the_new_generation_config(installed):
    model = installed()
    longer = copy.deepcopy(GREEDY)
    longer.max_new_tokens = 20
    config = {"continuous_batching_config": SMALL}
    with model.continuous_batching_context_manager(
        GREEDY, persistent_manager=True, **config
    ) as kept:
        kept.add_requests(INPUTS)
        version = kept.policy_version
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))
    manager = model.init_continuous_batching(longer, **config)
    assert manager is kept
    assert manager.policy_version == version + 1
    manager.start()
    manager.add_request(INPUTS[0], eos_token_id=-1, request_id="mine")
    output = manager.get_result("mine")
    assert len(output.generated_tokens) == 20
    expected = plain_logprobs(model, output.prompt_ids, output.generated_tokens)
    assert output.logprobs == pytest.approx(expected, abs=1e-5)
    manager.stop(keep_for_next_session=True)
    # Another config is another engine.
    other = model.init_continuous_batching(longer, RolloutConfig(block_size=8))
    assert other is not kept
    assert kept.status().kv_bytes == 0


def test_one_kept_engine_holds_memory_at_a_time(installed):
    model = installed()
    with model.continuous_batching_context_manager(
        GREEDY, continuous_batching_config=SMALL, persistent_manager=True
    ) as manager:
        manager.add_requests(INPUTS)
    assert len(list(manager)) == len(INPUTS)
    assert manager.status().kv_bytes > 0
    model.generate_batch(INPUTS, GREEDY, SMALL, persistent_manager=True)
    generator = kept_by(model).generator
    assert (manager.status().kv_bytes, generator.manager.status().kv_bytes > 0) == (0, True)
    assert model.init_continuous_batching(GREEDY, SMALL) is manager
    assert generator.manager.status().kv_bytes == 0
    manager.start()
    manager.add_requests(INPUTS)
    # An engine with work keeps its memory.
    outputs = model.generate_batch(INPUTS, GREEDY, SMALL, persistent_manager=True)
    assert len(list(manager)) == len(outputs) == len(INPUTS)
    cb_rollout.uninstall(model)
    assert manager.status().kv_bytes == generator.manager.status().kv_bytes == 0


def test_a_wrapper_generates_with_its_adapter():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model_of_guide(), config)
    cb_rollout.install(model)
    ours = model.generate_batch(INPUTS, GREEDY, SMALL)
    cb_rollout.uninstall(model)
    require_equal(ours, model.generate_batch(INPUTS, GREEDY, SMALL))
    with model.disable_adapter():
        plain = model.generate_batch(INPUTS, GREEDY, SMALL)
    assert plain["req_0"].logprobs != pytest.approx(ours["req_0"].logprobs, abs=1e-5)


def test_a_compiled_wrapper_is_installed_and_may_go():
    model = model_of_guide()
    compiled = torch.compile(model)
    cb_rollout.install(compiled)
    ours = compiled.generate_batch(INPUTS, GREEDY)
    del compiled
    gc.collect()
    require_equal(model.generate_batch(INPUTS, GREEDY), ours)
    cb_rollout.uninstall(model)


def test_what_has_no_such_methods_or_its_own_is_refused():
    with pytest.raises(ConfigurationError, match="model is a Linear"):
        cb_rollout.install(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="Qwen3Model has none of transformers' methods"):
        cb_rollout.install(tiny_model().model)
    model = of_transformers(model_of_guide())
    with pytest.raises(ConfigurationError, match="has a init_continuous_batching of its own"):
        cb_rollout.install(model)
    with pytest.raises(ConfigurationError, match="config is a dict"):
        cb_rollout.install(model_of_guide(), {"block_size": 8})
