"""The models that are run: Qwen3 shapes with random weights, and a tokenizer of whole words."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cb_rollout.tools.bench.sizes import EOS, SEED


def create_model(shape: dict[str, Any], device: str, **overrides: Any) -> Qwen3ForCausalLM:
    """Random weights, made on the device: float32 on a CPU, bfloat16 elsewhere.

    Args:
        shape: what `Qwen3Config` is told.
        device: where the model is.
        overrides: settings that come before the shape's.
    """
    settings: dict[str, Any] = shape | {"eos_token_id": EOS, "pad_token_id": 0} | overrides
    config = Qwen3Config(**settings)
    torch.manual_seed(SEED)
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def create_ending_model(shape: dict[str, Any], device: str, mean_length: int) -> Qwen3ForCausalLM:
    """A model whose completions end by themselves, after so many tokens in the mean."""
    model = create_model(shape, device, tie_word_embeddings=False)
    _end_after(model, mean_length)
    return model


@torch.no_grad()
def _end_after(model: Qwen3ForCausalLM, mean_length: int) -> None:
    """Make the end equally likely after every token, so that lengths are geometric.

    One coordinate of the residual stream is made constant, and only the end reads it.
    """
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.model.embed_tokens.weight[:, 0] = 1.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[EOS] = 0.0
    ids = torch.randint(3, model.config.vocab_size, (8, 64), device=model.device)
    hidden = model.model(ids).last_hidden_state.float()
    others = (hidden @ model.lm_head.weight.float().T).logsumexp(-1).mean()
    wanted = others - torch.tensor(mean_length - 1.0, device=model.device).log()
    model.lm_head.weight[EOS, 0] = wanted / hidden[..., 0].mean()


def linear_layers(model: torch.nn.Module) -> list[torch.nn.Linear]:
    """The layers that multiply matrices, the head included."""
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def matmul_parameters(model: Qwen3ForCausalLM) -> tuple[int, int]:
    """Parameters that multiply every token, and those of the head, which multiply only the last."""
    head = model.lm_head.weight.numel()
    return sum(layer.weight.numel() for layer in linear_layers(model)) - head, head


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token a word, so that prompts of any ids can be written as text."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, vocab_size))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
