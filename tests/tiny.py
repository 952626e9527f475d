"""Tiny real models, the exact log-probabilities they give, and a tokenizer of characters.

Everything here is deterministic and leaves the global random state as it found it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from cb_rollout import GenerationOutput

PAD, EOS, BOS = 0, 1, 2

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "mistral": {"sliding_window": 32},
    "bloom": {"n_layer": 2, "n_head": 4},
    # Left to themselves the hybrids' two layers would be of one kind.
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "deepseek_v3": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
    "granitemoehybrid": {
        "head_dim": None,
        "num_key_value_heads": 4,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
}
# What each family needs beside SMALL; None takes a setting of SMALL away.

SHARPNESS = 4.0
# Multiplies fresh weights, whose outputs are so near uniform that a wrong cache is not seen.


def tiny_model(
    family: str = "qwen3", vocab_size: int = 256, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A float32 model of `family` on the CPU, in eval mode; equal arguments give equal weights.

    A family that `FAMILIES` does not list has to be given what it needs beside `SMALL`.
    """
    settings = {**SMALL, "vocab_size": vocab_size, **FAMILIES.get(family, {}), **overrides}
    given = {name: value for name, value in settings.items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **given))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SHARPNESS)
    return model.eval()


@torch.no_grad()
def plain_logprobs(
    model: torch.nn.Module,
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
    temperature: float = 1.0,
) -> list[float]:
    """The log-probability of each generated token, from one forward without cache or padding.

    Float32 log-softmax of logits/temperature over the whole vocabulary; `model` is run as it is.
    """
    input_ids = torch.tensor([[*prompt_ids, *generated_ids]])
    logits = model(
        input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False
    ).logits
    logprobs = (logits[0, len(prompt_ids) - 1 : -1].float() / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(list(generated_ids))[:, None])[:, 0].tolist()


def largest_difference(
    model: torch.nn.Module, outputs: Iterable[GenerationOutput], temperature: float = 1.0
) -> float:
    """Between any delivered log-probability and the plain forward's, in nats."""
    return max(
        abs(ours - theirs)
        for output in outputs
        for ours, theirs in zip(
            output.logprobs,
            plain_logprobs(model, output.prompt_ids, output.generated_tokens, temperature),
            strict=True,
        )
    )


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character or newline; 99 tokens, with the ids of `tiny_model`."""
    words = ["<pad>", "<eos>", "<unk>", "\n", *map(chr, range(32, 127))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def save_checkpoint(path: Path) -> Path:
    """A model and its tokenizer of characters, in a directory."""
    tokenizer = char_tokenizer()
    tokenizer.save_pretrained(path)
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(path)
    return path


CHAT_MARKERS = ["<|pad|>", "<|end|>", "<|start|>"]

TOOL_TEMPLATE = """\
{%- if tools %}<|start|>tools
{{ tools | tojson }}<|end|>
{% endif %}
{%- for message in messages %}<|start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte of UTF-8, as byte-level vocabularies write them; 259 tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: index for index, word in enumerate([*CHAT_MARKERS, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|start|>"],
        chat_template=TOOL_TEMPLATE,
    )
