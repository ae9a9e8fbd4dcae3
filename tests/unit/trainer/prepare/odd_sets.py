"""Small data sets of other formats, made to be right or odd, and the records that an import makes of them."""

import json
from pathlib import Path

import yaml
from PIL import Image

from stage2_api.coordinates import coord_bin
from stage2_trainer.data.signatures import REPLACE
from stage2_trainer.prepare import record_writer
from stage2_trainer.prepare.annotations import Tally
from stage2_trainer.prepare.record_writer import NothingKept, RecordChoice, write_records
from stage2_trainer.prepare.voc import VocChoice, read_voc
from stage2_trainer.prepare.yolo import read_yolo

SIZE = (100, 200)


def picture(path: Path, size=SIZE, orientation=None) -> Path:
    """Write an image; EXIF's orientation where one is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    if orientation:
        exif[274] = orientation
    Image.new("RGB", size, "grey").save(path, exif=exif)
    return path


def yolo(folder: Path, labels: dict[str, str | bytes | None], *, images=None, **changes) -> Path:
    """Write a data set of YOLO's layout with one split, train; labels by the image's name (None: no file)."""
    for name in labels if images is None else images:
        picture(folder / "images" / "train" / name)
    for name, text in labels.items():
        path = (folder / "labels" / "train" / name).with_suffix(".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
    document = {"path": ".", "train": "images/train", "names": {0: "cat", 1: "dog"}, **changes}
    (folder / "data.yaml").write_text(yaml.safe_dump({key: one for key, one in document.items() if one is not None}))
    return folder / "data.yaml"


def voc_object(name="cat", box=(1, 1, 100, 200), **more):
    """Return the XML of an object."""
    corners = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=False)
    inner = "".join(f"<{corner}>{number}</{corner}>" for corner, number in corners)
    marks = "".join(f"<{key}>{value}</{key}>" for key, value in more.items())
    return f"<object><name>{name}</name>{marks}<bndbox>{inner}</bndbox></object>"


def voc(folder: Path, annotations: dict[str, str], *, size=SIZE, file_name=None, images=None) -> Path:
    """Write a folder of VOC; annotations by name: XML of objects, or a whole file where it begins with `<?`."""
    (folder / "Annotations").mkdir(parents=True, exist_ok=True)
    for name in annotations if images is None else images:
        picture(folder / "JPEGImages" / f"{name}.jpg")
    for name, objects in annotations.items():
        sides = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>" if size else ""
        head = f"<filename>{file_name or name + '.jpg'}</filename>{sides}"
        whole = objects if objects.startswith("<?") else f"<annotation>{head}{objects}</annotation>"
        (folder / "Annotations" / f"{name}.xml").write_text(whole)
    return folder


def unreadable(fault: str, way_out: str = REPLACE) -> str:
    """Return the reason of an image that cannot be read."""
    return f"{record_writer.UNREADABLE}: {fault}; {way_out}"


class Imported:
    """The records of an import, and what it counted; no records where no object was kept."""

    def __init__(self, output: Path, read, **choice) -> None:
        self.tally = Tally()
        self.output = output
        self.records = []
        try:
            write_records(read(self.tally), output, RecordChoice(**choice), self.tally)
        except NothingKept:
            assert not output.exists()
            return
        self.records = [json.loads(line) for line in output.read_text().splitlines()]

    @property
    def objects(self):
        """Description and bins of all objects."""
        return [
            (one["desc"], [coord_bin(token) for token in one.get("bbox_2d") or one["poly"]])
            for record in self.records
            for one in record["objects"]
        ]

    @property
    def counts(self):
        """All that was counted, by its reason."""
        return dict(self.tally.images_left_out + self.tally.objects_left_out + self.tally.changed)


def import_yolo(folder: Path, data: Path, split="train", **choice) -> Imported:
    return Imported(folder / "out" / "x.jsonl", lambda tally: read_yolo(data, split, tally), **choice)


def import_voc(folder: Path, source: Path, what=None, **choice) -> Imported:
    return Imported(folder / "out" / "x.jsonl", lambda tally: read_voc(source, what or VocChoice(), tally), **choice)
