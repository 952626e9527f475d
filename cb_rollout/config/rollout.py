"""Define `RolloutConfig`: every setting of a rollout, with its default, range and meaning.

Does not depend on a model or a device; values that do are chosen elsewhere. Loads no torch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cb_rollout.config.checks import (
    amount,
    check_fields,
    integer,
    known_fields_only,
    number,
    one_of,
    optional_path,
    setting,
)
from cb_rollout.config.combinations import refused
from cb_rollout.config.compilation import MAX_LEVEL, compile_setting
from cb_rollout.config.enums import (
    LogprobsMode,
    LossForward,
    Numerics,
    OldLogps,
    OnLogprobDrift,
    ReleaseCache,
    RolloutDtype,
    SamplingMaskMode,
    SchedulerType,
    WeightSync,
)
from cb_rollout.config.reference import own_settings
from cb_rollout.errors import ConfigurationError

# Larger than any count that a machine can hold; the memory plan finds how many fit.
MAX_COUNT = 2**62

# Names of vLLM, SGLang and others, and settings that belong to SamplingParams.
SYNONYMS = {
    "max_num_seqs": "max_requests_per_batch",
    "max_running_requests": "max_requests_per_batch",
    "max_batch_size": "max_requests_per_batch",
    "context_length": "max_model_len",
    "max_seq_len": "max_model_len",
    "max_seq_length": "max_model_len",
    "max_total_tokens": "max_model_len",
    "num_gpu_blocks": "num_blocks",
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_blocks": "num_blocks",
    "chunked_prefill_size": "max_batch_tokens",
    "mem_fraction_static": "max_memory_percent",
    "gpu_memory_fraction": "max_memory_percent",
    "swap_space": "cpu_offload_space",
    "enforce_eager": "use_cuda_graph",
    "old_logprobs": "old_logps",
    "max_num_batched_tokens": "max_batch_tokens",
    "gpu_memory_utilization": "max_memory_percent",
    "enable_prefix_caching": "allow_block_sharing",
    "dtype": "rollout_dtype",
    "temperature": "SamplingParams(temperature=...)",
    "max_new_tokens": "SamplingParams(max_new_tokens=...)",
    "max_tokens": "SamplingParams(max_new_tokens=...)",
    "top_p": "SamplingParams(top_p=...)",
    "top_k": "SamplingParams(top_k=...)",
}


@known_fields_only(ConfigurationError, SYNONYMS, own_settings)
@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Settings of a rollout generator. A setting that cannot be honoured raises an error.

    transformers' names for a setting work too, such as `page_size` for `block_size`.

    Raises:
        ConfigurationError: a field is unknown, out of range, or cannot be honoured.
    """

    block_size: int = setting(32, "Tokens per KV cache block.", integer(1, most=MAX_COUNT))
    num_blocks: int | None = setting(
        None,
        "Number of KV cache blocks; None: as many as the workload needs, within "
        "max_memory_percent.",
        integer(1, most=MAX_COUNT),
    )
    max_batch_tokens: int | None = setting(
        None,
        "Maximum prompt tokens in one forward, padding included; None: a default for the device.",
        integer(1),
    )
    max_requests_per_batch: int | None = setting(
        None,
        "Maximum sequences that are decoded together; None: a default for the device.",
        integer(1, most=MAX_COUNT),
    )
    max_memory_percent: float = setting(
        0.8,
        "Share of the free memory, after the training reserve, that the KV cache may use.",
        number(lambda v: 0 < v <= 1, "is outside (0, 1]; 0.4 is 40%"),
    )
    max_blocks_per_request: int | None = setting(
        None,
        "Accepted for compatibility with transformers, where it is the size of a block table. "
        "Here, 0 decodes with the model's own attention, without paged kernels, CUDA graphs or "
        "compilation; other values change nothing. To limit a sequence's length, set "
        "max_model_len.",
        integer(0),
    )
    max_model_len: int | None = setting(
        None,
        "Maximum tokens of one sequence, prompt included; None: limited by model and cache.",
        integer(1, most=MAX_COUNT),
    )
    allow_block_sharing: bool = setting(
        True, "Let sequences of one policy version share the blocks of equal prefixes."
    )
    use_async_batching: bool | None = setting(
        None,
        "Launch a decode step before the tokens of the previous one have arrived; None: only if "
        "steps are CUDA graphs and the model has no recurrent states.",
        one_of(None, True, False),
    )
    use_cuda_graph: bool | tuple[bool, bool] | None = setting(
        None,
        "Decode with CUDA graphs; None: if device and model allow it; False: never, which on a CPU "
        "also turns off the traced forward. As in transformers, a pair is (prefill, decode); "
        "prefill must be False.",
        one_of(None, True, False, (False, True), (False, False), [False, True], [False, False]),
    )
    q_padding_interval_size: int = setting(
        0,
        "For CUDA graphs and for compiled forwards of fixed sizes, round the number of sequences "
        "(in prefill: of prompt tokens) up to a multiple of this. A larger value means fewer "
        "graphs and more padding; 0: chosen automatically.",
    )
    kv_padding_interval_size: int = setting(
        0,
        "Accepted for compatibility with transformers. It changes nothing, because a CUDA graph "
        "here reads sequences of any length.",
    )
    max_cached_graphs: int = setting(
        0,
        "Maximum number of CUDA graphs to keep for decode steps, and of sizes that a compile "
        "config with dynamic=False compiles; 0: chosen automatically.",
    )
    varlen_compile_config: object | None = setting(
        None,
        "torch.compile settings for packed prefill: transformers' CompileConfig, or a dict of its "
        "fields. None: follow default_compile_level, then the generation config's compile_config; "
        "if neither is set, do not compile.",
        compile_setting("varlen_compile_config"),
    )
    decode_compile_config: object | None = setting(
        None,
        "torch.compile settings for decode steps, in the same forms. None: follow "
        "default_compile_level, then the generation config's compile_config, then "
        "use_default_compile_configs.",
        compile_setting("decode_compile_config"),
    )
    default_compile_level: int = setting(
        0,
        "Compile prefill and decode steps that have no compile config of their own. 1: inductor's "
        "defaults; 2: mode='max-autotune-no-cudagraphs'; 3: the same, with one graph per size; 0: "
        "follow the other settings.",
        integer(0, most=MAX_LEVEL),
    )
    use_default_compile_configs: bool | None = setting(
        None,
        "Compile decode steps with inductor and the engine's own settings; None: on a GPU if steps "
        "are CUDA graphs, but under attach not for a training of fewer than 20,000 decode steps; "
        "on a CPU, after 2,000 decode steps. In a ContinuousBatchingConfig, True sets "
        "default_compile_level=3, as it does in transformers.",
        one_of(None, True, False),
    )
    scheduler_type: str = setting(
        "fifo",
        "fifo: in order of arrival; prefill when waiting >= running / 4, or after 8 decode steps; "
        "prefill_first: decode only when no prompt can be admitted.",
        SchedulerType,
    )
    safety_margin: float | None = setting(
        None,
        "Share of the KV cache blocks that must be free before another sequence is admitted; "
        "0: none; None: one block per running sequence.",
        number(lambda v: 0 <= v <= 1, "is neither None nor a share in [0, 1]; 0.15 is 15%", None),
    )
    return_logprobs: bool = setting(True, "Return the log-probability of every sampled token.")
    cpu_offload_space: float | None = setting(
        0.0,
        "GiB of host memory for the keys of preempted sequences, which are copied back if that is "
        "faster than recomputing them. 0: always recompute; None: as much as "
        "cpu_offload_space_safety_threshold allows. No effect on a CPU, where the keys are "
        "already in host memory.",
        amount("GiB", None),
    )
    cpu_offload_space_safety_threshold: float = setting(
        0.8,
        "Largest share of the available host memory for cpu_offload_space; a larger value is "
        "reduced to it, with a warning. 0: offload nothing; 1: use all of it.",
        number(lambda v: 0 <= v <= 1, "is outside [0, 1]; 0.8 is 80%"),
    )
    cpu_group_timeout: float | None = setting(
        None,
        "Seconds that a process of a tensor-parallel group waits for the other processes before "
        "it raises an error; None: the timeout of init_process_group.",
        number(
            lambda v: 0 < v < math.inf, "is neither None nor a finite number > 0 of seconds", None
        ),
    )
    max_queue_size: int = setting(
        0, "Maximum number of waiting requests; another one raises QueueFullError. 0: unlimited."
    )
    seed: int | None = setting(
        None,
        "Seed for sampling; None: the trainer's seed under attach, otherwise a random one.",
        integer(0),
    )

    weight_sync: str = setting(
        "auto",
        "shared: generate with the training module; copy: generate with a copy, with adapters "
        "merged, that each sync updates in place; auto: copy if the model is sharded, if autocast "
        "casts the weights anyway, or if the model has adapters and the GPU has room; otherwise "
        "shared.",
        WeightSync,
    )
    tensor_parallel_size: int = setting(
        1,
        "Number of neighbouring processes that split each layer of a copy, with transformers' "
        "tensor parallelism, and generate all their prompts together. In a RolloutPool: actors "
        "per worker. 1: each process has the whole model, or its part of a model that is already "
        "split.",
        integer(1),
    )
    rollout_dtype: str = setting(
        "auto",
        "auto: the dtype of the trainer's forward. With another dtype, the rollout runs under "
        "autocast to it or, with weight_sync='copy' and weights that are not float32, stores the "
        "copy in it.",
        RolloutDtype,
    )
    verify_weight_sync: bool = setting(
        False,
        (
            "After each sync, compare every tensor of the copy; raise WeightSyncError if one "
            "differs."
        ),
    )
    logprobs_mode: str = setting(
        "policy",
        "policy: log-softmax of logits/temperature over the whole vocabulary, as the loss "
        "recomputes it; processed: the same after penalties, bans and truncation.",
        LogprobsMode,
    )
    numerics: str = setting(
        "fast",
        "fast: log-probabilities equal the trainer's up to rounding; bitwise: they are bit for "
        "bit equal, whatever else is in the batch (CPUs only).",
        Numerics,
    )
    sampling_mask: str = setting(
        "ignore",
        "Applies to top_k, top_p and min_p. ignore: the loss normalizes over the whole "
        "vocabulary, although tokens were sampled from a part of it; replay: record the token ids "
        "that truncation kept for each sampled token, and normalize over these only, in the "
        "rollout and in the loss.",
        SamplingMaskMode,
    )
    router_replay: bool = setting(
        False,
        "For a mixture of experts: record each token's experts in the rollout, prompts included, "
        "and use the same experts in every forward of the loss, with the loss's own scores.",
    )
    replay_num_rollouts: int = setting(
        4,
        "Number of earlier training rollouts whose sampling masks and experts are kept, for a "
        "trainer class of your own that trains on their rows again; 0: none.",
    )
    old_logps: str = setting(
        "auto",
        "Source of the old log-probabilities, those of the policy before the update. trainer: "
        "another forward of the trainer, as in TRL; rollout: those that sampling recorded, "
        "without that forward; auto: as trainer, until a verification finds both equal up to "
        "rounding. From then on without the forward: the loss's own if each rollout trains one "
        "step, otherwise the sampled ones.",
        OldLogps,
    )
    loss_forward: str = setting(
        "packed",
        "How the loss runs the model. packed: all completions in one row without padding, each "
        "shared prompt once, and completions without an advantage without gradients; trainer: the "
        "trainer's padded batch.",
        LossForward,
    )
    loss_tokens_per_forward: int | str = setting(
        "auto",
        "Maximum tokens in one forward of loss_forward='packed'. A larger batch is cut into "
        "parts, which saves memory but recomputes each part in the backward pass; auto: the whole "
        "micro-batch.",
        integer(1, also=("auto",)),
    )
    verify_every_steps: int = setting(
        10,
        (
            "Every N rollouts, recompute some sequences with a plain forward and compare them; 0: "
            "never."
        ),
    )
    verify_num_sequences: int = setting(
        2, "Number of sequences that each verification recomputes.", integer(1)
    )
    max_logprob_drift: float | None = setting(
        None,
        "Largest allowed difference, in nats, between a sampled log-probability and the "
        "trainer's; on_logprob_drift says what happens beyond it. None: only report the "
        "difference.",
        amount("nats", None),
    )
    on_logprob_drift: str = setting(
        "raise",
        "What to do beyond max_logprob_drift. raise: raise LogprobDriftError; recompute: warn, "
        "and use old_logps='trainer' from then on.",
        OnLogprobDrift,
    )
    record_num_sequences: int = setting(
        4, "Number of sequences per rollout to write to the run's records, token by token; 0: none."
    )
    save_rollouts: str | None = setting(
        None,
        "Folder in which to save every rollout of a trainer as Parquet files, so that "
        "SavedRollouts can train from them again; None: save none.",
        optional_path,
    )
    concurrent_tools: bool = setting(
        True,
        "In each turn, call the tools of all conversations at the same time, each in its own "
        "thread; False: one after the other, on the trainer's thread.",
    )
    tool_timeout_seconds: float | None = setting(
        None,
        "Time limit of one tool call, in seconds; beyond it, the conversation gets a "
        "ToolTimeoutError as the answer and continues without tools. None: unlimited.",
        amount("seconds", None),
    )
    release_cache: str = setting(
        "between_steps",
        "between_steps: free the KV memory while the trainer trains; with_weights: also free a "
        "copy's weights and the CUDA graphs; never: keep everything.",
        ReleaseCache,
    )
    training_reserve_gib: float | str = setting(
        "auto",
        "GiB to keep free for memory that training has not allocated yet; auto: estimated.",
        amount("GiB", "auto"),
    )

    def __post_init__(self) -> None:
        check_fields(self, ConfigurationError)
        if self.use_async_batching and self.wants_graphs is False:
            raise refused("async batching, no graphs", graphs=repr(self.use_cuda_graph))
        is_guarded = self.old_logps == OldLogps.ROLLOUT and self.max_logprob_drift is not None
        if self.on_logprob_drift == OnLogprobDrift.RECOMPUTE and not is_guarded:
            raise refused("drift, sampled old logps")
        if self.tool_timeout_seconds is not None and not self.concurrent_tools:
            raise refused("tool timeout, one thread", seconds=f"{self.tool_timeout_seconds:g}")
        if self.default_compile_level and self.use_default_compile_configs is False:
            raise refused("compile level, no default", level=self.default_compile_level)
        if self.numerics == Numerics.BITWISE:
            # With any of these set, the two forwards cannot agree bit for bit.
            for name, reason in (
                ("rollout_dtype", "computes in another dtype than the trainer"),
                ("use_default_compile_configs", "compiles sums in another order"),
                ("default_compile_level", "compiles sums in another order"),
                ("varlen_compile_config", "compiles sums in another order"),
                ("decode_compile_config", "compiles sums in another order"),
            ):
                value = getattr(self, name)
                if value not in (RolloutDtype.AUTO, None, False):
                    raise refused(
                        "bitwise, another setting", name=name, value=repr(value), reason=reason
                    )

    @property
    def wants_graphs(self) -> bool | None:
        """True: decode with CUDA graphs; False: never; None: if device and model allow it."""
        asked = self.use_cuda_graph
        if isinstance(asked, tuple | list):
            # The pair is (prefill, decode).
            asked = asked[1]
        if asked is None:
            return None
        return bool(asked)

    @property
    def looks_ahead(self) -> bool:
        """True: launch a CUDA graph before the previous step's tokens have arrived."""
        return self.use_async_batching is None or bool(self.use_async_batching)


