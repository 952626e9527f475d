"""The official client trains and samples here as its own service would have it."""

import gc
import math
import warnings

import httpx
import pytest
import tinker
import torch
from peft import LoraConfig, get_peft_model
from tinker import types
from tiny import char_tokenizer, plain_logprobs, tiny_model

from cb_rollout import RolloutConfig, RolloutGenerator
from cb_rollout.server.options import ServerOptions
from cb_rollout.server.tinker import policies
from cb_rollout.server.tinker.launch import TinkerServer

# The client leaves its connections to the garbage collector, closed or not.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")

KEY = "tml-only-for-tests"
MODEL = "tiny"
CONFIG = RolloutConfig(seed=3, block_size=4, num_blocks=256, max_batch_tokens=256)
TEXTS = [[20, 21, 22, 23, 24, 25], [20, 21, 30], [40, 41, 42, 43]]
ADAM = types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0)


def new_model():
    return tiny_model("llama", vocab_size=len(char_tokenizer()))


@pytest.fixture(scope="module", autouse=True)
def collected():
    """Collect the client's connections here, where their warnings are not taken for ours."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def server(collected, tmp_path_factory):
    options = ServerOptions(port=0, api_key=KEY, model_name=MODEL)
    folder = tmp_path_factory.mktemp("checkpoints")
    with TinkerServer(new_model(), char_tokenizer(), options, folder, CONFIG) as running:
        yield running


def new_client(server):
    """A client to close: it asks for a sign of life, and warns, for as long as it is open."""
    return tinker.ServiceClient(base_url=server.url, api_key=KEY)


@pytest.fixture
def client(server):
    with new_client(server) as service:
        yield service


@pytest.fixture
def other_client(server):
    with new_client(server) as service:
        yield service


def training(client, rank=4, seed=1):
    return client.create_lora_training_client(base_model=MODEL, rank=rank, seed=seed).result()


def datum(token_ids, **inputs):
    return types.Datum(
        model_input=types.ModelInput.from_ints(token_ids[:-1]),
        loss_fn_inputs={"target_tokens": token_ids[1:], **inputs},
    )


def supervised():
    return [datum(text, weights=[1.0] * (len(text) - 1)) for text in TEXTS]


def reference_run(num_steps, rank=4, seed=1):
    """Train the same adapter by a plain forward, without any of the server's code but the names."""
    model = new_model().eval().requires_grad_(False)
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    attention = [n for n in linear if "attn" in n]
    mlp = [n for n in linear if "mlp" in n]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=32, target_modules=[*attention, *mlp, "lm_head"])
        model = get_peft_model(model, config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0
    )
    losses = []
    for _ in range(num_steps):
        loss = torch.zeros(())
        for text in TEXTS:
            logits = model(input_ids=torch.tensor([text[:-1]])).logits[0]
            targets = torch.tensor(text[1:])[:, None]
            loss = loss - logits.log_softmax(-1).gather(-1, targets).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


def test_the_server_says_what_it_has(server):
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length) == (MODEL, 512)


def test_training_is_that_of_a_plain_forward(client):
    run = training(client)
    assert run.get_info().lora_rank == 4
    losses = []
    for _ in range(4):
        result = run.forward_backward(supervised(), "cross_entropy")
        run.optim_step(ADAM).result()
        losses.append(result.result().metrics["loss:sum"])
    model, expected = reference_run(4)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[-1] < losses[0]
    sampler = run.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(TEXTS[0])
    params = types.SamplingParams(max_tokens=6, temperature=1.0, stop=[])
    response = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result()
    assert len(response.sequences) == 2
    for sequence in response.sequences:
        assert (sequence.stop_reason, len(sequence.tokens)) == ("length", 6)
        expected = plain_logprobs(model, TEXTS[0], sequence.tokens)
        assert sequence.logprobs == pytest.approx(expected, abs=1e-3)
    assert response.prompt_logprobs[0] is None
    expected = plain_logprobs(model, TEXTS[0][:1], TEXTS[0][1:])
    assert response.prompt_logprobs[1:] == pytest.approx(expected, abs=1e-3)


def test_clients_end_as_each_would_alone(client, other_client):
    runs = [training(client, 4, 1), training(other_client, 2, 7)]
    losses = [[], []]
    for _ in range(3):
        futures = [run.forward_backward(supervised(), "cross_entropy") for run in runs]
        steps = [run.optim_step(ADAM) for run in runs]
        for own, future, step in zip(losses, futures, steps, strict=True):
            step.result()
            own.append(future.result().metrics["loss:sum"])
    for own, (rank, seed) in zip(losses, [(4, 1), (2, 7)], strict=True):
        assert own == pytest.approx(reference_run(3, rank, seed)[1], rel=1e-4)


