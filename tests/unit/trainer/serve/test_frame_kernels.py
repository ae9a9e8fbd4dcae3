"""The kernels draft what their reference drafts, and compile for the GPUs that they are for."""

import datetime
import os
import subprocess
import sys

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stage2_trainer.serve import frame, frame_kernels
from tests.integration.conftest import ROOT

REQUESTS = 2000 if os.environ.get("STAGE2_EXHAUSTIVE") == "1" else 40
PARAMETERS = {"rows": "*i64", "last_sampled": "*i64", "drafts": "*i64"} | dict.fromkeys(
    ("EXAMPLE", "AFTER_NAME", "request_stride", "stride", "blocks"), "i32"
)
LEADS = {"LEAD": frame.LEAD, "ANY": frame.ANY}
CONSTANTS = {
    "_scan": {"LONGEST": frame.LONGEST_REPETITION, "BLOCK": frame_kernels.BLOCK, **LEADS},
    "_copy": {
        "SHORTEST": frame.SHORTEST_REPETITION, "NAME": frame.LONGEST_NAME, "DIGITS": frame.LONGEST_NUMBER,
        "COORDINATE": frame.COORDINATE, "BLOCKS": 64, **LEADS,
    },
}  # fmt: skip


def test_kernels_draft_what_reference_drafts_for_random_requests():
    """Others each day. Triton's interpreter is chosen when Triton is imported, so it has a process of its own."""
    seed = str(datetime.date.today().toordinal())
    command = [sys.executable, "-m", "bench.frame_kernels", str(REQUESTS), seed]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, (seed, done.stdout, done.stderr[-2000:])
    assert "| all |" in done.stdout


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize(("name", "most"), [("_scan", {}), *(("_copy", {"K": k}) for k in (1, 11, 24))])
def test_kernels_compile_without_gpu(name, most, architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, constants = getattr(frame_kernels, name), CONSTANTS[name] | most
    if most:
        constants["SLOTS"] = triton.next_power_of_2(most["K"])
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={one: "constexpr" if one in constants else PARAMETERS.get(one, "*i32") for one in names},
        constexprs={(names.index(one),): value for one, value in constants.items()},
    )
    assert triton.compile(source, target=GPUTarget("cuda", architecture, 32)).asm["cubin"]
