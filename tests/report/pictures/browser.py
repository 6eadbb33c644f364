"""Headless Chromium through chromedriver's WebDriver protocol: enough to open a page, act on it and look at it."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

__all__ = ["Browser", "browser", "found"]

START_S = 20.0


def found() -> bool:
    """Whether there is a Chromium and its driver."""
    return all(shutil.which(name) for name in ("chromium", "chromedriver"))


class Browser:
    """One session."""

    def __init__(self, port: int, dark: bool, size: tuple[int, int]) -> None:
        self.connection = HTTPConnection("127.0.0.1", port, timeout=60)
        self.path = ""
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={size[0]},{size[1]}"]
        wanted = {"goog:chromeOptions": {"args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.post("/session", {"capabilities": {"alwaysMatch": wanted}})
        self.path = f"/session/{session['sessionId']}"
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", {"features": scheme})

    def post(self, path: str, body: Mapping[str, Any] | None, method: str = "POST") -> Any:
        """One command's value."""
        text = None if body is None else json.dumps(body)
        self.connection.request(method, f"{self.path}{path}", text, {"Content-Type": "application/json"})
        value = json.loads(self.connection.getresponse().read())["value"]
        assert not (isinstance(value, dict) and "error" in value), value
        return value

    def devtools(self, command: str, parameters: Mapping[str, Any]) -> Any:
        """A command of the developer tools' protocol."""
        return self.post("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, page: Path) -> None:
        """Load a file."""
        self.post("/url", {"url": page.as_uri()})

    def run(self, script: str, *arguments: object) -> Any:
        """What a function body returns in the page."""
        return self.post("/execute/sync", {"script": script, "args": list(arguments)})

    def act(self, kind: str, actions: Sequence[Mapping[str, Any]]) -> None:
        """Pointer or key actions."""
        more = {"parameters": {"pointerType": "mouse"}} if kind == "pointer" else {}
        self.post("/actions", {"actions": [{"type": kind, "id": kind, "actions": actions, **more}]})

    def console(self) -> list[str]:
        """What the console says, warnings and errors."""
        return [one["message"] for one in self.post("/se/log", {"type": "browser"})]

    def screenshot(self, file: Path) -> None:
        """The whole page as a PNG."""
        size = self.devtools("Page.getLayoutMetrics", {})["cssContentSize"]
        shot = {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        file.write_bytes(base64.b64decode(self.devtools("Page.captureScreenshot", shot)["data"]))


@contextmanager
def browser(dark: bool = False, size: tuple[int, int] = (1200, 900)) -> Iterator[Browser]:
    """A browser, closed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["chromedriver", f"--port={port}"]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < until, "chromedriver does not answer"
                time.sleep(0.05)
        one = Browser(port, dark, size)
        try:
            yield one
        finally:
            one.post("", None, "DELETE")
            one.connection.close()
    finally:
        driver.terminate()
        driver.wait(10)