def test_samples_of_the_base_model_and_top_tokens(client):
    sampler = client.create_sampling_client(base_model=MODEL).result()
    prompt = types.ModelInput.from_ints(TEXTS[0])
    params = types.SamplingParams(max_tokens=3, temperature=0.0, stop=[])
    response = sampler.sample(
        prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    model = new_model()
    (sequence,) = response.sequences
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TEXTS[0]])).logits[0]
    assert sequence.tokens[0] == int(logits[-1].argmax())
    values, ids = logits[:-1].log_softmax(-1).topk(3, -1)
    for place, expected_ids, expected in zip(
        response.topk_prompt_logprobs[1:], ids, values, strict=True
    ):
        assert [token for token, _ in place] == expected_ids.tolist()
        assert [value for _, value in place] == pytest.approx(expected.tolist(), abs=1e-4)
    assert sampler.compute_logprobs(prompt).result()[1:] == pytest.approx(
        plain_logprobs(model, TEXTS[0][:1], TEXTS[0][1:]), abs=1e-4
    )


def expected_loss(name, logprobs, old, advantages):
    """The loss of each token, by its definition in scalars."""
    total = 0.0
    for new, before, advantage in zip(logprobs, old, advantages, strict=True):
        ratio = math.exp(new - before)
        clipped = min(max(ratio, 0.8), 1.2)
        total += {
            "importance_sampling": -ratio * advantage,
            "ppo": -min(ratio * advantage, clipped * advantage),
            "cispo": -clipped * advantage * new,
            "dro": -(new * advantage - 0.5 * 0.05 * (new - before) ** 2),
        }[name]
    return total


def test_targets_that_are_not_the_next_tokens_are_scored_as_they_are(client):
    run = training(client)
    targets = [0, 7, *TEXTS[0][3:]]
    weights = [0.0, 1.0, 1.0, 1.0, 1.0]
    data = datum([*TEXTS[0][:-1], 0], target_tokens=targets, weights=weights)
    result = run.forward_backward([data, *supervised()], "cross_entropy").result()
    with torch.no_grad():
        logits = new_model()(input_ids=torch.tensor([TEXTS[0][:-1]])).logits[0]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(targets)[:, None])[:, 0].tolist()
    assert result.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_losses_of_sampled_tokens_are_their_definitions(client, name):
    run = training(client)
    model = new_model()
    text = TEXTS[0]
    own = plain_logprobs(model, text[:1], text[1:])
    old = [value + shift for value, shift in zip(own, (0.0, 0.5, -0.5, 0.1, -0.1), strict=True)]
    advantages = [1.0, -1.0, 2.0, 0.0, -0.5]
    data = [datum(text, logprobs=old, advantages=advantages)]
    result = run.forward_backward(data, name).result()
    assert result.metrics["loss:sum"] == pytest.approx(
        expected_loss(name, own, old, advantages), rel=1e-4
    )
    assert result.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(own, abs=1e-4)


def test_a_custom_loss_runs_in_the_client(client):
    run = training(client, seed=5)

    def loss(data, logprobs):
        total = -torch.cat(list(logprobs)).sum()
        return total, {"tokens": float(sum(len(each) for each in logprobs))}

    result = run.forward_backward_custom(supervised(), loss).result()
    assert result.metrics["tokens"] == sum(len(text) - 1 for text in TEXTS)
    run.optim_step(ADAM).result()
    after = run.forward(supervised(), "cross_entropy").result()
    other = training(client, seed=5)
    other.forward_backward(supervised(), "cross_entropy").result()
    other.optim_step(ADAM).result()
    expected = other.forward(supervised(), "cross_entropy").result()
    assert after.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-4)


