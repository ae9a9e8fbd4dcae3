# The few commands a person types. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
VENV ?= .venv
# Of PyTorch and vLLM: cpu or gpu.
BUILD ?= cpu
# The last folder has uv where hack/setup had to fetch it.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH):$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/stage2/tools/bin
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Where it is set, each process compiles what it imports anew: 13 CPU seconds for a learner's.
export PYTHONDONTWRITEBYTECODE :=
# Of what has not changed, by its content: a fresh clone checks only what it changed.
export MYPY_CACHE_DIR := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/stage2/mypy
CODE := crds controller trainer report cli hack examples bench
OUT ?= out/demo
TESTS ?= tests/unit
# Runs a tier; tests that fail run once more, alone: at once, or with LATER=--later at the end of `make test`.
LATER ?=
ONCE_MORE = OMP_NUM_THREADS=1 python -m tests.support.once_more $(LATER) $(@:test-%=%) -q --durations=10
# Two processes, by file (tests/support/together.py): the servers of a file start once.
BY_FILE := -n 2 --dist loadfile
NEEDS := python -m tests.support.prerequisites

.PHONY: help setup demo demo-cluster test test-on-clusters check test-unit test-integration test-wheel test-cluster test-alone test-shared test-jobs test-gpu test-mutants fuzz red-team check-report lint format verify generate site bench smoke-colocate images lock-images audit check-gpu-image release clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  \033[1m%-18s\033[0m %s\n", $$1, $$2}'

setup: $(VENV)/.ready ## Install everything into .venv (done by the other commands when needed)

$(VENV)/.ready: pyproject.toml
	hack/setup $(VENV) $(BUILD)

demo: setup ## Train the tiny jobs as local processes: stage 1 continued, then stage 2 with three vLLM servers; figures of both, and a page
	hack/demo $(OUT)

demo-cluster: setup ## The stage-2 job on Kubernetes: the cluster that KUBECONFIG names, else kind, else one built from source
	hack/demo-cluster

test: setup ## All tests: what computes beside what waits, and one tier with a cluster after the other
	$(NEEDS)
	rm -f out/tests/*.failed out/tests/*.flaky
	code=0; $(MAKE) --jobs=3 --output-sync=line --no-print-directory LATER=--later test-unit test-integration test-on-clusters \
	  || code=$$?; python -m tests.support.once_more --again; exit $$code

test-on-clusters: setup
	$(MAKE) --no-print-directory test-cluster
	$(MAKE) --no-print-directory test-jobs

check: setup ## What .ci/run has beside the tests: the linters, the check of generated files, eight mutants
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory verify
	$(MAKE) --no-print-directory test-mutants SAMPLE=8

test-unit: setup ## Functions and modules, without servers or a cluster
	$(ONCE_MORE) $(BY_FILE) $(TESTS)

test-integration: setup ## Real vLLM servers and the CPU stub, processes and HTTP; the wheel
	$(ONCE_MORE) $(BY_FILE) tests/integration tests/wheel

test-wheel: ## The wheel in a clean virtual environment, of Python STAGE2_PYTHON; needs uv alone
	uvx --quiet --with pytest-timeout,pytest-asyncio pytest -q --noconftest tests/wheel

test-cluster: setup ## A real API server and kubelet: the cluster of KUBECONFIG, else hack/local-cluster
	$(NEEDS)
	$(MAKE) --no-print-directory test-alone
	$(MAKE) --no-print-directory test-shared

test-alone: setup
	$(ONCE_MORE) -m alone tests/cluster

test-shared: setup
	$(ONCE_MORE) -n 3 --dist loadfile -m "not alone" tests/cluster

test-jobs: setup ## The example jobs trained by real images in real pods, on the same kind of cluster
	$(NEEDS)
	$(ONCE_MORE) $(BY_FILE) tests/jobs

check-report: setup ## The pages of stage2 report, opened and used in a real Chromium
	PYTHONPATH=. python hack/check_report.py

test-gpu: setup ## Checks that need a CUDA device: packed attention, what offload frees, weights over NCCL
	pytest -q tests/gpu --log-cli-level=INFO

test-mutants: setup ## Defects, each of which a test must notice, made in copies of the code; SAMPLE=8: so many, others each day
	python -m tests.support.mutants $(if $(SAMPLE),--sample $(SAMPLE))

fuzz: setup ## Hand hostile input to every reader until one breaks: jobs, YAML, records, images, answers
	STAGE2_FUZZ_EXAMPLES=$${STAGE2_FUZZ_EXAMPLES:-20000} pytest -q -n 2 --dist load tests/unit/fuzz

red-team: setup ## Attack a job on the cluster that KUBECONFIG names, with the release of make demo-cluster, from three sides; print what each got
	python -m tests.red_team

lint: setup ## ruff, mypy --strict, the import law, dead code, the manifests of chart and jobs, the workflows
	ruff check . && ruff format --check . && mypy && lint-imports && vulture && python hack/check_manifests.py
	go -C hack/actionlint tool actionlint

format: setup ## Format the code
	ruff check --fix . && ruff format .

generate: setup ## Write what is generated: CRD, schemas, reference, the page of commands, pictures
	python hack/generate.py

verify: setup ## Fail if what is generated differs from what is committed
	python hack/generate.py --check

site: setup ## Build the site into out/site; open it with `python -m http.server -d out/site`
	python hack/build_site.py out

bench: setup ## The benchmarks, side by side with what a user would pick instead
	bench/run

smoke-colocate: setup ## Short real runs with vLLM inside the learner: packed or not, rollouts reused or not, in one table
	python -m bench.smoke_colocate

images: setup ## Build the controller and trainer images with buildah
	hack/local-cluster/local-cluster build

lock-images: ## Choose the versions that the images install anew, the newest that pyproject.toml allows
	python3 hack/lock_images.py

audit: ## Look up what the images install in OSV's database of vulnerabilities: DATABASE=PATH, its zip for PyPI
	hack/audit "$(DATABASE)"

check-gpu-image: setup ## Build the trainer image for GPUs with buildah, and examine it; no GPU is needed, but 40 GB of disk
	hack/local-cluster/local-cluster check-gpu-image

release: setup ## Test, and cut a release: version, changelog, commit, sdist, wheel and chart in dist/, tag; VERSION=x.y.z. Nothing is pushed
	python hack/release.py --check $(VERSION)
	.ci/run
	python hack/release.py $(VERSION)

clean: ## Remove the virtual environment and outputs of this folder
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache
