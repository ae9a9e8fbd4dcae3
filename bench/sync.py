"""A full weight sync, from the learner's tensors to copies in the servers, against the machine's limit and other ways.

The servers are processes that keep what they are sent (`bench.sink`). Times are wall times, the best of several.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import torch
from bench import raw_gloo
from bench.tables import Row, Table
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

from stage2_api.vllm import ServerAddress, VllmSync
from stage2_trainer.process.background import in_background
from stage2_trainer.sync.fleet.delivery import Shipment
from stage2_trainer.sync.fleet.push import FullPush, reach, send
from stage2_trainer.sync.fleet.server import ServerSession
from stage2_trainer.sync.tensors.announcement import bucket_bytes, plan_buckets
from stage2_trainer.sync.tensors.merge import WeightAccess, merged_weights

LAYERS, HIDDEN, WIDE = 28, 512, 1536
TRAINED_LAYERS = 7
BUCKET_BYTES = 10 * 2**20  # as many buckets as a model of 9 GB has at the default of 512 MiB
RUNS = 10
RANK = 16
RECIPE_WIDTH, RECIPE_RANK = 2, 4
"""Of the recipe of three servers (rank 16, 8 billion weights) the adapter is a 76th of the layers that it touches, and
these are a fifth of the model: as with this rank at this width, over the layers that train."""
START_TIMEOUT_S = 120.0
PORTS = 10_000, 20_000


class Policy(nn.Module):
    """Tensors in the number and proportions of Qwen3-0.6B's layers; the last quarter trains.

    width: in halves of that model's.
    """

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_layer(width * HIDDEN, width * WIDE) for _ in range(LAYERS))
        self.to(torch.bfloat16)
        for layer in list(self.layers)[:-TRAINED_LAYERS]:
            layer.requires_grad_(False)


def _layer(hidden: int, wide: int) -> nn.Module:
    layer = nn.Module()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        layer.add_module(name, nn.Linear(hidden, hidden, bias=False))
    for name in ("gate_proj", "up_proj"):
        layer.add_module(name, nn.Linear(hidden, wide, bias=False))
    layer.add_module("down_proj", nn.Linear(wide, hidden, bias=False))
    for name in ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"):
        layer.add_module(name, nn.RMSNorm(hidden))
    return layer


def rows() -> Iterator[Row]:
    """One to three servers: each against the raw broadcast, then the ways that a user would pick instead."""
    for width in (1, 2):
        with saved(Policy(width)) as (policy, folder, size):
            for count in (1, 2, 3):
                with servers(count, folder) as (addresses, token):
                    what = f"{count} server{'s' * (count > 1)}, {size}"
                    yield from compared(what, policy, addresses, token)
                    yield from merged(what, adapted(policy), addresses, token)


@contextmanager
def saved(policy: Policy) -> Iterator[tuple[Policy, str, str]]:
    """Yield the policy, the folder that it is saved in, and its size in words."""
    source = merged_weights(policy)
    megabytes = sum(meta.nbytes for meta in source.metadata()) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        save_file(dict(source), Path(folder) / "model.safetensors")
        yield policy, folder, f"{megabytes:.0f} MB, {len(source.entries)} tensors"


def compared(what: str, policy: Policy, addresses: list[ServerAddress], token: str) -> Iterator[Row]:
    """The rows of one number of servers."""
    options: dict[str, Any] = {"token": token, "timeout_s": 60.0, "device": torch.device("cpu")}
    with ExitStack() as stack:
        full = FullPush(addresses, access=WeightAccess(BUCKET_BYTES), how=VllmSync(changed_only=False), **options)
        stack.callback(full.close)
        groups = raw_groups(full)
        ours, raw, loaded, sealed, packed, each, disk = alternately(
            lambda: full.push(policy, version=1),
            lambda: broadcast(full, groups, policy),
            lambda: broadcast(full, groups, policy, load=True),
            lambda: broadcast_sealed(full, groups, policy),
            lambda: broadcast_packed(full, groups, policy),
            lambda: tensor_by_tensor(full, policy),
            lambda: by_disk(full, policy),
        )
        yield Row(what, "raw gloo broadcast in the clear, thrown away", ours, raw)
        yield Row(what, "raw gloo broadcast in the clear, each buffer copied to its place", ours, loaded)
        yield Row(what, "raw gloo broadcast, each buffer sealed by AES-GCM, opened, copied", ours, sealed)
        yield Row(
            what, "vLLM's own packing, broadcast by gloo in the clear, each buffer copied to its place", ours, packed
        )
        yield Row(what, "one RPC a tensor", ours, each)
        yield Row(what, "checkpoint on disk, reload", ours, disk)
        full.close()
        changed = FullPush(addresses, access=WeightAccess(BUCKET_BYTES), **options)
        stack.callback(changed.close)
        changed.push(policy, version=1)
        (part,) = alternately(lambda: changed.push(policy, version=1))
        yield Row(
            f"{what}, {TRAINED_LAYERS} of {LAYERS} layers train", "everything instead of what changed", part, ours
        )


def raw_groups(full: FullPush) -> list[Any]:
    """Form a gloo group with every server."""
    ports = free_ports(len(full.fleet.sessions))
    calls = [
        in_background(_post, session, "/raw/join", port)
        for session, port in zip(full.fleet.sessions, ports, strict=True)
    ]
    groups = [raw_gloo.group(port, 0) for port in ports]
    for call in calls:
        call.result()
    return groups


def adapted(policy: Policy, rank: int = RANK, layers: int = LAYERS) -> nn.Module:
    """Return the policy under a DoRA adapter of the last layers' linear ones, moved a little away from nothing."""
    last = "|".join(map(str, range(LAYERS - layers, LAYERS)))
    linear = rf"layers\.({last})\..*_proj"
    options = LoraConfig(r=rank, lora_alpha=2 * rank, use_dora=True, target_modules=linear)
    model: Any = get_peft_model(copy.deepcopy(policy), options)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=1e-3)
    return cast(nn.Module, model)


