"""Every combination of variants against an oracle, over random answers."""

import json
import random
from collections import Counter

import numpy as np

from stage2_trainer.matching import (
    GroundTruth,
    MatchOptions,
    build_target,
    parse_rollout,
    segment_meta,
    serialize_objects,
    supervision,
)
from tests.support.turns import is_exhaustive, seed_of_the_day
from tests.unit.trainer.matching.oracle import (
    box_iou,
    desc_span,
    layout,
    matches,
    plainly_numbered,
    reaching,
    spelled,
    taught_text,
)
from tests.unit.trainer.matching.random_answers import random_answer
from tests.unit.trainer.matching.vocabularies import aligned_vocab, fused_vocab

BRANCHES = [
    "a broken object leaves",
    "a broken object stays",
    "a wrong number stays",
    "box follows",
    "box taught a mixture",
    "dropped",
    "dynamic asked, polygons matched",
    "lead spelled anew",
    "lead stays",
    "name taught",
    "name taught nothing",
    "numbered anew",
    "part of a character taught",
    "penalised",
    "repeated",
    "right name spelled differently",
    "token closes the object before",
    "token cut",
]


def planned(parsed, target, truth, options, seen):
    """The matches with their targets, the answer's objects that remain, and the missed ones."""
    valid, kept = parsed.valid_objects, []
    for i, one in enumerate(valid):
        same = (box_iou(valid[k].bins, one.bins) for k in kept if valid[k].desc == one.desc)
        kept += [i] if options.duplicate_iou is None or max(same, default=-1) < options.duplicate_iou else []
    found = matches(valid, kept, truth, options, seen)
    gt_of = dict(found.keys())
    missed = [g for g in range(len(truth)) if g not in gt_of.values()]
    remain = [i for i in kept if i in gt_of or options.unmatched_objects != "dropped"]
    assert [(pair.pred, pair.gt) for pair in target.matching.supervised] == sorted(found)
    assert target.matching.unmatched == tuple(i for i in range(len(valid)) if i not in gt_of)
    assert target.appended == tuple(missed)
    assert target.repeated == tuple(i for i in range(len(valid)) if i not in kept)
    assert target.dropped == tuple(i for i in kept if i not in remain)
    seen += Counter({"repeated": len(target.repeated), "dropped": len(target.dropped)})
    return found, remain, missed


def is_rewritten(parsed, remain, options, seen):
    in_prefix = [one for one in parsed.objects if one.in_prefix]
    plain = plainly_numbered(parsed.prefix_text, [one.span for one in in_prefix])
    removed, broken = len(remain) < len(parsed.valid_objects), not all(one.valid for one in in_prefix)
    anew = removed or (options.matched_text_weight > 0 and not plain)
    seen["numbered anew"] += anew and not removed
    seen["a broken object stays"] += not anew and broken and options.matched_text_weight > 0
    seen["a broken object leaves"] += anew and broken
    seen["a wrong number stays"] += not anew and not plain
    return anew


def counts_from_one(text):
    """Whether the keys of a JSON object are object_1, object_2 and so on."""
    keys = json.loads(text, object_pairs_hook=lambda pairs: [key for key, _ in pairs])
    return keys == [f"object_{n}" for n in range(1, len(keys) + 1)]


