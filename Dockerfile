# GPU image for the cluster profile: CUDA, SGLang with its torch, Megatron-core, Transformer Engine. The test suite lints
# it; it was not built there. A machine without a GPU needs no image (recipes/setup.sh).
#
#   docker build -t megatron-async .
#   docker run --gpus all --shm-size=64g --network=host -v /data:/data megatron-async launch --config /data/run.yaml
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Versions of the distribution's packages follow the base image's tag.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12 python3.12-dev python3.12-venv git \
    && rm -rf /var/lib/apt/lists/*

ENV PYTHONUNBUFFERED=1 \
    PATH=/opt/venv/bin:$PATH

WORKDIR /opt/megatron-async

# Requirements before the code, so that a change of code does not install the engines again. Transformer Engine is
# compiled against the torch that SGLang brought, hence second and without build isolation.
COPY requirements requirements
COPY setup.py pyproject.toml README.md LICENSE ./
COPY megatron_async/__init__.py megatron_async/__init__.py
# The extras of setup.py carry the versions.
# hadolint ignore=DL3013
RUN python3.12 -m venv /opt/venv \
    && python -m pip install --no-cache-dir ".[gpu,tau2]" -r requirements/build.txt \
    && MAX_JOBS=8 python -m pip install --no-cache-dir --no-build-isolation ".[transformer-engine]" \
    && python -m pip uninstall --yes megatron-async

COPY megatron_async megatron_async
COPY sglang_bridge sglang_bridge
COPY recipes recipes
COPY tools tools
RUN python -m pip install --no-cache-dir --no-deps --no-build-isolation --editable . \
    && userdel --remove ubuntu \
    && useradd --create-home --uid 1000 trainer

USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["megatron-async"]
CMD ["doctor"]
