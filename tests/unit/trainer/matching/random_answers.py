"""Random true objects, and answers to them as a careless model writes them."""

import json
from dataclasses import replace

from stage2_api.coordinates import coord_token
from stage2_trainer.matching import GTObject

# Names of one line mostly have as many tokens.
LIKE = [
    ["cat", "dog", "owl"],
    ["red box", "tan box"],
    ["Äste", "Öfen"],
    ["🦊", "🦉", "🐝"],
    ['a "b"', 'c "d"'],
    ["horse"],
    ["c\\d", " x\t"],
    ["like <|coord_5|>", "is <|coord_6|>"],
    ['q", "w', '{"a": 1}, "object_3": {'],
    ["object_7", "object_9", '"object_888": 5'],
]
NAMES = [name for names in LIKE for name in names]
NOISE = ['"object_9": {}', '"object_3": {"desc": "cat", "bbox_2d": [1, 2, 3, 4]}', '"object_4": {"desc": "🦊"}',
         '"object_7": 5', '"note": "}{"', '"object_5": {"desc": x, "poly": ["<|coord_7|>"]}', "",
         '"object_77777777777777": {"desc": "x", "bbox_2d": []}', '"object_88888": null', '"object_6": [{"desc": "x"}]',
         '"object_２": {"desc": "x"}', '"object_٣": 3', '"object_\\u0034": {}', '"object_": {}', '"object_-1": {}',
         '"object_2.5": {}', '"object_3 ": {}', '"OBJECT_2": {}', '"objects": {"object_77": {}}',
         '"object_' + "8" * 4001 + '": {}']  # fmt: skip
BROKEN = ["{}", '{"desc": "x", "bbox_2d": []}', '{"object_7": {"desc": "x"}}', "{x}", "5", '"{"', "[{}]"]
# Where an answer has a number N, these may stand in its place.
NUMBERS = ["0N", "000N", "N1", "1"]


def key_of(rng, n):
    return f'"object_{rng.choice(NUMBERS).replace("N", str(n)) if rng.random() < 0.05 else n}"'


def shape(rng, name, polygon):
    x, y, w, h = (rng.randint(*ends) for ends in ((0, 600), (0, 600), (0, 390), (1, 390)))
    return GTObject(name, *(("poly", (x, y, x + w, y, x, y + h)) if polygon else ("bbox", (x, y, x + w, y + h))))


def said_value(rng, one):
    """The JSON of an object as a careless model writes it."""
    tokens = [coord_token(k) for k in one.bins]
    if one.kind == "poly" and rng.random() < 0.7:
        tokens = [list(pair) for pair in zip(tokens[::2], tokens[1::2], strict=True)]
    pairs = [("desc", one.desc), ("bbox_2d" if one.kind == "bbox" else "poly", tokens)]
    pairs = pairs[::-1] if rng.random() < 0.1 else [("desc", "twice"), *pairs] if rng.random() < 0.05 else pairs
    between = rng.choice([", "] * 6 + [",", " ,\n"])
    colon = rng.choice([": "] * 6 + [":", " : "])
    escape = rng.random() < 0.3
    fields = between.join(json.dumps(key) + colon + json.dumps(value, ensure_ascii=escape) for key, value in pairs)
    return colon + "{" + rng.choice([""] * 6 + [" ", "\n"]) + fields + rng.choice([""] * 6 + [" "]) + "}"


def random_answer(rng, vocab):
    """True objects, and the ids of an answer that has some of them, near or far, others, and broken ones."""
    polygons = rng.choice([0, 0, 0, 0.3])
    truth = [shape(rng, rng.choice(NAMES), rng.random() < polygons) for _ in range(rng.randint(0, 5))]
    answered = []
    for one in rng.sample(truth, rng.randint(0, len(truth))):
        far = rng.choice([0, 3, 20, 20, 300])
        like = next(names for names in LIKE if one.desc in names)
        name = rng.choice([one.desc, rng.choice(like), rng.choice(NAMES)])
        moved = tuple(min(999, max(0, k + rng.randint(-far, far))) for k in one.bins)
        answered.append(replace(one, desc=name, bins=moved))
    answered += [shape(rng, rng.choice(NAMES), rng.random() < polygons) for _ in range(rng.choice([0, 0, 1, 2, 4]))]
    rng.shuffle(answered)
    for one in rng.sample(answered, min(len(answered), rng.choice([0, 0, 1, 2]))):
        again = replace(one, bins=tuple(min(999, k + rng.randint(0, 4)) for k in one.bins))
        if rng.random() < polygons:
            x1, y1, x2, y2 = bounds(one.bins)
            again = GTObject(one.desc, "poly", (x1, y1, x2, y1, x2, y2, x1, y2))
        answered.insert(rng.randint(0, len(answered)), again)
    entries, n = [], rng.choice([1] * 6 + [2])
    for one in answered:
        if rng.random() < 0.12:
            counted = rng.random() < 0.4
            entries.append(f'"object_{n}": {rng.choice(BROKEN)}' if counted else rng.choice(NOISE))
            n += counted
        entries.append(key_of(rng, n) + said_value(rng, one))
        n += rng.choice([1] * 12 + [0, 2])
    text = rng.choice([""] * 18 + ["\n", "\n", " ", " ", "Sure: ", "\u00a0"]) + "{" + rng.choice([""] * 6 + ["\n", " "])
    for i, entry in enumerate(entries):
        text += (rng.choice([", "] * 18 + [",", " , ", ",\n", ",\u00a0", ", , "]) if i else "") + entry
    text += rng.choice(["}", "}", "\n}", "}<|im_end|>", "} That is all."])
    cuts = sorted(rng.sample(range(len(text)), rng.choice([0, 0, 0, 2, 9]) if len(text) > 9 else 0))
    ids = [one for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) for one in vocab.encode(text[a:b])]
    return truth, ids[: rng.randint(0, len(ids))] if rng.random() < 0.2 else ids


def bounds(bins):
    return min(bins[::2]), min(bins[1::2]), max(bins[::2]), max(bins[1::2])
