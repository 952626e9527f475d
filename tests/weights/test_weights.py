"""Which module generates, and how its tensors follow the trainer's."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from peft import LoraConfig, inject_adapter_in_model
from tiny import FAMILIES, tiny_model

from cb_rollout import (
    ConfigurationError,
    ContinuousBatchingManager,
    RolloutConfig,
    RolloutGenerator,
    WeightSyncError,
)
from cb_rollout.compat import transformers as hf_compat
from cb_rollout.compat.tensor_parallel import Split
from cb_rollout.weights import create_weight_sync, require_equal
from cb_rollout.weights.adapters import LowRank
from cb_rollout.weights.base import SharedWeights
from cb_rollout.weights.copied import CopiedWeights
from cb_rollout.weights.replica import tensors_by_name
from cb_rollout.weights.tensor import Weight

COPY = RolloutConfig(weight_sync="copy")


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[5, 6, 7, 8]])).logits


def change(model) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_copy_is_the_model_buffers_included_and_never_moves(family):
    model = tiny_model(family)
    state = torch.get_rng_state()
    weights = create_weight_sync(model, COPY)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(logits(weights.module), logits(model))
    places = {name: t.data_ptr() for name, t in tensors_by_name(weights.module).items()}
    assert not any(t.is_meta for t in tensors_by_name(weights.module).values())
    own = {t.data_ptr() for t in tensors_by_name(model).values()}
    assert not own & set(places.values())
    change(model)
    assert not torch.equal(logits(weights.module), logits(model))
    weights.sync()
    assert torch.equal(logits(weights.module), logits(model))
    assert {n: t.data_ptr() for n, t in tensors_by_name(weights.module).items()} == places


def bytes_of(tensors):
    """What storages take, each counted once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_released_weights_take_no_bytes_and_the_next_sync_writes_them_all(family):
    model = tiny_model(family)
    # A sync alone copies no frozen weight twice.
    next(model.parameters()).requires_grad_(False)
    weights = create_weight_sync(model, COPY)
    copy = weights.module
    size = sum(parameter.nbytes for parameter in copy.parameters())
    identity = [(id(t), t.untyped_storage()._cdata) for t in tensors_by_name(copy).values()]
    buffers = {name: tensor.clone() for name, tensor in copy.named_buffers()}
    assert bytes_of(copy.parameters()) == size
    change(model)
    for _ in range(2):
        # A second release finds nothing to release.
        weights.release()
        weights.release()
        assert bytes_of(copy.parameters()) == 0
        assert all(torch.equal(tensor, buffers[name]) for name, tensor in copy.named_buffers())
        assert weights.sync() == sum(t.nbytes for t in {*copy.parameters(), *copy.buffers()})
        assert bytes_of(copy.parameters()) == size
        assert weights.differing() == []
        assert torch.equal(logits(copy), logits(model))
    assert [(id(t), t.untyped_storage()._cdata) for t in tensors_by_name(copy).values()] == identity


def test_weights_that_were_released_come_back_whole_after_a_sync_that_failed(monkeypatch):
    model = tiny_model()
    weights = create_weight_sync(model, COPY)
    weights.release()
    head, model.lm_head = model.lm_head, torch.nn.Linear(4, 4)
    with pytest.raises(WeightSyncError, match=r"lm_head\.weight"):
        weights.sync()
    assert bytes_of(weights.module.parameters()) == 0
    model.lm_head = head
    with monkeypatch.context() as patched:
        patched.setattr(Weight, "value", None)
        with pytest.raises(TypeError):
            weights.sync()
    weights.sync()
    assert torch.equal(logits(weights.module), logits(model))


