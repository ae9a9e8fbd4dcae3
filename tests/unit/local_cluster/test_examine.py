"""The examination of an image tells what is missing in it, and nothing of what is there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from local_cluster import buildah, examine, gpu_image, images
from local_cluster.layout import Layout

LDD = """\
\tlinux-vdso.so.1 (0x00007ffd)
\tlibtorch_cuda.so => not found
\tlibcuda.so.1 => not found
\tlibnuma.so.1 => not found
\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)
"""


def test_imports_are_found_anywhere_in_source() -> None:
    source = (
        "import os.path, torch.nn\nfrom . import near\ndef f():\n    from vllm.envs import X\n    import numpy as np\n"
    )
    assert examine.imported_names(source) == {"os", "torch", "vllm", "numpy"}


def test_missing_package_is_reported_with_importing_files(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("import json, absent, present\nimport kopf\n")
    (tmp_path / "two.py").write_text("import absent\n")
    (fault,) = examine.missing_packages([tmp_path], lambda name: name == "present", examine.OTHER_SIDE)
    assert fault == "package absent: imported by one.py and 1 other files, and not installed"


def test_package_version_differing_from_vllm_pin_is_reported() -> None:
    installed = {"torch": "2.13.0+cu130", "torchvision": "0.27.0"}
    pins = ["torch==2.13.0", "torchvision == 0.28.0", "xformers==1.0", 'ray==2.0; extra == "x"', "numpy>=2"]
    assert examine.other_versions(pins, installed.get) == [
        "package torchvision: vLLM was built with 0.28.0, and 0.27.0 is installed",
        "package xformers: vLLM was built with 1.0, and none is installed",
    ]


def test_driver_and_bundled_libraries_are_not_reported_missing() -> None:
    assert examine.lacking(LDD) == {"libtorch_cuda.so", "libcuda.so.1", "libnuma.so.1"}
    lacked = {Path("a.so"): examine.lacking(LDD), Path("b.so"): {"libnvidia-ml.so.1"}}
    lacked[Path("torchcodec/libtorchcodec_core4.so")] = {"libavcodec.so.58"}
    (fault,) = examine.missing_libraries(lacked, frozenset({"libtorch_cuda.so"}))
    assert fault == "library libnuma.so.1: needed by a.so and 0 other files, and not there"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_real_shared_library_with_missing_dependency_is_found(tmp_path: Path) -> None:
    for name, other in (("inner", []), ("outer", ["-L.", "-linner"])):
        (tmp_path / f"{name}.c").write_text(f"int {name}(void) {{ return 0; }}")
        forced = "-Wl,--no-as-needed"
        command = ["gcc", "-shared", "-fPIC", f"{name}.c", forced, *other, "-o", f"lib{name}.so"]
        subprocess.run(command, cwd=tmp_path, check=True)
    (tmp_path / "libinner.so").rename(tmp_path / "gone")
    libraries = examine.shared_libraries(tmp_path)
    assert [path.name for path in libraries] == ["libouter.so"]
    assert examine.looked_up(libraries) == {tmp_path / "libouter.so": {"libinner.so"}}


def test_folders_with_wrong_write_access_are_reported(tmp_path: Path) -> None:
    assert examine.unusable_folders([str(tmp_path)], ["/proc/1"]) == []
    gone = str(tmp_path / "gone")
    assert examine.unusable_folders([gone], [str(tmp_path)]) == [
        f"folder {gone}: must be writable",
        f"folder {tmp_path}: must be read-only",
    ]


def test_missing_compiler_is_reported() -> None:
    assert examine.missing_compilers(lambda name: None)[:2] == ["compiler gcc: not there", "compiler g++: not there"]


def test_server_environment_disables_kernels_that_need_nvcc() -> None:
    assert len(examine.needs_nvcc({"VLLM_USE_FLASHINFER_SAMPLER": "1"})) == 2
    assert examine.needs_nvcc(examine._server_environment()) == []


def test_examination_runs_with_standard_library_alone() -> None:
    program = f"import runpy, sys; runpy.run_path({examine.__file__!r}); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert "local_cluster" not in done.stdout


def test_gpu_image_is_another_build_of_trainer_image(tmp_path: Path) -> None:
    assert (gpu_image.IMAGE.dockerfile, gpu_image.IMAGE.arguments) == (
        images.PROJECT_IMAGES[1].dockerfile,
        ("VLLM=gpu",),
    )
    assert gpu_image.IMAGE.reference not in {image.reference for image in images.PROJECT_IMAGES}
    command = gpu_image.examination_command(Layout.default(tmp_path), "working")
    assert command[:3] == [*buildah.OWN_MOUNTS, "sh"]
    assert command[command.index("examine") + 1 : command.index("buildah")] == [
        "working",
        str(gpu_image.EXAMINATION),
        gpu_image.USER,
        gpu_image.PYTHON,
    ]
