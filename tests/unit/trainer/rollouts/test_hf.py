"""Rollouts by the learner's own model: batches answer as single prompts do, and leave training as it was.

Answers that repeat themselves end, each for itself.
"""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from stage2_api.rollout_matching import RepeatTerminate, RolloutMatching
from stage2_trainer.data.encode import PromptCache
from stage2_trainer.model.transformers_compat import disable_cache
from stage2_trainer.rollouts.hf import Decoding, HfBackend, RepeatTermination, holds_objects, repeats
from stage2_trainer.wire.requests import RolloutRequest, SeedPlan

PLAN = SeedPlan(17, 0, 0)


@pytest.fixture
def model(model):
    disable_cache(model)
    return model.train()


@pytest.fixture
def generate(model, encoder, chats):
    def run(*, plan=PLAN, **options):
        decoding = Decoding(**{"max_new_tokens": 24, **options})
        requests = [RolloutRequest(messages=chat) for chat in chats]
        backend = HfBackend(model, encoder, decoding, cache=PromptCache(encoder, 0))
        return backend.generate(requests, seed_plan=plan, version=3)

    return run


def ids(rollouts):
    return [rollout.token_ids for rollout in rollouts]


def test_left_padded_batch_gives_same_answers_as_single_prompts(generate, encoder, chats):
    batched = generate(batch_size=3)
    assert ids(batched) == ids(generate(batch_size=1))
    prompts = [encoder.prompt(chat).input_ids.tolist() for chat in chats]
    assert [rollout.prompt_token_ids for rollout in batched] == prompts
    assert len({len(prompt) for prompt in prompts}) == 3, "images of different sizes: there was something to pad"
    assert {(rollout.server, rollout.version) for rollout in batched} == {("learner", 3)}


def test_answer_ends_with_end_of_turn_or_at_token_limit(generate, encoder):
    end = encoder.end_of_turn_ids[0]
    for rollout in generate(batch_size=3, max_new_tokens=128):
        assert rollout.token_ids.count(end) == (rollout.finish_reason == "stop")
        assert rollout.token_ids[-1] == end or len(rollout.token_ids) == 128
    assert {rollout.finish_reason for rollout in generate(max_new_tokens=4)} == {"length"}


def test_sampled_answers_depend_only_on_seed(generate):
    hot = {"temperature": 5.0, "batch_size": 3}
    once = ids(generate(**hot))
    torch.manual_seed(99)
    assert ids(generate(**hot)) == once
    assert ids(generate(**hot, plan=SeedPlan(17, 1, 0))) != once


def test_generation_keeps_training_mode_and_random_state(generate, model):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    generate(temperature=1.0, max_new_tokens=4)
    assert torch.equal(torch.rand(3), expected)
    assert model.training


