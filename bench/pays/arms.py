"""The arms of the comparison, as training YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Config = dict[str, Any]

PROMPT_ROOM = 472  # tokens of a row that its answers leave for prompts
COORDINATE_WEIGHT = 0.1  # of their losses, in all arms: at 1 names are a fifteenth of a small part, and fade
GROUP = 4  # answers to an image in GRPO
TEMPERATURE = 1.0  # of sampled answers
_COORDINATE_WEIGHTS = ("soft_ce_weight", "w1_weight", "gate_weight")
RECIPE: Mapping[str, Any] = {
    "supervised_share": 0.5,
    "missed_desc_weight": 1.0,
    "duplicate_iou": 0.9,
    "unmatched_objects": "penalised",
}


@dataclass(frozen=True)
class Arm:
    """One way to train on. what: for the table. variant: trainer. matching: keys of `rollout_matching` it sets.

    against: the arms that it is set against in the table. after: the arm at whose last weights it begins, with the same
    seed; empty: at the start. rate: peak of its own; 0: that of `Sizes`. annotated: the order of its annotations, if it
    is an arm of a first stage 1, which trains the tower too; empty: the arm goes on from a start.
    """

    what: str
    variant: str
    matching: Mapping[str, Any]
    against: tuple[str, ...] = ("a",)
    after: str = ""
    rate: float = 0.0
    annotated: str = ""


def _alone(what: str, **matching: Any) -> Arm:
    """Return stage 2 with one variant, which is set against stage 2 without it too."""
    return Arm(f"stage 2, {what}", "rollout_matching_sft", matching, ("a", "b"))


ARMS: Mapping[str, Arm] = {
    "a": Arm("stage 1 continued", "sft", {}, ()),
    "b": Arm("stage 2", "rollout_matching_sft", {}),
    "c": Arm("stage 2, recipe", "rollout_matching_sft", RECIPE),
    "e": Arm("stage 2, recommended recipe", "rollout_matching_sft", {"recipe": "recommended"}),
    "d": Arm("GRPO, F1 as reward", "grpo", {}),
    "e+a": Arm("(e), then stage 1", "sft", {}, ("e",), after="e"),
    "e+e": Arm("(e), then (e) again", "rollout_matching_sft", {"recipe": "recommended"}, ("e", "e+a"), after="e"),
    "e+d": Arm("(e), then GRPO", "grpo", {}, ("e", "e+a", "e+e"), after="e", rate=3e-5),
    "supervised": _alone("half of the steps supervised", supervised_share=0.5),
    "names": _alone("names of missed objects", missed_desc_weight=1.0),
    "duplicates": _alone("duplicates out of the prefix", duplicate_iou=0.9),
    "unmatched": _alone("unmatched objects dropped", unmatched_objects="dropped"),
    "penalised": _alone("unmatched objects penalised", unmatched_objects="penalised"),
    "penalty": _alone("repetition penalty of 1.1", repetition_penalty=1.1),
    "sampled": _alone("rollouts sampled at 0.7", temperature=0.7),
    "dropped": Arm("recipe, unmatched dropped", "rollout_matching_sft", {**RECIPE, "unmatched_objects": "dropped"}),
    "quarter": Arm("recipe, a quarter supervised", "rollout_matching_sft", {**RECIPE, "supervised_share": 0.25}),
    "tops": Arm("stage 1, annotated by exact tops", "sft", {}, (), annotated="tops"),
    "rows": Arm("stage 1, annotated in rows", "sft", {}, ("tops",), annotated="rows"),
    "rest": Arm("recipe, three quarters supervised", "rollout_matching_sft", {**RECIPE, "supervised_share": 0.75}),
}
COMPARED = ("a", "b", "c", "d")
TIMED = "b"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the comparison.

    steps: optimizer steps of an arm; places_steps, names_steps: before it, in this order; tower_steps: before each of
    these. batch: images of a step of an arm; stage1_batch, tower_batch: before it. train, held_out: images of the data.
    rate, stage1_rate, tower_rate: peaks. side: of an image, the longer one in pixels. least_objects, most_objects: in
    an image. object_tokens: room in an answer for each of the most. smallest, largest: heights of digits or sides of
    shapes, as shares of the image's shorter side. least_side: to which smaller images are enlarged. prompt: the
    question. gate: weight of the loss on probability outside the coordinate tokens. order: of the annotations of
    shapes, `tops`, `rows` or `random`; empty: the images are of digits. unlabelled: share of the shapes that the
    annotations of the start's and the arms' images leave out; those of held-out images are complete. shelves: on which
    shapes stand in rows; 0: they are scattered.
    """

    steps: int = 60
    places_steps: int = 600
    names_steps: int = 500
    tower_steps: int = 600
    batch: int = 8
    stage1_batch: int = 16
    tower_batch: int = 32
    train: int = 3000
    held_out: int = 300
    rate: float = 3e-4
    stage1_rate: float = 1e-3
    tower_rate: float = 1e-3
    side: int = 64
    least_objects: int = 0
    most_objects: int = 2
    object_tokens: int = 32
    smallest: float = 0.4
    largest: float = 0.6
    least_side: int = 32
    prompt: str = "List the digits."
    gate: float = COORDINATE_WEIGHT
    order: str = ""
    unlabelled: float = 0.0
    shelves: int = 0

    @property
    def pixels(self) -> tuple[int, int]:
        """Least and most pixels of an image."""
        return self.least_side**2, self.side**2

    @property
    def answer(self) -> int:
        """Most tokens of an answer."""
        return self.object_tokens * self.most_objects

    @property
    def row(self) -> int:
        """Tokens of a packed row, which holds an answer and all that it missed."""
        return PROMPT_ROOM + 2 * self.answer