def check(ids, truth, vocab, options, seen):
    target = build_target(ids, GroundTruth(tuple(truth)), vocab, options)
    parsed, y_ids = parse_rollout(ids, vocab), list(target.y_train_ids)
    found, remain, missed = planned(parsed, target, truth, options, seen)
    gt_of, valid = dict(found.keys()), parsed.valid_objects
    anew = is_rewritten(parsed, remain, options, seen)
    stretches, end = [], parsed.text.find("{") + 1
    for one in parsed.objects:
        stretches += [(end, *one.span)] if one.valid else []
        end = one.span[1] if one.span[1] >= 0 else end
    kept, stay = (
        layout(parsed, stretches, remain, seen) if anew else (parsed.prefix_text, [(0, 0, len(parsed.prefix_text))])
    )
    first = len(remain) + 1 if anew else 1 + (parsed.max_object_index or 0)
    tail = ", " * bool(kept.endswith("}") and missed) + serialize_objects([truth[g] for g in missed], first)[1:]
    y_text = kept + tail
    y, aligned = vocab.align(y_ids), vocab.align(ids)
    assert (y.text, target.prefix_text, target.append_text) == (y_text, kept, tail)
    assert y_ids == (spelled(vocab, aligned, ids, y_text, stay) if anew else [*parsed.prefix_ids, *vocab.encode(tail)])
    assert not (anew or (options.matched_text_weight and parsed.clean)) or counts_from_one(y_text)
    assert y.starts[target.prefix_len] <= len(kept) < y.starts[target.prefix_len + 1]
    again = parse_rollout(y_ids, vocab)
    order = [*((True, i) for i in remain), *((False, g) for g in missed)]
    objects = dict(zip(order, again.valid_objects, strict=True))

    labels, weights, texts, coordinates = np.full(len(y_ids), -100), np.ones(len(y_ids)), {}, {}
    inside = np.flatnonzero(len(kept) < y.starts[1:]).tolist()
    labels[inside] = [y_ids[t] if vocab.bin_of(y_ids[t]) is None else -100 for t in inside]
    for (own, k), one in objects.items():
        if not own:
            labels[reaching(y, *desc_span(y_text, one.span[0]), range(len(y_ids)))] = -100
        if not own or k in gt_of:
            coordinates |= zip(one.token_positions, found[k, gt_of[k]] if own else truth[k].bins, strict=True)
        if own and k in gt_of and options.matched_text_weight:
            offset = one.token_positions[0] - valid[k].token_positions[0]
            taught = taught_text(vocab, aligned, ids, stretches[k], stay, (valid[k], truth[gt_of[k]]), seen)
            texts |= {t + offset: label for t, label in taught.items()}
    labels[list(texts)], weights[list(texts)] = list(texts.values()), options.matched_text_weight or 1
    if options.unmatched_objects == "penalised":
        led_on = dict(zip(again.valid_objects, again.ends_before, strict=True))
        at = [y.token_at(led_on[one]) for (own, k), one in objects.items() if own and k not in gt_of]
        labels[at], weights[at] = np.array(y_ids)[at], -options.unmatched_weight
        seen["penalised"] += len(at)

    assert dict(target.text_labels) == texts
    row = [1, 1, *y_ids, 2]
    masks = supervision(segment_meta(target, [1, 1], encoded_len=len(row)), row, vocab)
    assert masks.labels.tolist() == [-100, -100, *labels, 2]
    assert (np.ones(len(row)) if masks.weights is None else masks.weights).tolist() == [1, 1, *weights, 1]
    positions, bins = (masks.coord_positions - 2).tolist(), masks.coord_targets.tolist()
    assert dict(zip(positions, bins, strict=True)) == target.coord_targets == coordinates


def test_targets_of_random_answers_equal_oracle():
    seeds = range(20, 24) if is_exhaustive() else [seed_of_the_day()]
    seen: Counter[str] = Counter()
    for seed in seeds:
        answers_are_taught_what_the_text_says(seed, 500, seen)
    if is_exhaustive():
        assert min(seen[branch] for branch in BRANCHES) >= 20, seen


def answers_are_taught_what_the_text_says(seed, cases, seen):
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(cases):
        vocab = rng.choice([aligned_vocab(), fused_vocab()])
        truth, ids = random_answer(rng, vocab)
        options = MatchOptions(
            maskiou_resolution=64,
            assignment=rng.choice(["hungarian", "dynamic"]),
            matched_text_weight=rng.choice([0.0, 0.5, 1.0]),
            unmatched_objects=rng.choice(["neutral", "dropped", "penalised"]),
            duplicate_iou=rng.choice([None, 0.8]),
        )
        check(ids, truth, vocab, options, seen)
