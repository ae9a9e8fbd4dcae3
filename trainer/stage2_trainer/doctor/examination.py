"""The examination of a run before it runs: configuration, records and images, model, GPUs, memory, disk, ports."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from stage2_api.errors import ConfigError
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.model_files import model_path, require_trusted
from stage2_trainer.data.run_records import LOOKED_AT, spread
from stage2_trainer.doctor.footprint import GIB, Footprint, Part, footprint, total
from stage2_trainer.doctor.image_files import images_of
from stage2_trainer.doctor.machine import SHARED_MEMORY, Machine, room_at
from stage2_trainer.doctor.requirement import Requirement, good, of_errors
from stage2_trainer.preflight import checked_records
from stage2_trainer.process.policy import coord_vocab
from stage2_trainer.process.supported import check_supported, in_process
from stage2_trainer.serve.launch import installed_platform
from stage2_trainer.serve.server_command import CPU_KV_CACHE_GIB
from stage2_trainer.wire.names import host_and_port, is_loopback

BUSY_SHARE = 0.05
SHARED_MEMORY_BYTES = GIB
ROOM_FOR_PASSES = 2 * GIB  # of a server: activations, graphs, kernels
CPU_ENGINE_BYTES = 2 * GIB  # of a vLLM on a CPU beside weights and cache: libraries, two processes, activations
CHECKPOINTS_BESIDE = 1  # the one that is being written


@dataclass(frozen=True)
class Devices:
    """The GPUs that a run asks for: of rollout servers, so many each, and of the learner."""

    servers: int
    per_server: int
    learner: int

    @property
    def count(self) -> int:
        """All of them."""
        return self.servers * self.per_server + self.learner


@dataclass
class Examination:
    """The examination of one run on one machine. devices: what it asks for; None where only a job would say."""

    config: RunConfig
    machine: Machine
    devices: Devices | None = None

    def findings(self) -> Iterator[Requirement]:
        """Yield what is found, the quick things first."""
        yield from self._configuration()
        yield from self._data()
        yield from self._gpus()
        yield from self._host()
        yield from self._ports()
        yield from self._model()

    def _configuration(self) -> Iterator[Requirement]:
        processes = self.devices.learner if self.devices and in_process(self.config) else 1
        try:
            check_supported(self.config, world_size=max(1, processes))
        except ConfigError as error:
            yield from of_errors("configuration", error)
        else:
            yield good("configuration", "this version does what it asks for, and the packages for it are installed")

    def _data(self) -> Iterator[Requirement]:
        try:
            records = checked_records(self.config, world_size=1)
        except ConfigError as error:
            yield from of_errors("records", error)
            return
        held_out = f", {len(records.held_out)} held out" if records.held_out else ""
        yield good("records", f"{len(records.train)} to train on{held_out}")
        yield images_of(spread(records.train, LOOKED_AT))

    def _gpus(self) -> Iterator[Requirement]:
        if self.devices is None or not self.devices.count:
            return
        wanted, found = self.devices.count, self.machine.gpus
        if not found and _for_cpus():
            yield good("GPUs", f"none: the vLLM here is for CPUs, and the {wanted} that are asked for are not needed")
            return
        if len(found) < wanted:
            way_out = "run it on a machine that has them; CUDA_VISIBLE_DEVICES may hide some"
            yield Requirement("GPUs", "missing", f"{len(found)} visible, and the run asks for {wanted}", way_out)
            return
        busy = [gpu.index for gpu in found[:wanted] if gpu.used > BUSY_SHARE * gpu.total]
        names = ", ".join(sorted({gpu.name for gpu in found[:wanted]}))
        said = f"{len(found)} visible ({names}, driver {self.machine.driver}), {wanted} asked for"
        if busy:
            yield Requirement(
                "GPUs", "doubtful", f"{said}; in use: {', '.join(busy)}", "end what uses them, or choose others"
            )
        else:
            yield good("GPUs", said)

    def _host(self) -> Iterator[Requirement]:
        said = f"{_gib(self.machine.shared_memory)} free in {SHARED_MEMORY}"
        if self.machine.shared_memory < SHARED_MEMORY_BYTES:
            way_out = "mount an emptyDir of medium Memory there; Docker takes --shm-size"
            yield Requirement("shared memory", "doubtful", f"{said}: workers of vLLM and NCCL may end at once", way_out)
        else:
            yield good("shared memory", said)

    def _ports(self) -> Iterator[Requirement]:
        if in_process(self.config):
            return
        for address in self.config.rollout_matching.vllm.server.resolved_servers():
            host, _ = host_and_port(address.base_url)
            if is_loopback(host) and not _is_free(address.group_port):
                said, way_out = f"group_port {address.group_port} is in use", "end what listens there, or take another"
                yield Requirement("ports", "missing", said, way_out)

    def _model(self) -> Iterator[Requirement]:
        try:
            folder = model_path(self.config.model.model)
            require_trusted(self.config.model, folder)
            if self.config.rlhf is None:
                trusted = self.config.model.allow_remote_code
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)
                coord_vocab(tokenizer, str(folder))
            found = footprint(self.config, str(folder), row_tokens=self._row_tokens())
        except ConfigError as error:
            yield from of_errors("model", error)
            return
        except (OSError, ValueError) as error:
            yield Requirement("model", "missing", f"model.model: {error}", "give the folder of a Qwen3-VL checkpoint")
            return
        yield good("model", f"{_count(found.trained)} parameters train")
        yield self._learner_memory(found)
        yield self._host_memory(found)
        if not in_process(self.config):
            yield self._server_memory(found)
        yield self._disk(found)

    def _row_tokens(self) -> int:
        vllm = self.config.rollout_matching.vllm
        return self.config.max_length or self.config.training.packing_length or vllm.max_model_len or 0

    def _learner_memory(self, found: Footprint) -> Requirement:
        parts = ", ".join(f"{part.name} {_gib(part.nbytes)}" for part in found.learner if part.nbytes)
        said = f"about {_gib(total(found.learner))}: {parts}"
        room = self.machine.smallest_gpu
        if room is None or total(found.learner) <= room:
            return good("learner memory", said if room is None else f"{said}; a GPU here has {_gib(room)}")
        way_out = "lower global_max_length, set training.gradient_checkpointing, or train adapters of fewer layers"
        return Requirement("learner memory", "doubtful", f"{said}; a GPU here has {_gib(room)}", way_out)

    def _host_memory(self, found: Footprint) -> Requirement:
        parts = found.offloaded if self.machine.gpus else (*found.learner, *self._engines_here(found))
        said = f"about {_gib(total(parts))} of the host's: {', '.join(part.name for part in parts if part.nbytes)}"
        if not any(part.nbytes for part in parts):
            return good("host memory", f"{_gib(self.machine.memory)} free, and nothing is offloaded to it")
        said += f"; {_gib(self.machine.memory)} free"
        if total(parts) <= self.machine.memory:
            return good("host memory", said)
        way_out = "raise the container's memory limit" + (
            ", or turn rollout_matching.offload off" if found.offloaded else ""
        )
        return Requirement("host memory", "doubtful", said, way_out)

    def _engines_here(self, found: Footprint) -> tuple[Part, ...]:
        """Return what vLLM takes of the memory of a host without GPUs: servers of the run, or a colocated engine."""
        config, servers = self.config, 0
        if not in_process(config):
            here = [
                is_loopback(host_and_port(one.base_url)[0])
                for one in config.rollout_matching.vllm.server.resolved_servers()
            ]
            servers = self.devices.servers if self.devices else sum(here)
        elif config.rollout_matching.rollout_backend != "hf":
            servers = 1
        each = total(found.server) + CPU_KV_CACHE_GIB * GIB + CPU_ENGINE_BYTES
        return (Part(f"vLLM ({servers} x {_gib(each)})", servers * each),) if config.makes_rollouts else ()

    def _server_memory(self, found: Footprint) -> Requirement:
        vllm = self.config.rollout_matching.vllm
        gpus = vllm.resolved_tensor_parallel_size(world_size=1)
        per_token = f"{found.cache_token / 1024:.0f} KiB for each token of its cache"
        weights = f"weights {_gib(found.server[0].nbytes)}, and {per_token}"
        room = self.machine.smallest_gpu
        if room is None or vllm.max_model_len is None:
            return good("server memory", weights)
        left = int(room * gpus * vllm.gpu_memory_utilization) - total(found.server) - ROOM_FOR_PASSES
        answers = max(0, left) / (found.cache_token * vllm.max_model_len)
        said = f"{weights}: {answers:.1f} sequences of vllm.max_model_len {vllm.max_model_len} fit beside each other"
        if answers >= 1:
            return good("server memory", said)
        way_out = "lower vllm.max_model_len, raise vllm.tensor_parallel_size, or take larger GPUs"
        return Requirement("server memory", "missing", said, way_out)

    def _disk(self, found: Footprint) -> Requirement:
        training = self.config.training
        folder = Path(training.output_dir)
        kept = training.save_total_limit
        best = self.config.best_metric is not None
        proved = self.config.rollout_matching.rollout_backend != "hf"
        at_once = max(kept or 1, 1 + best + proved)  # the best one, and the newest proved, stay beside the newest
        needed = found.checkpoint * (at_once + CHECKPOINTS_BESIDE)
        free = room_at(folder.absolute())
        said = f"{_gib(free)} free at training.output_dir, a checkpoint takes about {_gib(found.checkpoint)}"
        if free < needed:
            return Requirement(
                "disk", "missing", f"{said}, and {_gib(needed)} are needed", "make room, or name another folder"
            )
        if kept is None:
            way_out = "set training.save_total_limit, unless all of them are wanted"
            return Requirement("disk", "doubtful", f"{said}, and all checkpoints are kept", way_out)
        return good("disk", f"{said}, and {at_once} are kept{', the best among them' if best else ''}")


def _for_cpus() -> bool:
    """Whether the vLLM that is installed here runs on CPUs."""
    try:
        return installed_platform() == "cpu"
    except ConfigError:
        return False


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count < 10 * GIB else f"{count / GIB:.0f} GiB"


def _count(number: int) -> str:
    return f"{number / 1e6:,.1f} million"