def merged(
    what: str, policy: Any, addresses: list[ServerAddress], token: str, *, runs: int = RUNS, disk: bool = True
) -> Iterator[Row]:
    """The rows of an adapter: the server merges, against the learner that merges and sends layers or writes a file."""
    options: dict[str, Any] = {"token": token, "timeout_s": 60.0, "device": torch.device("cpu")}
    ways = [VllmSync(merge="server"), VllmSync(merge="learner"), VllmSync(merge="learner", changed_only=False)]
    with ExitStack() as stack:
        taken = []
        for how in ways:  # one after the other: each takes the ports of the one before
            sync = FullPush(addresses, access=WeightAccess(BUCKET_BYTES), how=how, **options)
            stack.callback(sync.close)
            sync.push(policy, version=1)
            sent = sync.push(policy, version=1)
            taken += [(sent.bytes / 1e6, *alternately(functools.partial(sync.push, policy, version=1), runs=runs))]
            if disk and how is ways[-1]:
                taken += [(0.0, *alternately(functools.partial(by_disk, sync, policy), runs=runs))]
            sync.close()
    (adapter, ours), (layers, changed), (_, everything), *by_file = taken
    rank = policy.peft_config["default"].r
    what = f"{what}, DoRA of rank {rank} merged at the server: {adapter:.1f} MB sent"
    yield Row(what, f"merged at the learner, what changed: {layers:.0f} MB", ours, changed)
    yield Row(what, "merged at the learner, everything", ours, everything)
    for _, seconds in by_file:
        yield Row(what, "merged at the learner, checkpoint on disk, reload", ours, seconds)


def broadcast(full: FullPush, groups: list[Any], policy: Policy, *, load: bool = False) -> None:
    """Send as many bytes in as many pieces, already packed, to servers that throw them away, or keep a copy."""
    sizes = raw_sizes(policy)
    calls = [in_background(_post, session, "/raw", {"sizes": sizes, "load": load}) for session in full.fleet.sessions]
    raw_gloo.broadcast(groups, sizes)
    for call in calls:
        call.result()


