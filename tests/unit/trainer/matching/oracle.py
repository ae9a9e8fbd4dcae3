"""What docs/semantics.md (4.2 to 4.6, 5, 20) says of an answer, written from that text and not from the product.

`seen` counts what happens, so that a test can tell whether it has seen everything.
"""

import json
import re
from dataclasses import replace
from json.decoder import scanstring

from stage2_trainer.matching import match
from stage2_trainer.matching.sinkhorn import target_bins
from tests.unit.trainer.matching.random_answers import bounds

SPACE = "[ \n\r\t]*"


def box_iou(one, other):
    (a, b, c, d), (e, f, g, h) = bounds(one), bounds(other)
    both = max(0, min(c, g) - max(a, e)) * max(0, min(d, h) - max(b, f))
    return both / max(1, (c - a) * (d - b) + (g - e) * (h - f) - both)


def first_of_least_distance(answered, truth, free, known):
    return min(free, key=lambda g: (sum(abs(answered[k] - truth[g].bins[k]) for k in range(known)), g))


def matches(valid, stay, truth, options, seen):
    """(prediction, true object) -> targets of its coordinates."""
    pairs = match([valid[i] for i in stay], truth, replace(options, assignment="hungarian")).pairs
    taught = target_bins([(valid[stay[pair.pred]], truth[pair.gt]) for pair in pairs], options)
    found = {(stay[pair.pred], pair.gt): bins for pair, bins in zip(pairs, taught, strict=True)}
    if options.assignment == "dynamic" and all(one.kind == "bbox" for one in [*valid, *truth]):
        free = [g for g in range(len(truth)) if g not in [pair[1] for pair in found]]
        left = [i for i in stay if i not in [pair[0] for pair in found]]
        for i in left[: len(free)]:
            like = [first_of_least_distance(valid[i].bins, truth, free, known) for known in (1, 1, 2, 3)]
            found[i, like[3]] = tuple(truth[g].bins[k] for k, g in enumerate(like))
            free.remove(like[3])
            seen["box taught a mixture"] += len(set(like)) > 1
            seen["box follows"] += 1
    else:
        seen["dynamic asked, polygons matched"] += options.assignment == "dynamic"
    return found


def reaching(aligned, start, end, among):
    """The tokens that have a character, or a part of one, in the stretch."""
    s = aligned.starts.tolist()
    return [t for t in among if s[t] < end and s[t + 1] + (t in aligned.split) > start]


def desc_span(text, at):
    """The characters of the value of `desc` of the object that begins here, without its quotes; the last one counts."""
    spans = {}
    while text[at] != "}":
        key, at = scanstring(text, text.index('"', at) + 1)
        start = re.compile(f"{SPACE}:{SPACE}").match(text, at).end()
        _, at = json.JSONDecoder().raw_decode(text, start)
        spans[key] = start + 1, at - 1
        at = re.compile(SPACE).match(text, at).end()
    return spans["desc"]


def plainly_numbered(prefix, spans):
    """Whether a prefix is `{`, and then commas, keys that count from 1, and the values of these objects."""
    values, left = [], prefix
    for start, end in reversed(spans):  # each value becomes one mark
        values, left = [prefix[start:end], *values], left[:start] + "V" + left[end:]
    keys = f"{SPACE},{SPACE}".join(f'"object_{n}"{SPACE}:{SPACE}V' for n in range(1, len(values) + 1))
    return re.fullmatch(f"{SPACE}{{{SPACE}{keys}{SPACE}", left) is not None


def layout(parsed, stretches, remain, seen):
    """The text of an answer of which only some objects remain, and what stays of the answer.

    What stays: where it begins in the text, and its first character in the answer and the one after its last.
    """
    before = parsed.prefix_text.index("{") + 1
    text, stay = parsed.prefix_text[:before], [(0, 0, before)]
    for n, k in enumerate(remain, 1):
        start, value, end = stretches[k]
        lead = f'{SPACE}{"," * (n > 1)}{SPACE}"object_{n}"{SPACE}:{SPACE}'
        if start == before and re.fullmatch(lead, parsed.text[start:value]):
            seen["lead stays"] += 1
            text += parsed.text[start:end]
            stay = [*stay[:-1], (*stay[-1][:2], end)]
        else:
            seen["lead spelled anew"] += 1
            text += f'{", " * (n > 1)}"object_{n}": '
            stay.append((len(text), value, end))
            text += parsed.text[value:end]
        before = end
    return text, stay


def spelled(vocab, aligned, ids, text, stay):
    """The tokens of a text of which some stretches stay: whole tokens keep their ids, all else is encoded at once."""
    s, found, done = aligned.starts.tolist(), [], 0
    for at, first, last in stay:
        whole = [t for t in range(len(ids)) if s[t] >= first and s[t + 1] + (t in aligned.split) <= last]
        if whole:
            begin, end = s[whole[0]], s[whole[-1] + 1]
            found += vocab.encode(text[done : at + begin - first]) + [ids[t] for t in whole]
            done = at + end - first
    return found + vocab.encode(text[done:])


def taught_text(vocab, aligned, ids, stretch, stay, pair, seen):
    """Token of the answer -> the id that it is taught, of one matched object."""
    (start, value, end), (answered, true), s = stretch, pair, aligned.starts.tolist()
    first, last = next(run[1:] for run in stay if run[1] <= value and end <= run[2])
    ends = [s[t + 1] + (t in aligned.split) for t in range(len(ids))]
    mine = [t for t in range(len(ids)) if start < ends[t] <= end]
    labels = {t: ids[t] for t in mine if s[t] >= first and ends[t] <= last and vocab.bin_of(ids[t]) is None}
    seen["token cut"] += any(s[t] < last < ends[t] for t in range(len(ids)) if last == end)
    seen["token closes the object before"] += any(s[t] < start - 1 for t in labels)
    d0, d1 = desc_span(aligned.text, value)
    named = reaching(aligned, d0, d1, mine)
    if answered.desc == true.desc:
        seen["right name spelled differently"] += json.dumps(true.desc, ensure_ascii=False)[1:-1] != aligned.text[d0:d1]
        return labels
    name = json.dumps(true.desc, ensure_ascii=False)[1:-1]
    anew = vocab.encode(aligned.text[value:d0] + name + aligned.text[d1:end])
    other = vocab.align(anew)
    true_tokens = reaching(other, d0 - value, d0 - value + len(name), range(len(anew)))
    whole = len(named) == len(true_tokens) and labels.keys() >= set(named)
    seen["name taught" if whole else "name taught nothing"] += 1
    seen["part of a character taught"] += whole and any(t in aligned.split for t in named)
    labels = {t: label for t, label in labels.items() if t not in named}
    return labels | (dict(zip(named, (anew[t] for t in true_tokens), strict=True)) if whole else {})
