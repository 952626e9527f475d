"""Contenders beside the wheel's: the server, other models, and vLLM in a process of its own.

`vllm_process` starts vLLM's, whose process runs the script `vllm_worker`. `audited` samples with
other engines for `scripts/measure/audit.py`.
"""
