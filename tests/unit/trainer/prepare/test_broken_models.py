"""A model folder of which a file is broken, or missing, is refused with a sentence, and nothing is made of it."""

import json
import os
import shutil
import struct

import pytest
from safetensors.torch import load_file, save_file

from stage2_api.errors import ConfigError
from stage2_trainer.model.policy import load_processor
from stage2_trainer.prepare.coordinate_tokens import prepare
from tests.support import forked
from tests.unit.trainer.prepare.stock_models import stock

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LAYER = "model.language_model.layers.1.mlp.up_proj.weight"
MOST_HEADER = 2**62


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return stock(tmp_path_factory.mktemp("stock"))


@pytest.fixture
def model(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def config(change):
    """Return a spoiler of config.json."""

    def spoil(folder):
        found = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(change(found)))

    return spoil


def content(name, text):
    return lambda folder: (folder / name).write_bytes(text)


def without(name):
    return lambda folder: (folder / name).unlink()


def cut(length):
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:length])


def lacking(folder):
    tensors = load_file(folder / WEIGHTS)
    del tensors[LAYER]
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def changed_table(change):
    """Return a spoiler of the weights that is given them, and the name of the embeddings."""

    def spoil(folder):
        tensors = load_file(folder / WEIGHTS)
        change(tensors, next(name for name in tensors if name.endswith("embed_tokens.weight")))
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    return spoil


def sharded(index):
    def spoil(folder):
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        (folder / INDEX).write_text(index)

    return spoil


def fifo(name):
    def spoil(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return spoil


OBJECTS = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json"]
BROKEN = {
    **{f"{name}: not JSON": (content(name, b"{"), rf"{name} must be a JSON object \(Expecting") for name in OBJECTS},
    **{
        f"{name}: a list": (content(name, b"[]"), rf"{name} must be a JSON object \(it is a list\)") for name in OBJECTS
    },
    "config.json: no text": (content("config.json", b"\xff\xfe"), "config.json must be a JSON object"),
    "config.json: missing": (without("config.json"), "must be the folder of a model"),
    "config.json: empty": (content("config.json", b"{}"), "must be a Qwen3-VL; its config.json has model_type None"),
    "another architecture": (
        config(lambda found: {"model_type": "llama"}),
        "must be a Qwen3-VL; its config.json has model_type llama",
    ),
    "a text part that is a number": (config(lambda found: found | {"text_config": 5}), "transformers loads"),
    "sizes of another model": (
        config(lambda found: found | {"text_config": found["text_config"] | {"intermediate_size": 8}}),
        "transformers loads",
    ),
    "tokenizer.json: empty": (content("tokenizer.json", b"{}"), "transformers loads"),
    "tokenizer.json: missing": (without("tokenizer.json"), "transformers loads"),
    "processor_config.json: missing": (without("processor_config.json"), "transformers loads"),
    "chat_template.jinja: no text": (content("chat_template.jinja", b"\xff"), "template in chat_template.jinja cannot"),
    "chat_template.jinja: missing": (without("chat_template.jinja"), "must have a chat template"),
    "generation_config.json: of a word": (content("generation_config.json", b'{"temperature": "a"}'), "transformers"),
    "weights: missing": (without(WEIGHTS), "transformers loads"),
    "weights: empty": (cut(0), "header too small"),
    "weights: a header that is cut off": (cut(200), "header"),
    "weights: cut off": (cut(-100), "incomplete"),
    "weights: a header without end": (content(WEIGHTS, struct.pack("<Q", MOST_HEADER)), "header too large"),
    "weights: without a layer": (lacking, rf"must hold all weights; it lacks {LAYER}"),
    "weights: another output head than the tied one": (
        changed_table(lambda tensors, table: tensors.update({"lm_head.weight": tensors[table] + 1})),
        r"must have one table, as in config.json \(tie_word_embeddings\)",
    ),
    "weights: an embedding that is no number": (
        changed_table(lambda tensors, table: tensors[table][5].fill_(float("nan"))),
        "must have finite embeddings and output head",
    ),
    "config.json: quantised": (
        config(lambda found: found | {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}),
        "must not be quantised",
    ),
    "an index that is no JSON": (sharded("{"), "index.json must be a JSON object"),
    "an index without weights": (sharded("{}"), "transformers loads"),
    "an index of a file that is not there": (
        sharded('{"metadata": {}, "weight_map": {"a": "lost.safetensors"}}'),
        "lost.safetensors",
    ),
    "a FIFO for a tokenizer": (fifo("tokenizer.json"), "tokenizer.json is not a regular file"),
    "a FIFO for weights": (fifo(WEIGHTS), "model.safetensors is not a regular file"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_model_folder_is_refused_in_one_line(model, tmp_path, case):
    spoil, message = BROKEN[case]
    spoil(model)
    with pytest.raises(ConfigError, match=rf"MODEL: .*{message}") as caught:
        prepare(str(model), tmp_path / "made")
    assert len(str(caught.value).splitlines()) == 1
    assert [one.name for one in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_learner_refuses_model_file_that_is_not_json(model, name):
    content(name, b"{")(model)
    with pytest.raises(ConfigError, match=rf"model\.model: .*{name} must be a JSON object"):
        load_processor(model)


def test_prepare_command_exits_with_64_on_broken_model(model, tmp_path):
    content("config.json", b"[]")(model)
    command = [forked.STAGE2, "prepare", model, "--output", tmp_path / "made"]
    done = forked.run(command, imports=forked.LEARNER)
    assert (done.returncode, done.stdout) == (64, "")
    assert "Traceback" not in done.stderr
    assert "config.json must be a JSON object" in " ".join(done.stderr.split())
