"""List what each setting of `RolloutConfig` costs, or when to change it.

`docs/configuration.md` is written from this table; the meaning of a setting is its help text.
"""

COSTS = {
    "block_size": "Larger: less bookkeeping, more unused room in last blocks, and less sharing.",
    "num_blocks": "Set it for a cache of a fixed size, which is allocated at once.",
    "max_batch_tokens": "Lower it if prompts run out of memory; higher, prompts start sooner.",
    "max_requests_per_batch": "Lower it to bound a decode step's memory and time.",
    "max_memory_percent": "Lower it if training runs out of memory.",
    "max_blocks_per_request": "0 is slower; for comparisons with the model's own attention.",
    "max_model_len": "Set it to limit how much of the cache one sequence can use.",
    "allow_block_sharing": "Off costs a copy of the prompt per completion; for comparisons only.",
    "use_async_batching": "Off leaves the device idle between steps; for comparisons.",
    "use_cuda_graph": "Off saves the graphs' memory and the seconds of capturing them; see gpu.md.",
    "q_padding_interval_size": "Larger: fewer graphs to capture, more rows of padding.",
    "max_cached_graphs": "Fewer graphs use less memory, but steps have more rows of padding.",
    "varlen_compile_config": (
        "Costs seconds to minutes of compiling when the engine is made; see gpu.md."
    ),
    "decode_compile_config": (
        "The same; on a CPU the engine's own compilation is faster. See gpu.md."
    ),
    "default_compile_level": (
        "A higher level compiles for longer, in the first rollout; a failure is only a warning."
    ),
    "use_default_compile_configs": (
        "Costs seconds of compiling, and on a CPU needs a C++ compiler (see gpu.md); set False on "
        "a GPU for runs of a few steps."
    ),
    "scheduler_type": "prefill_first fills the batch sooner, while running sequences wait.",
    "safety_margin": "Higher: fewer preemptions, but fewer sequences that run together.",
    "cpu_offload_space": (
        "Set it on a GPU if rollout/preemptions is high; the memory is pinned, so other processes "
        "cannot use it. See memory.md."
    ),
    "cpu_offload_space_safety_threshold": "Lower it if training needs the host's memory.",
    "cpu_group_timeout": "Lower it to notice a lost process sooner; raise it if one may be late.",
    "return_logprobs": "Off saves only the copies in the outputs.",
    "max_queue_size": "Set it if many threads submit requests, as in a service.",
    "seed": "Set it to make a run repeatable.",
    "weight_sync": "A copy costs its memory, and time to copy at each sync; see weights.md.",
    "tensor_parallel_size": (
        "Set it if one device cannot hold a whole copy; each step then has collectives."
    ),
    "rollout_dtype": "A smaller dtype is faster, but its log-probabilities are not the trainer's.",
    "verify_weight_sync": "Costs one pass over the weights per sync.",
    "logprobs_mode": "policy ignores truncation and processed includes it; see training.md.",
    "numerics": "bitwise slows down rollout and loss; see numerics.md.",
    "sampling_mask": "replay costs 4 bytes per kept token id, and the loss holds its logits whole.",
    "router_replay": (
        "Costs a byte per token, layer and chosen expert (two above 256 experts); decode steps "
        "run without CUDA graphs or a trace."
    ),
    "replay_num_rollouts": "Costs the memory of that many rollouts' records.",
    "old_logps": "The sampled ones save a forward; with rollout, set max_logprob_drift too.",
    "loss_forward": "packed compares some rows of the first batch with the trainer's forward.",
    "loss_tokens_per_forward": "Lower: less memory; cutting a batch costs one more forward.",
    "verify_every_steps": "Costs verify_num_sequences forwards each time.",
    "verify_num_sequences": "Raise it when looking for a difference.",
    "max_logprob_drift": "Set it once you know the run's usual drift.",
    "on_logprob_drift": "recompute costs the skipped forward again, from then on.",
    "record_num_sequences": "Costs disk, one line per sequence.",
    "save_rollouts": "Costs disk: about 12 bytes for each token.",
    "concurrent_tools": "Turn it off if only one thread may call the tools.",
    "tool_timeout_seconds": "Set it if a tool may hang; needs concurrent_tools.",
    "release_cache": (
        "between_steps costs an allocation per rollout; with_weights also a whole sync and new "
        "graphs per rollout; with never, the cache keeps its memory during training."
    ),
    "training_reserve_gib": (
        "Set it if the estimate is wrong: another optimizer, large activations."
    ),
}
