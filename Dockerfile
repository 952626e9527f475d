# cb_rollout on a CPU, or on NVIDIA GPUs. Build it from the root of a checkout:
#   docker build --tag cb-rollout .
#   docker build --tag cb-rollout-cuda --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 \
#       --build-arg TORCH_INDEX= .
#   docker run --rm cb-rollout cb-rollout demo
#
# BASE: an image of Debian or Ubuntu with Python >= 3.11, or whose packages have it.
ARG BASE=python:3.11
FROM ${BASE}
# The images of Python have all of these. The CPU kernels need a C++ compiler, Triton a C compiler
# and Python's headers; KubeRay asks for the health of a node with wget.
RUN command -v pip >/dev/null || { apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv wget \
    && rm -rf /var/lib/apt/lists/*; }
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY cb_rollout cb_rollout
COPY recipes recipes
# An index with CPU builds of torch. Empty: the default build, which brings CUDA's libraries.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# The arguments of pip install.
ARG REQUIREMENTS=".[server]"
# Torch's build for CUDA requires a triton of its own.
RUN if [ -z "${TORCH_INDEX}" ]; then sed -i '/^triton==/d' constraints.txt; fi
RUN pip install --no-cache-dir --constraint constraints.txt \
    ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} ${REQUIREMENTS}
CMD ["cb-rollout", "--help"]
