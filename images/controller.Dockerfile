# The controller: kopf and the Kubernetes client; never torch.
FROM python:3.11-slim-bookworm

ENV PATH=/opt/stage2/bin:$PATH PYTHONUNBUFFERED=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src

# Dependencies in a layer of their own, made from pyproject.toml alone: a change of code leaves it untouched.
# numpy and scipy serve stage2_trainer.matching, which the controller never imports: 150 MB less.
COPY pyproject.toml ./
RUN --mount=type=cache,target=/var/cache/uv set -eu; \
    python3 -m venv /opt/stage2; \
    python3 -m venv /tmp/uv; \
    /tmp/uv/bin/pip install --quiet --no-cache-dir 'uv>=0.9,<1'; \
    printf '%s\n' "numpy; sys_platform == 'never'" "scipy; sys_platform == 'never'" > /tmp/overrides.txt; \
    UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy /tmp/uv/bin/uv pip install --python /opt/stage2/bin/python \
        --compile-bytecode --override /tmp/overrides.txt -r pyproject.toml --extra controller \
        'hatchling>=1.27'; \
    rm -rf /tmp/uv /tmp/overrides.txt

COPY . .
RUN pip install --quiet --no-cache-dir --no-deps --no-build-isolation . && rm -rf /src/*

# A name for a user without an entry in /etc/passwd, whatever its number: kopf, PyTorch and others ask for one.
ENV USER=stage2 LOGNAME=stage2
USER 10001:10001
WORKDIR /tmp
CMD ["python", "-m", "stage2_controller"]
