"""`stage2 import chat`: grounding data of ms-swift and Qwen-VL, and odd files of their kinds."""

import base64
import io
import json

import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_trainer.prepare import annotations, chat, picture_files, record_writer
from stage2_trainer.prepare.chat import read_chat
from tests.unit.trainer.prepare.odd_sets import Imported, picture

BINS = [100, 100, 600, 500]
PLACE = ("cat", BINS)
PIXELS = [10, 20, 60, 100]
THOUSANDTHS = [100, 100, 600, 500]


def swift(refs=("cat",), boxes=(PIXELS,), texts=("<image>find <ref-object>", "<bbox>"), images=("a.png",), **more):
    """Return a line of ms-swift; `more` is of its objects."""
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
    return {"messages": messages, "images": images, "objects": {"ref": refs, "bbox": boxes, **more}}


def qwen(answer, image="a.png", **more):
    """Return a line of Qwen-VL's fine-tuning data."""
    said = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    turns = [{"from": "human", "value": "<image>\nfind"}, {"from": "gpt", "value": said}]
    return {"image": image, "conversations": turns} | more


def parts(answer, **image):
    """Return a line of messages whose content is a list of parts."""
    asked = [{"type": "image", **image}, {"type": "text", "text": "find"}]
    said = [{"type": "text", "text": json.dumps(answer)}]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


def imported(folder, *lines, units=None, images=("a.png",), **choice) -> Imported:
    for name in images:
        picture(folder / "set" / name)
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "x.jsonl").write_text(text)
    read = lambda tally: read_chat(folder / "x.jsonl", folder / "set", tally, units=units)  # noqa: E731
    return Imported(folder / "out" / "x.jsonl", read, **choice)


CAT = {"bbox_2d": THOUSANDTHS, "label": "cat"}
OTHER = [10, 120, 60, 180]
OTHER_BINS = [100, 600, 600, 900]
NEAR = {picture_files.RELOCATED: 1}

