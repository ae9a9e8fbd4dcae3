"""Digests: equal for equal bytes wherever they lie, different for every fault that a sync can make."""

import pytest
import torch
from safetensors.torch import save_file

from stage2_trainer.sync.fleet.merge_location import MergeLocation, MergeMismatch
from stage2_trainer.sync.tensors import digest
from stage2_trainer.sync.tensors.digest import Digests, differing
from stage2_trainer.sync.tensors.merge import WeightEntry, WeightSource
from stage2_trainer.sync.tensors.model_folder import folder_digests
from stage2_trainer.wire.errors import ServerError
from tests.unit.trainer.sync.exactness import digests_of


def hashed(tensor, name="model.a.weight"):
    return digests_of([(name, tensor)])[name]


def some(shape=(129, 515), dtype=torch.bfloat16):
    torch.manual_seed(2)
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (129, 515), (2**15 * 4 + 1,)])
def test_equal_bytes_have_equal_digests_at_any_memory_offset(dtype, shape):
    tensor = (some(shape, torch.float32) * 50).to(dtype)
    shifted = torch.empty(tensor.numel() + 1, dtype=dtype)[1:].view(shape).copy_(tensor)
    assert hashed(shifted) == hashed(tensor)
    assert hashed(tensor.clone()) == hashed(tensor)


def test_digest_of_transposed_view_equals_digest_of_contiguous_copy():
    tensor = some()
    assert hashed(tensor.T) == hashed(tensor.T.contiguous()) != hashed(tensor)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_digest_does_not_depend_on_threads_or_piece_size(threads, at_once, monkeypatch):
    tensor = some((777, 1111))
    expected, before = hashed(tensor), torch.get_num_threads()
    torch.set_num_threads(threads)
    monkeypatch.setitem(digest.PIECES_AT_ONCE, "cpu", at_once)
    found = hashed(tensor)
    torch.set_num_threads(before)
    assert found == expected


@pytest.mark.parametrize("place", [0, 1, 77, 66_000])
@pytest.mark.parametrize("bit", [0, 7, 15])
def test_flipping_single_bit_changes_digest(place, bit):
    tensor = some()
    changed = tensor.clone()
    changed.view(-1).view(torch.int16)[place] ^= -(2**15) if bit == 15 else 2**bit
    assert hashed(changed) != hashed(tensor)


@pytest.mark.parametrize("distance", [1, 4, 515, 2**13, 2**15, 2**17])
def test_swapping_two_elements_changes_digest(distance):
    tensor = some((2**18,))
    swapped = tensor.clone()
    swapped[0], swapped[distance] = tensor[distance], tensor[0]
    assert hashed(swapped) != hashed(tensor)


def test_swapping_rows_changes_digest():
    tensor = some((8, 2**17))
    order = [1, 0, 2, 3, 4, 5, 6, 7]
    assert hashed(tensor[order]) != hashed(tensor)


def test_digest_depends_on_name_dtype_and_shape():
    tensor = some()
    different = {hashed(tensor), hashed(tensor, "b"), hashed(tensor.view(515, 129)), hashed(tensor.view(torch.float16))}
    assert len(different) == 4


def test_missing_tensor_changes_digest_of_its_layer():
    digests = Digests()
    digests.add("l.0.q_proj.weight", some((8, 8)))
    digests.add("l.1.down_proj.weight", some((8, 8)))
    taken = ["l.0.q_proj.weight", "l.1.down_proj.weight"]
    assert digests.by_layer(taken) == digests.by_layer()
    assert differing(digests.by_layer([*taken, "l.0.k_proj.weight"]), digests.by_layer()) == ["l.0.qkv_proj"]
    assert differing(digests.by_layer(taken[1:]), digests.by_layer()) == ["l.0.qkv_proj"]


def layers(tensors):
    digests = Digests()
    for name, tensor in tensors.items():
        digests.add(name, tensor)
    return digests.by_layer()


def test_layers_with_swapped_missing_or_wrong_tensors_are_named():
    names = [f"l.{i}.self_attn.{p}_proj.weight" for i in range(3) for p in "qkv"]
    tensors = {name: some((8, 8)) + i for i, name in enumerate(names)}
    right = layers(tensors)
    assert set(right) == {f"l.{i}.self_attn.qkv_proj" for i in range(3)}
    swapped = {**tensors, names[0]: tensors[names[1]], names[1]: tensors[names[0]]}
    across = {**tensors, names[0]: tensors[names[3]], names[3]: tensors[names[0]]}
    lost = {name: tensor for name, tensor in tensors.items() if not name.startswith("l.2.")}
    wrong = {**tensors, names[4]: tensors[names[4]] + 1}
    assert differing(right, right) == []
    assert layers(dict(reversed(tensors.items()))) == right, "in whatever order they came"
    assert differing(right, layers(swapped)) == ["l.0.self_attn.qkv_proj"]
    assert differing(right, layers(across)) == ["l.0.self_attn.qkv_proj", "l.1.self_attn.qkv_proj"]
    assert differing(right, layers(lost)) == ["l.2.self_attn.qkv_proj"]
    assert differing(layers(lost), right) == ["l.2.self_attn.qkv_proj"]
    assert differing(right, layers(wrong)) == ["l.1.self_attn.qkv_proj"]


def test_no_tensors_have_no_digests():
    assert digests_of([]) == {}


def test_model_folder_tensors_are_digested_in_learner_dtype(tmp_path):
    save_file({"w": some(dtype=torch.float32)}, tmp_path / "model.safetensors")
    found = folder_digests(str(tmp_path), [("w", "bfloat16"), ("lost", "float32")])
    assert found == digests_of([("w", some())])


class Server:
    """A server that answers with the digests of its model folder, or not at all."""

    base_url = "http://s"

    def __init__(self, answer):
        self.answer = answer

    def post(self, route, phase, *, body):
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"digests": self.answer}


def test_server_folder_must_hold_current_base_weights_of_learner():
    weights = {name: some((3,), torch.float32) for name in "ab"}
    source = WeightSource(tuple(WeightEntry(name, weight, None, trains=False) for name, weight in weights.items()))
    location, right = MergeLocation("auto"), digests_of(weights.items())
    location.digest_base(source)
    assert location.compare_folder(Server(right), source) == right
    with pytest.raises(ServerError) as lost:
        location.compare_folder(Server(ServerError("http://s", "compare", "went away")), source)
    assert not isinstance(lost.value, MergeMismatch)
    with pytest.raises(MergeMismatch, match=r"other base weights than the learner: b$"):
        location.compare_folder(Server({"a": right["a"]}), source)
    weights["a"].add_(1)
    location.digest_base(source)
    with pytest.raises(MergeMismatch, match=r"other base weights than the learner: a$"):
        location.compare_folder(Server(right), source)
