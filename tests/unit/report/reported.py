"""A run's output folder, small and written by hand: its log, its held-out rollouts, their images."""

import json
from html.parser import HTMLParser

from PIL import Image

from stage2_report.html_page import PageRequest, render_page
from stage2_trainer.matching import serialize_objects
from tests.unit.trainer.scores.scenes import box

HOSTILE = "</script><script>alert(1)</script>\u202e<img src=x onerror=alert(1)>"
PARTS = ("generate", "forward", "backward")


def step(number, **figures):
    times = {f"step/{part}_s": 1.0 + number for part in PARTS}
    return {"event": "step", "step": number, "loss": 2.0 / number, "rollout/staleness": 1.0, **times, **figures}


def evaluation(number, f1=0.5):
    figures = {f"eval_rollout_{name}": f1 for name in ("f1", "f1_class_iou50", "f1_iou50", "ap", "ap50")}
    return {"event": "evaluation", "step": number, **figures}


def rollout(number, place, truth, objects, image=None, *, text=None, finish_reason="stop"):
    def described(one):
        return {"desc": one.desc, "kind": one.kind, "bins": list(one.bins)}

    size = {"record_index": place, "width": 64, "height": 48}
    asked = {"sample_id": f"val.jsonl:{place + 1}", **size, "image": image, "ground_truth": [*map(described, truth)]}
    answered = {"text": serialize_objects(objects) if text is None else text, "finish_reason": finish_reason}
    return {"event": "rollout", "part": "held-out", "step": number, **asked, **answered}


def write_run(folder, *, samples=3, steps=(1, 2), evaluated=(0, 2), hostile=False):
    """Write a run that gets better: of sample n, the answer of the last evaluation has n wrong objects."""
    folder.mkdir(parents=True)
    truth = [box(HOSTILE if hostile else "cat", 0, 0, 400, 400), box("dog", 500, 500, 900, 900)]
    lines, rollouts = [step(number) for number in steps], []
    for number in evaluated:
        lines.append(evaluation(number))
        for place in range(samples):
            image = folder / f"{place}.png"
            if place != 1:
                Image.new("RGB", (64, 48), (place % 256, 90, 90)).save(image)
            off = [box("dog", 500, 0, 520 + one, 20) for one in range(place)]
            objects = [truth[0], truth[0]] if number == evaluated[0] else [*truth, *off]
            rollouts.append(rollout(number, place, truth, objects, str(image)))
    for name, content in (("stage2_log.jsonl", lines), ("rollouts.jsonl", rollouts)):
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in content))
    return folder


def answer(number, prompt, reward, folder, *, text="<DOMAIN=S>", part="train", **changes):
    document = {
        "event": "rollout",
        "part": part,
        "step": number,
        "record": prompt,
        "sample_id": f"train.jsonl:{prompt + 1}",
        "image": str(folder / f"{prompt}.png"),
        "answer": text,
        "rewards": {"summary.format": 1.0, "summary.content_f1": reward / 2},
        "reward": reward,
        "advantage": reward - 0.5,
        "server": "http://a:1",
        "version": number,
        "finish_reason": "stop",
    }
    return {**document, **changes}


def write_lines(path, lines):
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))


def write_grpo_run(folder, *, text="<DOMAIN=S>"):
    """Write two steps of two prompts with two answers each, and an evaluation; the first prompt's image is there."""
    folder.mkdir(parents=True)
    Image.new("RGB", (64, 48), "red").save(folder / "0.png")
    figures = {"event": "step", "loss": -0.02, "reward": 0.4, "reward_std": 0.25, "rewards/summary.format/mean": 0.5}
    evaluated = {"event": "evaluation", "step": 0, "eval_reward": 0.5}
    write_lines(folder / "stage2_log.jsonl", [evaluated, *({**figures, "step": number} for number in (1, 2))])
    places = [(number, prompt, k) for number in (0, 1) for prompt in (0, 1) for k in (0, 1)]
    train = [answer(n, prompt, 0.25 * prompt + 0.5 * n + 0.1 * k, folder, text=text) for n, prompt, k in places]
    write_lines(folder / "rollouts.jsonl", [answer(0, 0, 0.5, folder, part="held-out"), *train])
    return folder


class PageParser(HTMLParser):
    """The elements of a page, in order, each with its attributes and the text right after its start."""

    VOID = frozenset({"meta", "input", "img", "br", "link"})

    def __init__(self, page):
        super().__init__()
        self.elements, self.open, self.refs = [], [], []
        self.feed(page)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.elements:
            self.elements[-1][2].append(data)

    def all(self, tag, **attributes):
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        found = [(own, text) for name, own, text in self.elements if name == tag and wanted.items() <= own.items()]
        return [(own, "".join(text).strip()) for own, text in found]


def page_of(*runs, **options):
    """The page of one run, or of two."""
    return PageParser(render_page(PageRequest(runs, runs[0] / "page.html", **options)))
