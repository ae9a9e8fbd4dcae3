"""`python -m tests.hostile_counts`: hand every front what hostile people handed it, and print one table of what held.

The cases are those of the unit tier, which this runs; a test that tries many in a loop tells how many as its property
`cases`. Exit code 1 where a case did not hold, a front has fewer than `least`, or docs/threat-model.md says another
table: `--write` writes it there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs" / "threat-model.md"
BEGIN, END = "<!-- python -m tests.hostile_counts --write -->\n", "<!-- end of what it wrote -->\n"
HEAD = ("front", "cases", "held", "where")
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Front:
    """One place where strangers hand something in.

    tests: `file::function` of what tries it, below tests/unit. least: no fewer cases than this, which an earlier
    review had by hand, may be tried.
    """

    name: str
    tests: Sequence[str]
    least: int

    @property
    def files(self) -> list[str]:
        """The test files, each once."""
        return sorted({f"tests/unit/{test.partition('::')[0]}" for test in self.tests})


FRONTS = (
    Front(
        "requests to a server without its token: routes, headers, disguises",
        (
            "trainer/engine/test_guarded_routes.py::test_a_route_is_closed",
            "trainer/engine/test_guarded_routes.py::test_a_route_in_disguise_is_closed",
            "trainer/engine/test_guarded_routes.py::test_a_request_that_hides_in_another_is_closed",
            "trainer/engine/test_guard.py::test_every_other_route_demands_the_token",
            "trainer/engine/test_guard.py::test_a_second_header_beside_the_token_is_refused",
            "trainer/engine/test_guard.py::test_a_websocket_called_health_is_not_the_health_route",
        ),
        209,
    ),
    Front(
        "answers of a server: endless, dripping, compressed, forged",
        ("trainer/rollouts/test_hostile_answers.py::test",),
        11,
    ),
    Front(
        "a server that lies",
        (
            "trainer/rollouts/test_lying_server.py::test_what_is_no_rollout_is_an_error_of_the_server_in_one_line",
            "trainer/rollouts/test_lying_server.py::test_what_is_no_answer_of_http_is_an_error_of_the_server",
            "trainer/rollouts/test_lying_server.py::test_any_rollout_can_be_learnt_from",
        ),
        22,
    ),
    Front(
        "answers of a model, damaged in every place",
        ("trainer/matching/test_hostile_texts.py::test_whatever_is_wrong_with_an_answer_it_is_a_target",),
        3_054,
    ),
    Front(
        "data records",
        (
            "trainer/data/test_hostile_records.py::test_a_hostile_line_is_refused_in_a_sentence",
            "trainer/data/test_records.py::test_a_mistake_is_named_with_file_line_and_field",
            "trainer/data/test_records.py::test_half_a_surrogate_pair_is_named_since_no_file_or_terminal_takes_it",
        ),
        67,
    ),
    Front(
        "images",
        (
            "trainer/data/test_hostile_images.py::test_what_is_no_image_is_named",
            "trainer/data/test_hostile_images.py::test_no_image_is_handed_to_another_program",
            "trainer/data/test_images.py::test_a_broken_data_url_is_named",
            "trainer/data/test_images.py::test_few_bytes_do_not_become_many_pixels",
            "trainer/data/test_images.py::test_a_file_that_never_ends_is_left_at_its_bound",
            "trainer/data/test_images.py::test_what_is_no_regular_file_is_no_image",
        ),
        19,
    ),
    Front(
        "jobs and YAML for `stage2 validate`",
        (
            "cli/test_validate.py::test_every_wrong_file_of_the_table_is_refused",
            "cli/test_config_files.py::test_hostile_yaml_is_refused_in_a_sentence",
            "cli/test_config_files.py::test_a_device_is_refused",
            "cli/test_config_files.py::test_of_twenty_thousand_mistakes_the_first_are_shown",
        ),
        28,
    ),
    Front(
        "overrides of pod templates",
        (
            "controller/job/test_template_rules.py::test_it_is_refused",
            "controller/job/test_template_rules.py::test_a_part_of_another_shape_is_refused_with_its_path",
            "charts/test_policy.py::test_a_risky_override_is_refused",
        ),
        42,
    ),
    Front(
        "a learner's answers about its progress",
        (
            "controller/cluster/test_progress_reader.py::test_a_hostile_answer_is_no_report",
            "controller/cluster/test_progress_reader.py::test_no_redirect_is_followed",
            "controller/cluster/test_progress_reader.py::test_an_answer_without_end_is_left_at_its_bound",
            "controller/cluster/test_progress_reader.py::test_nobody_else_is_shown_the_token",
        ),
        30,
    ),
    Front(
        "pods in the servers' labels",
        ("controller/job/test_service_members.py::test_a_pod_that_wears_all_labels",),
        5,
    ),
)


@dataclass
class Count:
    """What came of a front's cases. longest_s: the test that took the most time, in seconds."""

    cases: int = 0
    held: int = 0
    tracebacks: int = 0
    longest_s: float = 0.0
    failed: list[str] = field(default_factory=list)


