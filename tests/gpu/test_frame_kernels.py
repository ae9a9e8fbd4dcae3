"""The kernels draft on a GPU what their reference drafts."""

from bench.frame_kernels import compare

from tests.gpu.conftest import ON_GPU_ALONE


@ON_GPU_ALONE  # the interpreter is chosen when Triton is imported
def test_kernels_draft_on_gpu_what_reference_drafts():
    found = list(compare(2000, 1, "cuda"))
    assert any(drafted for _, _, drafted, _ in found)
    assert not any(differs for *_, differs in found)
