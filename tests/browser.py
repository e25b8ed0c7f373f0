"""A headless Chromium, driven by the W3C's WebDriver protocol through chromedriver."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference
KEYS = {"enter": "\ue007", "escape": "\ue00c", "up": "\ue013", "control": "\ue009", "shift": "\ue008"}


def missing() -> str:
    """The requirement of a browser's tests that this machine lacks; "" if none."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium and shutil.which("chromedriver"):
        return ""
    return "chromium and chromedriver are needed; on Debian: apt install chromium chromium-driver"


class Browser:
    """Use it as a context manager: the browser ends with it. `place` is an empty directory of its own."""

    def __init__(self, place: Path):
        driver = shutil.which("chromedriver")
        assert driver
        environ = {"PATH": os.environ["PATH"], "HOME": str(place), "TMPDIR": str(place)}
        self._process = subprocess.Popen(
            [driver, "--port=0"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        found = None
        while found is None:
            line = self._process.stdout.readline()
            assert line, "chromedriver ended"
            found = re.search(r"started successfully on port (\d+)", line)
        self._base = f"http://127.0.0.1:{found[1]}/session"
        options = {
            "binary": shutil.which("chromium") or shutil.which("google-chrome"),
            "args": [*FLAGS, f"--user-data-dir={place}/profile", "--window-size=1280,860"],
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        try:
            self._base += "/" + self._send("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._send("DELETE", "")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, url: str) -> None:
        self._send("POST", "/url", {"url": url})

    def js(self, script: str, *arguments: Any) -> Any:
        """The value of a script, such as `return document.title`."""
        return self._send("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any, seconds: float = 30) -> Any:
        """The first value of a script that is true."""
        until = time.monotonic() + seconds
        while not (value := self.js(script, *arguments)):
            assert time.monotonic() < until, f"timed out: {script} {arguments}\n{self.log()}"
            time.sleep(0.05)
        return value

    def texts(self, css: str) -> list[str]:
        """The visible part of each such element."""
        return self.js("return [...document.querySelectorAll(arguments[0])].map((e) => e.innerText)", css)

    def click(self, css: str) -> None:
        """Click the last such element, once it is there."""
        found = self.wait(
            "return [...document.querySelectorAll(arguments[0])].filter((e) => e.offsetParent).at(-1)", css
        )
        self._send("POST", f"/element/{found[ELEMENT]}/click", {})

    def type(self, css: str, text: str) -> None:
        """Type into the last such element."""
        found = self.wait("return [...document.querySelectorAll(arguments[0])].at(-1)", css)
        self._send("POST", f"/element/{found[ELEMENT]}/value", {"text": text})

    def keys(self, *keys: str) -> None:
        """Press these together."""
        actions = [{"type": kind, "value": KEYS.get(key, key)} for kind in ("keyDown", "keyUp") for key in keys]
        self._send("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def size(self, width: int, height: int) -> None:
        """The page's, also such as a phone has."""
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 2 if width < 600 else 1,
            "mobile": width < 600,
        }
        self._send("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics})

    def scheme(self, name: str) -> None:
        """light or dark, as the system would have it."""
        features = {"features": [{"name": "prefers-color-scheme", "value": name}]}
        self._send("POST", "/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": features})

    def log(self) -> list[str]:
        """Complaints of the browser since the last call."""
        return [one["message"] for one in self._send("POST", "/se/log", {"type": "browser"})]

    def shot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._send("GET", "/screenshot")))
