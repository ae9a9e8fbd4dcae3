"""What we send to `swift rollout` is what the real ms-swift reads, in a virtual environment of its own."""

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from stage2_trainer.wire.chat import infer_request, request_config
from stage2_trainer.wire.requests import RolloutRequest, Sampling

pytestmark = pytest.mark.in_turns(3, first=2)

# ms-swift and what its protocol module imports beside what is installed here: all of its dependencies are gigabytes.
PACKAGES = ("ms-swift==4.6.0", "modelscope==1.40.2", "modelscope-hub==0.5.1", "json-repair==0.64.5")
READ = """
import dataclasses, json, sys
from pydantic import TypeAdapter
from swift.infer_engine.protocol import RequestConfig, RolloutInferRequest
for line in sys.stdin:
    body = json.loads(line)
    requests = TypeAdapter(list[RolloutInferRequest]).validate_python(body["infer_requests"])
    config = TypeAdapter(RequestConfig).validate_python(body["request_config"])
    print(json.dumps([[dataclasses.asdict(one) for one in requests], dataclasses.asdict(config)]))
"""
SAMPLINGS = [Sampling(64), Sampling(64, temperature=0.7, repetition_penalty=1.05)]
IMAGE = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def swift_python() -> Path:
    """An interpreter that can import ms-swift; its environment is kept until what it is made of changes."""
    made_of = json.dumps([PACKAGES, sys.executable, sys.version])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "stage2" / "tests"
    folder = cache / f"ms-swift-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES], check=True)
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "installed-here.pth").write_text(sysconfig.get_path("purelib"))
        (folder / ".ready").touch()
    return python


def test_ms_swift_reads_every_field_of_requests(swift_python: Path) -> None:
    parts = [{"type": "image_url", "image_url": {"url": IMAGE}}, {"type": "text", "text": "List the shapes."}]
    chat = [{"role": "system", "content": "Answer in JSON."}, {"role": "user", "content": parts}]
    requests = [infer_request(RolloutRequest(chat))] * 2
    configs = [request_config(sampling, seed=17) for sampling in SAMPLINGS]
    asked = "\n".join(json.dumps({"infer_requests": requests, "request_config": config}) for config in configs)
    done = subprocess.run([swift_python, "-c", READ], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line, config in zip(done.stdout.splitlines()[-len(configs) :], configs, strict=True):
        found, read = json.loads(line)
        assert {key: read[key] for key in config} == config
        for request in found:
            assert request["messages"][1]["content"] == "<image>List the shapes."
            assert request["images"] == [IMAGE]
