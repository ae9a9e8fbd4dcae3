"""Listeners of rollouts: dumps of some steps, and how well descriptions agree."""

from __future__ import annotations

import json
import sys

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.learner.listeners import DescriptionAgreement, SampleDumps
from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.process.supported import check_supported
from stage2_trainer.telemetry.run_log import remove_run
from stage2_trainer.wire.requests import Rollout
from tests.unit.trainer.learner.configs import run_config
from tests.unit.trainer.learner.harness import box, record


@pytest.fixture
def matched(encoder, matcher):
    """A function that matches a record of two boxes to an answer that calls them so."""

    def match(*names):
        one = record("no.png", object_1=box("red box", 0, 0, 400, 400), object_2=box("blue box", 500, 500, 900, 900))
        answered = [GTObject(name, true.kind, true.bins) for name, true in zip(names, one.objects, strict=False)]
        text = serialize_objects(answered)
        ids = encoder.tokenizer.encode(text, add_special_tokens=False)
        return matcher.match(one, Rollout([1, 2], ids, text, "scripted", 0, "stop"))

    return match


def dump_of(folder, **options):
    training = {"output_dir": str(folder), "logging_steps": 2}
    return SampleDumps(run_config(training=training, matching={"monitor_dump": {"enabled": True, **options}}))


def names(folder):
    return sorted(path.name for path in folder.rglob("step_*"))


def test_due_steps_are_dumped_for_people(tmp_path, matched):
    dump = dump_of(tmp_path)
    for step in range(4):
        dump(step, [matched("red box", "bl\u00fc `b`ox"), matched("red box")])
        dump(step, [matched("red box")])  # a later micro-step
    assert names(tmp_path) == ["step_000002.json", "step_000002.md", "step_000004.json", "step_000004.md"]
    text = (tmp_path / "monitor_dumps" / "step_000002.json").read_bytes()
    assert text.isascii()
    (sample,) = json.loads(text)["samples"]
    assert sample["prompt"]
    assert [one["desc"] for one in sample["predictions"]] == ["red box", "bl\u00fc `b`ox"]
    assert len(sample["pairs"]) == 2
    assert len(sample["prefix_target_bins"]) == 8
    shown = (tmp_path / "monitor_dumps" / "step_000002.md").read_bytes()
    assert shown.isascii()
    assert b"    " + sample["text"].encode("ascii", "backslashreplace") in shown
    assert [path.name for path in remove_run(tmp_path)] == ["monitor_dumps"]
    assert names(tmp_path) == []


def test_missed_objects_stand_in_the_dump(tmp_path, matched):
    dump_of(tmp_path, every_steps=1)(0, [matched("red box")])
    (sample,) = json.loads((tmp_path / "monitor_dumps" / "step_000001.json").read_text())["samples"]
    assert sample["missed"] == [1]
    assert "blue box" in sample["appended_text"]


@pytest.mark.parametrize(
    ("options", "written"),
    [
        ({"max_events": 1}, ["step_000002.json", "step_000002.md"]),
        ({"write_markdown": False, "max_events": 0}, ["step_000002.json", "step_000004.json"]),
        ({"dump_first_step": True, "write_markdown": False, "max_events": 2}, ["step_000001.json", "step_000002.json"]),
        ({"enabled": False}, []),
    ],
)
def test_the_keys_say_what_is_dumped(tmp_path, matched, options, written):
    dump = dump_of(tmp_path, out_dir=str(tmp_path / "else"), **options)
    for step in range(4):
        dump(step, [matched("red box")])
    assert names(tmp_path) == written


def test_texts_are_cut_and_a_dump_that_is_there_stays(tmp_path, matched):
    dump = dump_of(tmp_path, every_steps=1, max_text_chars=20, max_samples=5)
    dump(0, [matched("red box"), matched("blue box")])
    path = tmp_path / "monitor_dumps" / "step_000001.json"
    before = path.read_text()
    assert [len(one["text"]) for one in json.loads(before)["samples"]] == [23, 23]
    dump(0, [matched("red box")])
    assert path.read_text() == before


def agreement(every=1, **options):
    config = run_config(matching={"desc_monitor": {"enabled": True, **options}})
    return DescriptionAgreement(config.rollout_matching.desc_monitor, every=every)


def test_descriptions_are_compared_exactly(matched):
    found = agreement(mode="exact", every=2)
    found(0, [matched("red box", "blue box")])
    assert found.figures(1) == {}
    found(1, [matched("red box", "Blue-Box")])
    found(1, [matched("green box", "blue box")])
    assert found.figures(2) == {"desc/pairs": 4.0, "desc/exact": 0.5, "desc/normalised": 0.75}
    assert found.figures(4) == {}, "rollouts that are trained on again are not compared again"


def test_at_most_so_many_pairs_are_compared(matched):
    found = agreement(mode="exact", max_pairs=3)
    found(0, [matched("red box", "blue box")] * 3)
    assert found.figures(1)["desc/pairs"] == 3.0


@pytest.fixture(scope="module")
def sentence_model(tmp_path_factory):
    """A sentence-embedding model of two layers, of nobody's weights."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("sentences")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "blue", "green", "box"]
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    BertTokenizerFast(vocab={word: place for place, word in enumerate(words)}).save_pretrained(folder)
    return folder


def test_descriptions_are_compared_by_their_meaning(matched, sentence_model):
    found = agreement(mode="both", semantic_model=str(sentence_model), semantic_threshold=0.999, semantic_batch_size=1)
    found(0, [matched("red box", "green")])
    figures = found.figures(1)
    assert (figures["desc/exact"], figures["desc/semantic"]) == (0.5, 0.5)
    assert figures["desc/semantic_mean"] < 0.999


def test_a_model_that_cannot_be_loaded_is_left_out_with_a_warning(matched, tmp_path, caplog):
    found = agreement(mode="both", semantic_model=str(tmp_path / "lost"))
    for step in range(2):
        found(step, [matched("red box", "blue box")])
        assert found.figures(step + 1) == {"desc/pairs": 2.0, "desc/exact": 1.0, "desc/normalised": 1.0}
    assert caplog.text.count("cannot be loaded") == 1


def test_the_figures_stand_in_the_step_s_record(trained):
    lines, _, _ = trained(descriptions=lambda step: {"desc/pairs": float(step)})
    assert [line["desc/pairs"] for line in lines if line["event"] == "step"] == [1.0]


def test_a_tracker_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    config = run_config(training={"report_to": ["trackio"]})
    with pytest.raises(ConfigError, match=r"training.report_to: 'trackio'; needs .* pip install \"stage2\[trackio\]\""):
        check_supported(config, world_size=1)