# Fields that only an attached trainer, or only a RolloutGenerator, acts on. Each maps to the values
# besides its default that have no effect.
TRAINER_FIELDS: dict[str, tuple[Any, ...]] = {
    "old_logps": (), "loss_forward": (), "loss_tokens_per_forward": (),
    "verify_every_steps": (0,), "verify_num_sequences": (),
    "max_logprob_drift": (), "on_logprob_drift": (), "record_num_sequences": (0,),
    "save_rollouts": (), "replay_num_rollouts": (0,),
    "concurrent_tools": (), "tool_timeout_seconds": (),
}  # fmt: skip
GENERATOR_FIELDS: dict[str, tuple[Any, ...]] = {
    "weight_sync": ("shared",), "tensor_parallel_size": (), "verify_weight_sync": (),
}  # fmt: skip


def require_unused(
    config: RolloutConfig, fields: Mapping[str, tuple[Any, ...]], complaint: str
) -> None:
    """Raise `ConfigurationError` if a field is set that has no effect here.

    Args:
        config: the settings to check.
        fields: names, each with the values besides the default that are allowed.
        complaint: the reason, for the error's text.
    """
    for name, idle in fields.items():
        value = getattr(config, name)
        default = getattr(RolloutConfig, name)
        if value != default and value not in idle:
            raise ConfigurationError(f"{name}={value!r}: {complaint}; or leave it at {default!r}.")
