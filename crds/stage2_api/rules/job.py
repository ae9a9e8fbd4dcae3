"""Rules between keys of a job, in CEL, and in Python where a rule is beyond `cel.holds`."""

from __future__ import annotations

import re

from stage2_api.job import JobSpec
from stage2_api.kubernetes_types import NodeAffinity, NodeSelectorRequirement, NodeSelectorTerm
from stage2_api.pod import layout
from stage2_api.rules.grpo_batches import batch_problems
from stage2_api.validation.validate import Rule

_MATCHING = "config.custom.extra.rollout_matching"
_VLLM = f"{_MATCHING}.vllm"
_SERVER = f"{_VLLM}.server"
_GRPO = "$?(config.rlhf)"
_SILENT = "$(config.custom.trainer_variant) == 'sft' && $(config.training.eval_strategy) == 'no'"
_NOT_VLLM = f"({_SILENT} || $({_MATCHING}.rollout_backend) != 'vllm')"
_JOBSET = "$(engine) == 'JobSet'"
_HAS_SERVERS = f"({_GRPO} || !{_NOT_VLLM} && $({_VLLM}.mode) == 'server')"
_RESERVED_PATHS = ("/", *layout.FOLDERS)
_LEADS_TO_OURS = frozenset(folder.rpartition("/")[2] for folder in layout.FOLDERS)


def _has_servers(spec: JobSpec) -> bool:
    return spec.config.rollout_matching.uses_servers


def _grpo(spec: JobSpec) -> bool:
    return spec.config.rlhf is not None


def _needs_other_gpus(spec: JobSpec) -> bool:
    """Return whether a GRPO server's copies of the model need more or fewer GPUs than it has."""
    wanted = _tensor_parallel(spec) * spec.config.data_parallel_size
    return _grpo(spec) and spec.gpu_resource != "" and spec.rollout.gpus_per_server != wanted


def _tensor_parallel(spec: JobSpec) -> int:
    return spec.config.rollout_matching.vllm.tensor_parallel_size or 1


def _goes_up(spec: JobSpec) -> bool:
    paths = ([part for part in v.mount_path.split("/") if part not in ("", ".")] for v in spec.volumes)
    return any(".." in parts and (parts[-1] == ".." or not _LEADS_TO_OURS.isdisjoint(parts)) for parts in paths)


def _is_reserved(path: str) -> bool:
    return path in _RESERVED_PATHS or any(path == one or path.startswith(f"{one}/") for one in layout.MOUNTED)


def _spelling_pattern(folder: str) -> str:
    """Return a pattern of a path prefix that allows repeated slashes and `.` parts."""
    return "".join(f"/+([.]/+)*{part}" for part in folder.split("/") if part)


def _nodes(spec: JobSpec) -> NodeAffinity:
    affinity = spec.placement.affinity
    return (affinity and affinity.node_affinity) or NodeAffinity()


def _required(spec: JobSpec) -> list[NodeSelectorTerm]:
    required = _nodes(spec).required_during_scheduling_ignored_during_execution
    return required.node_selector_terms if required else []


def _preferred(spec: JobSpec) -> list[NodeSelectorTerm]:
    return [one.preference for one in _nodes(spec).preferred_during_scheduling_ignored_during_execution]


def _compares(one: NodeSelectorRequirement) -> bool:
    """Return whether a requirement has as many values as its operator takes."""
    if one.operator in ("In", "NotIn"):
        return bool(one.values)
    if one.operator in ("Exists", "DoesNotExist"):
        return not one.values
    return len(one.values) == 1 and re.fullmatch(r"-?[0-9]{1,18}", one.values[0]) is not None


