"""Room for rollouts: everything comes back byte for byte, in order, whatever happens meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from stage2_trainer.model.offload import DeviceMover, StateOffloader, host_copy, moved_away, optimizer_tensors
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.rollouts.in_process import ColocateRollouts, EngineError
from stage2_trainer.rollouts.rollout_source import GenerationRequest
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import UNSYNCED, Rollout


@dataclass
class Shelf:
    """A mover that keeps the bytes elsewhere, and leaves nothing usable in their place."""

    events: list[str] = field(default_factory=list)
    held: dict[int, torch.Tensor] = field(default_factory=dict)

    def away(self, tensor):
        self.held[id(tensor)] = tensor.data.clone()
        tensor.data = torch.empty(0)

    def back(self, tensor):
        if id(tensor) in self.held:
            tensor.data = self.held.pop(id(tensor))

    def release(self):
        self.events.append("release")


@pytest.fixture
def trained():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return model, optimizer


def everything(model, optimizer):
    return [*model.parameters(), *optimizer_tensors(optimizer)]


def copies(tensors):
    return [tensor.clone() for tensor in tensors]


def test_offloaded_tensors_return_with_same_bytes(trained):
    before = copies(everything(*trained))
    with moved_away(everything(*trained), Shelf()):
        assert all(tensor.numel() == 0 for tensor in everything(*trained))
    assert all(map(torch.equal, before, everything(*trained)))


def test_offloaded_tensors_return_when_rollouts_fail(trained):
    before, shelf = copies(everything(*trained)), Shelf()
    with pytest.raises(RuntimeError, match="no rollouts"), moved_away(everything(*trained), shelf):
        raise RuntimeError("no rollouts")
    assert all(map(torch.equal, before, everything(*trained)))
    assert shelf.held == {}


def test_offloaded_tensors_return_when_later_move_fails(trained):
    class Full(Shelf):
        def away(self, tensor):
            if len(self.held) == 3:
                raise MemoryError("main memory is full")
            super().away(tensor)

    before = copies(everything(*trained))
    with pytest.raises(MemoryError), moved_away(everything(*trained), Full()):
        pytest.fail("the block must not run")
    assert all(map(torch.equal, before, everything(*trained)))


def test_tied_weights_stay_tied(trained):
    model, _ = trained
    tied = nn.Linear(4, 8)
    tied.weight = model[0].weight
    with moved_away(nn.ModuleList([model, tied]).parameters(), Shelf()):
        pass
    assert tied.weight is model[0].weight


def test_optimizer_without_state_has_no_tensors_to_offload():
    assert optimizer_tensors(None) == []
    assert optimizer_tensors(torch.optim.AdamW([nn.Parameter(torch.zeros(2))])) == []


def test_shared_optimizer_tensor_is_offloaded_once():
    """Optimizers of 8 bits keep one map of numbers for all parameters."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    shared = torch.arange(4.0)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"qmap1": shared, "state1": torch.zeros(2)}
    assert sum(one is shared for one in optimizer_tensors(optimizer)) == 1
    assert len(optimizer_tensors(optimizer)) == 3


def test_optimizer_step_counts_are_not_offloaded(trained):
    _, optimizer = trained
    assert len(optimizer_tensors(optimizer)) == 2 * len(list(trained[0].parameters()))


def test_offload_is_no_op_on_cpu(trained):
    model, _ = trained
    mover = DeviceMover(torch.device("cpu"))
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    with moved_away(model.parameters(), mover):
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(3, 5), torch.randn(3, 5).t(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    ids=["rows", "columns", "channels last"],
)
def test_host_copy_has_same_bytes_and_layout(tensor):
    held = host_copy(tensor.bfloat16(), page_locked=False)  # tests/gpu/test_offload_memory.py has the other
    assert held.stride() == tensor.stride()
    assert torch.equal(held, tensor.bfloat16())


@dataclass
class Watched:
    """An engine that notes what is at home while it works."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    fails: bool = False
    events: list[tuple[str, bool, bool]] = field(default_factory=list)
    version: int = UNSYNCED

    def _note(self, what):
        here = all(parameter.numel() for parameter in self.model.parameters())
        self.events.append((what, here, all(tensor.numel() for tensor in optimizer_tensors(self.optimizer))))

    def start(self):
        self._note("start")

    def sync(self, model, *, version, make_room):
        self._note("sync")
        make_room()
        self.version = version
        return SyncReport.create(version, 0.1, ["engine"])

    def generate(self, requests, *, seed_plan):
        self._note("generate")
        if self.fails:
            raise MemoryError("CUDA out of memory")
        return [Rollout([1], [2], "", "engine", self.version, "stop") for _ in requests]


def colocated(trained, *, model=True, optimizer=True, fails=False):
    engine = Watched(*trained, fails=fails)
    offload = StateOffloader(Shelf(), model=model, optimizer=optimizer)
    offload.find_optimizer = lambda: trained[1]
    return engine, ColocateRollouts(
        engine, offload, sync_mode="full", seed=17, reporter=Reporter(), interrupt=Interrupt()
    )


def generate(rollouts, trained, step=0, micro_step=0):
    chats = [[{"role": "user", "content": "?"}]]
    return rollouts.generate(GenerationRequest(trained[0], chats, step, micro_step, Stopwatch()))


def test_weights_are_pushed_with_model_present_and_optimizer_offloaded(trained):
    engine, rollouts = colocated(trained)
    generate(rollouts, trained)
    assert engine.events == [("start", False, False), ("sync", True, False), ("generate", False, False)]


@pytest.mark.parametrize(("model", "optimizer"), [(True, False), (False, True), (False, False)])
def test_only_configured_parts_are_offloaded(trained, model, optimizer):
    engine, rollouts = colocated(trained, model=model, optimizer=optimizer)
    generate(rollouts, trained)
    assert engine.events[-1] == ("generate", not model, not optimizer)


def test_engine_starts_once_and_syncs_once_per_optimizer_step(trained):
    engine, rollouts = colocated(trained)
    for step, micro_step in ((0, 0), (0, 1), (1, 0)):
        generate(rollouts, trained, step, micro_step)
    assert [what for what, *_ in engine.events] == ["start", "sync", "generate", "generate", "sync", "generate"]
    assert rollouts.sync_state.version == 1


def test_failing_engine_raises_error_that_suggests_hf_backend(trained):
    before = copies(everything(*trained))
    _, rollouts = colocated(trained, fails=True)
    with pytest.raises(EngineError, match=r"rollout_backend: hf"):
        generate(rollouts, trained)
    assert all(map(torch.equal, before, everything(*trained)))
