"""An exported folder goes to a hub by the command of docs/models.md; this hub keeps what it gets in a folder."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

from huggingface_hub import ModelCard

from stage2_trainer.export.checkpoint_folder import open_checkpoint
from stage2_trainer.export.model_export import export_model
from tests.support.http_server import QuietHandler, serving
from tests.unit.trainer.export.trained import saved, trained

COMMAND = "hf upload --private OWNER/NAME models/mine"


class Hub(QuietHandler):
    """The part of a hub that `hf upload` asks; it takes all files inside a commit, none by LFS."""

    folder: Path

    def do_GET(self) -> None:
        self._send({"id": "me/mine", "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
        if "/preupload/" in self.path:
            names = [one["path"] for one in json.loads(lines[0])["files"]]
            self._send({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
            return
        for line in lines if "/commit/" in self.path else ():
            if (change := json.loads(line))["key"] == "file":
                (self.folder / change["value"]["path"]).write_bytes(base64.b64decode(change["value"]["content"]))
        url = f"{self.server.url}/me/mine"
        self._send({"url": url, "commitUrl": f"{url}/commit/1", "commitOid": "1" * 40})

    def _send(self, document: object) -> None:
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def test_documented_command_publishes_whole_exported_folder(tmp_path, model_path):
    assert COMMAND in (Path(__file__).parents[4] / "docs/models.md").read_text()
    opened = open_checkpoint(saved(trained(model_path, "lora"), model_path, tmp_path / "run"), model=str(model_path))
    exported, folder = export_model(opened, tmp_path / "models" / "mine").folder, tmp_path / "hub"
    folder.mkdir()
    command = [str(Path(sys.executable).with_name("hf")), *COMMAND.replace("OWNER/NAME", "me/mine").split()[1:]]
    with serving(type("OneHub", (Hub,), {"folder": folder})) as server:
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_x"}
        environment["HF_HUB_DISABLE_UPDATE_CHECK"] = "1"  # asks the package index
        environment.pop("HF_HUB_OFFLINE", None)
        subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    published = {one.name: one.read_bytes() for one in folder.iterdir()}
    assert published == {one.name: one.read_bytes() for one in exported.iterdir()}
    card = ModelCard.load(folder / "README.md").data
    assert (card.library_name, card.pipeline_tag, card.tags) == ("transformers", "image-text-to-text", ["stage2"])
