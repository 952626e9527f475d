"""Upper bounds: rates of this machine, measured, and kernels of a step on a GPU, modelled.

`machine` times products and copies. `gpu_model` needs no GPU: `tensors` are tensors of a CUDA
device that is not there, `kernel_recorder` counts what their operators would launch, `steps` runs
a decode step and a prefill of cb_rollout and of transformers on them, `vllm_kernels` lists what
vLLM launches, and `cards` turns kernels into milliseconds.
"""