SPARSE = Sizes()
DENSE = replace(SPARSE, side=128, most_objects=8, smallest=0.2, largest=0.3)
"""Scenes of one to eight digits of the same size in pixels."""
SHAPES = replace(
    SPARSE, steps=240, rate=1e-3, places_steps=1010, stage1_rate=2e-3, train=1500, held_out=1000, side=112,
    least_side=112, least_objects=4, most_objects=9, object_tokens=43, smallest=0.16, largest=0.30,
    prompt="List the shapes.", gate=1.0, order="random",
)  # fmt: skip
"""Scenes of four to nine boxes and ellipses whose annotations have no order; the start is 1,010 steps of 16."""
MANY = replace(SHAPES, side=160, least_side=160, least_objects=6, most_objects=20, smallest=0.11, largest=0.19)
"""Scenes of six to twenty shapes of about the same size in pixels."""
FEW = replace(
    SHAPES, steps=60, batch=16, places_steps=400, train=1000, held_out=300, side=96, least_side=96, least_objects=2,
    most_objects=4, smallest=0.2, largest=0.4,
)  # fmt: skip
"""Scenes of two to four shapes; the start is that of `examples/tiny-unordered`."""
FIRST = replace(FEW, steps=200, places_steps=0, rate=1e-3, train=1600, order="rows")
"""Scenes of two to four shapes in an order, for arms that begin at the tiny model itself."""
DATA: Mapping[str, Sizes] = {
    "digits": SPARSE,
    "dense-digits": DENSE,
    "shapes": SHAPES,
    "sorted-shapes": replace(SHAPES, order="tops"),
    "unlabelled-shapes": replace(SHAPES, unlabelled=0.2),
    "few-shapes": FEW,
    "many-shapes": MANY,
    "scattered": FIRST,
    "shelves": replace(FIRST, shelves=2, most_objects=6, smallest=0.2, largest=0.34),
}


def places_config(sizes: Sizes, model: Path, data: Path, output: Path) -> Config:
    """Return the first part of stage 1: all of the model, and the loss as it is, which learns places before names."""
    found = _stage1(sizes, sizes.places_steps, model, data, output)
    _train_all(found)
    return found


def names_config(sizes: Sizes, model: Path, data: Path, output: Path) -> Config:
    """Return the second part of stage 1, which learns names: as the arms train, but on more images a step."""
    return _stage1(sizes, sizes.names_steps, model, data, output)


def _train_all(found: Config) -> None:
    """Let a configuration train the tower too, with the loss as it is."""
    found["tuner"] |= {"freeze_vit": False, "freeze_aligner": False}
    found["custom"]["extra"]["rollout_matching"] |= dict.fromkeys(_COORDINATE_WEIGHTS, 1.0)