# A line, and the objects and counts that it gives.
SWIFT = {
    "one box": (swift(), [PLACE], {}),
    "shares": (swift(boxes=[[0.1, 0.1, 0.6, 0.5]], bbox_type="norm1"), [PLACE], {}),
    "pixels by name": (swift(bbox_type="real"), [PLACE], {}),
    "a bbox_type of another tool": (swift(bbox_type="norm1000"), [], {chat.BBOX_TYPE: 1}),
    "a bbox_type that is a list": (swift(bbox_type=["real"]), [], {chat.BBOX_TYPE: 1}),
    "shares that are named pixels": (swift(boxes=[[0.1, 0.1, 0.6, 0.5]]), [], {annotations.SHARES: 1}),
    "one ref of two boxes": (
        swift(boxes=[PIXELS, OTHER], texts=["<ref-object>", "<bbox><bbox>"]), [PLACE, ("cat", OTHER_BINS)], {}
    ),
    "refs, then boxes": (
        swift(["cat", "dog"], [PIXELS, OTHER], ["<ref-object>, <ref-object>", "<bbox>, <bbox>"]),
        [PLACE, ("dog", OTHER_BINS)],
        {},
    ),
    "two boxes behind the first of two refs, none behind the other": (
        swift(["cat", "dog"], [PIXELS, OTHER], ["<ref-object>", "<bbox><bbox> no <ref-object>"]),
        [PLACE, ("cat", OTHER_BINS)],
        {},
    ),
    "more boxes than refs, and no placeholders": (
        swift(["cat", "dog"], [PIXELS] * 3, ["find", "here"]), [], {chat.UNPAIRED: 1}
    ),
    "a box before its ref, of unlike numbers": (
        swift(["cat", "dog"], [PIXELS] * 3, ["find", "<bbox><bbox><ref-object><bbox><ref-object>"]),
        [],
        {chat.UNPAIRED: 1},
    ),
    "a point": (swift(["cat", "cat"], [PIXELS, [5, 6]]), [PLACE], {chat.POINT: 1}),
    "a box of text, of five numbers and of none": (
        swift(["cat"] * 4, [PIXELS, ["1", 2, 3, 4], [1, 2, 3, 4, 5], None]),
        [PLACE],
        {annotations.BROKEN_BOX: 2, annotations.FIVE_NUMBERS: 1},
    ),
    "a box of no end": (
        json.dumps(swift(["cat"] * 2, [PIXELS, [1, 2, float("inf"), 4]])), [PLACE], {annotations.BROKEN_BOX: 1}
    ),
    "a blank ref and one that is a number": (
        swift(["cat", " ", 5], [PIXELS] * 3), [PLACE], {chat.NO_LABEL: 2}
    ),
    "a ref in another script": (swift([" 猫 é "]), [("猫 é", BINS)], {}),
    "objects as a list": (swift() | {"objects": [1]}, [], {chat.BROKEN_OBJECTS: 1}),
    "objects of a number": (swift(boxes=5), [], {chat.BROKEN_OBJECTS: 1}),
    "a box outside": (swift(boxes=[[200, 20, 260, 100]]), [], {record_writer.BEYOND: 1}),
    "a box without area": (swift(boxes=[[10, 20, 10, 100]]), [], {record_writer.NO_AREA: 1}),
    "a width for a corner": (swift(boxes=[[50, 100, 20, 30]]), [], {record_writer.REVERSED: 1}),
    "an image_id": (swift(images=["b.png", "a.png"], image_id=[1]), [PLACE], {chat.NO_BOX_IN_IMAGE: 1}),
    "image_ids that lead nowhere": (swift(image_id=[7]), [], {chat.OTHER_IMAGE: 1}),
    "image_ids of another number": (swift(image_id=[0, 0]), [], {chat.OTHER_IMAGE: 1}),
    "two images, and no image_id": (swift(images=["a.png", "b.png"]), [PLACE], {chat.NO_BOX_IN_IMAGE: 1}),
    "no image": (swift(images=[]), [], {chat.NO_IMAGE: 1}),
    "an image as a mapping": (swift(images=[{"path": "a.png", "bytes": None}]), [PLACE], {}),
    "an absolute path": (swift(images=["/mnt/disk/sub/a.png"]), [PLACE], NEAR),
    "a path of Windows": (swift(images=["D:\\set\\a.png"]), [PLACE], NEAR),
    "an address": (swift(images=["https://x.org/y/a.png?z=1"]), [PLACE], NEAR),
    "neither messages nor conversations": ({"images": ["a.png"], "query": "x"}, [], {chat.NO_CHAT: 1}),
    "a line that is a list": ("5", [], {chat.BROKEN_LINE: 1}),
    "a line that is cut off": (json.dumps(swift())[:-9], [], {chat.BROKEN_LINE: 1}),
    "a line nested deeply": ('{"a":' * 100_000, [], {chat.BROKEN_LINE: 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", SWIFT)
def test_ms_swift_line_gives_expected_objects_and_counts(tmp_path, case):
    line, objects, counts = SWIFT[case]
    found = imported(tmp_path, line, images=["a.png", "b.png"])
    assert (found.objects, found.counts) == (objects, counts)


QWEN = {
    "a list": (qwen([CAT]), [PLACE], {}),
    "a fence": (qwen(f"Here:\n```json\n[{json.dumps(CAT)}]\n```\nDone [1]."), [PLACE], {}),
    "text around it, with brackets": (qwen(f"In [1] {{see}}: {json.dumps([CAT])}"), [PLACE], {}),
    "one mapping": (qwen(CAT), [PLACE], {}),
    "a mapping of objects": (qwen({"objects": [CAT]}), [PLACE], {}),
    "several boxes of a label": (
        qwen({"bbox_2d": [THOUSANDTHS, OTHER_BINS], "label": "cat"}), [PLACE, ("cat", OTHER_BINS)], {}
    ),
    "no label": (qwen([CAT, {"bbox_2d": THOUSANDTHS}]), [PLACE], {chat.NO_LABEL: 1}),
    "a point": (qwen([CAT, {"point_2d": [5, 6], "label": "x"}]), [PLACE], {chat.POINT: 1}),
    "an item that is a number": (qwen([CAT, 5]), [PLACE], {}),
    "no JSON": (qwen("a cat"), [], {chat.NO_BOXES: 1}),
    "JSON of something else": (qwen({"answer": 4}), [], {chat.NO_BOXES: 1}),
    "JSON that is cut off": (qwen('[{"bbox_2d": [1, 2'), [], {chat.NO_BOXES: 1}),
    "brackets without end": (qwen("[" * 100_000), [], {chat.NO_BOXES: 1}),
    "an answer of the user": (
        {"image": "a.png", "conversations": [{"from": "human", "value": json.dumps([CAT])}]}, [], {chat.NO_BOXES: 1}
    ),
    "parts with an image": (parts([CAT], image="file:///mnt/set/a.png"), [PLACE], NEAR),
    "parts with an address": (parts([CAT], image_url={"url": "a.png"}), [PLACE], {}),
    "a size of another image": (qwen([CAT], width=7, height=9), [], {record_writer.OTHER_SIZE: 1}),
    "a size of zeros": (qwen([CAT], width=0, height=0), [PLACE], {}),
    "pixels, read as thousandths": (qwen([{**CAT, "bbox_2d": [3000, 20, 3900, 90]}]), [], {annotations.NOT_SHARES: 1}),
}  # fmt: skip


@pytest.mark.parametrize("case", QWEN)
def test_qwen_line_gives_expected_objects_and_counts(tmp_path, case):
    line, objects, counts = QWEN[case]
    found = imported(tmp_path, line, units="thousandths")
    assert (found.objects, found.counts) == (objects, counts)


def test_qwen_boxes_in_pixels_are_read_with_units_option(tmp_path):
    assert imported(tmp_path, qwen([{**CAT, "bbox_2d": PIXELS}]), units="pixels").objects == [PLACE]


def test_boxes_of_unknown_units_are_refused(tmp_path):
    """Qwen2.5-VL writes pixels and Qwen3-VL thousandths, and most pixels could be either."""
    with pytest.raises(ConfigError, match=r"--units: .*line 2 and others; their largest number is 600.*--units pixels"):
        imported(tmp_path, swift(), qwen([CAT], "b.png"))


def test_lines_about_one_image_are_one_record(tmp_path):
    dog = {**CAT, "label": "dog"}
    found = imported(tmp_path, qwen([CAT]), qwen([dog, CAT], "./a.png"), units="thousandths")
    assert (found.objects, found.counts) == ([PLACE, ("dog", BINS)], {chat.JOINED: 1})


def test_empty_list_as_answer_means_image_without_objects(tmp_path):
    found = imported(tmp_path, qwen([CAT]), qwen([], "b.png"), units="thousandths", images=["a.png", "b.png"])
    assert ([len(record["objects"]) for record in found.records], found.counts) == ([1, 0], {})


def test_list_of_lines_is_read_like_lines(tmp_path):
    found = imported(tmp_path, json.dumps([qwen([CAT], id=17)], indent=1), units="thousandths")
    assert ([record["sample_id"] for record in found.records], found.objects) == (["17"], [PLACE])


def test_image_inside_a_line_is_written_beside_the_data_file(tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (100, 200)).save(file, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    found = imported(tmp_path, swift(images=[url]), swift(["dog"], images=[url]), images=[])
    assert (found.objects, found.counts) == ([PLACE, ("dog", BINS)], {chat.JOINED: 1})
    assert Image.open(found.output.parent / found.records[0]["images"][0]).size == (100, 200)


def test_line_with_too_many_boxes_is_left_out(tmp_path):
    line = swift(["cat"], [PIXELS] * (chat.MOST_BOXES + 1))
    assert imported(tmp_path, line, swift()).counts == {chat.TOO_MANY: 1}


@pytest.mark.parametrize("content", ["[", "[" * 200_000])
def test_file_with_invalid_json_list_is_refused(tmp_path, content):
    with pytest.raises(ConfigError, match="must be JSON lines, or one list"):
        imported(tmp_path, content)


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"FILE.*must be readable"):
        read_chat(tmp_path / "lost.jsonl", tmp_path, annotations.Tally())
