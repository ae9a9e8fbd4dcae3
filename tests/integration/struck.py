"""One of several learner processes: when it comes to a phase of a step, the launcher of all is asked to stop.

    python -m tests.integration.struck CONFIG PHASE

The second process asks, for torchrun passes it on to all. In `rollouts` and `evaluation` the answers of that process
would never end, and in `engine` those of all; other phases last until that process is asked itself.

The phases of `IN_PUSH` come in the middle of a push of weights that ZeRO-3 has spread. There the first process is
asked, fails by itself, or kills a server; with `pushes` nothing happens. Each process writes into `whole-RANK.json` the
most bytes of weights that it ever held whole in a push, and those of all weights.
"""

import itertools
import json
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path

import yaml
from torch import nn

from stage2_api.parsing import parse_run_config
from stage2_cli.processes import end_with_parent
from stage2_trainer import main
from stage2_trainer.learner.loop import Learner
from stage2_trainer.learner.passes import RowPasses
from stage2_trainer.learner.schedule import Window
from stage2_trainer.model.gathered_weights import GatheredWeights
from stage2_trainer.rollouts.colocate import ColocateEngine
from stage2_trainer.rollouts.first_process import FirstProcessRollouts
from stage2_trainer.rollouts.hf import HfBackend

STEP = 1  # steps that are whole before the phase comes
ENDLESS = 10**6
NO_TOKEN = -1
BUCKET_BYTES = 200_000  # a bucket ends once it exceeds them


STRUCK: list[bool] = []


def strike() -> None:
    """Ask the launcher to stop, once."""
    if os.environ["RANK"] == "1" and not STRUCK:
        STRUCK.append(True)
        os.kill(os.getppid(), signal.SIGTERM)


def strike_and_hear() -> None:
    """Ask the launcher to stop, once, and go on when it has passed that on to this process."""
    if os.environ["RANK"] != "1" or STRUCK:
        return
    heard, handle = [], signal.getsignal(signal.SIGTERM)

    def hear(number, frame) -> None:
        heard.append(number)
        handle(number, frame)

    signal.signal(signal.SIGTERM, hear)
    strike()
    while not heard:
        time.sleep(0.01)


def before(owner: type, name: str, do) -> None:
    """Do something before each call of a method."""
    real = getattr(owner, name)

    def method(self, *arguments, **options):
        do(self, *arguments, **options)
        return real(self, *arguments, **options)

    setattr(owner, name, method)


def after(owner: type, name: str, do) -> None:
    """Do something after each call of a method, however it ends."""
    real = getattr(owner, name)

    def method(*arguments, **options):
        try:
            return real(*arguments, **options)
        finally:
            do()

    setattr(owner, name, method)


def endless(backend: HfBackend) -> None:
    """Let answers never end."""
    backend._decoding, backend._end = replace(backend._decoding, max_new_tokens=ENDLESS), NO_TOKEN
    strike()


def in_rollouts(backend: HfBackend, requests, *, seed_plan, version=None) -> None:
    if version == STEP and os.environ["RANK"] == "1":
        endless(backend)


def in_evaluation(backend: HfBackend, requests, *, seed_plan, version=None) -> None:
    if version == STEP and len(requests) > 1 and os.environ["RANK"] == "1":  # a step asks for one
        endless(backend)


def in_engine(engine: ColocateEngine, requests, *, seed_plan) -> None:
    """Ask the engine the same again and again; all of its processes must."""
    if engine.version == STEP:
        engine._calls = itertools.repeat
        strike()


def in_gradients(passes: RowPasses, group) -> None:
    if passes.step == STEP:
        strike_and_hear()


def in_optimizer(learner: Learner, window: Window) -> None:
    if window.step == STEP:
        strike_and_hear()


def in_save(learner: Learner, folder: Path) -> None:
    if learner.state.global_step == STEP + 1:
        strike_and_hear()


class Pushes:
    """The pushes of ZeRO-3's weights, in small buckets: in the second push, the first process is struck.

    That is when it is about to gather the third bucket, and the other process gathers it already.

    most: the most bytes of weights that were whole in this process at once, as gathered for a push or by its proof.
    """

    def __init__(self, blow) -> None:
        self.most = {"push": 0, "proof": 0}
        self.begun = self.gathers = 0
        self._blow = blow
        self._parameters: list[nn.Parameter] = []

    def install(self, output: Path) -> None:
        from deepspeed import zero
        from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

        GatheredWeights.__init__ = partialmethod(GatheredWeights.__init__, BUCKET_BYTES)
        after(zero.GatheredParameters, "__enter__", partial(self._count, "push"))
        after(PartitionedParameterCoordinator, "fetch_sub_module", partial(self._count, "proof"))
        before(zero.GatheredParameters, "__enter__", self._gather)
        before(FirstProcessRollouts, "sync", self._begin)
        after(FirstProcessRollouts, "sync", lambda: self._end(output / f"whole-{os.environ['RANK']}.json"))

    def _begin(self, rollouts, model, **options) -> None:
        self.begun, self.gathers, self._parameters = self.begun + 1, 0, list(model.parameters())

    def _gather(self, context) -> None:
        self.gathers += 1
        if os.environ["RANK"] == "0" and (self.begun, self.gathers) == (2, 3):
            self._blow()

    def _count(self, what: str) -> None:
        self.most[what] = max(self.most[what], sum(one.nbytes for one in self._parameters))

    def _end(self, path: Path) -> None:
        every = sum(one.ds_numel * one.element_size() for one in self._parameters)
        path.write_text(json.dumps({**self.most, "all": every}))
        self._parameters = []


def fail() -> None:
    raise RuntimeError("a fault of the learner itself")


IN_PUSH = {
    "pushes": lambda: None,
    "push": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "fault": fail,
    "server": lambda: os.kill(int(os.environ["STRUCK_SERVER"]), signal.SIGKILL),
}
PHASES = {
    "rollouts": (HfBackend, "generate", in_rollouts),
    "evaluation": (HfBackend, "generate", in_evaluation),
    "engine": (ColocateEngine, "generate", in_engine),
    "gradients": (RowPasses, "_seeded", in_gradients),  # behind the check that precedes each pass
    "optimizer": (Learner, "_change_weights", in_optimizer),
    "save": (Learner, "_write", in_save),
}


def install(phase: str, output: Path) -> None:
    if phase == "loading":
        strike()
    elif phase in IN_PUSH:
        Pushes(IN_PUSH[phase]).install(output)
    else:
        before(*PHASES[phase])


if __name__ == "__main__":
    end_with_parent()
    config, phase = sys.argv[1:]
    install(phase, Path(config).parent)
    sys.exit(main.learn(parse_run_config(yaml.safe_load(Path(config).read_text()))))
