"""Options of a run over a data set, with their help texts.

Owns names, defaults, and the options that a resumed run must repeat. Loads no torch.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from cb_rollout.config.checks import known_fields_only
from cb_rollout.config.rollout import RolloutConfig
from cb_rollout.config.sampling import SamplingParams
from cb_rollout.errors import ConfigurationError

# The generation config that is saved with the model, or none.
GENERATION_CONFIGS = ("model", "none")

# Options that change no result.
RUN_OPTIONS = ("split", "subset", "max_num_seqs", "max_memory_percent", "dtype", "device")

# Names that vLLM and OpenAI's API use.
SYNONYMS = {"max_tokens": "max_new_tokens", "n": "num_return_sequences"}

_SAMPLING_HELP = {f.name: f.metadata["help"] for f in dataclasses.fields(SamplingParams)}


def _field(default: Any, help_text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help_text})


@known_fields_only(ConfigurationError, SYNONYMS)
@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Options of a run over a data set.

    Raises:
        ConfigurationError: an option is unknown or out of its range.
        InvalidRequestError: a sampling parameter is out of its range.
    """

    max_new_tokens: int | None = _field(
        None, "Longest completion, in tokens; None: 512, or fewer where the model takes fewer."
    )
    num_return_sequences: int = _field(1, "Completions of each row; their prompt is computed once.")
    temperature: float | None = _field(
        None, "Divides the logits; 0 is greedy. None: the generation config's, as for the next 3."
    )
    top_k: int | None = _field(None, _SAMPLING_HELP["top_k"])
    top_p: float | None = _field(None, _SAMPLING_HELP["top_p"])
    min_p: float | None = _field(None, _SAMPLING_HELP["min_p"])
    generation_config: str = _field(
        "model", "model: the one saved with the model; none: temperature 1, nothing truncated."
    )
    ignore_eos: bool = _field(False, "Generate on past the model's end of sequence.")
    seed: int | None = _field(None, "Make a run repeatable, interrupted or not; None: fresh draws.")
    system_prompt: str | None = _field(None, "A system message before each chat.")
    chat: bool = _field(False, "Make each prompt that is text a chat of one user message.")
    logprobs: bool = _field(False, "Write the log-probability of every token.")
    split: str = _field("train", "Split of a data set that is not a file.")
    subset: str | None = _field(None, "Subset of a data set that is no file; None: its only one.")
    max_num_seqs: int | None = _field(None, "Most sequences decoded together; None: by device.")
    max_memory_percent: float = _field(0.8, "Share of the free memory that the KV cache may take.")
    dtype: str = _field(
        "auto", "Of the weights: auto (the checkpoint's), float32, bfloat16, float16."
    )
    device: str = _field("auto", "Where to run; auto: a GPU where there is one, else the CPU.")

    def __post_init__(self) -> None:
        if not isinstance(self.num_return_sequences, int) or self.num_return_sequences < 1:
            raise ConfigurationError(
                f"num_return_sequences={self.num_return_sequences} is below 1."
            )
        if self.generation_config not in GENERATION_CONFIGS:
            why = "is neither model nor none."
            raise ConfigurationError(f"generation_config={self.generation_config!r} {why}")
        self.sampling_params(SamplingParams())
        self.rollout_config()

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return the sampling parameters; `defaults` apply to the options that are None."""
        fields: dict[str, Any] = {}
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(self, name)
            if value is not None:
                fields[name] = value
        if self.temperature:
            # A temperature above 0 asks for sampling, even if the model's generation config is
            # greedy.
            fields["do_sample"] = True
        return dataclasses.replace(
            defaults,
            **fields,
            max_new_tokens=self.max_new_tokens,
            max_length=None,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
        )

    def rollout_config(self) -> RolloutConfig:
        """Return the engine's settings, without a reserve for training."""
        return RolloutConfig(
            max_requests_per_batch=self.max_num_seqs,
            max_memory_percent=self.max_memory_percent,
            return_logprobs=self.logprobs,
            seed=self.seed,
            training_reserve_gib=0,
        )

    def shaping_results(self) -> dict[str, Any]:
        """Return the options that change results, by name; a resumed run must repeat them."""
        return {name: value for name, value in vars(self).items() if name not in RUN_OPTIONS}
