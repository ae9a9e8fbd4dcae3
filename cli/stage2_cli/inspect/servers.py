"""The answer of the configured rollout servers to one record, its prompt held against the learner's."""

from __future__ import annotations

import os
from pathlib import Path

from stage2_api.errors import ConfigError, Problem
from stage2_api.runconfig import RunConfig
from stage2_cli.inspect.inputs import check_images
from stage2_trainer.data.encode import Encoder
from stage2_trainer.data.messages import chat_messages
from stage2_trainer.data.records import Record
from stage2_trainer.process.qwen3_vl import load_processor
from stage2_trainer.process.training_arguments import pixel_limits
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.wire.credentials import read_token
from stage2_trainer.wire.requests import Rollout, RolloutRequest, Sampling, SeedPlan, answers


def rollout(config: RunConfig, record: Record, *, model: Path) -> Rollout:
    """One answer, drawn with the seed of the run's first request, from the weights that the servers hold now.

    Raises ConfigError when no server is configured, an image is missing, or server and learner see different prompts;
    ServerError when the server fails.
    """
    matching = config.rollout_matching
    server = matching.vllm.server
    urls = [address.base_url for address in server.resolved_servers()]
    if not urls:
        path = "custom.extra.rollout_matching.vllm.server.servers"
        way_out = "name the servers there, or give an answer with --response-ids or --response-file"
        raise ConfigError([Problem(path, None, "must name the servers that are to answer", way_out)])
    token = read_token(os.environ)
    check_images(record)
    messages = chat_messages(record, config.custom.user_prompt, system=config.template.system)
    encoder = Encoder(load_processor(model, remote_code=config.model.allow_remote_code, **pixel_limits(config)))
    limit = server.infer_timeout_s
    with ServerBackend(
        urls,
        token=token,
        sampling=Sampling.from_config(matching),
        timeout_s=server.timeout_s,
        infer_timeout_s=limit if limit is not None and limit > 0 else None,
    ) as backend:
        found = backend.generate([RolloutRequest(messages)], seed_plan=SeedPlan(config.training.seed, 0, 0))
    (answer,) = answers(found)
    encoder.check_prompt(encoder.prompt(messages), answer.prompt_token_ids, answer.server)
    return answer
