"""Say of each setting of `RolloutConfig` what it costs, or when to change it.

`docs/configuration.md` is written from this table; the meaning of a setting is its help text.
"""

COSTS = {
    "block_size": "Larger: less bookkeeping, more waste in last blocks and less shared.",
    "num_blocks": "Set it for a cache of a known size; it is then taken at once.",
    "max_batch_tokens": "Lower it where prompts run out of memory; higher, prompts start sooner.",
    "max_requests_per_batch": "Lower it to bound a decode step's memory and time.",
    "max_memory_percent": "Lower it where training runs out of memory.",
    "max_blocks_per_request": "Set it to bound what one sequence may take from the others.",
    "allow_block_sharing": "Off costs a copy of the prompt per completion; for comparisons only.",
    "use_async_batching": "Off leaves the device idle between steps; for comparisons.",
    "use_cuda_graph": "Off saves the graphs' memory and the seconds of capturing them; see gpu.md.",
    "q_padding_interval_size": "Larger: fewer graphs to capture, more rows of padding.",
    "max_cached_graphs": "Fewer take less memory, and steps have more rows of padding.",
    "use_default_compile_configs": (
        "Seconds of compiling, and on a CPU a C++ compiler (see gpu.md); False on a GPU for runs "
        "of a few steps."
    ),
    "scheduler_type": "prefill_first fills the batch sooner, while running sequences wait.",
    "return_logprobs": "Off saves nothing but the copies in the outputs.",
    "max_queue_size": "Set it where many threads submit, as in a service.",
    "seed": "Set it to have the same run twice.",
    "weight_sync": "A copy costs its memory and a copy per sync; see weights.md.",
    "tensor_parallel_size": (
        "Set it where one device cannot hold a whole copy; each step then has collectives."
    ),
    "rollout_dtype": "A smaller dtype is faster, and its log-probabilities are not the trainer's.",
    "verify_weight_sync": "Costs one pass over the weights per sync.",
    "logprobs_mode": "policy ignores truncation and processed includes it; see training.md.",
    "numerics": "bitwise costs speed, in rollout and loss; see numerics.md.",
    "sampling_mask": "replay costs 4 bytes per kept token id, and the loss's logits whole.",
    "router_replay": (
        "Costs a byte per token, layer and chosen expert (two above 256 experts); decode steps "
        "run without CUDA graphs or a trace."
    ),
    "replay_num_rollouts": "Costs the memory of that many rollouts' records.",
    "old_logps": "The sampled ones save a forward per rollout; set max_logprob_drift with rollout.",
    "loss_forward": "packed compares some rows of the first batch with the trainer's forward.",
    "loss_tokens_per_forward": "Lower: less memory; a batch that is cut costs one more forward.",
    "verify_every_steps": "Costs verify_num_sequences forwards each time.",
    "verify_num_sequences": "Raise it when looking for a difference.",
    "max_logprob_drift": "Set it once the run's own drift is known.",
    "on_logprob_drift": "recompute costs the saved forward from then on.",
    "record_num_sequences": "Costs disk, one line per sequence.",
    "save_rollouts": "Costs disk: about 12 bytes for each token.",
    "concurrent_tools": "Turn it off for tools that only one thread may call.",
    "tool_timeout_seconds": "Set it where a tool may hang; needs concurrent_tools.",
    "release_cache": (
        "between_steps costs an allocation per rollout; with_weights: a whole sync and new graphs"
        " per rollout too; never: its memory while training."
    ),
    "training_reserve_gib": (
        "Set it where the estimate is wrong: another optimizer, long activations."
    ),
}
