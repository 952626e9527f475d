"""Define `RolloutConfig`: every setting of a rollout, with its default, range and meaning.

Resolves nothing that needs a model or a device. Loads no torch.
"""

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

# Above every count that a machine holds: the memory plan answers with what it does hold.
MAX_COUNT = 2**62

# vLLM's names, and settings that belong to SamplingParams.
SYNONYMS = {
    "max_num_seqs": "max_requests_per_batch",
    "max_num_batched_tokens": "max_batch_tokens",
    "gpu_memory_utilization": "max_memory_percent",
    "enable_prefix_caching": "allow_block_sharing",
    "dtype": "rollout_dtype",
    "temperature": "SamplingParams(temperature=...)",
    "max_new_tokens": "SamplingParams(max_new_tokens=...)",
}


@known_fields_only(ConfigurationError, SYNONYMS, own_settings)
@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Settings of a rollout generator; every one is honoured or refused, none ignored.

    transformers' own names are taken too: `page_size` is `block_size`.

    Raises:
        ConfigurationError: a field is unknown, out of range, or cannot be honoured.
    """

    block_size: int = setting(32, "Tokens per KV cache block.", integer(1, most=MAX_COUNT))
    num_blocks: int | None = setting(
        None,
        "KV cache blocks; None: as many as the workload uses, within max_memory_percent.",
        integer(1, most=MAX_COUNT),
    )
    max_batch_tokens: int | None = setting(
        None,
        "Most prompt tokens in one forward, any padding included; None: chosen by device.",
        integer(1),
    )
    max_requests_per_batch: int | None = setting(
        None, "Most sequences decoded together; None: chosen by device.", integer(1, most=MAX_COUNT)
    )
    max_memory_percent: float = setting(
        0.8,
        "Share of the free memory, after the training reserve, that the KV cache may take.",
        number(lambda v: 0 < v <= 1, "is outside (0, 1]; 0.4 is 40%"),
    )
    max_blocks_per_request: int | None = setting(
        None,
        "Most KV cache blocks of one sequence; None or 0: bounded by the model and the cache.",
        integer(0),
    )
    allow_block_sharing: bool = setting(
        True, "Share the blocks of equal prefixes between sequences under one policy version."
    )
    use_async_batching: bool | None = setting(
        None,
        "Launch a decode step before the last one's tokens have come; "
        "None: where steps are CUDA graphs, and no state is recurrent.",
        one_of(None, True, False),
    )
    use_cuda_graph: bool | tuple[bool, bool] | None = setting(
        None,
        "Decode under CUDA graphs; None: where device and model allow; False: also no trace of the "
        "forward on a CPU; a pair, as transformers has it: of prefill, which must be False, and of "
        "decode.",
        one_of(None, True, False, (False, True), (False, False), [False, True], [False, False]),
    )
    q_padding_interval_size: int = setting(
        0, "Rows of a decode graph are rounded up to a multiple of this; 0: chosen."
    )
    kv_padding_interval_size: int = setting(
        0, "Keys of a decode graph are not padded; not available.", one_of(0)
    )
    max_cached_graphs: int = setting(0, "Decode graphs kept; 0: chosen.")
    varlen_compile_config: object | None = setting(
        None, "torch.compile of prefill; not available.", one_of(None)
    )
    decode_compile_config: object | None = setting(
        None,
        "torch.compile of decode steps with settings of your own; not available.",
        one_of(None),
    )
    use_default_compile_configs: bool | None = setting(
        None,
        "Have inductor compile decode steps; None: where they are CUDA graphs, and on a CPU after "
        "2,000 steps; prefill is not compiled.",
        one_of(None, True, False),
    )
    scheduler_type: str = setting(
        "fifo",
        "fifo: in order of arrival; prefill when waiting >= running / 4, or after 8 decode steps; "
        "prefill_first: decode only when no prompt can be admitted.",
        SchedulerType,
    )
    return_logprobs: bool = setting(True, "Deliver the log-probability of every sampled token.")
    max_queue_size: int = setting(
        0, "Most requests that may wait; one more raises QueueFullError. 0: unlimited."
    )
    seed: int | None = setting(
        None,
        "Seed of the random draws; None: the trainer's seed when attached, else fresh.",
        integer(0),
    )

    weight_sync: str = setting(
        "auto",
        "shared: generate with the training module; copy: with a copy that each sync updates in "
        "place, adapters merged; auto: copy if sharded, if autocast casts the weights anyway, or, "
        "with adapters, if a GPU has room; else shared.",
        WeightSync,
    )
    tensor_parallel_size: int = setting(
        1,
        "Neighbouring processes over which the layers of a copy are split, by transformers' tensor "
        "parallelism; they roll out the prompts of all of them together. Of a RolloutPool: actors "
        "of each worker. 1: each process has the whole model, or its part of a split one.",
        integer(1),
    )
    rollout_dtype: str = setting(
        "auto",
        "auto: what the trainer's forward computes in; else autocast to this dtype or, with "
        "weight_sync='copy' and weights that are not float32, hold the copy in it.",
        RolloutDtype,
    )
    verify_weight_sync: bool = setting(
        False, "After a sync compare every tensor of a copy; WeightSyncError if any differs."
    )
    logprobs_mode: str = setting(
        "policy",
        "policy: log-softmax of logits/temperature over the whole vocabulary, as the loss "
        "recomputes it; processed: after penalties, bans and truncation too.",
        LogprobsMode,
    )
    numerics: str = setting(
        "fast",
        "fast: log-probabilities equal the trainer's to rounding; bitwise: in every bit, whatever "
        "else is in the batch; on CPUs.",
        Numerics,
    )
    sampling_mask: str = setting(
        "ignore",
        "ignore: the loss uses the whole vocabulary; replay: each token's top-k, top-p or min-p "
        "set is recorded, and the log-probabilities of rollout and loss are over that set alone.",
        SamplingMaskMode,
    )
    router_replay: bool = setting(
        False,
        "Mixture of experts: record the experts that each token takes in the rollout, prompts "
        "included; every forward of the loss takes them again, with its own scores of them.",
    )
    replay_num_rollouts: int = setting(
        4,
        "Earlier training rollouts whose sampling masks and experts are kept for a trainer class "
        "of your own that trains on their rows again; 0: none.",
    )
    old_logps: str = setting(
        "auto",
        "trainer: the trainer's forward recomputes the old log-probabilities; rollout: the sampled "
        "ones are the old ones, and that forward is saved; auto: saved once a verification has "
        "found the two equal to rounding; the old ones are then the loss's own where a rollout "
        "trains one step, else the sampled ones.",
        OldLogps,
    )
    loss_forward: str = setting(
        "packed",
        "trainer: the loss computes the trainer's padded batch; packed: no padding, each common "
        "prefix once, and no gradient of rows without an advantage.",
        LossForward,
    )
    loss_tokens_per_forward: int | str = setting(
        "auto",
        "Tokens of one forward of loss_forward='packed'; a larger batch is cut, and the backward "
        "pass computes each part again; auto: all of the trainer's micro-batch.",
        integer(1, also=("auto",)),
    )
    verify_every_steps: int = setting(
        10, "Recompute some sequences with a plain forward every this many rollouts; 0: never."
    )
    verify_num_sequences: int = setting(
        2, "How many sequences each verification recomputes.", integer(1)
    )
    max_logprob_drift: float | None = setting(
        None,
        "Act as on_logprob_drift says beyond this difference, in nats; None: only report it.",
        amount("nats", None),
    )
    on_logprob_drift: str = setting(
        "raise",
        "raise: LogprobDriftError; recompute: warn, and from then on old_logps='trainer'.",
        OnLogprobDrift,
    )
    record_num_sequences: int = setting(
        4, "Sequences per rollout written, token by token, to the run's records; 0: none."
    )
    save_rollouts: str | None = setting(
        None,
        "Folder that gets every rollout of a trainer as Parquet files, to train from again by "
        "SavedRollouts; None: none.",
        optional_path,
    )
    concurrent_tools: bool = setting(
        True,
        "Call the tools of all conversations of a turn at the same time, each call in a "
        "thread of its own; off: one after the other, on the trainer's thread.",
    )
    tool_timeout_seconds: float | None = setting(
        None,
        "Longest time of one tool call; the conversation is told of the ToolTimeoutError and goes "
        "on. None: unlimited.",
        amount("seconds", None),
    )
    release_cache: str = setting(
        "between_steps",
        "between_steps: give the KV memory back while training runs; with_weights: also that of a "
        "copy's weights and of CUDA graphs; never: keep.",
        ReleaseCache,
    )
    training_reserve_gib: float | str = setting(
        "auto",
        "GiB that training will still allocate, kept out of the KV budget; auto: estimated.",
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
        if self.numerics == Numerics.BITWISE:
            # No two forwards could be the same bits.
            for name, reason in (
                ("rollout_dtype", "computes in another dtype than the trainer"),
                ("use_default_compile_configs", "compiles sums in another order"),
            ):
                if (value := getattr(self, name)) not in (RolloutDtype.AUTO, None, False):
                    raise refused(
                        "bitwise, another setting", name=name, value=repr(value), reason=reason
                    )

    @property
    def wants_graphs(self) -> bool | None:
        """True: decode under CUDA graphs; False: never; None: where device and model allow."""
        asked = self.use_cuda_graph
        asked = asked[1] if isinstance(asked, tuple | list) else asked
        return None if asked is None else bool(asked)

    @property
    def looks_ahead(self) -> bool:
        """True: launch a CUDA graph before the last step's tokens have come."""
        return self.use_async_batching is None or bool(self.use_async_batching)


# Fields that only an attached trainer, or only a RolloutGenerator, acts on. Each maps to the values
# beside its default that ask for nothing.
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
    """Raise `ConfigurationError` with a `complaint` for a field that nothing here acts on.

    `fields` maps names to the values beside the default that ask for nothing.
    """
    for name, idle in fields.items():
        value, default = getattr(config, name), getattr(RolloutConfig, name)
        if value != default and value not in idle:
            raise ConfigurationError(f"{name}={value!r}: {complaint}; or leave it at {default!r}.")
