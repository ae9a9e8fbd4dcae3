"""A stock model gets coordinate tokens: ordinary ones, with rows that begin near what the model knows."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from stage2_api.errors import ConfigError
from stage2_trainer.matching import CoordVocab
from stage2_trainer.prepare.coordinate_tokens import TOKENS, prepare, start_rows
from tests.unit.trainer.prepare.stock_models import SEED, mixture_of, stock
from tiny_model.checkpoint import save
from tiny_model.model import build_model, build_processor
from tiny_model.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return stock(tmp_path_factory.mktemp("stock"))


def loaded(folder):
    return AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder).tokenizer


def test_coordinate_tokens_are_added_to_moe_model(plain, tmp_path):
    made = prepare(str(mixture_of(plain, tmp_path / "stock")), tmp_path / "made")
    after, tokenizer = loaded(tmp_path / "made")
    assert after.config.model_type == "qwen3_vl_moe"
    assert made.first_id == int(CoordVocab.from_tokenizer(tokenizer).ids[0])
    assert len(after.get_input_embeddings().weight) == made.rows
    before, _ = loaded(tmp_path / "stock")
    experts = {name: tensor for name, tensor in before.state_dict().items() if ".experts." in name}
    assert experts
    assert all(torch.equal(after.state_dict()[name], tensor) for name, tensor in experts.items())
    stock_file, made_file = (load_file(next((tmp_path / one).glob("*.safetensors"))) for one in ("stock", "made"))
    laid_out = [name for name in stock_file if ".experts." in name]
    assert laid_out
    assert all(torch.equal(made_file[name], stock_file[name]) for name in laid_out), "vLLM reads no other layout"


def test_coordinate_tokens_are_added_without_changing_other_weights(plain, tmp_path):
    made = prepare(str(plain), tmp_path / "made")
    before, known = loaded(plain)
    after, tokenizer = loaded(tmp_path / "made")
    vocab = CoordVocab.from_tokenizer(tokenizer)
    assert (made.first_id, made.last_id) == (int(vocab.ids[0]), int(vocab.ids[-1]))
    assert (made.rows, made.tied) == (len(after.get_input_embeddings().weight), True)
    assert after.lm_head.weight is after.get_input_embeddings().weight
    assert torch.equal(after.lm_head.weight[: len(known)], before.lm_head.weight[: len(known)])
    assert after.config.text_config.vocab_size == made.rows >= len(tokenizer)
    assert made.rows % 64 == 0
    text = '{"desc": "a", "bbox_2d": [<|coord_0|>, <|coord_17|>, <|coord_999|>]}'
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.encode("name", add_special_tokens=False) == known.encode("name", add_special_tokens=False)


def test_untied_embedding_and_head_get_separate_rows(tmp_path):
    made = prepare(str(stock(tmp_path / "stock", tied=False)), tmp_path / "made")
    after, _ = loaded(tmp_path / "made")
    assert not made.tied
    table, head = after.get_input_embeddings().weight, after.lm_head.weight
    assert len(table) == len(head) == made.rows
    assert not torch.equal(table[made.first_id], head[made.first_id])


def test_spare_embedding_rows_are_used_first(tmp_path):
    """The tables of stock models are longer than their vocabularies, and no training has touched what is left over."""
    tokenizer = build_tokenizer(SEED, plain=True)
    model = build_model(tokenizer, SEED)
    known = len(tokenizer)
    model.resize_token_embeddings(known + 100, mean_resizing=False)
    model.get_input_embeddings().weight.data[known:] = 1e4
    save(tmp_path / "stock", model, build_processor(tokenizer))
    made = prepare(str(tmp_path / "stock"), tmp_path / "made")
    after, _ = loaded(tmp_path / "made")
    assert made.first_id == known
    assert after.lm_head.weight.abs().max() < 1e3


def test_rows_of_near_bins_are_similar_and_have_usual_norm():
    table = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)) + 3
    rows = start_rows(table, lambda text: [int(digit) for digit in text])
    apart = rows - table.mean(0)
    alike = torch.nn.functional.cosine_similarity(apart[:-1], apart[1:]).mean()
    far = torch.nn.functional.cosine_similarity(apart[:500], apart[500:]).mean()
    assert alike > 0.95
    assert alike > far + 0.1
    usual = float((table - table.mean(0)).norm(dim=1).mean())
    assert float(apart.norm(dim=1).mean()) == pytest.approx(usual, rel=1e-4)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ([(token, False) for token in TOKENS], "already"),
        ([(token, False) for token in TOKENS[:10]], "10 of the 1000"),
        ([(TOKENS[0], True)], "vanish"),
    ],
)
def test_model_with_coordinate_tokens_is_refused(tmp_path, extra, message):
    with pytest.raises(ConfigError, match=message):
        prepare(str(stock(tmp_path / "stock", extra=extra)), tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_non_empty_output_folder_is_refused(plain, tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="new or an empty folder"):
        prepare(str(plain), tmp_path)
    assert (tmp_path / "mine").exists()


def test_missing_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"MODEL: .*give its folder"):
        prepare(str(tmp_path / "lost"), tmp_path / "made")


def test_additional_chat_templates_are_readable_by_other_users(tmp_path):
    """A container runs as another user than who has prepared its model."""
    model = stock(tmp_path / "stock")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    folder = prepare(str(model), tmp_path / "made").folder / "additional_chat_templates"
    assert folder.stat().st_mode & 0o005 == 0o005
    assert [path.name for path in folder.iterdir()] == ["tools.jinja"]
