"""What vLLM found out about a model when the image was built is found by servers that cannot write there."""

from pathlib import Path

from stage2_trainer.sync.vllm.vllm_compat import offer_model_inspections

NAME = "vllm-model.json"


def _kept(folder: Path) -> Path:
    folder.mkdir()
    (folder / NAME).write_text("the image's")
    return folder


def test_an_answer_of_the_image_lies_where_vllm_looks(tmp_path):
    kept, root = _kept(tmp_path / "kept"), tmp_path / "root"
    for _ in range(2):
        offer_model_inspections(kept, root)
    assert (root / "modelinfos" / NAME).read_text() == "the image's"


def test_an_answer_of_a_server_s_own_is_left_alone(tmp_path):
    kept, root = _kept(tmp_path / "kept"), tmp_path / "root"
    own = root / "modelinfos" / NAME
    own.parent.mkdir(parents=True)
    own.write_text("its own")
    offer_model_inspections(kept, root)
    assert own.read_text() == "its own"
    assert not own.is_symlink()