def main() -> int:
    """Run the cases, print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/threat-model.md")
    options = parser.parse_args()
    found = counted(run())
    print(table(found))
    print(f"\n{summary(found.values())}")
    wrong = faults(found)
    if options.write and not wrong:
        DOCS.write_text(with_table(DOCS.read_text(encoding="utf-8"), table(found)), encoding="utf-8")
    elif not wrong and written(DOCS.read_text(encoding="utf-8")) != table(found):
        wrong = ["docs/threat-model.md holds another table: python -m tests.hostile_counts --write"]
    for fault in wrong:
        sys.stderr.write(f"{fault}\n")
    return int(bool(wrong))


def run() -> ElementTree.Element:
    """Run the files of all fronts once; return pytest's report."""
    files = sorted({file for front in FRONTS for file in front.files})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        logging = ("-o", "junit_logging=all", "-o", "junit_log_passing_tests=true", "-o", "junit_family=xunit1")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *logging, *files]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        return ElementTree.parse(report).getroot()  # written by the line above


def counted(report: ElementTree.Element) -> dict[str, Count]:
    """Return what came of each front, by its name, from pytest's report."""
    found = {front.name: Count() for front in FRONTS}
    for case in report.iter("testcase"):
        name = f"{case.get('file', '').removeprefix('tests/unit/')}::{case.get('name', '')}"
        for front in FRONTS:
            if name.startswith(tuple(front.tests)):
                _enter(found[front.name], name, case)
    return found


def _enter(count: Count, name: str, case: ElementTree.Element) -> None:
    properties = {one.get("name"): one.get("value") for one in case.iter("property")}
    tried = int(properties.get("cases") or 1)
    bad = any(case.find(outcome) is not None for outcome in ("failure", "error", "skipped"))
    said = "".join(text for kind in ("system-out", "system-err") for one in case.iter(kind) for text in one.itertext())
    count.cases += tried
    count.held += 0 if bad else tried
    count.tracebacks += said.count(TRACEBACK)
    count.longest_s = max(count.longest_s, float(case.get("time") or 0))
    count.failed += [name] if bad else []


def faults(found: Mapping[str, Count]) -> list[str]:
    """Return what is wrong, a sentence each."""
    told = [f"did not hold: {name}" for count in found.values() for name in count.failed]
    told += [f"a traceback was printed: {name}" for name, count in found.items() if count.tracebacks]
    least = {front.name: front.least for front in FRONTS}
    return told + [
        f"{name}: {count.cases} cases, of at least {least[name]}"
        for name, count in found.items()
        if count.cases < least[name]
    ]


def table(found: Mapping[str, Count]) -> str:
    """Return the table in Markdown."""
    rows = [HEAD, ("---",) * len(HEAD)]
    for front in FRONTS:
        count = found[front.name]
        files = ", ".join(f"`{file}`" for file in front.files)
        rows.append((front.name, f"{count.cases:,}", f"{count.held:,}", files))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def summary(counts: Iterable[Count]) -> str:
    """Return the sum of all fronts in a sentence."""
    every = list(counts)
    cases, held, tracebacks = (sum(getattr(one, name) for one in every) for name in ("cases", "held", "tracebacks"))
    longest = max(one.longest_s for one in every)
    return f"{cases:,} cases, {held:,} held, {tracebacks} tracebacks; the longest test took {longest:.1f} s"


def written(text: str) -> str:
    """Return the table that a document holds."""
    return text.partition(BEGIN)[2].partition(END)[0]


def with_table(text: str, made: str) -> str:
    """Return a document that holds this table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + made + END + rest.partition(END)[2]


if __name__ == "__main__":
    sys.exit(main())
