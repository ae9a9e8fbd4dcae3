"""The examination of a run before it starts: configuration, records and images, model, GPUs, memory, disk, ports."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from stage2_api.advice import idle_settings
from stage2_api.errors import ConfigError, refused
from stage2_api.pod import layout
from stage2_api.runconfig import RunConfig
from stage2_trainer.checks.packages import missing_packages
from stage2_trainer.checks.preflight import checked_records
from stage2_trainer.checks.resources import (
    CONTEXT_BYTES,
    GIB,
    SHARED_MEMORY,
    Footprint,
    Machine,
    Part,
    room_at,
    total,
)
from stage2_trainer.checks.supported import check_supported
from stage2_trainer.data.images import ImageError, read_header
from stage2_trainer.data.model_files import is_on_hub, model_path, require_folder, require_trusted
from stage2_trainer.data.object_order import ObjectOrder
from stage2_trainer.data.records import Record
from stage2_trainer.data.run_records import LOOKED_AT, spread
from stage2_trainer.model.checkpoints import list_checkpoints, size_of
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.serve.launch import installed_platform, require_engine_options
from stage2_trainer.serve.server_command import CPU_KV_CACHE_GIB
from stage2_trainer.wire.credentials import host_and_port, is_free, is_loopback

NAMED = 3
LARGE_PIXELS = 50_000_000
BUSY_SHARE = 0.05
ROOM_FOR_PASSES = 2 * GIB  # of a server: activations, graphs, kernels
CPU_ENGINE_BYTES = 2 * GIB  # of a vLLM on a CPU beside weights and cache: libraries, two processes, activations
CHECKPOINTS_BESIDE = 1  # the one that is being written
TRAINER = "pip install 'stage2[trainer]'; GPUs, memory and model are examined with them"
Verdict = Literal["good", "doubtful", "missing"]


@dataclass(frozen=True)
class Requirement:
    """One thing that a run needs.

    what: its name. status: what there is, and what is needed. way_out: what to do unless it is good.
    """

    what: str
    verdict: Verdict
    status: str
    way_out: str = ""


def good(what: str, status: str) -> Requirement:
    """Return a met requirement."""
    return Requirement(what, "good", status)


def missing_from(what: str, error: ConfigError) -> list[Requirement]:
    """Return a missing requirement for each problem of a configuration error."""
    return [Requirement(what, "missing", problem.statement, problem.way_out) for problem in error.problems]


@dataclass(frozen=True)
class Devices:
    """The GPUs that a job needs: for each of its rollout servers, and for the learner.

    on_gpus: whether it asks for any; without, these are processes on the CPU.
    """

    servers: int
    per_server: int
    learner: int
    on_gpus: bool = True

    @property
    def count(self) -> int:
        """The number of all GPUs."""
        return self.servers * self.per_server + self.learner if self.on_gpus else 0


@dataclass
class Examination:
    """The examination of one run on one machine.

    devices: the GPUs of a job; None for a training YAML. cpu: whether a person asks for a run on the CPU.
    """

    config: RunConfig
    machine: Machine
    devices: Devices | None = None
    cpu: bool = False

    @property
    def uses_gpus(self) -> bool:
        """Whether the run is to use GPUs: those of its job, or else those that are here."""
        return not self.cpu and bool(self.machine.gpus or (self.devices and self.devices.count))

    @property
    def _starts_vllm(self) -> bool:
        """Whether the run starts a vLLM on this machine: a job's servers, or one inside the learner."""
        matching, here = self.config.rollout_matching, bool(self.devices and self.devices.servers)
        return self.config.makes_rollouts and matching.rollout_backend == "vllm" and (here or matching.colocates)

    def findings(self) -> Iterator[Requirement]:
        """Yield all requirements, the quick ones first. Without the trainer's packages, only those that need none."""
        if lacking := missing_packages("trainer"):
            yield Requirement("packages", "missing", f"not installed: {', '.join(lacking)}", TRAINER)
        else:
            with ACTIVITY.doing("checking packages and GPUs"):
                yield from self._configuration()
                yield from self._gpus()
        yield from self._settings()
        with ACTIVITY.doing("checking the records"):
            yield from self._data()
        yield from self._host()
        yield from self._ports()
        if not lacking:
            with ACTIVITY.doing("measuring what the model needs"):
                yield from self._model()

    def _configuration(self) -> Iterator[Requirement]:
        servers = self.config.rollout_matching.uses_servers
        processes = self.devices.learner if self.devices and not servers else 1
        try:
            check_supported(self.config, world_size=max(1, processes))
            require_engine_options(self.config)
            if self._starts_vllm:
                installed_platform()
        except ConfigError as error:
            yield from missing_from("configuration", error)
        else:
            yield good("configuration", "supported by this version, and its packages are installed")

    def _settings(self) -> Iterator[Requirement]:
        for advice in idle_settings(self.config):
            yield Requirement("settings", "doubtful", advice.statement, advice.way_out)

    def _data(self) -> Iterator[Requirement]:
        try:
            records = checked_records(self.config, world_size=1)
        except ConfigError as error:
            yield from missing_from("records", error)
            return
        held_out = f", {len(records.held_out)} held out" if records.held_out else ""
        yield good("records", f"{len(records.train)} to train on{held_out}")
        looked_at = spread(records.train, LOOKED_AT)
        yield check_order(looked_at)
        yield check_images(looked_at)

    def _gpus(self) -> Iterator[Requirement]:
        if self.devices is None:
            return
        if not self.devices.on_gpus:
            yield good("GPUs", "the job asks for none, and runs on the CPU")
        if not self.devices.count:
            return
        wanted, found = self.devices.count, self.machine.gpus
        if self.cpu:
            yield good("GPUs", f"the run is on the CPU; {wanted} of the job stay unused")
            return
        if len(found) < wanted:
            way_out = "use a machine that has them (CUDA_VISIBLE_DEVICES may hide some), or the CPU with --cpu"
            yield Requirement("GPUs", "missing", f"{len(found)} visible, and the run needs {wanted}", way_out)
            return
        busy = [str(gpu.index) for gpu in found[:wanted] if gpu.used > BUSY_SHARE * gpu.total]
        names = ", ".join(sorted({gpu.name for gpu in found[:wanted]}))
        status = f"{len(found)} visible ({names}, driver {self.machine.driver}), {wanted} needed"
        if busy:
            status += f"; in use: {', '.join(busy)}"
            yield Requirement("GPUs", "doubtful", status, "free them, or choose other GPUs")
        else:
            yield good("GPUs", status)

    def _host(self) -> Iterator[Requirement]:
        status = f"{_size(self.machine.shared_memory)} free in {SHARED_MEMORY}"
        if self.machine.shared_memory < layout.SHARED_MEMORY_BYTES:
            way_out = "mount an emptyDir of medium Memory there; with Docker, set --shm-size"
            yield Requirement("shared memory", "doubtful", f"{status}: workers of vLLM and NCCL may crash", way_out)
        else:
            yield good("shared memory", status)

    def _ports(self) -> Iterator[Requirement]:
        if not self.config.rollout_matching.uses_servers:
            return
        for address in self.config.rollout_matching.vllm.server.resolved_servers():
            host, _ = host_and_port(address.base_url)
            if is_loopback(host) and not is_free(address.group_port):
                status = f"group_port {address.group_port} is in use"
                yield Requirement("ports", "missing", status, "free it, or choose another port")

    def _model(self) -> Iterator[Requirement]:
        from transformers import AutoTokenizer

        from stage2_trainer.checks.footprint import footprint
        from stage2_trainer.model.policy import coord_vocab

        try:
            if not is_on_hub(self.config.model.model):
                require_folder(self.config, Path(self.config.model.model))
            folder = model_path(self.config.model.model)
            require_trusted(self.config.model, folder)
            if self.config.rlhf is None:
                trusted = self.config.model.allow_remote_code
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
                coord_vocab(tokenizer, str(folder))
            found = footprint(self.config, str(folder), row_tokens=self.row_tokens)
        except ConfigError as error:
            yield from missing_from("model", error)
            return
        except (OSError, ValueError) as error:
            yield Requirement("model", "missing", f"model.model: {error}", "give the folder of a Qwen3-VL checkpoint")
            return
        yield good("model", f"{found.trained / 1e6:,.1f} million parameters train")
        if self.uses_gpus:
            yield self.learner_memory(found)
            yield from self._shared_gpu(found)
        yield self._host_memory(found)
        if self.uses_gpus and self.config.rollout_matching.uses_servers:
            yield self.server_memory(found)
        if self.config.makes_rollouts and self.config.rollout_matching.rollout_backend == "vllm":
            yield self._engine()
        yield check_disk(self.config, found)

    @property
    def row_tokens(self) -> int:
        """The tokens of the longest row that the learner trains on; 0 where nothing bounds it."""
        vllm = self.config.rollout_matching.vllm
        return self.config.max_length or self.config.training.packing_length or vllm.max_model_len or 0

    def learner_memory(self, found: Footprint) -> Requirement:
        """Return whether the learner fits a GPU of this machine."""
        parts = (*found.learner, Part("CUDA", CONTEXT_BYTES))
        listed = ", ".join(f"{part.name} {_size(part.nbytes)}" for part in parts if part.nbytes)
        status = f"about {_size(total(parts))}: {listed}"
        room, vllm = self.machine.smallest_gpu, self.config.rollout_matching.vllm
        if room is not None and self.config.rollout_matching.colocates and not vllm.sleep_level:
            room = int(room * (1 - vllm.gpu_memory_utilization))
            status += f"; vLLM takes {vllm.gpu_memory_utilization:.0%} of the GPU"
        if room is None or total(parts) <= room:
            return good("learner memory", status if room is None else f"{status}; a GPU here has {_size(room)} for it")
        way_out = "lower global_max_length, set training.gradient_checkpointing, or train adapters of fewer layers"
        return Requirement("learner memory", "doubtful", f"{status}; a GPU here has {_size(room)} for it", way_out)

    def _shared_gpu(self, found: Footprint) -> Iterator[Requirement]:
        """Yield whether learner and colocated engine fit a GPU while both are there; an engine may sleep between."""
        matching, room = self.config.rollout_matching, self.machine.smallest_gpu
        if not (matching.colocates and self.config.makes_rollouts and matching.vllm.sleep_level and room):
            return
        engine = int(room * matching.vllm.gpu_memory_utilization)
        moments = {
            "a push": found.beside_push + CONTEXT_BYTES,
            "generation": found.beside_answers + engine + CONTEXT_BYTES,
        }
        listed = " and ".join(f"about {_size(nbytes)} during {moment}" for moment, nbytes in moments.items())
        status = f"learner and vLLM take {listed}; a GPU here has {_size(room)}"
        if max(moments.values()) <= room:
            yield good("GPU shared with vLLM", status)
            return
        way_out = (
            "set rollout_matching.offload.enabled with offload_model and offload_optimizer, or lower"
            " vllm.gpu_memory_utilization"
        )
        yield Requirement("GPU shared with vLLM", "doubtful", status, way_out)

    def _host_memory(self, found: Footprint) -> Requirement:
        parts = found.offloaded if self.uses_gpus else (*found.learner, *self._engines_here(found))
        status = f"about {_size(total(parts))} of the host's: {', '.join(part.name for part in parts if part.nbytes)}"
        if not any(part.nbytes for part in parts):
            return good("host memory", f"{_size(self.machine.memory)} free, and nothing is offloaded to it")
        status += f"; {_size(self.machine.memory)} free"
        if total(parts) <= self.machine.memory:
            return good("host memory", status)
        matching, way_out = self.config.rollout_matching, "raise the container's memory limit"
        if self.uses_gpus:
            way_out += ", turn rollout_matching.offload off" if matching.offload.enabled else ""
            way_out += ", or set vllm.sleep_level to 2" if matching.vllm.sleep_level == 1 else ""
        return Requirement("host memory", "doubtful", status, way_out)

    def _engines_here(self, found: Footprint) -> tuple[Part, ...]:
        """Return the memory of vLLM on a host without GPUs: servers of the run, or a colocated engine."""
        config, servers = self.config, 0
        if config.rollout_matching.uses_servers:
            here = [
                is_loopback(host_and_port(one.base_url)[0])
                for one in config.rollout_matching.vllm.server.resolved_servers()
            ]
            servers = self.devices.servers if self.devices else sum(here)
        elif config.rollout_matching.rollout_backend != "hf":
            servers = 1
        each = total(found.server) + CPU_KV_CACHE_GIB * GIB + CPU_ENGINE_BYTES
        return (Part(f"vLLM ({servers} x {_size(each)})", servers * each),) if config.makes_rollouts else ()

    def _engine(self) -> Requirement:
        """Return which of vLLM's implementations will compute answers; only those of CPUs are tested here."""
        vllm = self.config.rollout_matching.vllm
        runner = "V2" if self.uses_gpus and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0" else "V1"
        backend = vllm.passed_through().get("attention_backend", "of its own choice")
        tested = "" if runner == "V1" else " (docs/gpu.md: no test on CPUs covers it)"
        return good("vLLM", f"model runner {runner}{tested}, attention backend {backend}, sampler of the runner")

    def server_memory(self, found: Footprint) -> Requirement:
        """Return whether a server fits its GPUs, and how many of the longest answers run there at the same time."""
        vllm = self.config.rollout_matching.vllm
        gpus = vllm.resolved_tensor_parallel_size(world_size=1)
        per_token = f"{found.cache_token / 1024:.0f} KiB for each token of its cache"
        weights = f"weights {_size(found.server[0].nbytes)}, "
        if found.adapted and vllm.sync.merge != "learner":
            weights += f"of which a merge reads {_size(found.adapted)} from the host's page cache at each push, "
        weights += f"and {per_token}"
        room = self.machine.smallest_gpu
        if room is None or vllm.max_model_len is None:
            return good("server memory", weights)
        left = int(room * gpus * vllm.gpu_memory_utilization) - total(found.server) - ROOM_FOR_PASSES
        answers = max(0, left) / (found.cache_token * vllm.max_model_len)
        status = f"{weights}: {answers:.1f} sequences of vllm.max_model_len {vllm.max_model_len} fit at the same time"
        if answers >= 1:
            return good("server memory", status)
        way_out = "lower vllm.max_model_len, raise vllm.tensor_parallel_size, or take larger GPUs"
        return Requirement("server memory", "missing", status, way_out)


