# The controller: kopf, the Kubernetes client, and of stage2 the two packages that it imports. Neither pip nor commands.
ARG BASE=docker.io/library/python:3.11-slim-bookworm
FROM $BASE

ENV PATH=/opt/stage2/bin:$PATH PYTHONPATH=/opt/stage2/own PYTHONUNBUFFERED=1

# Dependencies in a layer of their own, each by its version and hash (hack/lock_images.py), and the list of them with
# their licences (CycloneDX): a change of code leaves it untouched. Byte code is made here because the root file system
# is read-only where it runs.
COPY images/requirements/controller.txt images/requirements/tools.txt /tmp/requirements/
RUN --mount=type=cache,target=/var/cache/uv set -eu; \
    python3 -m venv --without-pip /opt/stage2; \
    python3 -m venv /tmp/tools; \
    /tmp/tools/bin/pip install --quiet --no-cache-dir --require-hashes -r /tmp/requirements/tools.txt; \
    UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy /tmp/tools/bin/uv pip install --python /opt/stage2/bin/python \
        --compile-bytecode --no-deps --require-hashes -r /tmp/requirements/controller.txt; \
    /tmp/tools/bin/cyclonedx-py environment --no-validate -o /opt/stage2/sbom.cdx.json /opt/stage2/bin/python; \
    rm -rf /tmp/tools /tmp/requirements

COPY crds/stage2_api /opt/stage2/own/stage2_api
COPY controller/stage2_controller /opt/stage2/own/stage2_controller
RUN python -m compileall -q /opt/stage2/own

ARG COMMIT=""
LABEL org.opencontainers.image.title="stage2 controller" \
    org.opencontainers.image.description="Turns RolloutMatchingJobs into servers and learners" \
    org.opencontainers.image.licenses=Apache-2.0 \
    org.opencontainers.image.revision=$COMMIT

# A name for a user without an entry in /etc/passwd, whatever its number: kopf and others ask for one.
ENV USER=stage2 LOGNAME=stage2
USER 10001:10001
WORKDIR /tmp
CMD ["python", "-m", "stage2_controller"]
