"""What the files of a model folder cost once they are used: chat templates, which are programs, and sizes of images.

A template is rendered here first, in a process with limits, because no look at a program shows that it ends.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stage2_trainer.data.files import read_regular

SECONDS = 5
"""Seconds of processor time for a template; it takes a few milliseconds."""
PATIENCE_S = 120  # of a busy machine
MEMORY = 1 << 30
LARGEST = 1 << 20  # bytes of a template, and characters of a rendered one
MOST_TEMPLATES = 16
TEMPLATE_KEY = "chat_template"
ENDS = f"must be rendered in {SECONDS} s of a processor, 1 GiB of memory, and {LARGEST:,} characters"
PIXELS = 16_777_216  # to which a small image is enlarged; the most that stock models take
RANGES = {
    "patch_size": 1024,
    "merge_size": 64,
    "spatial_merge_size": 64,
    "temporal_patch_size": 64,
    "shortest_edge": PIXELS,
    "min_pixels": PIXELS,
    "longest_edge": 10**9,
    "max_pixels": 10**9,
    "height": 16_384,
    "width": 16_384,
}
"""The largest value of each size, in pixels, patches or frames; the least is 1."""

_RENDER = """
import json, resource, sys
limits = json.loads(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))
resource.setrlimit(resource.RLIMIT_CPU, (limits["seconds"], limits["seconds"] + 1))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

def raise_exception(message):
    raise TemplateError(message)

environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
)
environment.filters["tojson"] = lambda value, **options: json.dumps(value, **options)
environment.globals["raise_exception"] = raise_exception
environment.globals["strftime_now"] = lambda form: form
asked = {"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "List all objects."}]}
answered = {"role": "assistant", "content": [{"type": "text", "text": "{}"}]}
plain = [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
try:
    template = environment.from_string(sys.stdin.read())
except (MemoryError, OverflowError):
    raise
except Exception:
    sys.exit(0)  # the loader reports a template that is none
for messages, more in (([asked], True), ([asked, answered], False), (plain, False), (plain[:2], True)):
    length = 0
    try:
        for part in template.generate(messages=messages, tools=None, add_generation_prompt=more):
            length += len(part)
            if length > limits["characters"]:
                sys.exit(3)
    except (MemoryError, OverflowError):
        raise
    except Exception:
        pass  # the model's own affair, such as a role that it refuses
"""


def flaw_of_costs(folder: Path, documents: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return which file of a model folder costs too much, as a rule; None if none does.

    documents: its descriptions by the name of their file.
    """
    return _flaw_of_sizes(documents) or _flaw_of_templates(folder, documents)


def _flaw_of_sizes(documents: Mapping[str, Mapping[str, Any]]) -> str | None:
    for name, document in documents.items():
        part = {"vision_config": document.get("vision_config")} if name == "config.json" else document
        if name != "config.json" and not name.endswith("processor_config.json"):
            continue
        for path, value in _sizes(part):
            most = RANGES[path.rpartition(".")[2]]
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                return f"{path} in its {name} must be a whole number from 1 to {most:,} (it is {str(value)[:40]})"
    return None


def _sizes(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield all sizes in a document, with their paths."""
    left = [("", document)]
    while left:
        path, part = left.pop()
        for key, value in part.items():
            if isinstance(value, dict):
                left.append((f"{path}{key}.", value))
            elif key in RANGES:
                yield f"{path}{key}", value


def _flaw_of_templates(folder: Path, documents: Mapping[str, Mapping[str, Any]]) -> str | None:
    files = [*sorted(folder.glob("*.jinja")), *sorted((folder / "additional_chat_templates").glob("*.jinja"))]
    if len(files) > MOST_TEMPLATES:
        return f"has more than {MOST_TEMPLATES} chat templates"
    templates: list[tuple[str, str]] = []
    for file in files:
        try:
            templates.append((file.name, read_regular(file, LARGEST).decode()))
        except (OSError, UnicodeDecodeError) as error:
            return f"its chat template in {file.name} cannot be read ({getattr(error, 'strerror', None) or error})"
    for name, document in documents.items():
        templates += ((name, text) for text in _texts(document.get(TEMPLATE_KEY)))
    if len(templates) > MOST_TEMPLATES:
        return f"has more than {MOST_TEMPLATES} chat templates"
    for name, text in templates:
        if len(text) > LARGEST:
            return f"its chat template in {name} is larger than {LARGEST:,} characters"
        if not _renders(text, SECONDS):
            return f"its chat template in {name} {ENDS}"
    return None


def _texts(value: Any) -> list[str]:
    """Return the templates of a key: a text, a mapping of texts by name, or a list of names with texts."""
    if isinstance(value, dict):
        return [text for text in value.values() if isinstance(text, str)]
    listed = [one.get("template") if isinstance(one, dict) else one for one in value or () if isinstance(value, list)]
    return [text for text in [value, *listed] if isinstance(text, str)]


@functools.lru_cache(maxsize=MOST_TEMPLATES)
def _renders(template: str, seconds: int) -> bool:
    """Whether a template ends within the limits, whatever it says."""
    limits = json.dumps({"seconds": seconds, "memory": MEMORY, "characters": LARGEST})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _RENDER, limits],
            input=template.encode("utf-8", errors="replace"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
