"""What runs inside a wrapper's forward pass, and that nothing stays behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stage2_trainer.learner.step import run_inside


class Wrapper(nn.Module):
    """Like DistributedDataParallel: does something around the forward pass of what it holds."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.passes = 0

    def forward(self, *inputs):
        self.passes += 1
        return self.module(*inputs)


@pytest.fixture
def module():
    return nn.Linear(2, 1)


def test_the_computation_runs_within_the_wrapper(module):
    wrapper = Wrapper(module)
    found = run_inside(wrapper, module, lambda x: ("ours", module(x)), torch.ones(2))
    assert found[0] == "ours"
    assert torch.equal(found[1], module(torch.ones(2)))
    assert wrapper.passes == 1


def test_an_unwrapped_module_is_its_own_wrapper(module):
    assert run_inside(module, module, lambda x: x + 1, 1) == 2


def test_the_module_is_as_it_was_afterwards_also_after_an_error(module):
    def fail(x):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        run_inside(Wrapper(module), module, fail, 1)
    assert "forward" not in module.__dict__
    patched = module.forward = lambda x: "patched by somebody"
    run_inside(Wrapper(module), module, lambda x: x, 1)
    assert module.forward is patched
