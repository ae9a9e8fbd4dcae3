# The controller: kopf and the Kubernetes client; never torch.
ARG BASE=docker.io/library/python:3.11-slim-bookworm
FROM $BASE

ENV PATH=/opt/stage2/bin:$PATH PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src

# Dependencies in a layer of their own, each by its version and hash (hack/lock_images.py), and the list of them with
# their licences (CycloneDX): a change of code leaves it untouched.
COPY images/requirements/controller.txt images/requirements/tools.txt /tmp/requirements/
RUN --mount=type=cache,target=/var/cache/uv set -eu; \
    python3 -m venv /opt/stage2; \
    python3 -m venv /tmp/tools; \
    /tmp/tools/bin/pip install --quiet --no-cache-dir --require-hashes -r /tmp/requirements/tools.txt; \
    UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy /tmp/tools/bin/uv pip install --python /opt/stage2/bin/python \
        --compile-bytecode --no-deps --require-hashes -r /tmp/requirements/controller.txt; \
    /tmp/tools/bin/cyclonedx-py environment --no-validate -o /opt/stage2/sbom.cdx.json /opt/stage2/bin/python; \
    rm -rf /tmp/tools /tmp/requirements

COPY . .
ARG COMMIT=""
RUN STAGE2_COMMIT=$COMMIT pip install --quiet --no-cache-dir --no-deps --no-build-isolation . && rm -rf /src/*

# A name for a user without an entry in /etc/passwd, whatever its number: kopf, PyTorch and others ask for one.
ENV USER=stage2 LOGNAME=stage2
USER 10001:10001
WORKDIR /tmp
CMD ["python", "-m", "stage2_controller"]
