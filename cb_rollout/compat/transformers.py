"""Use private APIs of transformers (5.17 to 5.23), accelerate 1.15 and PEFT 0.21."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import copy
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, PreTrainedModel, cache_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from cb_rollout.compat.fsdp import has_fsdp2, is_sharded
from cb_rollout.compat.patching import CountedPatch, replacing
from cb_rollout.errors import ConfigurationError

# The argument of a forward that takes the cache: `cache` since transformers 5.24. Before, it is
# `cache_params` in Mamba and `past_key_values` in others. In RWKV it is `state`, which is no Cache.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "state")

# A cache layer that stores nothing; transformers 5.17 lacks it, and takes an empty layer.
DummyLayer: Any = getattr(cache_utils, "DummyLayer", cache_utils.DynamicLayer)


def unwrap(model: torch.nn.Module) -> PreTrainedModel:
    """Return the transformers model inside DDP, `torch.compile` and PEFT wrappers.

    A PEFT adapter stays active, because its layers are inside the returned model. Adapters for
    prompt learning are refused.
    """
    *_, innermost = _wrappers(model)
    assert isinstance(innermost, PreTrainedModel)
    return innermost


def trained_forward(model: torch.nn.Module) -> torch.nn.Module:
    """Return the module to call for the forward that the trainer computes.

    This is the outermost wrapper that may compute something itself (PEFT's for aLoRA and X-LoRA, or
    a user's), or FSDP's root, which gathers the parameters that belong to no unit. DDP,
    `torch.compile` and DeepSpeed only pass the call on, and DDP would communicate.
    """
    wrappers = list(_wrappers(model))
    for wrapper in wrappers:
        if not _only_passes_on(wrapper):
            return wrapper
    return wrappers[-1]


def generation_config_of(model: torch.nn.Module) -> Any:
    """Return the default generation config of a model's `generate`; None if it has none.

    A config on PEFT's wrapper (0.21) takes precedence over the inner model's.
    """
    *wrappers, innermost = _wrappers(model)
    for wrapper in wrappers:
        own = vars(wrapper).get("generation_config")
        if own is not None and hasattr(wrapper, "peft_config"):
            return own
    return getattr(innermost, "generation_config", None)


def _only_passes_on(wrapper: torch.nn.Module) -> bool:
    is_compiled = "_orig_mod" in vars(wrapper).get("_modules", {})
    is_replicated = isinstance(wrapper, DistributedDataParallel | DataParallel)
    is_deepspeed = type(wrapper).__module__.startswith("deepspeed.")
    return is_compiled or is_replicated or is_deepspeed


def _wrappers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the model and each module that it wraps, down to the transformers model."""
    module: Any = model
    yield module
    while not isinstance(module, PreTrainedModel):
        # torch 2.13's `OptimizedModule`, then PEFT 0.21's `PeftModel`.
        if hasattr(module, "_orig_mod"):
            module = module._orig_mod
        elif hasattr(module, "peft_config"):
            if any(config.is_prompt_learning for config in module.peft_config.values()):
                raise ConfigurationError(
                    "prompt-learning adapters are not supported; use LoRA or another adapter that "
                    "lives inside the model's layers."
                )
            module = module.get_base_model()
        elif isinstance(getattr(module, "module", None), torch.nn.Module):
            module = module.module
        else:
            raise ConfigurationError(
                f"model is a {type(model).__name__}; pass a transformers causal language model, "
                "plain or wrapped by PEFT, DDP, torch.compile or accelerate."
            )
        yield module


ACTIVATED_LORA = (
    "an activated LoRA (alora_invocation_tokens) begins at a place of each row that only PEFT's "
    "wrapper knows"
)


def invocation_token_ids(model: torch.nn.Module) -> list[int]:
    """Return the invocation tokens of PEFT's (0.21) activated LoRA; empty: there is none."""
    for wrapper in _wrappers(model):
        for config in getattr(wrapper, "peft_config", {}).values():
            tokens = getattr(config, "alora_invocation_tokens", None)
            if tokens:
                return list(tokens)
    return []


def refuse_what_cannot_generate(model: PreTrainedModel) -> None:
    """Raise `ConfigurationError` for a model that is not a causal language model."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigurationError(
            f"{type(model).__name__} is an encoder-decoder, and cb_rollout runs decoder-only "
            "models; use model.generate."
        )
    attention = attention_implementation(model)
    if attention.startswith("paged|"):
        raise ConfigurationError(
            f"the model's attention is {attention!r}, which only transformers' own continuous "
            "batching can call; load the model with attn_implementation='sdpa', or call "
            f"model.set_attn_implementation({attention.removeprefix('paged|')!r})."
        )
    # A model may keep its head inside a language model that it wraps.
    if model.get_output_embeddings() is None and not model.can_generate():
        raise ConfigurationError(
            f"{type(model).__name__} has no language-model head; load the checkpoint with "
            "AutoModelForCausalLM."
        )
    embedding = None
    # transformers 5.23 raises for a model that only contains others, such as thinker and talker.
    with suppress(NotImplementedError):
        embedding = model.get_input_embeddings()
    if not hasattr(embedding, "weight"):
        raise ConfigurationError(
            f"{type(model).__name__} embeds its inputs with {type(embedding).__name__}, not with "
            "one table of token embeddings; pass the language model inside it, or use "
            "model.generate."
        )


def refuse_sharded(model: PreTrainedModel) -> None:
    """Raise `ConfigurationError` for a model that is not whole on one device of one process."""
    is_split = tensor_parallel_group(model) is not None
    if has_fsdp2(model) or (is_sharded(model) and not is_split):
        raise ConfigurationError(
            "the model's parameters are sharded over processes, so every forward needs all "
            "processes; use a RolloutGenerator with weight_sync='auto' or 'copy'."
        )
    devices = {p.device for p in model.parameters()}
    if any(device.type == "meta" for device in devices):
        raise ConfigurationError(
            "the model has weights on the meta device: they were not loaded, or a device_map "
            "offloaded them. Load the whole model on one device (device_map={'': 0})."
        )
    if len(devices) > 1:
        raise ConfigurationError(
            f"the model is spread over {len(devices)} devices, which is not supported; load it on "
            "one (device_map={'': 0})."
        )


def tensor_parallel_group(model: PreTrainedModel) -> ProcessGroup | None:
    """Return the processes that share the model's layers; None: the layers are not split.

    transformers 5.23 marks the model that a `tp_plan` split, and keeps its device mesh.
    """
    if (getattr(model, "tp_size", None) or 1) == 1:
        return None
    mesh: Any = model._device_mesh
    return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")


def is_quantized(model: PreTrainedModel) -> bool:
    """Return whether weights are quantized: transformers 5.23 says so, or a dtype shows it."""
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None):
        return True
    return not all(parameter.is_floating_point() for parameter in model.parameters())


def keep_differentiable(model: PreTrainedModel) -> None:
    """Keep bitsandbytes 0.50 from packing 4-bit weights in a way that training cannot use.

    On CPUs with AVX512-BF16 the first forward in evaluation mode packs them in place; later
    training forwards have no gradient through these layers.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if getattr(module, "support_avx512bf16_for_cpu", False):
            module.support_avx512bf16_for_cpu = False


def forward_argument_names(model: PreTrainedModel) -> frozenset[str]:
    """Return the argument names of the model class's forward.

    Read from the class: accelerate 1.15 replaces `forward` on the instance.
    """
    return frozenset(inspect.signature(type(model).forward).parameters)


def cache_argument(model: PreTrainedModel) -> str | None:
    """Return the name of the forward's argument for the cache; None: it takes no cache."""
    parameters = inspect.signature(type(model).forward).parameters
    names = [name for name in CACHE_ARGUMENTS if name in parameters]
    # XLM's `cache` is a dict.
    if names and names[0] == "cache" and "Cache" not in str(parameters["cache"].annotation):
        names = names[1:]
    return names[0] if names else None


def forward_passes_on(model: PreTrainedModel) -> bool:
    """Return whether the class's forward takes arbitrary keywords, as in transformers 5.23."""
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def model_eos_token_ids(model: torch.nn.Module) -> tuple[int, ...]:
    """Return the ids that end a sequence, from the generation config or else the model's config."""
    own_config = unwrap(model).config.get_text_config(decoder=True)
    for config in (generation_config_of(model), own_config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    return ()


def vocab_size(model: PreTrainedModel) -> int:
    """Return the number of rows of the input embedding: token ids below it can be fed back."""
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.shape[0]


def text_token_ids(model: PreTrainedModel) -> list[int]:
    """Return 1 to 256 token ids, of ordinary text if possible.

    They are spread over the middle half of the vocabulary. Special, added and untrained tokens are
    at its ends; the model never learned them, and their log-probabilities are chaotic.
    """
    # The ids that a config names: padding, ends, and those of images and sounds.
    settings = vars(model.config) | vars(model.config.get_text_config(decoder=True))
    special = []
    for name, value in settings.items():
        if name.endswith(("_token_id", "_token_index")):
            special.append(value)
    size = vocab_size(model)
    middle = range(size // 4, max(size // 4 + 1, size - size // 4))
    stride = max(1, len(middle) // 256)
    ids = [token_id for token_id in middle[::stride] if token_id not in special]
    if ids:
        return ids[:256]
    # The middle of a tiny vocabulary may have only special tokens.
    ids = [token_id for token_id in range(min(256, size)) if token_id not in special]
    return ids or [0]


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the config's maximum sequence length (transformers 5.23); None: it has none."""
    text_config = model.config.get_text_config(decoder=True)
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        limit = getattr(text_config, name, None)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def num_query_heads(model: PreTrainedModel) -> int:
    """Return the config's number of query heads (transformers 5.23); 0: it has none."""
    count = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", None)
    return count if isinstance(count, int) else 0


# transformers 5.23's names of cache layers that hold keys, values and an index per token, or
# states per sequence. Layers that a model registers under other names may hold more.
PAGEABLE_KINDS = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    # The name in transformers 5.17.
    "deepseek_sparse_attention",
    "qwen_sparse_attention",
    "minimax_m3_sparse",
    "conv",
    "linear_attention",
    "hybrid",
    "hybrid_sliding",
)


def pageable_layers() -> tuple[type, ...]:
    """Return the cache layers whose contents can be kept in pages and table rows.

    The result is not cached, because a model registers its cache layer when its module is imported.
    """
    kinds = cache_utils.DYNAMIC_LAYER_TYPE_MAPPING
    return tuple({kinds[kind] for kind in PAGEABLE_KINDS if kind in kinds})


def token_index(layer: Any) -> tuple[torch.Tensor | None, int]:
    """Return a sparse-attention cache layer's index, `[1, heads, tokens, size]`, and positions.

    The second value is the number of position ids that the layer keeps per token. In transformers
    5.23 DeepSeek V3.2's layers have `indexer_keys`, MiniMax M3's `idx_keys`.
    """
    index = getattr(layer, "idx_keys", None)
    if getattr(layer, "indexer_keys", None) is not None:
        index = layer.indexer_keys[:, None]
    positions = getattr(layer, "indexer_position_ids", None)
    num_positions = 0 if positions is None else positions.shape[0]
    return index, num_positions


Attention = Callable[..., Any]


# Functions that replace models' own attention in every thread; the last function is used.
_EVERYWHERE: list[Attention] = []


def _lookup(interface: Any, implementation: str, default: Attention) -> Attention:
    own_attention = _LOOKUP.own(interface, implementation, default)
    if _EVERYWHERE:
        own_attention = partial(_EVERYWHERE[-1], own_attention)
    of_thread = _LOOKUP.of_thread
    if of_thread is not None:
        own_attention = partial(of_thread, own_attention)
    return own_attention


_LOOKUP = CountedPatch(AttentionInterface, "get_interface", _lookup)


def replacing_attention(attend: Attention) -> AbstractContextManager[None]:
    """Make models use `attend(own_attention, module, query, ...)` in this thread.

    Every model of transformers (5.17 to 5.23) looks up its attention in one class, at every layer
    of every forward. Inside the context, that class returns `attend` to this thread, and the
    original function to other threads. The model and its `_attn_implementation` are not touched.
    Any thread may call.
    """
    assert _LOOKUP.of_thread is None, "a forward within a forward"
    return _LOOKUP.installed(attend)


@contextmanager
def computing_attention(attend: Attention) -> Iterator[None]:
    """Replace models' own attention functions with `attend(own_attention, module, query, ...)`.

    This applies to every thread, and inside `replacing_attention`, whose function receives `attend`
    as the model's own attention. Contexts may be nested. Any thread may enter one.
    """
    with _LOOKUP.installed():
        _EVERYWHERE.append(attend)
        try:
            yield
        finally:
            _EVERYWHERE.remove(attend)


@contextmanager
def repeated_in_checkpoints(
    model: torch.nn.Module, context: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Enter a context, and enter it again whenever gradient checkpointing recomputes a layer.

    That happens in the backward pass, after this context, and on a GPU in another thread. The
    checkpointing functions of transformers 5.23 and torch 2.13 are replaced inside.
    """
    is_inside = True

    def with_context(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_again(*arguments: Any, **named: Any) -> Any:
            if is_inside:
                return run(*arguments, **named)
            with context():
                return run(*arguments, **named)

        return run_again

    def wrapped(own: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(run: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            return own(with_context(run), *arguments, **named)

        return checkpoint

    wrappers = []
    for module in model.modules():
        for name in ("_gradient_checkpointing_func", "checkpoint_fn"):
            own = vars(module).get(name)
            if own is not None:
                wrappers.append((module, name, wrapped(own)))
    try:
        with replacing(wrappers), context():
            yield
    finally:
        is_inside = False


def checkpointed_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers that gradient checkpointing recomputes (transformers 5.23)."""
    layers = []
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
            layers.append(module)
    return layers


def keeping_activations(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Make forwards keep activations that gradient checkpointing would recompute."""
    layers = checkpointed_layers(model)
    return replacing((layer, "gradient_checkpointing", False) for layer in layers)


def attention_implementation(module: torch.nn.Module) -> str:
    """Return the name of the attention that a layer calls (transformers 5.23)."""
    config: Any = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", None) or "eager"


def attention_mask_dtype(implementation: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the mask that an attention function takes (transformers 5.23).

    The mask holds booleans, and then no mask at all means causal; or it holds numbers of `dtype`,
    which are added to the scores. Refuses an unknown mask.
    """
    mask = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation)
    if mask not in (sdpa_mask, eager_mask):
        raise ConfigurationError(f"attn_implementation={implementation!r} takes an unknown mask")
    return torch.bool if mask is sdpa_mask else dtype


def attention_window(
    module: torch.nn.Module, arguments: Mapping[str, Any], longest: int
) -> int | None:
    """Return the layer's attention window in tokens, the token itself included; None: no window.

    Refuses a layer that has a window but does not pass it to its attention function, or the reverse
    (transformers 5.23), if the `longest` sequence exceeds the window.
    """
    window = arguments.get("sliding_window")
    config: Any = getattr(module, "config", None)
    index = getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    layer_type = types[index] if types and isinstance(index, int) else None
    limit = None
    if layer_type == "chunked_attention":
        limit = getattr(config, "attention_chunk_size", None)
    elif layer_type in (None, "sliding_attention") and window is None:
        limit = getattr(config, "sliding_window", None)
    if isinstance(limit, int) and longest > limit:
        raise ConfigurationError(f"its attention keeps a window of {limit} tokens to itself")
    if layer_type == "full_attention" and window is not None and longest > window:
        raise ConfigurationError(f"a layer of full attention passes a window of {window} tokens")
    return window


def replacing_forward(module: Any, forward: Callable[..., Any]) -> AbstractContextManager[None]:
    """Make a module run `forward` instead of its own, also when a wrapper calls it."""
    return replacing([(module, "forward", forward)])


def backbone_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the model without its head (transformers 5.23).

    Refuses a model whose head and layers are one module.
    """
    # OPT's head reads its decoder, inside its base model.
    backbone = model.get_decoder()
    if backbone is None or backbone is model:
        raise ConfigurationError("its head and its layers are one module")
    return backbone


@contextmanager
def taking_hidden_states(model: PreTrainedModel) -> Iterator[list[Any]]:
    """Take the backbone's output, and give the head only one token's hidden states, (B, 1, H)."""
    taken: list[Any] = []

    def take(_module: Any, _arguments: Any, output: Any) -> Any:
        taken.append(copy(output))
        output.last_hidden_state = output.last_hidden_state[:, :1]
        return output

    handle = backbone_of(model).register_forward_hook(take)
    try:
        yield taken
    finally:
        handle.remove()


def giving_hidden_states(
    model: PreTrainedModel, kind: type[Any], hidden: torch.Tensor
) -> AbstractContextManager[None]:
    """Make the model's forward run only its head, on these hidden states, (B, S, H).

    `kind` is the class of the backbone's output.
    """
    output = kind(last_hidden_state=hidden)
    return replacing_forward(backbone_of(model), lambda *_, **__: output)


def repeat_states(cache: Any, num_rows: int, device: torch.device) -> None:
    """Repeat a cache's single row for the rows of one forward, with gradients.

    transformers 5.23 itself would overwrite the states that the backward pass needs.
    """
    cache.reorder_cache(torch.zeros(num_rows, dtype=torch.int64, device=device))
    for layer in cache.layers:
        if hasattr(layer, "update_conv_state"):
            vars(layer)["update_conv_state"] = partial(_after_conv_states, layer)
            vars(layer)["update_recurrent_state"] = lambda states, *_, **__: states


def _after_conv_states(
    layer: Any, states: torch.Tensor, state_idx: int = 0, *_: Any, **__: Any
) -> torch.Tensor:
    return torch.cat([layer.conv_states[state_idx], states], dim=-1)


def add_to_notebook_table(trainer: Any, step: int, values: Mapping[str, float]) -> None:
    """Add columns to a step's line in a trainer's notebook table, if it draws one.

    `NotebookProgressCallback` of transformers 5.23 shows only the loss. With evaluations, its table
    has one line per evaluation, and nothing is added.
    """
    if trainer.args.eval_strategy != "no":
        return
    for callback in trainer.callback_handler.callbacks:
        table = getattr(callback, "training_tracker", None)
        if table is not None:
            table.write_line({"Step": step, **values})