def test_a_run_goes_on_from_its_checkpoint_with_the_optimizer(client):
    run = training(client)
    run.forward_backward(supervised(), "cross_entropy").result()
    run.optim_step(ADAM).result()
    path = run.save_state("first").result().path
    assert path.startswith("tinker://")
    resumed = client.create_training_client_from_state_with_optimizer(path).result()
    losses = []
    for each in (run, resumed):
        each.forward_backward(supervised(), "cross_entropy").result()
        each.optim_step(ADAM).result()
        losses.append(each.forward(supervised(), "cross_entropy").result().metrics["loss:sum"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_sampling_client_keeps_its_weights_while_training_goes_on(client):
    run = training(client)
    run.forward_backward(supervised(), "cross_entropy").result()
    run.optim_step(ADAM).result()
    sampler = run.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(TEXTS[0])
    before = sampler.compute_logprobs(prompt).result()
    for _ in range(2):
        run.forward_backward(supervised(), "cross_entropy").result()
        run.optim_step(ADAM).result()
    assert sampler.compute_logprobs(prompt).result()[1:] == pytest.approx(before[1:], abs=1e-5)
    newer = run.save_weights_and_get_sampling_client().result()
    assert newer.compute_logprobs(prompt).result()[1:] != pytest.approx(before[1:], abs=1e-2)


def test_a_name_that_is_saved_anew_leaves_sampling_clients_their_weights(client, monkeypatch):
    run = training(client)
    path = run.save_weights_for_sampler("named").result().path
    sampler = client.create_sampling_client(model_path=path).result()
    prompt = types.ModelInput.from_ints(TEXTS[0])
    before = sampler.compute_logprobs(prompt).result()[1:]
    run.forward_backward(supervised(), "cross_entropy").result()
    run.optim_step(ADAM).result()
    assert run.save_weights_for_sampler("named").result().path == path
    assert sampler.compute_logprobs(prompt).result()[1:] == pytest.approx(before, abs=1e-5)
    # One that is new pushes the old weights out of memory, and their file is gone.
    monkeypatch.setattr(policies, "MAX_SAMPLERS", 1)
    newer = client.create_sampling_client(model_path=path).result()
    assert newer.compute_logprobs(prompt).result()[1:] != pytest.approx(before, abs=1e-2)
    with pytest.raises(tinker.RequestFailedError, match="was saved anew after this sampling"):
        sampler.compute_logprobs(prompt).result()
    with pytest.raises(Exception, match="there is no checkpoint"):
        client.create_sampling_client(model_path=f"{path}x").result()


def sampled_datum(text, old):
    num_tokens = len(text) - 1
    return datum(text, logprobs=[old] * num_tokens, advantages=[1.0] * num_tokens)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low_threshold": "abc"}, "clip_low_threshold='abc'; send a finite number"),
        ({"clip_low_threshold": math.nan}, "clip_low_threshold=nan; send a finite number"),
        ({"clip_low_threshold": 3.0}, "clip_low_threshold=3.0 is above clip_high_threshold=1.2"),
    ],
)
def test_settings_of_a_loss_are_checked(client, settings, message):
    run = training(client)
    with pytest.raises(tinker.RequestFailedError, match=message):
        run.forward_backward([sampled_datum(TEXTS[0], 0.0)], "ppo", settings).result()


def test_targets_that_are_no_whole_numbers_are_refused(client):
    targets = types.TensorData(data=[21.5, 22.0], dtype="float32", shape=[2])
    data = types.Datum(
        model_input=types.ModelInput.from_ints([20, 21]), loss_fn_inputs={"target_tokens": targets}
    )
    run = training(client)
    with pytest.raises(tinker.RequestFailedError, match="send token ids as int64"):
        run.forward([data], "cross_entropy").result()


def test_a_request_that_fails_adds_no_gradient(client, monkeypatch):
    run = training(client)
    run.forward_backward(supervised(), "cross_entropy").result()
    # Each datum is a part of its own: the first has a gradient when the second fails.
    monkeypatch.setattr(policies, "MAX_BACKWARD_TOKENS", 1)
    data = [sampled_datum(TEXTS[0], 0.0), sampled_datum(TEXTS[0], -1e30)]
    with pytest.raises(tinker.RequestFailedError, match="the loss of datum 1 is not finite"):
        run.forward_backward(data, "importance_sampling").result()
    run.optim_step(ADAM).result()
    after = run.forward(supervised(), "cross_entropy").result().metrics["loss:sum"]
    assert after == pytest.approx(reference_run(2)[1][1], rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [{"learning_rate": -1.0}, {"beta1": 1.5}, {"eps": 0.0}, {"grad_clip_norm": -1.0}],
    ids=["learning_rate", "beta1", "eps", "grad_clip_norm"],
)
def test_settings_of_adam_are_checked(client, settings):
    run = training(client)
    run.forward_backward(supervised(), "cross_entropy").result()
    (name,) = settings
    with pytest.raises(tinker.RequestFailedError, match=f"{name}=.* is no setting of Adam"):
        run.optim_step(types.AdamParams(**settings)).result()


def test_weights_that_became_infinite_are_told_and_do_not_hold_up_the_client(client):
    run = training(client)
    run.forward_backward(supervised(), "cross_entropy").result()
    run.optim_step(types.AdamParams(learning_rate=1e30)).result()
    with pytest.raises(tinker.RequestFailedError, match="is not finite"):
        run.forward_backward(supervised(), "cross_entropy").result()


