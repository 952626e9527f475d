"""vLLM as a contender: `contender` starts it, and `worker` is the script that its process runs."""
