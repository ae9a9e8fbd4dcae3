"""One name, one thing: no two public classes and no two files of one name mean different things."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("crds/stage2_api", "controller/stage2_controller", "trainer/stage2_trainer", "cli/stage2_cli")

# Names that stand for one thing in several places, or that Python and the field fix. Name -> why.
FILES_OF_ONE_NAME = {
    "__init__": "Python's",
    "__main__": "Python's",
    "main": "a program's entry: `stage2`, `stage2 learn`, the operator",
    "errors": "the errors of the room that it lies in",
    "tcp": "both ends of one transport",
    "nccl": "both ends of one transport",
    "trainer": "the trainer of its room: rollout matching, GRPO",
    "build": "puts the trainer of its room together",
    "progress": "the report of a learner: its model, and the route that serves it",
    "reproducibility": "the record of a run: its model, and the learner that fills it",
    "validate": "`stage2 validate` and the functions that it calls",
    "evaluate": "`stage2 evaluate`, and the learner's own evaluation",
    "replay": "`stage2 replay` and the functions that it calls",
    "run": "the rules of a run, and `stage2 run`",
    "job": "a job's model and its rules",
    "grpo": "the model of a GRPO run and its rules",
    "grpo_batches": "the batches of a GRPO run and their rules",
    "grpo_server": "the server of a GRPO run and its rules",
}
CLASSES_OF_ONE_NAME: dict[str, str] = {}


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def public_classes(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def several(places: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_files_of_one_name_mean_two_things() -> None:
    places = defaultdict(list)
    for path in modules():
        places[path.stem].append(str(path.relative_to(ROOT)))
    found = several(places)
    assert {name: paths for name, paths in found.items() if name not in FILES_OF_ONE_NAME} == {}
    assert set(FILES_OF_ONE_NAME) - set(found) == set(), "no longer needed: take them out"


def test_no_two_public_classes_of_one_name_mean_two_things() -> None:
    places = defaultdict(list)
    for path in modules():
        for name in public_classes(path):
            places[name].append(str(path.relative_to(ROOT)))
    found = several(places)
    assert {name: paths for name, paths in found.items() if name not in CLASSES_OF_ONE_NAME} == {}
    assert set(CLASSES_OF_ONE_NAME) - set(found) == set(), "no longer needed: take them out"