_MORE_ROOM = "free some space, name another folder, or set training.save_only_model (a restart has a new optimizer)"


def check_disk(config: RunConfig, found: Footprint) -> Requirement:
    """Return whether the checkpoints of a run fit its disk; those that are there will be replaced."""
    training = config.training
    folder = Path(training.output_dir)
    kept = training.save_total_limit
    best = config.best_metric is not None
    proved = config.rollout_matching.rollout_backend != "hf"
    at_once = max(kept or 1, 1 + best + proved)  # the best and the newest proved one are kept besides the newest
    if training.save_strategy == "steps" and training.max_steps > 0:
        at_once = min(at_once, 1 + training.max_steps // training.save_steps)
    replaced = size_of(list_checkpoints(folder)) if kept else 0
    needed = found.checkpoint * (at_once + CHECKPOINTS_BESIDE) - replaced
    free = room_at(folder.absolute())
    status = f"{_size(free)} free at training.output_dir, a checkpoint takes about {_size(found.checkpoint)}"
    if free < needed:
        status += f", and {_size(needed)} are needed"
        return Requirement("disk", "missing", status, f"lower training.save_total_limit, {_MORE_ROOM}")
    if kept is None:
        way_out = "set training.save_total_limit, unless you want all of them"
        return Requirement("disk", "doubtful", f"{status}, and all checkpoints are kept", way_out)
    return good("disk", f"{status}, and {at_once} are kept{', the best among them' if best else ''}")


def require_room(config: RunConfig) -> None:
    """Raise ConfigError where not even one checkpoint of a run fits its disk.

    Says nothing of a model that is not here or is broken: servers and learner fetch it, or report it best.
    """
    if config.training.save_strategy == "no":
        return
    from stage2_trainer.checks.footprint import footprint  # takes PyTorch, which takes seconds

    try:
        found = footprint(config, str(model_path(config.model.model)), row_tokens=0)
    except (OSError, ValueError):
        return
    free = room_at(Path(config.training.output_dir).absolute())
    if free < found.checkpoint:
        rule = f"a checkpoint takes about {_size(found.checkpoint)}, and {_size(free)} are free there"
        raise refused("training.output_dir", config.training.output_dir, rule, _MORE_ROOM)


def _size(count: float) -> str:
    if count < GIB / 10:
        return f"{count / 2**20:.0f} MiB"
    return f"{count / GIB:.2f} GiB" if count < 10 * GIB else f"{count / GIB:.0f} GiB"


def check_order(records: Sequence[Record]) -> Requirement:
    """Return whether the objects of these records have an order that a model can see."""
    order = ObjectOrder.from_records(records)
    if order.advice is not None:
        return Requirement("order of objects", "doubtful", str(order), order.advice)
    return good("order of objects", str(order))


def check_images(records: Sequence[Record]) -> Requirement:
    """Return whether the images of these records can be read; only headers are read."""
    broken: list[str] = []
    large: list[str] = []
    sources = [(record, source) for record in records for source in record.images]
    with ACTIVITY.doing("reading headers", len(sources), "images") as reading:
        for record, source in sources:
            reading.advance()
            try:
                width, height = read_header(source).size
            except ImageError as error:
                broken.append(f"{record.sample_id} ({error})")
                continue
            if width * height > LARGE_PIXELS:
                large.append(record.sample_id)
    if broken:
        status = f"{len(broken)} of {len(sources)} cannot be read: {_few(broken)}"
        return Requirement("images", "missing", status, "replace them")
    if large:
        status = f"{len(large)} of {len(sources)} have more than {LARGE_PIXELS // 10**6} megapixels: {_few(large)}"
        return Requirement("images", "doubtful", status, "make them smaller: each is decoded in full, many times")
    return good("images", f"the headers of {len(sources)} can be read")


def _few(names: Sequence[str]) -> str:
    return ", ".join(islice(names, NAMED)) + (", …" if len(names) > NAMED else "")
