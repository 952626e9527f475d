"""Everything that a workload times: this package, transformers, and vLLM in a process of its own.

`contenders` has those of this process and the server. `vllm_process` starts vLLM's, whose process
runs the script `vllm_worker`.
"""
