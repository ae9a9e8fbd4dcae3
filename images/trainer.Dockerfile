# The rollout servers and the learner. VLLM=gpu is the build for NVIDIA GPUs; VLLM=cpu runs anywhere, slowly.
ARG BASE=docker.io/library/python:3.11-slim-bookworm
FROM $BASE
ARG VLLM=cpu

ENV PATH=/opt/stage2/bin:$PATH PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HOME=/tmp
WORKDIR /src

# vLLM's CPU kernels link libnuma. Unless enforce_eager is set, PyTorch compiles C++ at its first use, as Triton and
# DeepSpeed do on GPUs.
RUN set -eu; \
    apt-get update -q; \
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends libnuma1 g++ python3-dev; \
    rm -rf /var/lib/apt/lists/*

# Dependencies in a layer of their own, each by its version and hash (hack/lock_images.py), and the list of them with
# their licences (CycloneDX): a change of code leaves these gigabytes untouched. Byte code is made here because the root
# file system is read-only where it runs.
COPY images/requirements/$VLLM.txt images/requirements/tools.txt /tmp/requirements/
RUN --mount=type=cache,target=/var/cache/uv set -eu; \
    python3 -m venv /opt/stage2; \
    python3 -m venv /tmp/tools; \
    /tmp/tools/bin/pip install --quiet --no-cache-dir --require-hashes -r /tmp/requirements/tools.txt; \
    UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy /tmp/tools/bin/uv pip install --python /opt/stage2/bin/python \
        --compile-bytecode --no-deps --require-hashes -r "/tmp/requirements/$VLLM.txt"; \
    /tmp/tools/bin/cyclonedx-py environment --no-validate -o /opt/stage2/sbom.cdx.json /opt/stage2/bin/python; \
    rm -rf /tmp/tools /tmp/requirements

# vLLM imports a model in another process to learn what it can do, 10 s and more of each server's start. It finds the
# answer here (stage2_trainer/serve/plugin.py). Without a GPU the other build may fail to ask: then servers ask.
ENV STAGE2_MODELINFOS=/opt/stage2/modelinfos
RUN set -eu; \
    ask='from vllm.model_executor.models.registry import ModelRegistry as r'; \
    ask="$ask; r.models['Qwen3VLForConditionalGeneration'].inspect_model_cls()"; \
    VLLM_CACHE_ROOT=/opt/stage2 python -c "$ask" || [ "$VLLM" = gpu ]; \
    mkdir -p "$STAGE2_MODELINFOS"; \
    chmod -R a+rX "$STAGE2_MODELINFOS"; \
    rm -rf /tmp/* /tmp/.[!.]*

# The CPU build carries what the tiny jobs of examples/ train on.
COPY . .
ARG COMMIT=""
RUN set -eu; \
    STAGE2_COMMIT=$COMMIT pip install --quiet --no-cache-dir --no-deps --no-build-isolation .; \
    if [ "$VLLM" = cpu ]; then \
        mkdir -p /opt/stage2/examples; \
        cp -r examples/tiny-qwen3-vl examples/tiny-summaries examples/tiny-few /opt/stage2/examples/; \
        python examples/make_shapes.py /opt/stage2/examples/shapes; \
        python examples/make_few.py /opt/stage2/examples/few; \
        python examples/make_summaries.py /opt/stage2/examples/summaries; \
    fi; \
    rm -rf /src/*

LABEL org.opencontainers.image.title="stage2 trainer" \
    org.opencontainers.image.description="Rollout servers and learner of a RolloutMatchingJob" \
    org.opencontainers.image.licenses=Apache-2.0 \
    org.opencontainers.image.revision=$COMMIT

# A name for a user without an entry in /etc/passwd, whatever its number: kopf, PyTorch and others ask for one.
ENV USER=stage2 LOGNAME=stage2
USER 10001:10001
WORKDIR /tmp
CMD ["stage2", "--help"]
