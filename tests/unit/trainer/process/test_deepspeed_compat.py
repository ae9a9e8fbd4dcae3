"""DeepSpeed starts on a machine without a compiler, and at once."""

import importlib

import pytest

from stage2_trainer.process.deepspeed_compat import compile_nothing


def test_nothing_is_compiled_where_processes_join(monkeypatch):
    pytest.importorskip("deepspeed")
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    backend = importlib.import_module("deepspeed.comm.torch")
    monkeypatch.setattr(ShareMemCommBuilder, "load", lambda self: pytest.fail("a compiler was asked"))
    compile_nothing()
    assert backend.build_shm_op() is None
