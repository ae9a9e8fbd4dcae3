"""Buckets: what is packed on one side is cut on the other, by one rule."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stage2_trainer.sync.tensors.announcement import (
    TensorMeta,
    bucket_bytes,
    from_wire,
    pack,
    plan_buckets,
    to_wire,
    unpack,
)


def meta(name, *shape, dtype=torch.float32):
    return TensorMeta(name, dtype, shape)


def test_bucket_ends_once_it_exceeds_limit():
    metas = [meta("a", 4), meta("b", 4), meta("c", 1), meta("d", 100), meta("e", 1)]
    names = [[m.name for m in bucket] for bucket in plan_buckets(metas, 20)]
    assert names == [["a", "b"], ["c", "d"], ["e"]]


@given(st.lists(st.integers(0, 50)), st.integers(1, 300))
def test_every_tensor_is_in_one_bucket_in_order(sizes, limit):
    metas = [meta(str(i), size) for i, size in enumerate(sizes)]
    assert [m for bucket in plan_buckets(metas, limit) for m in bucket] == metas


def test_buckets_equal_packed_broadcast_chunks_of_vllm():
    packed = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor")
    tensors = [(str(i), torch.zeros(size)) for i, size in enumerate([10, 90, 3, 3, 200, 1, 1, 60])]
    theirs, stream = [], iter(tensors)
    while chunk := packed.pack_tensors(stream, lambda item: item[1], 400):
        theirs.append(chunk.names)
    metas = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
    assert [[m.name for m in bucket] for bucket in plan_buckets(metas, 400)] == theirs


def test_tensors_of_any_dtype_and_layout_are_unpacked_unchanged():
    tensors = {
        "odd": torch.arange(3, dtype=torch.bfloat16),
        "after_odd": torch.randn(2, 3),
        "transposed": torch.randn(4, 2).T,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "ints": torch.arange(5),
    }
    bucket = [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    longer = torch.full((bucket_bytes(bucket) + 8,), 255, dtype=torch.uint8)  # an earlier bucket was longer
    buffer = pack(bucket, iter(tensors.items()), longer)
    assert buffer.shape == (bucket_bytes(bucket),)
    assert buffer.data_ptr() == longer.data_ptr()
    for name, tensor in unpack(from_wire(**to_wire(bucket)), buffer):
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize(
    "stream", [[("b", torch.zeros(2))], [("a", torch.zeros(3))], [("a", torch.zeros(2).double())], []]
)
def test_stream_that_differs_from_announced_metadata_is_refused(stream):
    with pytest.raises(ValueError, match="was announced"):
        pack([meta("a", 2)], iter(stream), torch.empty(8, dtype=torch.uint8))