def _stage1(sizes: Sizes, steps: int, model: Path, data: Path, output: Path) -> Config:
    found = _config(sizes, sizes.stage1_batch, model, data, output, seed=17)
    found["training"] |= {"max_steps": steps, "learning_rate": sizes.stage1_rate, "save_steps": steps}
    found["custom"]["trainer_variant"] = "sft"
    return found


def arm_config(arm: Arm, seed: int, sizes: Sizes, model: Path, data: Path, output: Path) -> Config:
    """Return the run of an arm with a seed."""
    found = _config(sizes, sizes.batch, model, data, output, seed=seed)
    found["training"] |= {"max_steps": sizes.steps, "learning_rate": arm.rate or sizes.rate, "save_steps": sizes.steps}
    found["custom"]["trainer_variant"] = arm.variant
    if arm.variant == "grpo":
        return _rewarded(found, sizes)
    if arm.annotated:
        _train_all(found)
        found["custom"]["train_jsonl"] = str(data / f"train-{arm.annotated}.jsonl")
    found["custom"]["extra"]["rollout_matching"] |= arm.matching
    return found


def answer_config(sizes: Sizes, model: Path, data: Path, output: Path) -> Config:
    """Return the configuration with which every checkpoint answers the held-out images."""
    found = _config(sizes, sizes.batch, model, data, output, seed=17)
    found["training"] |= {"max_steps": 1, "eval_strategy": "steps", "per_device_eval_batch_size": 32}
    held_out = {"val_jsonl": str(data / "val.jsonl"), "val_sample_limit": sizes.held_out}
    found["custom"] |= {"trainer_variant": "rollout_matching_sft", **held_out}
    return found


def sampling_config(sizes: Sizes, model: Path, data: Path, output: Path) -> Config:
    """Return the configuration with which a checkpoint samples answers to the held-out images, as GRPO's are."""
    found = answer_config(sizes, model, data, output)
    found["custom"]["extra"]["rollout_matching"]["temperature"] = TEMPERATURE
    return found


def _rewarded(found: Config, sizes: Sizes) -> Config:
    """Make a run one of GRPO, with several answers to each image; its server is none (see `bench.pays.rewarded`)."""
    answers = sizes.batch * GROUP
    batches = {"per_device_train_batch_size": answers, "effective_batch_size": answers, "packing": False}
    found["training"] |= batches
    found["rlhf"] = {
        "use_vllm": True,
        "vllm_mode": "server",
        "reward_funcs": ["objects.f1_class"],
        "num_generations": GROUP,
        "generation_batch_size": answers,
        "max_completion_length": sizes.answer,
        "temperature": TEMPERATURE,
        "beta": 0.0,
    }
    server = {"vllm_tensor_parallel_size": 1, "vllm_data_parallel_size": 1, "vllm_max_model_len": sizes.row}
    found["custom"]["extra"] = {"rollout_server": server}
    return found


def _config(sizes: Sizes, batch: int, model: Path, data: Path, output: Path, *, seed: int) -> Config:
    return {
        "global_max_length": sizes.row,
        "model": {"model": str(model), "torch_dtype": "float32"},
        "template": dict(zip(("min_pixels", "max_pixels"), sizes.pixels, strict=True)),
        "tuner": {"train_type": "full", "freeze_vit": True, "freeze_aligner": True},
        "training": {
            "output_dir": str(output),
            "per_device_train_batch_size": batch,
            "effective_batch_size": batch,
            "warmup_ratio": 0.05,
            "lr_scheduler_type": "cosine",
            "gradient_checkpointing": False,
            "seed": seed,
            "save_strategy": "steps",
            "save_total_limit": 1,
            "dataloader_drop_last": True,
            "packing": True,
        },
        "custom": {
            "train_jsonl": str(data / "train.jsonl"),
            "user_prompt": sizes.prompt,
            "extra": {
                "rollout_matching": {
                    "rollout_backend": "hf",
                    "rollout_generate_batch_size": 32,
                    "max_new_tokens": sizes.answer,
                    "target_sigma": 8.0,
                    **dict.fromkeys(_COORDINATE_WEIGHTS, COORDINATE_WEIGHT),
                    "gate_weight": sizes.gate,
                    "post_rollout_pack_scope": "step",
                }
            },
        },
    }
