"""A draft is made once for a spec, anew for another one, and forgotten with its job."""

from stage2_controller.job.desired import DesiredCache
from stage2_controller.job.key import Key
from tests.unit.controller import builders as b


def test_a_draft_is_made_once_until_the_spec_changes() -> None:
    drafts, raw = DesiredCache(b.SETTINGS), b.job()
    first = drafts.of(raw)
    assert drafts.of(b.job()) is first
    edited = {**raw, "metadata": {**raw["metadata"], "generation": raw["metadata"]["generation"] + 1}}
    assert drafts.of(edited) is not first


def test_a_draft_goes_with_its_job() -> None:
    drafts, raw = DesiredCache(b.SETTINGS), b.job()
    first = drafts.of(raw)
    drafts.forget(Key(raw["metadata"]["namespace"], raw["metadata"]["name"]))
    assert drafts.of(raw) is not first
