"""`RolloutConfig`: every setting of a rollout, what it means, and which values can be honoured.

Owns names, defaults and ranges; resolves nothing that needs a model or a device. Loads no torch.
"""

from dataclasses import dataclass, field
from typing import Any

from cb_rollout.config.rules import CompileSettings, compile_settings, require_valid
from cb_rollout.config.validation import known_fields_only
from cb_rollout.errors import ConfigurationError

NEIGHBOURS_WORDS = {
    "max_num_seqs": "max_requests_per_batch",
    "max_num_batched_tokens": "max_batch_tokens",
    "gpu_memory_utilization": "max_memory_percent",
    "enable_prefix_caching": "allow_block_sharing",
    "kv_cache_dtype": "kv_dtype",
    "dtype": "rollout_dtype",
    "temperature": "SamplingParams(temperature=...)",
    "max_new_tokens": "SamplingParams(max_new_tokens=...)",
}
# What vLLM calls the same thing, and what is looked for here and is elsewhere.


def _setting(default: Any, help_text: str, cost: str = "") -> Any:
    """A field with what it means, and what it costs or when to touch it."""
    return field(default=default, metadata={"help": help_text, "cost": cost})


@known_fields_only(ConfigurationError, NEIGHBOURS_WORDS)
@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Settings of a rollout generator; every one is honoured or refused, none ignored.

    Raises:
        ConfigurationError: a field is unknown, out of range, or cannot be honoured; the message
            says what to set instead.
    """

    block_size: int = _setting(
        32,
        "Tokens per KV cache block.",
        cost="Larger: less bookkeeping, more waste in last blocks and less shared.",
    )
    num_blocks: int | None = _setting(
        None,
        "KV cache blocks; None: as many as the workload uses, within max_memory_percent.",
        cost="Set it for a cache of a known size; it is then taken at once.",
    )
    max_batch_tokens: int | None = _setting(
        None,
        "Most prompt tokens in one forward, padding included; None: chosen by device.",
        cost="Lower it where prompts run out of memory; higher, prompts start sooner.",
    )
    max_requests_per_batch: int | None = _setting(
        None,
        "Most sequences decoded together; None: chosen by device.",
        cost="Lower it to bound a decode step's memory and time.",
    )
    max_memory_percent: float = _setting(
        0.8,
        "Share of the free memory, after the training reserve, that the KV cache may take.",
        cost="Lower it where training runs out of memory.",
    )
    max_blocks_per_request: int | None = _setting(
        None,
        "Most KV cache blocks of one sequence; None or 0: bounded by the model and the cache.",
        cost="Set it to bound what one sequence may take from the others.",
    )
    allow_block_sharing: bool = _setting(
        True,
        "Share the blocks of equal prefixes between sequences under one policy version.",
        cost="Off costs a copy of the prompt per completion; for comparisons only.",
    )
    use_async_batching: bool | None = _setting(
        None,
        "Launch a decode step before the last one's tokens have come, unless drafts are checked; "
        "None: where steps are CUDA graphs.",
        cost="Off leaves the device idle between steps; for comparisons.",
    )
    use_cuda_graph: bool | tuple[bool, bool] | None = _setting(
        None,
        "Decode under CUDA graphs; None: where device and model allow; False: also no trace of the "
        "forward on a CPU; a pair, as transformers has it: of prefill, which must be False, and of "
        "decode.",
        cost="Off saves the graphs' memory and the seconds of capturing them; see gpu.md.",
    )
    q_padding_interval_size: int = _setting(
        0,
        "Rows of a decode graph are rounded up to a multiple of this; 0: chosen.",
        cost="Larger: fewer graphs to capture, more rows of padding.",
    )
    kv_padding_interval_size: int = _setting(
        0,
        "A decode graph splits keys for the longest row, rounded up to a multiple of this; 0: "
        "chosen.",
        cost="Larger: fewer graphs to capture, more splits than short rows need.",
    )
    max_cached_graphs: int = _setting(
        0,
        "Decode graphs kept; 0: chosen.",
        cost="Fewer take less memory, and are captured again when needed again.",
    )
    varlen_compile_config: object | None = _setting(
        None, "torch.compile of prefill; not available."
    )
    decode_compile_config: object | None = _setting(
        None,
        "torch.compile of decode steps on a CPU: a transformers CompileConfig, or a dict of its "
        "fields.",
        cost="Needs a C++ compiler, and seconds of compiling; see gpu.md.",
    )
    use_default_compile_configs: bool = _setting(
        False,
        "torch.compile of decode steps on a CPU, with inductor's defaults; prefill is not "
        "compiled.",
        cost="As decode_compile_config; for long runs.",
    )
    num_speculative_tokens: int | None = _setting(
        None,
        "Most tokens of a draft, looked up in what a sequence and its group have said and checked "
        "by a decode step of few sequences; what is sampled stays the same. None: chosen; 0: none.",
        cost="Set 0 to compare.",
    )
    scheduler_type: str = _setting(
        "fifo",
        "fifo: in order of arrival; prompts run once they are many enough to be worth the decode "
        "step that they delay, or after 8 steps; prefill_first: decode only when no prompt can be "
        "admitted.",
        cost="prefill_first fills the batch sooner, while running sequences wait.",
    )
    return_logprobs: bool = _setting(
        True,
        "Deliver the log-probability of every sampled token.",
        cost="Off saves nothing but the copies in the outputs.",
    )
    max_queue_size: int = _setting(
        0,
        "Most requests that may wait; one more raises QueueFullError. 0: unlimited.",
        cost="Set it where many threads submit, as in a service.",
    )
    seed: int | None = _setting(
        None,
        "Seed of the random draws; None: the trainer's seed when attached, else fresh.",
        cost="Set it to have the same run twice.",
    )

    weight_sync: str = _setting(
        "auto",
        "shared: generate with the training module; copy: with a copy that each sync updates in "
        "place; auto: copy if sharded or if autocast casts the weights anyway, else shared.",
        cost="A copy costs its memory and a copy per sync; see weights.md.",
    )
    rollout_dtype: str = _setting(
        "auto",
        "auto: what the trainer's forward computes in; else autocast to this dtype or, with "
        "weight_sync='copy' and weights that are not float32, hold the copy in it.",
        cost="A smaller dtype is faster, and its log-probabilities are not the trainer's.",
    )
    verify_weight_sync: bool = _setting(
        False,
        "After a sync compare every tensor of a copy; WeightSyncError if any differs.",
        cost="Costs one pass over the weights per sync.",
    )
    logprobs_mode: str = _setting(
        "policy",
        "policy: log-softmax of logits/temperature over the whole vocabulary (what the loss "
        "recomputes); processed: after penalties, bans and truncation too (what was sampled from).",
        cost="Under truncation policy ignores it and processed measures it; see training.md.",
    )
    sampling_mask: str = _setting(
        "ignore",
        "ignore: the loss is of the whole vocabulary, whatever was sampled from; replay: each "
        "token's top-k, top-p or min-p set is kept, and log-probabilities are over it alone, here "
        "and in the loss.",
        cost="replay costs 4 bytes per kept token id, and the loss's logits whole.",
    )
    old_logps: str = _setting(
        "trainer",
        "trainer: the trainer's forward recomputes the old log-probabilities; rollout: the sampled "
        "ones are the old ones, and that forward is saved.",
        cost="rollout saves a forward per rollout; set max_logprob_drift with it.",
    )
    verify_every_steps: int = _setting(
        10,
        "Recompute some sequences with a plain forward every this many rollouts; 0: never.",
        cost="Costs verify_num_sequences forwards each time.",
    )
    verify_num_sequences: int = _setting(
        2,
        "How many sequences each verification recomputes.",
        cost="Raise it when looking for a difference.",
    )
    max_logprob_drift: float | None = _setting(
        None,
        "Act as on_logprob_drift says beyond this difference, in nats; None: only report it.",
        cost="Set it once the run's own drift is known.",
    )
    on_logprob_drift: str = _setting(
        "raise",
        "raise: LogprobDriftError; recompute: warn, and from then on old_logps='trainer'.",
        cost="recompute costs the saved forward from then on.",
    )
    record_num_sequences: int = _setting(
        4,
        "Sequences per rollout written, token by token, to the run's records; 0: none.",
        cost="Costs disk, one line per sequence.",
    )
    balance_ranks: bool = _setting(
        False,
        "Deal each rollout's prompts over the data-parallel processes by expected length; every "
        "process must generate at the same time.",
        cost="Costs an exchange of prompts and moved completions per rollout; see distributed.md.",
    )
    release_cache: str = _setting(
        "between_steps",
        "between_steps: give the KV memory back while training runs; never: keep.",
        cost="between_steps costs an allocation per rollout; never: its memory while training.",
    )
    training_reserve_gib: float | str = _setting(
        "auto",
        "GiB that training will still allocate, kept out of the KV budget; auto: estimated.",
        cost="Set it where the estimate is wrong: another optimizer, long activations.",
    )
    kv_dtype: str = _setting(
        "auto",
        "auto: keep keys and values as the model makes them; float8_e4m3fn: rounded, on GPUs that "
        "have it.",
        cost="float8 holds two or four times as many; log-probabilities drift from the trainer's "
        "by its rounding, and decode steps are gathered, without kernels or CUDA graphs.",
    )
    cpu_offload_gib: float = _setting(
        0.0,
        "GiB of host memory for the keys of preempted sequences; 0: they are computed anew.",
        cost="Set it on a GPU where rollout/preemptions is high; on a CPU raise num_blocks.",
    )

    def __post_init__(self) -> None:
        """Check every type and range, and refuse what cannot be honoured."""
        require_valid(self)

    @property
    def compiles_decode(self) -> CompileSettings | None:
        """How decode steps are compiled; None: they are not."""
        default = CompileSettings() if self.use_default_compile_configs else None
        return compile_settings("decode_compile_config", self.decode_compile_config) or default

    @property
    def wants_graphs(self) -> bool | None:
        """Whether decode steps should run as CUDA graphs; None: where they can."""
        asked = self.use_cuda_graph
        asked = asked[1] if isinstance(asked, tuple | list) else asked
        return None if asked is None else bool(asked)

    @property
    def looks_ahead(self) -> bool:
        """Whether graphs are launched before the results of the last are known."""
        return self.use_async_batching is None or bool(self.use_async_batching)
