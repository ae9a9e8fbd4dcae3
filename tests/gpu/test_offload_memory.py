"""StateOffloader on a GPU: the memory that it really frees, and the same bytes afterwards."""

import logging
import time

import pytest
import torch

from stage2_trainer.model.offload import DeviceMover, StateOffloader, optimizer_tensors
from tests.gpu.conftest import ON_GPU_ALONE

pytestmark = ON_GPU_ALONE
logger = logging.getLogger(__name__)

WIDTH, DEPTH = 4096, 8  # 0.5 GB of parameters, and twice that of optimizer state
PARAMETERS = 4 * DEPTH * (WIDTH * WIDTH + WIDTH)


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, WIDTH, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def held(trained):
    model, optimizer = trained
    return [tensor.detach().cpu().clone() for tensor in (*model.parameters(), *optimizer_tensors(optimizer))]


@pytest.mark.parametrize(("model", "optimizer"), [(True, False), (False, True), (True, True)])
def test_offloaded_tensors_free_gpu_memory_and_return_unchanged(trained, model, optimizer):
    offload = StateOffloader(DeviceMover(torch.device("cuda")), model=model, optimizer=optimizer)
    offload.find_optimizer = lambda: trained[1]
    before, reserved, allocated = held(trained), torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    start = time.monotonic()
    with offload.without_optimizer(), offload.without_model(trained[0]):
        freed = allocated - torch.cuda.memory_allocated()
        given_back = reserved - torch.cuda.memory_reserved()
        away = [one for one in (*trained[0].parameters(), *optimizer_tensors(trained[1])) if not one.is_cuda]
        page_locked = [one.is_pinned() for one in away]
    seconds = time.monotonic() - start
    logger.info(
        "model %s, optimizer %s: %.2f GB given back, there and back in %.2f s",
        model,
        optimizer,
        given_back / 1e9,
        seconds,
    )
    assert page_locked
    assert all(page_locked)
    assert freed >= 0.99 * PARAMETERS * (model + 2 * optimizer)
    assert given_back >= 0.9 * freed
    assert all(torch.equal(one, other) for one, other in zip(before, held(trained), strict=True))


def test_offloaded_tensors_return_after_error(trained):
    offload = StateOffloader(DeviceMover(torch.device("cuda")), model=True, optimizer=True)
    offload.find_optimizer = lambda: trained[1]
    before = held(trained)
    with pytest.raises(MemoryError), offload.without_optimizer(), offload.without_model(trained[0]):
        raise MemoryError("CUDA out of memory")
    assert all(parameter.is_cuda for parameter in trained[0].parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, held(trained), strict=True))
