"""A random model that ends its completions, and a tokenizer of one token a word."""

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.harness.workload import EOS
from cb_rollout.tools.bench import create_model


@torch.no_grad()
def create_ending_model(shape: dict[str, Any], device: str, mean_length: int | None) -> Any:
    """Create a model that samples EOS by itself after `mean_length` tokens on average.

    EOS is about equally likely after every token, so lengths are geometric: one coordinate of the
    residual stream is made constant, and only the logit of EOS reads it. `mean_length` of None:
    random weights, which end no completion.
    """
    if mean_length is None:
        return create_model(shape, device)
    model = create_model(shape, device, tie_word_embeddings=False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    model.model.embed_tokens.weight[:, 0] = 1.0
    model.lm_head.weight[:, 0] = 0.0
    model.lm_head.weight[EOS] = 0.0
    ids = torch.randint(3, model.config.vocab_size, (8, 64), device=model.device)
    hidden = model.model(ids).last_hidden_state.float()
    others = (hidden @ model.lm_head.weight.float().T).logsumexp(-1).mean()
    wanted = others - torch.tensor(mean_length - 1.0, device=model.device).log()
    model.lm_head.weight[EOS, 0] = wanted / hidden[..., 0].mean()
    return model


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Create a tokenizer of one token a word, so that any prompt ids can be written as text."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, vocab_size))]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