def broadcast_sealed(full: FullPush, groups: list[Any], policy: Policy) -> None:
    """The same, but each piece encrypted and proved as on a link, then copied to its place."""
    sizes = raw_sizes(policy)
    calls = [
        in_background(_post, session, "/raw-sealed", {"sizes": sizes, "rank": rank})
        for rank, session in enumerate(full.fleet.sessions)
    ]
    raw_gloo.broadcast_sealed(groups, sizes)
    for call in calls:
        call.result()


def broadcast_packed(full: FullPush, groups: list[Any], policy: Policy) -> None:
    """Send the tensors themselves as vLLM's engine packs them, over gloo where it takes NCCL."""
    source = merged_weights(policy)
    sizes = [bucket_bytes(bucket) for bucket in plan_buckets(source.metadata(), BUCKET_BYTES)]
    calls = [in_background(_post, session, "/raw", {"sizes": sizes, "load": True}) for session in full.fleet.sessions]
    raw_gloo.broadcast_made(groups, packed_by_vllm(iter(source)))
    for call in calls:
        call.result()


def packed_by_vllm(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yield the buffers that vLLM packs of tensors."""
    from vllm.distributed.weight_transfer.packed_tensor import pack_tensors

    while (chunk := pack_tensors(tensors, itemgetter(1), BUCKET_BYTES)) is not None:
        yield chunk.packed_tensor


def raw_sizes(policy: Policy) -> list[int]:
    """Return the sizes of as many bytes in as many pieces as a sync sends."""
    total = sum(meta.nbytes for meta in merged_weights(policy).metadata())
    return [BUCKET_BYTES] * (total // BUCKET_BYTES) + [total % BUCKET_BYTES]


def tensor_by_tensor(full: FullPush, policy: Policy) -> None:
    """Announce and send each tensor on its own, as TRL and ms-swift's older servers are sent weights."""
    source = merged_weights(policy)
    with full.fleet.update() as update:
        reach(update)
        for entry in source.entries:
            send(full.fleet, Shipment(source.only(frozenset({entry.name}))), update.fit, update)
        update.each(lambda session: ServerSession.finish(session, 1, vision_moved=False))


def by_disk(full: FullPush, policy: nn.Module) -> None:
    """Write a checkpoint, merged where there is an adapter, and let every server read it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(dict(merged_weights(policy)), path)
        for call in [in_background(_post, session, "/reload", {"path": str(path)}) for session in full.fleet.sessions]:
            call.result()


def _post(session: ServerSession, route: str, body: Any) -> None:
    session.client.post(route, "bench", body=body)


def alternately(*calls: Callable[[], object], runs: int = RUNS) -> list[float]:
    """The least wall time of each call. They take turns, so that what disturbs the machine disturbs all of them."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(1 + runs):
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [min(taken[1:]) for taken in times]  # the first is for caches to fill


@contextmanager
def servers(
    count: int, model: str, host: str = raw_gloo.LOOPBACK, inside: Sequence[str] = ()
) -> Iterator[tuple[list[ServerAddress], str]]:
    """Start so many sinks over a model folder; yields where they are, and their token.

    host: the address that they listen on. inside: the command that enters the network which has it.
    """
    token = secrets.token_hex(8)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "token").write_text(token)
        environment = {**os.environ, "STAGE2_TOKEN_FILE": str(folder / "token")}
        ports = free_ports(2 * count)
        addresses = [ServerAddress(f"http://{host}:{ports.pop()}", ports.pop()) for _ in range(count)]
        for address in addresses:
            command = [sys.executable, "-m", "bench.sink", address.base_url.rpartition(":")[2], model, host]
            process = subprocess.Popen([*inside, *command], env=environment)
            stack.callback(process.wait)
            stack.callback(process.terminate)
        for address in addresses:
            wait_until_up(address.base_url)
        yield addresses, token


def wait_until_up(url: str, context: ssl.SSLContext | None = None) -> None:
    """Return once a server answers its health route. context: of TLS."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/health", context=context).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(f"{url} did not start within {START_TIMEOUT_S:g} s")


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, below those that the system gives to outgoing connections."""
    found: list[int] = []
    for port in range(random.SystemRandom().randrange(*PORTS), 2**16):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError("no free ports")


TABLE = Table("Full weight sync", "ms", 1e3, rows)