def test_training_mode_is_restored_when_generation_fails(generate, model, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "generate", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        generate()
    assert model.training


def logprob(model, encoder, chat, answer):
    prompt = encoder.prompt(chat)
    sequence = torch.cat([prompt.input_ids, torch.tensor(answer)])[None]
    types = torch.cat([prompt.mm_token_type_ids, torch.zeros(len(answer), dtype=torch.int64)])[None]
    with torch.no_grad():
        logits = model(
            input_ids=sequence, mm_token_type_ids=types, pixel_values=prompt.pixel_values,
            image_grid_thw=prompt.image_grid_thw, use_cache=False,
        ).logits[0]  # fmt: skip
    scores = logits[len(prompt.input_ids) - 1 : -1].log_softmax(-1)
    return float(scores[range(len(answer)), answer].sum())


def test_best_beam_is_at_least_as_probable_as_greedy_answer(generate, model, encoder, chats):
    options = {"max_new_tokens": 6, "batch_size": 3}
    greedy = ids(generate(**options))
    found = generate(**options, num_beams=4, num_return_sequences=4)
    assert {rollout.decode_mode for rollout in found} == {"beam"}
    beams = ids(found)
    assert ids(generate(**options, num_beams=4)) == beams
    assert len(beams) == len(chats)
    model.eval()
    for chat, beam, single in zip(chats, beams, greedy, strict=True):
        assert logprob(model, encoder, chat, beam) >= logprob(model, encoder, chat, single) - 1e-4


def test_answer_ends_at_max_object_keys(generate, encoder):
    rules = RepeatTerminate(enabled=True, min_new_tokens=1, max_object_keys=1)
    for rollout in generate(batch_size=3, max_new_tokens=60, repeat=rules):
        assert rollout.text.count('"object_') == 1
        assert rollout.finish_reason == "repetition"
        assert rollout.token_ids[-1] == encoder.end_of_turn_ids[0]


def test_decoding_options_follow_config():
    greedy = Decoding.from_config(RolloutMatching(num_beams=4, rollout_generate_batch_size=8))
    assert (greedy.num_beams, greedy.num_return_sequences, greedy.batch_size, greedy.repeat) == (1, 1, 8, None)
    beam = RolloutMatching(rollout_backend="hf", decode_mode="beam", num_beams=4, repeat_terminate={"enabled": True})
    decoding = Decoding.from_config(beam)
    assert (decoding.num_beams, decoding.num_return_sequences) == (4, 4)
    assert decoding.repeat is not None


@pytest.mark.parametrize(
    "decoding",
    [Decoding(8), Decoding(8, temperature=0.5), Decoding(8, num_beams=2)],
    ids=["greedy", "sampled", "beams"],
)
def test_transformers_has_nothing_to_say_about_decoding_options(decoding):
    """Its warning of flags that "may be ignored" would be about ours, which a person has not set."""
    GenerationConfig(**decoding.options(), eos_token_id=1, pad_token_id=0).validate(strict=True)


def test_checkpoint_generation_defaults_are_not_used():
    greedy, sampled = Decoding(8).options(), Decoding(8, temperature=1e-9).options()
    assert (greedy["do_sample"], sampled["do_sample"], sampled["temperature"]) == (False, True, 1e-4)
    assert (sampled["top_p"], sampled["top_k"]) == (1.0, 0)
    assert all(value is not None for value in (*greedy.values(), *sampled.values())), "unset ones would be its own"


PIECES = {0: "<end>", 1: '{"', 2: "object_", 3: "1", 4: '": 0, "', 5: "x"}
END = 0


def rules(**keys):
    quiet = {"max_consecutive_token_repeats": 0, "ngram_size": 64, "min_new_tokens": 0}
    return RepeatTerminate(enabled=True, **{**quiet, **keys})


@pytest.mark.parametrize(
    ("answer", "keys", "ends"),
    [
        ([5, 5, 5], {"max_consecutive_token_repeats": 3}, True),
        ([5, 1, 5, 5], {"max_consecutive_token_repeats": 3}, False),
        ([5] * 100, {"max_consecutive_token_repeats": 0}, False),
        ([7, 1, 2, 1, 2], {"ngram_size": 2}, True),
        ([1, 2, 1, 2, 7], {"ngram_size": 2}, False),
        ([1, 2, 1, 2], {"ngram_size": 2, "ngram_repeats": 3}, False),
        ([1, 2, 1, 2, 1, 2], {"ngram_size": 2, "ngram_repeats": 3}, True),
        ([], {"ngram_size": 1}, False),
    ],
)
def test_only_real_repetition_ends_answer(answer, keys, ends):
    assert repeats(answer, rules(**keys)) is ends


def test_object_keys_are_counted_in_text_across_tokens():
    one = [1, 2, 3, 4, 2, 3]
    assert not holds_objects(one, 3, PIECES.__getitem__)
    assert holds_objects(one, 2, PIECES.__getitem__)
    assert not holds_objects([*one, *[5] * 8], 2, PIECES.__getitem__), "the second key is no news any more"


def end_scores(processor, rows):
    return processor(torch.tensor(rows), torch.zeros(len(rows), 6))


def test_only_repeating_row_is_forced_to_end():
    processor = RepeatTermination(rules(max_consecutive_token_repeats=2), 1, END, PIECES.__getitem__)
    scores = end_scores(processor, [[9, 5, 5], [9, 1, 2], [9, 0, 0]])
    assert scores[0].tolist() == [0.0] + [-torch.inf] * 5
    assert scores[1:].tolist() == [[0.0] * 6] * 2
    assert processor.ended == {0}


def test_repetition_is_ignored_before_min_new_tokens():
    processor = RepeatTermination(rules(max_consecutive_token_repeats=2, min_new_tokens=3), 1, END, PIECES.__getitem__)
    assert end_scores(processor, [[9, 5, 5]]).tolist() == [[0.0] * 6]
    assert end_scores(processor, [[9, 5, 5, 5]])[0, 1:].tolist() == [-torch.inf] * 5