def test_a_buffer_that_changed_is_copied():
    model = tiny_model()
    weights = create_weight_sync(model, COPY)
    model.model.rotary_emb.inv_freq.data.mul_(0.5)
    weights.sync()
    assert torch.equal(weights.module.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_a_copy_shares_nothing_with_autograd():
    model = tiny_model().train()
    module = create_weight_sync(model, COPY).module
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert not any(child.training for child in module.modules())
    assert all(parameter.grad_fn is None for parameter in module.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_is_copied_and_counted_once_tied_or_not(tied):
    model = tiny_model(tie_word_embeddings=tied)
    weights = create_weight_sync(model, COPY)
    head, embedding = weights.module.lm_head.weight, weights.module.model.embed_tokens.weight
    assert (head is embedding) == tied
    num_bytes = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    assert weights.sync() == num_bytes


def test_ties_follow_the_training_module_not_its_config():
    model = tiny_model(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    weights = create_weight_sync(model, COPY)
    layers = weights.module.model.layers
    assert layers[1].mlp.up_proj.weight is layers[0].mlp.up_proj.weight
    assert torch.equal(logits(weights.module), logits(model))


def test_frozen_tensors_are_copied_once_and_again_when_written():
    model = tiny_model().requires_grad_(False)
    weights = create_weight_sync(model, COPY)
    num_buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    assert weights.sync() == num_buffer_bytes
    norm = model.model.norm.weight
    norm.mul_(2)
    assert weights.sync() == num_buffer_bytes + norm.nbytes
    model.model.norm.weight = torch.nn.Parameter(norm * 2, requires_grad=False)
    assert weights.sync() == num_buffer_bytes + norm.nbytes
    assert torch.equal(logits(weights.module), logits(model))


def test_every_mismatch_is_reported_in_one_error_and_nothing_is_copied():
    model = tiny_model()
    weights = create_weight_sync(model, COPY)
    before = logits(weights.module)
    change(model)
    del model.model.norm.weight
    model.resize_token_embeddings(300)
    model.model.layers[0].mlp.register_parameter("gain", torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(WeightSyncError) as raised:
        weights.sync()
    message = str(raised.value)
    assert message.startswith("4 tensors")
    assert "lm_head.weight: (300, 64) in the training module, (256, 64) here" in message
    assert "model.embed_tokens.weight: (300, 64) in the training module" in message
    assert "model.norm.weight: not in the training module" in message
    assert "model.layers.0.mlp.gain: in the training module only" in message
    assert torch.equal(logits(weights.module), before)


def test_a_model_that_its_config_does_not_describe_is_refused_with_its_tensors():
    model = tiny_model()
    model.model.layers[0].mlp.register_parameter("gain", torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(WeightSyncError, match=r"1 tensors .*\n  model\.layers\.0\.mlp\.gain"):
        create_weight_sync(model, COPY)


def test_a_write_that_torch_does_not_count_is_found_by_the_check():
    model = tiny_model().requires_grad_(False)
    with RolloutGenerator(model, RolloutConfig(weight_sync="copy", verify_weight_sync=True)) as g:
        assert g.sync_weights().policy_version == 1
        model.model.norm.weight.data.mul_(2)
        model.lm_head.weight.data.mul_(2)
        with pytest.raises(
            WeightSyncError, match=r"^2 tensors .*: model\.norm\.weight, lm_head\.weight\. .*\.data"
        ):
            g.sync_weights()
        # Whatever was copied is in use, so no key of before may be read.
        assert g.policy_version == 2


def test_nan_equals_nan_and_many_names_are_cut():
    model = tiny_model().requires_grad_(False)
    model.model.norm.weight.fill_(float("nan"))
    weights = create_weight_sync(model, COPY)
    require_equal(weights)
    for parameter in model.parameters():
        parameter.data.add_(1)
    with pytest.raises(WeightSyncError, match=r"^24 tensors .* and 4 more\."):
        require_equal(weights)


def test_shared_weights_are_the_model_and_cost_nothing():
    model = tiny_model()
    weights = create_weight_sync(model, RolloutConfig(weight_sync="shared"))
    assert (weights.module is model, weights.sync(), weights.differing()) == (True, 0, [])


def test_auto_shares_what_computes_in_its_own_dtype():
    assert isinstance(create_weight_sync(tiny_model(), RolloutConfig()), SharedWeights)
    half = tiny_model().to(torch.bfloat16)
    assert isinstance(create_weight_sync(half, RolloutConfig()), SharedWeights)
    same = RolloutConfig(rollout_dtype="bfloat16")
    assert isinstance(create_weight_sync(half, same), SharedWeights)
    cast = create_weight_sync(tiny_model(), RolloutConfig(rollout_dtype="bfloat16"))
    assert isinstance(cast, CopiedWeights)


def test_packed_weights_run_in_place():
    model = tiny_model()
    packed = torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    model.model.layers[0].mlp.up_proj.weight = packed
    autocast = RolloutConfig(rollout_dtype="bfloat16")
    assert isinstance(create_weight_sync(model, autocast), SharedWeights)
    with pytest.raises(ConfigurationError, match=r"cannot copy a quantised model.*use 'shared'"):
        create_weight_sync(model, COPY)


class DoubledLinear(torch.nn.Linear):
    """Has the tensors of a linear layer and computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


def double(model):
    model.model.layers[0].mlp.down_proj.__class__ = DoubledLinear


def subclass_a_norm(model):
    norm = model.model.norm
    norm.__class__ = type("OtherNorm", (type(norm),), {})


def replace_an_activation(model):
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()


def add_a_bias(model):
    layer = model.model.layers[0].mlp.down_proj
    layer.bias = torch.nn.Parameter(torch.ones(layer.out_features))


@pytest.mark.parametrize("change", [double, subclass_a_norm, replace_an_activation, add_a_bias])
def test_auto_shares_what_a_copy_would_compute_otherwise(change, caplog):
    model = tiny_model()
    change(model)
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    for config, trainer in (
        (RolloutConfig(), accelerator),
        (RolloutConfig(rollout_dtype="bfloat16"), None),
    ):
        caplog.clear()
        weights = create_weight_sync(model, config, trainer)
        assert isinstance(weights, SharedWeights)
        assert weights.module is model
        assert "weights: shared, so each step casts them" in caplog.text
    with pytest.raises(WeightSyncError, match=r"weight_sync='shared'"):
        create_weight_sync(model, COPY)


@pytest.mark.parametrize("change", [double, subclass_a_norm, replace_an_activation])
def test_a_copy_names_the_modules_that_it_would_not_have(change):
    model = tiny_model()
    change(model)
    with pytest.raises(WeightSyncError, match=r"another class.*(down_proj|norm|act_fn) \(\w+ for"):
        create_weight_sync(model, COPY)


def test_a_manager_alone_keeps_no_copy():
    with pytest.raises(ConfigurationError, match=r"weight_sync='copy': .*use a RolloutGenerator"):
        ContinuousBatchingManager(tiny_model(), None, COPY)


def wrapped_whole(model):
    return torch.compile(model, backend="eager")


def wrapped_layers(model):
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")
    return model


@pytest.fixture(autouse=True)
def accelerate_starts_anew():
    """Its state is the process's, and refuses another precision than the first one's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def prepared(model):
    return Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)


@pytest.mark.parametrize("wrap", [wrapped_whole, wrapped_layers, prepared])
def test_wrappers_are_seen_through(wrap):
    model, plain = tiny_model(), tiny_model()
    module = create_weight_sync(hf_compat.unwrap(wrap(model)), COPY).module
    assert torch.equal(logits(module), logits(plain))


def test_a_copy_of_a_prepared_model_has_its_class_forward():
    module = create_weight_sync(hf_compat.unwrap(prepared(tiny_model())), COPY).module
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    ("size", "settings", "said"),
    [
        (1, {"tensor_parallel_size": 2}, "does not divide the 1 processes"),
        (1, {"tensor_parallel_size": 2, "weight_sync": "shared"}, "training module is not split"),
        (2, {"tensor_parallel_size": 4}, "leave it at 1, or set 2"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_what_to_set(size, settings, said):
    model = tiny_model()
    model._tp_size, model._device_mesh = size, SimpleNamespace(ndim=1, get_group=lambda: "group")
    with pytest.raises(ConfigurationError, match=said):
        RolloutGenerator(model, RolloutConfig(**settings))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_of_an_adapters_update_is_cut_from_its_factors(is_transposed, dim):
    added = LowRank(torch.randn(2, 6), torch.randn(8, 2), 0.5, is_transposed)
    whole = added.delta(added.A, added.B, torch.float32, None)
    for place in range(2):
        split = Split(dim, (torch.tensor([0, 1, 4]), torch.tensor([2, 3, 5])), place)
        part = added.delta(added.A, added.B, torch.float32, split)
        torch.testing.assert_close(part, split.part(whole))


def test_a_tensor_that_takes_another_ones_place_is_found():
    model = tiny_model()
    weights = create_weight_sync(model, RolloutConfig(weight_sync="copy"))
    weights.sync()
    before = weights.module.lm_head.weight.data_ptr()
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    weights.sync()
    assert torch.equal(weights.module.lm_head.weight, model.lm_head.weight)
    assert weights.module.lm_head.weight.data_ptr() == before
    model.lm_head = torch.nn.Linear(4, 4)
    with pytest.raises(WeightSyncError, match=r"lm_head\.weight"):
        weights.sync()


def untied(model):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)


def tied(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def shared_mlp(model):
    model.model.layers[1].mlp = model.model.layers[0].mlp


@pytest.mark.parametrize("is_released", [False, True])
@pytest.mark.parametrize(
    ("was_tied", "retie"), [(True, untied), (False, tied), (False, shared_mlp)]
)
def test_a_copy_is_tied_as_the_training_module_is_now(was_tied, retie, is_released):
    model = tiny_model(tie_word_embeddings=was_tied)
    weights = create_weight_sync(model, COPY)
    if is_released:
        weights.release()
    retie(model)
    for _ in range(2):
        change(model)
        weights.sync()
        assert weights.differing() == []
        assert torch.equal(logits(weights.module), logits(model))
    held = weights.module.lm_head.weight.data_ptr()
    weights.sync()
    assert weights.module.lm_head.weight.data_ptr() == held


def test_a_copy_is_cast_with_the_training_module():
    model = tiny_model()
    weights = create_weight_sync(model, COPY)
    model.to(torch.float64)
    weights.sync()
    assert weights.module.dtype == torch.float64
    assert torch.equal(logits(weights.module), logits(model))


def test_a_tied_model_that_was_resized_is_named_tensor_by_tensor():
    model = tiny_model(tie_word_embeddings=True)
    weights = create_weight_sync(model, COPY)
    model.resize_token_embeddings(300)
    with pytest.raises(WeightSyncError, match=r"^2 tensors .*\n  lm_head\.weight: \(300, 64\)"):
        weights.sync()


def test_a_copy_refuses_a_module_that_computes_something_else_since():
    model, name = tiny_model(), r"model\.layers\.1\.mlp\.act_fn"
    weights = create_weight_sync(model, COPY)
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    with pytest.raises(WeightSyncError, match=f"^1 submodules .* was made: {name}\\. .*'shared'"):
        weights.sync()


def test_a_number_that_a_training_module_notes_for_itself_stops_no_copy():
    model = tiny_model()
    model.last_loss = model.model.layers[0].load_balance = 0.5
    weights = create_weight_sync(model, COPY)
    model.last_loss = model.model.layers[0].load_balance = 0.25
    assert weights.sync().bit_length()


def test_autocast_and_inference_mode_around_a_copy_change_nothing_in_it():
    model = with_adapter(tiny_model())
    plain = create_weight_sync(model, COPY)
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        weights = create_weight_sync(model, COPY)
    weights.sync()
    with torch.autocast("cpu", torch.bfloat16):
        weights.sync()
        assert weights.differing() == []
    assert torch.equal(logits(weights.module), logits(plain.module))


def with_adapter(model):
    settings = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    return inject_adapter_in_model(settings, model)


class Autocasting:
    """What weights read of accelerate's `Accelerator`."""

    mixed_precision = "bf16"
    process_index = 0
    num_processes = 1
    device = torch.device("cpu")
    state = SimpleNamespace()


def under_autocast(model):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return logits(model)


def test_a_tied_head_is_held_once_more_in_the_compute_dtype_and_follows_each_sync():
    model = tiny_model(tie_word_embeddings=True).eval()
    weights = create_weight_sync(model, RolloutConfig(), Autocasting())
    head, embedding = weights.module.lm_head.weight, weights.module.model.embed_tokens.weight
    assert (head.dtype, embedding.dtype) == (torch.bfloat16, torch.float32)
    for _ in range(2):
        change(model)
        assert not torch.equal(head, model.lm_head.weight.bfloat16())
        assert "lm_head.weight" in weights.differing()
        weights.sync()
        assert torch.equal(head, model.lm_head.weight.bfloat16())
        assert torch.equal(embedding, model.lm_head.weight)
        assert weights.differing() == []
        assert torch.equal(under_autocast(weights.module), under_autocast(model))
    assert weights.module.lm_head.weight is head


def test_a_tied_head_that_a_sync_leaves_old_is_named(monkeypatch):
    model = tiny_model(tie_word_embeddings=True).eval()
    weights = create_weight_sync(model, RolloutConfig(), Autocasting())
    change(model)
    is_stale = CopiedWeights._is_stale
    monkeypatch.setattr(
        CopiedWeights,
        "_is_stale",
        lambda self, weight: weight.names != ("lm_head.weight",) and is_stale(self, weight),
    )
    weights.sync()
    assert not torch.equal(weights.module.lm_head.weight, model.lm_head.weight.bfloat16())
    with pytest.raises(WeightSyncError, match=r"^1 tensors .* lm_head\.weight"):
        require_equal(weights)


def test_a_held_head_is_counted_once_among_the_weights_that_memory_is_planned_beside():
    model = tiny_model(tie_word_embeddings=True).eval()
    own = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    with RolloutGenerator(model, RolloutConfig(), accelerator=Autocasting()) as generator:
        module = generator.manager.model
        weights = generator.manager.engine.training.bytes_now().weights
    assert module.lm_head.weight.nbytes == model.lm_head.weight.nbytes // 2
    assert weights == own + sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize("is_adapted", [False, True])
def test_under_autocast_a_copy_is_cast_and_adapters_are_the_trainers(is_adapted):
    model = tiny_model(tie_word_embeddings=False).eval()
    if is_adapted:
        model = with_adapter(model)
    weights = create_weight_sync(model, RolloutConfig(), Autocasting())
    assert type(weights) is (SharedWeights if is_adapted else CopiedWeights)
    assert torch.equal(under_autocast(weights.module), under_autocast(model))