_NODES = "placement.affinity.nodeAffinity"
_REQUIRED = f"{_NODES}.requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = f"{_NODES}.preferredDuringSchedulingIgnoredDuringExecution"
_COMPARE = (
    "{term}.matchExpressions.all(e, e.operator in ['In', 'NotIn'] ? has(e.values) && size(e.values) > 0 :"
    " e.operator in ['Exists', 'DoesNotExist'] ? !has(e.values) || size(e.values) == 0 :"
    " has(e.values) && size(e.values) == 1 && e.values[0].matches('^-?[0-9]{1,18}$'))"
)
# CEL cannot normalise a path; the rule about `..` makes these patterns sufficient.
_EXACTLY, _BELOW = ("|".join(map(_spelling_pattern, paths)) for paths in (_RESERVED_PATHS, layout.MOUNTED))
_RESERVED = f"^(({_EXACTLY})(/+[.])*/*$|({_BELOW})(/|$))"
_UP = "/[.][.](/|$)"
_TO_OURS = f"/({'|'.join(sorted(_LEADS_TO_OURS))})(/|$)|/[.][.](/+[.]?)*$"
_SOURCES = ("persistentVolumeClaim", "hostPath", "emptyDir", "configMap", "secret", "nfs")

JOB_RULES: tuple[Rule[JobSpec], ...] = (
    Rule(
        path="rollout.servers",
        cel=f"!{_HAS_SERVERS} || $(rollout.servers) > 0",
        rule="vllm.mode server needs rollout servers",
        way_out="set spec.rollout.servers to at least 1, or vllm.mode to colocate",
    ),
    Rule(
        path="rollout.servers",
        cel=f"{_HAS_SERVERS} || $(rollout.servers) == 0",
        rule="without vllm.mode server the learner makes its rollouts itself, so there are no servers",
        way_out="set vllm.mode to server (with rollout_backend vllm), or remove spec.rollout",
    ),
    Rule(
        path=_SERVER,
        cel=f"!$?({_SERVER}.servers) && !$?({_SERVER}.base_url) && !$?({_SERVER}.group_port)",
        rule="the job starts the servers itself and fills in their addresses",
        way_out="remove servers, base_url and group_port; spec.rollout says how many servers there are",
    ),
    Rule(
        path=f"{_SERVER}.protocol",
        cel=f"$({_SERVER}.protocol) == 'vllm'",
        rule="the servers of a job use the protocol vllm",
        way_out="remove protocol, or start `swift rollout` yourself and train with `stage2 learn`",
    ),
    *(
        Rule(
            path=path,
            cel=f"{_GRPO} || !{_HAS_SERVERS} || $({path}) <= 1 || $({_SERVER}.learners) == 'sharded'",
            rule="with rollout servers the learner is one process on one GPU",
            way_out=f"set spec.{path} to 1{others}, or set vllm.server.learners to sharded",
        )
        for path, others in (
            ("learner.gpus", " and give the others to spec.rollout.servers"),
            ("learner.nodes", ""),
        )
    ),
    Rule(
        path="learner.gpus",
        cel="$(gpuResource) == '' || $(learner.gpus) >= 1",
        rule="the learner needs a GPU",
        way_out='set spec.learner.gpus to 1, or spec.gpuResource to "" to train on the CPU',
    ),
    *(
        Rule(
            path=path,
            cel=f"{_JOBSET} || {of_one_node}",
            rule="engine Node runs all pods of a job on one node",
            way_out=f"set spec.engine to JobSet, or {otherwise}",
        )
        for path, of_one_node, otherwise in (
            ("rollout.servers", "$(rollout.servers) <= 16", "spec.rollout.servers to at most 16"),
            ("rollout.serversPerPod", "$(rollout.serversPerPod) == 1", "remove spec.rollout.serversPerPod"),
            ("learner.nodes", "$(learner.nodes) == 1", "spec.learner.nodes to 1"),
            ("placement.topologyKey", "!$?(placement.topologyKey)", "remove spec.placement.topologyKey"),
        )
    ),
    Rule(
        path="rollout.servers",
        cel=(
            "$(rollout.servers) % $(rollout.serversPerPod) == 0 && $(rollout.servers) <= 256 * $(rollout.serversPerPod)"
        ),
        rule="must fill at most 256 pods of spec.rollout.serversPerPod servers each",
        way_out="set spec.rollout.servers to a multiple of spec.rollout.serversPerPod, or change that",
    ),
    Rule(
        path="placement.topology",
        cel="$(placement.topology) == 'Preferred' || $?(placement.topologyKey)",
        rule="there is no domain without spec.placement.topologyKey",
        way_out="set spec.placement.topologyKey to a label of nodes, such as topology.kubernetes.io/zone",
    ),
    Rule(
        path="rollout.gpusPerServer",
        cel="$(gpuResource) == '' || $(rollout.servers) == 0 || $(rollout.gpusPerServer) >= 1",
        rule="each server needs a GPU",
        way_out='set spec.rollout.gpusPerServer to 1, or spec.gpuResource to "" to run on the CPU',
    ),
    Rule(
        path="rollout.gpusPerServer",
        cel="$(gpuResource) != '' || $(rollout.servers) == 0 || $(rollout.gpusPerServer) <= 1",
        rule="an empty spec.gpuResource means that there are no GPUs to assign",
        way_out="set spec.gpuResource to the GPUs' name, such as nvidia.com/gpu, or spec.rollout.gpusPerServer to 1",
    ),
    Rule(
        path="rollout.resourceClaimTemplate",
        cel="$?(rollout.resourceClaimTemplate) == ($?(learner.resourceClaimTemplate) && $(rollout.servers) > 0)",
        rule="servers and learner must request GPUs in the same way: all with a ResourceClaimTemplate, or none",
        way_out="give spec.rollout (where there are servers) and spec.learner one each, or remove both",
    ),
    Rule(
        path="learner.resourceClaimTemplate",
        cel="!$?(learner.resourceClaimTemplate) || $(gpuResource) != ''",
        rule="an empty spec.gpuResource means that there are no GPUs to claim",
        way_out="remove spec.gpuResource, or the ResourceClaimTemplates",
    ),
    Rule(
        path="placement.mode",
        cel=f"!$?(learner.resourceClaimTemplate) || $(placement.mode) == 'Scheduler' || {_JOBSET}",
        rule="only the scheduler knows which node has devices for a claim",
        way_out="set spec.placement.mode to Scheduler",
    ),
    Rule(
        path=f"{_VLLM}.tensor_parallel_size",
        breaks=lambda s: _has_servers(s) and not _grpo(s) and max(s.rollout.gpus_per_server, 1) != _tensor_parallel(s),
        cel=(
            f"{_GRPO} || !{_HAS_SERVERS} || ($(rollout.gpusPerServer) > 1 ? $(rollout.gpusPerServer) : 1) =="
            f" $({_VLLM}.tensor_parallel_size, 1)"
        ),
        rule="a server spreads its model over exactly spec.rollout.gpusPerServer GPUs",
        way_out="set vllm.tensor_parallel_size and spec.rollout.gpusPerServer to the same number",
    ),
    Rule(
        path=f"{_VLLM}.tensor_parallel_size",
        breaks=lambda s: s.config.rollout_matching.colocates and max(s.learner.gpus, 1) % _tensor_parallel(s) != 0,
        cel=(
            f"{_GRPO} || {_NOT_VLLM} || $({_VLLM}.mode) != 'colocate' ||"
            f" ($(learner.gpus) > 1 ? $(learner.gpus) : 1) % $({_VLLM}.tensor_parallel_size, 1) == 0"
        ),
        rule="must divide spec.learner.gpus, because each GPU has one learner process",
        way_out="lower vllm.tensor_parallel_size or change spec.learner.gpus",
    ),
    Rule(
        path="rollout.servers",
        cel=f"!{_GRPO} || $(rollout.servers) <= 1",
        rule="a GRPO run has one server, with as many copies of the model as there are GPUs",
        way_out="set spec.rollout.servers to 1, and vllm_data_parallel_size of rollout_server to the number of copies",
    ),
    Rule(
        path="rollout.gpusPerServer",
        breaks=_needs_other_gpus,
        # Not in CEL: the sizes come from the server's section or from the batch plan.
        reads=("config.custom.extra.rollout_server", "config.custom.grpo.batch_plan", "gpuResource"),
        rule="must be vllm_tensor_parallel_size times vllm_data_parallel_size of custom.extra.rollout_server",
        way_out="change one of the three",
    ),
    Rule(
        path="rollout.port",
        cel=f"!{_GRPO} || $(rollout.port) == $(config.rlhf.vllm_server_port, [8080])[0]",
        rule="must be the port of config.rlhf.vllm_server_port",
        way_out="set both to the same port; 8080 is the default of rlhf",
    ),
    Rule(
        path="config.rlhf",
        breaks=lambda s: _grpo(s) and bool(batch_problems(s.config, max(s.learner.gpus, 1) * s.learner.nodes)),
        reads=("learner.gpus", "learner.nodes", "config.training", "config.custom.grpo.batch_plan"),
        rule=(
            "a round of rollouts must be a multiple of num_generations, and of per_device_train_batch_size times "
            "learner processes (one for each of spec.learner.gpus on each of spec.learner.nodes)"
        ),
        way_out="change generation_batch_size (or unified_batch_size of custom.grpo.batch_plan) or one of the others",
    ),
    *(
        Rule(
            path=path,
            breaks=lambda s, terms=terms: (
                not all(  # type: ignore[misc]
                    _compares(one) for term in terms(s) for one in term.match_expressions
                )
            ),
            cel=f"!$?({path}) || self.{path}{every}, {_COMPARE.replace('{term}', term)})",
            rule="In and NotIn take values, Exists and DoesNotExist none, Gt and Lt one whole number",
            way_out="change operator or values of the requirement",
        )
        for path, terms, every, term in (
            (_REQUIRED, _required, ".nodeSelectorTerms.all(t", "t"),
            (_PREFERRED, _preferred, ".all(p", "p.preference"),
        )
    ),
    Rule(
        path="rollout.port",
        cel="$(rollout.port) + $(rollout.servers) - 1 <= 65535",
        rule="the servers use this port and the ones after it, up to 65535",
        way_out="lower spec.rollout.port; 8000 is the default",
    ),
    Rule(
        path="volumes",
        breaks=lambda s: len({volume.name for volume in s.volumes}) < len(s.volumes),
        # Not in CEL: the list's map keys enforce it already.
        rule="every volume needs a unique name",
        way_out="rename one of those that share a name",
    ),
    Rule(
        path="volumes",
        breaks=lambda s: len({layout.cleaned(volume.mount_path) for volume in s.volumes}) < len(s.volumes),
        cel="!has(self.volumes) || self.volumes.all(v, self.volumes.exists_one(w, w.mountPath == v.mountPath))",
        rule="every volume needs a unique mountPath",
        way_out="change one of those that share a mountPath",
    ),
    Rule(
        path="volumes",
        breaks=_goes_up,
        cel=(
            "!has(self.volumes) || !self.volumes.exists(v, "
            f"v.mountPath.matches('{_UP}') && v.mountPath.matches('{_TO_OURS}'))"
        ),
        rule="a mountPath that may lead to a folder of stage2 must not contain `..`",
        way_out="write the path without `..`",
    ),
    Rule(
        path="volumes",
        breaks=lambda s: any(v.name in layout.VOLUMES or _is_reserved(layout.cleaned(v.mount_path)) for v in s.volumes),
        cel=(
            "!has(self.volumes) || self.volumes.all(v, "
            f"!(v.name in {list(layout.VOLUMES)}) && !v.mountPath.matches('{_RESERVED}'))"
        ),
        rule=f"the names {', '.join(layout.VOLUMES)} and the paths {', '.join(_RESERVED_PATHS)} belong to stage2",
        way_out="choose another name or mountPath, such as /data",
    ),
    Rule(
        path="volumes",
        breaks=lambda s: any(len(volume.source) != 1 for volume in s.volumes),
        cel=(
            "!has(self.volumes) || self.volumes.all(v, "
            f"[{', '.join(f'has(v.{source})' for source in _SOURCES)}].filter(x, x).size() == 1)"
        ),
        rule="every volume needs exactly one source",
        way_out=f"give each volume one of {', '.join(_SOURCES)}",
    ),
)
