"""Rewards by name: put together, weighed, and added by others."""

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.grpo.rewards import Sample, load_rewards, score
from stage2_trainer.grpo.rewards.registry import ENTRY_POINTS
from tests.unit.trainer.grpo.summaries import about, sample

PACKAGE = """
def brevity(sample):
    return 1.0 / (1 + len(sample.text))
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that installs a package with rewards under the entry point, by their names."""

    def install(**names):
        (tmp_path / "their_rewards.py").write_text(PACKAGE)
        information = tmp_path / "theirs-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {target}" for name, target in names.items())
        (information / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{lines}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_scores_are_told_by_name_and_weighed_in_their_sum():
    rewards = load_rewards(["summary.format", "summary.strict"], [2.0, 0.5])
    found = score(rewards, sample("nothing"))
    assert found.by_name == {"summary.format": 0.0, "summary.strict": -1.0}
    assert found.total == -0.5
    assert score(rewards, about({"统计": []}, {"统计": []})).total == 2.0


def test_a_package_adds_a_reward_by_an_entry_point(package):
    package(**{"theirs.brevity": "their_rewards:brevity"})
    (reward,) = load_rewards(["theirs.brevity"], [1.0])
    assert reward(Sample("abc")) == 0.25


def test_a_name_that_is_taken_is_refused(package):
    package(**{"summary.format": "their_rewards:brevity"})
    with pytest.raises(ConfigError, match=r"summary\.format.*rename"):
        load_rewards(["summary.format"], [1.0])


def test_a_reward_that_cannot_be_imported_is_refused_before_anything_runs(package):
    package(**{"theirs.gone": "their_rewards:gone"})
    with pytest.raises(ConfigError, match=r"theirs\.gone.*their_rewards:gone"):
        load_rewards(["theirs.gone"], [1.0])


def test_all_rewards_that_do_not_exist_are_named_with_those_that_do():
    with pytest.raises(ConfigError) as refused:
        load_rewards(["summary.format", "summary.fromat", "theirs.brevity"], [1.0] * 3)
    assert [problem.path for problem in refused.value.problems] == ["rlhf.reward_funcs[1]", "rlhf.reward_funcs[2]"]
    assert "summary.format" in refused.value.problems[0].rule


def test_summaries_without_a_contract_are_refused():
    (reward,) = load_rewards(["summary.format"], [1.0])
    with pytest.raises(ConfigError, match=r"custom\.grpo\.summary"):
        reward(Sample("x"))


@pytest.mark.parametrize(
    ("metadata", "path"),
    [({"_fusion_template": "summary_space"}, "_fusion_template"), ({"summary_ref": "nothing"}, "summary_ref")],
)
def test_a_record_outside_the_contract_is_refused(metadata, path):
    (reward,) = load_rewards(["summary.content_f1"], [1.0])
    one = about({"统计": []}, {"统计": []})
    with pytest.raises(ConfigError, match=path):
        reward(Sample(one.raw, {**one.metadata, **metadata}, one.contract))