def test_samples_of_several_adapters_share_a_batch(client, monkeypatch):
    batches = []
    own = RolloutGenerator.generate_batch

    def recorded(generator, prompts, **arguments):
        batches.append({params.adapter for params in arguments["sampling_params"]})
        return own(generator, prompts, **arguments)

    monkeypatch.setattr(RolloutGenerator, "generate_batch", recorded)
    samplers = [client.create_sampling_client(base_model=MODEL).result()]
    for seed in (1, 2):
        run = training(client, seed=seed)
        run.forward_backward(supervised(), "cross_entropy").result()
        run.optim_step(ADAM).result()
        samplers.append(run.save_weights_and_get_sampling_client().result())
    prompt = types.ModelInput.from_ints(TEXTS[0])
    params = types.SamplingParams(max_tokens=8, seed=5)

    def logprobs(futures):
        return [list(future.result().sequences[0].logprobs) for future in futures]

    together = logprobs([sampler.sample(prompt, 1, params) for sampler in samplers])
    assert max(map(len, batches)) == 3
    alone = []
    for sampler in samplers:
        alone += logprobs([sampler.sample(prompt, 1, params)])
    assert len({values[0] for values in together}) == 3
    for values, expected in zip(together, alone, strict=True):
        assert values == pytest.approx(expected, abs=1e-4)


def test_a_session_that_ends_gives_the_memory_of_its_runs_back(server):
    with new_client(server) as ending:
        run = training(ending)
        info = {"model_id": run.model_id, "type": "get_info"}
    with new_client(server) as other:
        # Its creation runs after the end of the other session.
        training(other)
        url = f"{server.url}/api/v1/get_info"
        response = httpx.post(url, headers={"X-API-Key": KEY}, json=info)
    assert response.status_code == 422
    assert "is unknown, or was unloaded" in response.text


def test_what_the_server_does_not_offer_is_the_users_error(server, client):
    run = training(client)
    with pytest.raises(tinker.RequestFailedError, match="has no 'advantages'"):
        run.forward_backward([datum(TEXTS[0], logprobs=[0.0] * 5)], "ppo").result()
    with pytest.raises(tinker.RequestFailedError, match="token id 5000, outside the model's"):
        run.forward_backward([datum([5000, 7], weights=[1.0])], "cross_entropy").result()
    nan = [datum(TEXTS[1], logprobs=[0.0, 0.0], advantages=[math.nan, 0.0])]
    with pytest.raises(
        tinker.RequestFailedError, match="advantages holds a number that is not fin"
    ):
        run.forward_backward(nan, "ppo").result()
    with pytest.raises(tinker.RequestFailedError, match="ask for a rank of 1 to 1024"):
        training(client, rank=5000)
    with pytest.raises(Exception, match="base_model='other' is not served"):
        client.create_lora_training_client(base_model="other").result()


@pytest.mark.parametrize("key", ["tml-wrong", None])
def test_a_wrong_key_is_refused(server, key):
    headers = {} if key is None else {"X-API-Key": key}
    response = httpx.post(f"{server.url}/api/v1/create_session", headers=headers, json={})
    assert response.status_code == 401
    assert "the API key is missing or wrong" in response.text


def test_requests_without_a_number_are_not_taken_for_one(server, client):
    run = training(client)
    headers = {"X-API-Key": KEY}
    ids = []
    for _ in range(2):
        body = {"model_id": run.model_id, "adam_params": {"learning_rate": 0.0}}
        response = httpx.post(f"{server.url}/api/v1/optim_step", headers=headers, json=body)
        ids.append(response.json()["request_id"])
    assert len(set(ids)) == 2


def test_data_of_one_token_and_steps_without_gradients(client):
    run = training(client)
    run.optim_step(ADAM).result()
    one = datum([20, 21])
    result = run.forward_backward([one], "cross_entropy").result()
    expected = plain_logprobs(new_model(), [20], [21])
    assert result.loss_fn_outputs[0]["logprobs"].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_body_that_is_no_request_is_refused(server):
    headers = {"X-API-Key": KEY}
    for path, body in [
        ("create_model", b"{"),
        ("create_model", b'{"session_id": "../..", "model_seq_id": "x", "base_model": "tiny"}'),
        ("forward_backward", b"\xff\xff\xff"),
        ("asample", b"[]"),
        ("load_weights", b"{}"),
        ("weights_info", b'{"tinker_path": "tinker://../../../etc/passwd"}'),
        ("weights_info", b"[1]"),
        ("optim_step", b"[" * 100_000),
    ]:
        response = httpx.post(f"{server.url}/api/v1/{path}", headers=headers, content=body)
        assert response.status_code == 422, (path, response.text)
        assert response.json()["detail"]
