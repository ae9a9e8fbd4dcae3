"""The pages of `stage2 report --html`, opened and used in a real Chromium: `make check-report`.

Chromium is started without a network to use, driven over its debugging socket, and queried for what it shows.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from stage2_report.html_page import PageRequest, write_html
from tests.unit.report.reported import HOSTILE, write_grpo_run, write_run

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1400,1000")
SETTLED = "document.readyState === 'complete' && document.getElementById('count').textContent !== ''"
CHANGE = "document.getElementById('{}').{}; document.getElementById('{}').dispatchEvent(new Event('change'))"
ORDER = "[...document.querySelectorAll('.card:not([hidden]) h3')].map((one) => one.textContent).join()"
CLASS = "document.getElementById('class').value.slice(0, 9)"
PICTURE = "[...document.querySelectorAll('.panes svg')].some((one) => one.clientHeight > 50)"
GROUND = "getComputedStyle(document.body).backgroundColor"
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
WIDE = "[document.documentElement, ...document.querySelectorAll('.wide')]"
OVERHANG = f"{WIDE}.map((one) => one.scrollWidth - one.clientWidth)"
GROUNDS = (("dark", "rgb(13, 17, 23)"), ("light", "rgb(255, 255, 255)"))
EXPECTED = (
    ("no other script ran", "document.querySelectorAll('script, img').length", 1),
    ("all samples are shown", "document.getElementById('count').textContent", "3 of 3 shown"),
    ("the worst is first", ORDER, "val.jsonl:3,val.jsonl:2,val.jsonl:1"),
    ("the best is first", ("order", "value = 'best'", ORDER), "val.jsonl:1,val.jsonl:2,val.jsonl:3"),
    ("wrong ones are left", ("wrong", "checked = true", ORDER), "val.jsonl:2,val.jsonl:3"),
    ("one has duplicates", ("duplicates", "checked = true", ORDER), "val.jsonl:3"),
    ("none is cut off", ("cut", "checked = true", ORDER), ""),
    ("the page says so", "document.getElementById('none').hidden", False),
    ("no filter", ("cut", "checked = false", ORDER), "val.jsonl:3"),
    ("at the first step all have", ("view", "value = '0'", ORDER), "val.jsonl:3,val.jsonl:2,val.jsonl:1"),
    (
        "and the name is text",
        ("class", "selectedIndex = 1", "document.getElementById('class').value.slice(0, 9)"),
        "</script>",
    ),
    ("pictures have a size", PICTURE, True),
    ("nothing is wider than the window", "document.documentElement.scrollWidth <= innerWidth", True),
)

EXPECTED_OF_GRPO = (
    ("no other script ran", "document.querySelectorAll('script, img').length", 1),
    ("the last step is shown", "document.getElementById('count').textContent", "2 of 5 shown"),
    ("the worst is first", ORDER, "train.jsonl:1,train.jsonl:2"),
    ("the best is first", ("order", "value = 'best'", ORDER), "train.jsonl:2,train.jsonl:1"),
    ("an evaluation can be chosen", ("view", "value = '0'", ORDER), "train.jsonl:1"),
    ("none is cut off", ("cut", "checked = true", ORDER), ""),
    ("a picture has a size", ("cut", "checked = false", PICTURE), True),
    ("nothing is wider than the window", "document.documentElement.scrollWidth <= innerWidth", True),
)


class Tab:
    """A tab of a browser, over its debugging socket. complaints: what its console said of errors."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> Any:
        """Return what a method of the protocol answers."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while (answer := await self._socket.receive_json()).get("id") != self._number:
            if answer["method"] in ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"):
                self.complaints.append(str(answer["params"])[:300])
        return answer["result"]

    async def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        return (await self.call("Runtime.evaluate", expression=expression, returnByValue=True))["result"].get("value")


@asynccontextmanager
async def opened(page: Path, profile: Path) -> AsyncIterator[Tab]:
    """Open a page in a browser of its own."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        sys.exit("make check-report needs Chromium: apt-get install chromium")
    command = [program, *FLAGS, f"--user-data-dir={profile}", page.as_uri()]
    browser = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        assert browser.stderr is not None
        while not (found := re.search(rb"listening on ws://([^/]+)/", await browser.stderr.readline())):
            pass
        async with aiohttp.ClientSession() as session, session.get(f"http://{found[1].decode()}/json/list") as tabs:
            (address,) = [one["webSocketDebuggerUrl"] for one in await tabs.json() if one["type"] == "page"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Tab(socket)
    finally:
        browser.terminate()
        await browser.wait()


async def faults(page: Path, profile: Path, expected: Sequence[Any]) -> list[str]:
    """Return what is not as it should be."""
    async with opened(page, profile) as tab:
        for domain in ("Page", "Runtime", "Log"):
            await tab.call(f"{domain}.enable")
        while not await tab.value(SETTLED):
            await asyncio.sleep(0.2)
        found = []
        for name, asked, answer in expected:
            if not isinstance(asked, str):
                control, change, asked = asked
                await tab.value(CHANGE.format(control, change, control))
            if (value := await tab.value(asked)) != answer:
                found.append(f"{page.stem}: {name}: {value!r} instead of {answer!r}")
        for scheme, ground in GROUNDS:
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            await tab.call("Emulation.setEmulatedMedia", features=features)
            if (value := await tab.value(GROUND)) != ground:
                found.append(f"{page.stem}: {scheme}: the ground is {value!r} instead of {ground!r}")
        await tab.call("Emulation.setDeviceMetricsOverride", **PHONE)
        if any(over := await tab.value(OVERHANG)):
            found.append(f"{page.stem}: on a phone, the page and its tables are too wide by {over} pixels")
        return found + tab.complaints


def main() -> None:
    """Write pages of small runs with hostile texts, one of each kind, and look at them."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), []
        runs = ((write_run(folder / "objects", hostile=True), EXPECTED),)
        runs += ((write_grpo_run(folder / "grpo", text=HOSTILE), EXPECTED_OF_GRPO),)
        for run, expected in runs:
            page = folder / f"{run.name}.html"
            write_html(PageRequest([run], page))
            found += asyncio.run(asyncio.wait_for(faults(page, folder / f"{run.name}-profile", expected), 120))
    print("\n".join(found) or f"the pages are as they should be: {len(EXPECTED) + len(EXPECTED_OF_GRPO)} questions")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
