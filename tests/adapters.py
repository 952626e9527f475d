"""Tiny models with an adapter of each method that PEFT has, or with several adapters.

The adapters' weights are far from their start.
"""

import inspect
from pathlib import Path
from typing import Any

import peft
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from tiny import tiny_model

# Switches an activated LoRA on.
INVOCATION = [40, 41, 42]

# What a method's config needs beside its type and the layers it adapts.
SETTINGS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2, "target_modules": None},
    "C3A": {"block_size": 16},
    "FOURIERFT": {"n_frequency": 20},
    "IA3": {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["norm"]},
    "MULTITASK_PROMPT_TUNING": {"num_tasks": 2},
    "P_TUNING": {"encoder_hidden_size": 16},
    "ROAD": {"group_size": 16},
    "SHADOW": {"target_modules": None},
    "SHIRA": {"r": 2},
    # PEFT 0.21 leaves its vectors unset otherwise.
    "TINYLORA": {"init_weights": True},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [5, 6, 7]},
    "VBLORA": {"vector_length": 32, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 64},
}

# Settings of a method's variants.
VARIANTS: dict[str, dict[str, Any]] = {
    "LORA (DoRA)": {"use_dora": True},
    "LORA (rsLoRA)": {"use_rslora": True},
    "LORA (bias)": {"lora_bias": True},
    "LORA (embeddings)": {"target_modules": ["embed_tokens", "q_proj"]},
    "LORA (activated)": {"alora_invocation_tokens": INVOCATION},
    "LORA (saved modules)": {"modules_to_save": ["lm_head"]},
    "LORA (trained tokens)": {"trainable_token_indices": [5, 6, 7]},
}

# AdaMSS imports scikit-learn, which nothing else here needs.
METHODS = [
    *sorted(str(kind.value) for kind in PEFT_TYPE_TO_CONFIG_MAPPING if kind != "ADAMSS"),
    *VARIANTS,
]


def adapted(method: str, folder: Path, seed: int = 0, *, is_fresh: bool = False) -> peft.PeftModel:
    """Return a Llama with an adapter of a method, in evaluation mode; `folder` is for its files.

    `is_fresh`: its weights are as the method begins, else far from there.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if method == "XLORA":
            model = _mixture(folder)
        else:
            model = peft.get_peft_model(tiny_model("llama"), _config(method))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad and not is_fresh:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def _config(method: str) -> Any:
    kind, _, variant = method.partition(" ")
    config_class: Any = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    known = inspect.signature(config_class).parameters
    general = {"target_modules": ["q_proj", "up_proj"], "num_virtual_tokens": 4}
    settings = {name: value for name, value in general.items() if name in known}
    settings |= SETTINGS.get(kind, {})
    if variant:
        settings |= VARIANTS[method]
    return config_class(task_type="CAUSAL_LM", **settings)


def _mixture(folder: Path) -> peft.PeftModel:
    """Return an X-LoRA model: two adapters, which a classifier of the whole sequence mixes."""
    paths = {}
    for name in ("0", "1"):
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False
        )
        peft.get_peft_model(tiny_model("llama"), config).save_pretrained(folder / name)
        paths[name] = str(folder / name)
    model = tiny_model("llama")
    model.config.use_cache = False
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=64, adapters=paths)
    return peft.get_peft_model(model, config)


# Layers that tiny models of any family have some of.
LAYERS = ("q_proj", "v_proj", "o_proj", "up_proj", "in_proj", "x_proj")


def with_named_adapters(
    family: str, dtype: torch.dtype = torch.float32, vocab_size: int = 256, **settings: Any
) -> peft.PeftModel:
    """Return a model with LoRA adapters "one", "two" and "three", of which "one" is active.

    `settings` are of the config of each adapter.
    """
    model = tiny_model(family, vocab_size).to(dtype)
    linear = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    layers = sorted({name.rpartition(".")[2] for name in linear} & {*LAYERS})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted_model: Any = None
        for name, rank in (("one", 4), ("two", 8), ("three", 2)):
            config = peft.LoraConfig(
                **{"task_type": "CAUSAL_LM", "r": rank, "target_modules": layers} | settings
            )
            if adapted_model is None:
                adapted_model = peft.get_peft_model(model, config, adapter_name=name)
            else:
                adapted_model.add_adapter(name, config)
        move(adapted_model)
    return adapted_model.eval()


@torch.no_grad()
def move(model: torch.nn.Module, seed: int = 0) -> None:
    """Change the weights of all LoRA adapters."""
    draws = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta")):
            drawn = torch.randn(parameter.shape, generator=draws)
            parameter.add_(drawn.to(parameter), alpha=0.1)
