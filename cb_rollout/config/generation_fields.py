"""List how each field of transformers' `GenerationConfig` (5.17 to 5.24) is used.

Each field is in one table: read, an engine setting, without effect (with the reason), or refused
(with the reason). `docs/compatibility.md` prints the tables. Loads no torch.
"""

from typing import Any, NamedTuple

# Fields that `SamplingParams` has under the same name.
SAME_NAME = (
    "temperature", "top_k", "top_p", "min_p", "do_sample", "repetition_penalty",
    "no_repeat_ngram_size", "max_new_tokens", "max_length", "min_new_tokens", "min_length",
    "eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens",
)  # fmt: skip

# Fields that are read under another name of `SamplingParams`.
OTHER_NAME = {
    "stop_strings": "stop",
    "bad_words_ids": "bad_words",
    "sequence_bias": "sequence_bias, and logit_bias for single tokens",
    "suppress_tokens": "logit_bias",
}

# Fields that are not sampling parameters, with what reads each field.
READ_ELSEWHERE = {
    "num_return_sequences": "generate_batch and managers",
    "continuous_batching_config": "RolloutConfig, as settings of the engine",
    "compile_config": "decode_compile_config and varlen_compile_config, as their fallback",
    "disable_compile": "the same two, which then have no fallback",
}

# Fields of transformers' `GenerationConfig` that sampling parameters correspond to.
COUNTERPARTS = {
    **{name: name for name in SAME_NAME},
    "sequence_bias": "sequence_bias",
    "stop": "stop_strings",
    "bad_words": "bad_words_ids",
    "logit_bias": "suppress_tokens, sequence_bias of single tokens",
}

_BEAMS = "acts in beam search only, and num_beams above 1 is refused"
_DRAFTS = "acts with generate's assistant_model only, and no argument here takes one"

# Fields that have no effect, whatever their value, with the reason.
NO_EFFECT = {
    "pad_token_id": "no sequence is padded; a matrix of prompts with padded rows is refused by it",
    "bos_token_id": "begins an empty prompt only, and an empty prompt is refused",
    "decoder_start_token_id": "acts in an encoder-decoder only, and such a model is refused",
    "use_cache": "keys are always cached, and the tokens are the same without a cache",
    "max_cache_len": "sizes a static cache, and the paged cache grows by blocks",
    "low_memory": "acts in contrastive search only, and penalty_alpha above 0 is refused",
    "early_stopping": _BEAMS,
    "length_penalty": _BEAMS,
    "renormalize_logits": "probabilities and log-probabilities are always normalized",
    "return_dict_in_generate": "every output is a record, a GenerationOutput",
    "transformers_version": "says which version saved the config",
    "num_assistant_tokens": _DRAFTS,
    "num_assistant_tokens_schedule": _DRAFTS,
    "assistant_confidence_threshold": _DRAFTS,
    "assistant_lookbehind": _DRAFTS,
    "target_lookbehind": _DRAFTS,
    "assistant_ensemble_weight": _DRAFTS,
    "max_matching_ngram_size": ("acts with prompt_lookup_num_tokens only, which is refused"),
}


class Refusal(NamedTuple):
    """Why a field is refused, and what to do."""

    neutral: tuple[Any, ...]
    """Values besides None that change nothing; the error advises the first value."""
    reason: str
    advice: str


_GENERATE = "use model.generate"
_PROCESSOR = "pass transformers' own processor in SamplingParams(logits_processors=...)"
_BEAM_SEARCH = "beam search is not available"
_TRUNCATION = "this truncation is not available"
_ONE_TOKEN = "a decode step samples one token of a sequence, without drafts"
_ONE_FORWARD = "generated tokens are sampled from one forward of one model"
_NOT_KEPT = "forwards keep no scores of the vocabulary"
_NO_STATES = "forwards keep no states of layers"
_SCORES = "SamplingParams(top_logprobs=k) delivers the k likeliest tokens of each step"
_FORWARD = "call model(...) on output.prompt_ids + output.generated_tokens"

# Fields that are refused unless their value is None or neutral.
REFUSED = {
    "num_beams": Refusal((1,), _BEAM_SEARCH, _GENERATE),
    "num_beam_groups": Refusal((1,), _BEAM_SEARCH, _GENERATE),
    "diversity_penalty": Refusal((0.0,), _BEAM_SEARCH, _GENERATE),
    "constraints": Refusal(
        (None,), _BEAM_SEARCH, "use model.generate, or SamplingParams(grammar=...)"
    ),
    "force_words_ids": Refusal(
        (None, []), _BEAM_SEARCH, "use model.generate, or SamplingParams(grammar=...)"
    ),
    "encoder_no_repeat_ngram_size": Refusal(
        (0,), "a decoder-only model has no encoder's prompt", "use no_repeat_ngram_size"
    ),
    "epsilon_cutoff": Refusal((0.0,), _TRUNCATION, "use min_p"),
    "eta_cutoff": Refusal((0.0,), _TRUNCATION, "use min_p"),
    "top_h": Refusal((None,), _TRUNCATION, "use min_p"),
    "typical_p": Refusal((1.0,), _TRUNCATION, f"use min_p, or {_PROCESSOR}"),
    "encoder_repetition_penalty": Refusal((1.0,), "no field here is this penalty", _PROCESSOR),
    "exponential_decay_length_penalty": Refusal(
        (None,), "no field here is this penalty", _PROCESSOR
    ),
    "watermarking_config": Refusal((None,), "no field here is a watermark", _PROCESSOR),
    "guidance_scale": Refusal((1,), _ONE_FORWARD, _GENERATE),
    "penalty_alpha": Refusal((0.0,), "contrastive search is not available", _GENERATE),
    "dola_layers": Refusal((None,), _ONE_FORWARD, _GENERATE),
    "token_healing": Refusal((False,), "a prompt is continued as it is", _GENERATE),
    "remove_invalid_values": Refusal(
        (False,), "a sequence with invalid logits fails by itself", "leave it out"
    ),
    "max_time": Refusal(
        (None,), "sequences end by tokens, not by time", "end them with cancel_request"
    ),
    "is_assistant": Refusal((False,), _ONE_TOKEN, _GENERATE),
    "use_mtp": Refusal((False,), _ONE_TOKEN, _GENERATE),
    "assistant_early_exit": Refusal((None,), _ONE_TOKEN, _GENERATE),
    "prompt_lookup_num_tokens": Refusal((None,), _ONE_TOKEN, _GENERATE),
    "speculation_type": Refusal((None,), _ONE_TOKEN, _GENERATE),
    "output_scores": Refusal((False,), _NOT_KEPT, _SCORES),
    "output_logits": Refusal((False,), _NOT_KEPT, _SCORES),
    "output_attentions": Refusal((False,), _NO_STATES, _FORWARD),
    "output_hidden_states": Refusal((False,), _NO_STATES, _FORWARD),
    "cache_implementation": Refusal(
        (
            None, "paged", "dynamic", "static", "sliding_window", "hybrid", "hybrid_chunked",
        ),
        "keys stay on the model's device, in the dtype that the model computes",
        "bound their memory by max_memory_percent of the RolloutConfig",
    ),
    "cache_config": Refusal(
        (None, {}),
        "it describes a quantized cache, which is not available",
        "set block_size and num_blocks of the RolloutConfig",
    ),
    "prefill_chunk_size": Refusal(
        (None,),
        "the engine cuts prompts by itself",
        "set max_batch_tokens of the RolloutConfig, the most prompt tokens of one forward",
    ),
}  # fmt: skip
