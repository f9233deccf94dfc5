"""Drive a headless Chromium over the WebDriver protocol, which is JSON over HTTP: no client is
needed.

https://www.w3.org/TR/webdriver2/. Debian: `apt-get install chromium chromium-driver`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
ENTER = "\ue007"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it runs on this machine
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that the standard gives to a reference


def missing() -> str:
    """Say why no browser can be driven here; empty where one can."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not installed (Debian: chromium, chromium-driver)" * bool(
        absent
    )


class Browser:
    """Open one window of `width` x `height` CSS pixels; the context manager ends its processes."""

    def __init__(self, width: int, height: int) -> None:
        self.size = {"width": width, "height": height}

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = ["chromedriver", "--port=0"]
        self._driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        assert self._driver.stdout is not None
        started = (re.search(r"successfully on port (\d+)", line) for line in self._driver.stdout)
        port = next(found[1] for found in started if found)
        self._session = f"http://127.0.0.1:{port}/session"
        options = {
            "binary": shutil.which("chromium"),
            "args": [*FLAGS, f"--user-data-dir={self._profile.name}"],
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._post("", {"capabilities": {"alwaysMatch": wanted}})
        self._session += f"/{session['sessionId']}"
        phone = self.size["width"] < 600
        self.devtools(
            "Emulation.setDeviceMetricsOverride", **self.size, deviceScaleFactor=1, mobile=phone
        )

    def __exit__(self, *exc: object) -> None:
        try:
            if hasattr(self, "_session"):
                request = urllib.request.Request(self._session, method="DELETE")
                _OPENER.open(request, timeout=120).close()
        finally:
            self._driver.terminate()
            self._driver.communicate(timeout=120)
            self._profile.cleanup()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{self._session}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with _OPENER.open(request, timeout=300) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path) -> None:
        self._post("/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *args: Any) -> Any:
        """Return what the body of a JavaScript function returns."""
        return self._post("/execute/sync", {"script": script, "args": list(args)})

    def click(self, selector: str) -> None:
        """Click as a user does: the page scrolls there, and it is an error if something covers the
        element.
        """
        self._post(f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, keys: str) -> None:
        self._post(f"/element/{self._find(selector)}/value", {"text": keys})

    def _find(self, selector: str) -> str:
        found: str = self._post("/element", {"using": "css selector", "value": selector})[_ELEMENT]
        return found

    def console(self) -> list[str]:
        """Return what was logged since the last call, errors of the page and of its policy
        included.
        """
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def devtools(self, command: str, **params: Any) -> None:
        self._post("/goog/cdp/execute", {"cmd": command, "params": params})
