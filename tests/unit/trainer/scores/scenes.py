"""Records with answers, by hand and at random, in memory and as files."""

import json
from pathlib import Path

import numpy as np

from stage2_api.coordinates import coord_token
from stage2_trainer.data.records import Record
from stage2_trainer.matching import GTObject, serialize_objects
from stage2_trainer.scores.scored_image import ReadAnswer, read_answer

CLASSES = ("cat", "dog", "traffic light")


def box(desc, x1, y1, x2, y2):
    return GTObject(desc, "bbox", (x1, y1, x2, y2))


def poly(desc, *bins):
    return GTObject(desc, "poly", bins)


def record(place, objects, *, size=(640, 480), **metadata):
    """A record; `metadata` as a data file has it."""
    return Record(place, f"data.jsonl:{place + 1}", (f"{place}.jpg",), *size, tuple(objects), metadata=metadata)


def answer(objects, scores=None):
    """An answer that lists these objects."""
    found = read_answer(serialize_objects(objects))
    assert found.objects == tuple(objects)
    return found if scores is None else ReadAnswer(found.objects, tuple(scores), True, False, False)


def random_box(draw, desc):
    x, y = np.sort(draw.integers(0, 1000, 2)), np.sort(draw.integers(0, 1000, 2))
    return box(desc, int(x[0]), int(y[0]), int(x[1]), int(y[1]))


def random_poly(draw, desc):
    middle, radius, points = draw.integers(150, 850, 2), draw.integers(10, 140), draw.integers(3, 8)
    angles = np.sort(draw.uniform(0, 2 * np.pi, points))
    bins = [int(v) for a in angles for v in (middle[0] + radius * np.cos(a), middle[1] + radius * np.sin(a))]
    return poly(desc, *bins)


def shifted(draw, one, most=40):
    """An object near another one; one in four keeps its place to the bin."""
    if draw.random() < 0.25:
        return one
    moved = np.clip(np.array(one.bins) + draw.integers(-most, most + 1, len(one.bins)), 0, 999)
    if one.kind == "bbox":
        x, y = np.sort(moved[0::2]), np.sort(moved[1::2])
        moved = np.array([x[0], y[0], x[1], y[1]])
    return GTObject(one.desc, one.kind, tuple(map(int, moved)))


def random_scene(seed, *, images=40, kind="bbox", tied=False, crowded=False):
    """Records and answers: near misses, wrong names, unknown classes, repeats, empty images and answers."""
    draw = np.random.default_rng(seed)
    make = random_box if kind == "bbox" else random_poly
    records, answers = [], []
    for place in range(images):
        count = 0 if place % 9 == 0 else int(draw.integers(1, 150 if crowded and place % 7 == 1 else 9))
        truth = [make(draw, str(draw.choice(CLASSES))) for _ in range(count)]
        answered = [shifted(draw, one) for one in truth if draw.random() < 0.8]
        answered += [make(draw, str(draw.choice([*CLASSES, "unicorn"]))) for _ in range(int(draw.integers(0, 4)))]
        answered += [shifted(draw, one, 5) for one in answered[:2]]
        draw.shuffle(answered)
        scores = draw.integers(1, 4, len(answered)) / 4 if tied else draw.random(len(answered))
        crowds = [make(draw, str(draw.choice(CLASSES))) for _ in range(int(place % 5 == 2))]
        size = tuple(map(int, draw.integers(40, 900, 2)))
        records.append(record(place, truth, size=size, crowds=[line_object(c) for c in crowds]))
        answers.append(answer(answered, scores))
    return records, answers


def line_object(one):
    """An object as a data file has it."""
    key = "bbox_2d" if one.kind == "bbox" else "poly"
    return {"desc": one.desc, key: [coord_token(value) for value in one.bins]}


def write_data(folder, truths, *, name="data.jsonl", sample_ids=None, images=None, **metadata):
    """Write a data file of boxes. images: paths of files that bear their size as a name; else none, of (640, 480)."""
    path = folder / name
    with path.open("w") as file:
        for place, truth in enumerate(truths):
            image = images[place] if images else f"{place}.jpg"
            width, height = map(int, Path(image).stem.split("x")) if images else (640, 480)
            line = {"images": [image], "width": width, "height": height, "objects": [*map(line_object, truth)]}
            if sample_ids:
                line["sample_id"] = sample_ids[place]
            file.write(json.dumps({**line, **({"metadata": metadata} if metadata else {})}) + "\n")
    return path


def write_rollouts(folder, lines, *, name="rollouts.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
