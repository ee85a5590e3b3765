"""Headless Chromium over its DevTools protocol, with the standard library only: open a page, run JavaScript, look."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The browser's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class WebSocket:
    """A client's side of RFC 6455, as far as text messages need it."""

    def __init__(self, url: str, timeout: float = 30) -> None:
        match = re.fullmatch(r"ws://([^:/]+):(\d+)(/.*)", url)
        assert match, url
        host, port, path = match.groups()
        self.socket = socket.create_connection((host, int(port)), timeout)
        key = base64.b64encode(os.urandom(16)).decode()
        head = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        self.socket.sendall(f"{head}Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self.file = self.socket.makefile("rb")
        status = self.file.readline()
        assert b" 101 " in status, status
        while self.file.readline().strip():
            pass

    def send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        size = len(data)
        if size < 126:
            head = struct.pack("!BB", 0x81, 0x80 | size)
        elif size < 65536:
            head = struct.pack("!BBH", 0x81, 0x80 | 126, size)
        else:
            head = struct.pack("!BBQ", 0x81, 0x80 | 127, size)
        self.socket.sendall(head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(data)))

    def receive(self) -> str:
        """The next text message, its fragments put together; pings and the like are passed over."""
        parts = b""
        while True:
            first, second = self.file.read(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack("!H", self.file.read(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self.file.read(8))
            data = self.file.read(size)
            opcode = first & 0x0F
            if opcode in (0, 1):
                parts += data
                if first & 0x80:
                    return parts.decode()
            assert opcode != 8, "the browser closed the connection"

    def close(self) -> None:
        self.file.close()
        self.socket.close()


class Page:
    """One tab. ``complaints`` collects console errors and warnings, exceptions, and failed or refused requests."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        self.profile = tempfile.mkdtemp(prefix="chromium-")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += ["--disable-dev-shm-usage", "--remote-debugging-port=0", f"--user-data-dir={self.profile}"]
        binary = chromium()
        assert binary is not None
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen([binary, *options, "about:blank"], stdout=quiet, stderr=quiet)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        self._loads = 0
        self._socket: WebSocket | None = None
        try:
            self._socket = WebSocket(self._address())
            found = self._call("Target.getTargets", session=None)["targetInfos"]
            tab = next(one["targetId"] for one in found if one["type"] == "page")
            self._session = self._call("Target.attachToTarget", {"targetId": tab, "flatten": True}, session=None)[
                "sessionId"
            ]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
            self._call("Emulation.setFocusEmulationEnabled", {"enabled": True})
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def _address(self) -> str:
        """The browser writes its port into its profile once it listens."""
        file = Path(self.profile) / "DevToolsActivePort"
        for _ in range(300):
            if file.exists() and len(lines := file.read_text().split()) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            assert self.process.poll() is None, "the browser did not start"
            time.sleep(0.1)
        raise AssertionError("the browser opened no port")

    def _call(self, method: str, params: dict[str, Any] | None = None, session: str | None = "own") -> dict[str, Any]:
        assert self._socket is not None
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        if session == "own":
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.receive())
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._event(answer)

    def _event(self, event: dict[str, Any]) -> None:
        name, params = event.get("method"), event.get("params", {})
        if name == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console: {params['args']}")
        elif name == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {params['exceptionDetails']}")
        elif name == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"log: {params['entry']['text']}")
        elif name == "Page.loadEventFired":
            self._loads += 1
        elif name == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path: Path) -> None:
        """Load a file and wait until its scripts have run."""
        self._loads = 0
        self._call("Page.navigate", {"url": path.resolve().as_uri()})
        assert self._socket is not None
        while not self._loads:  # the socket's timeout ends a page that never loads
            self._event(json.loads(self._socket.receive()))

    def run(self, code: str) -> Any:
        """The value of a JavaScript expression."""
        result = self._call("Runtime.evaluate", {"expression": code, "returnByValue": True, "awaitPromise": True})
        assert "exceptionDetails" not in result, result.get("exceptionDetails")
        return result["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """A key on the keyboard: Tab (9), Enter (13), …"""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            event = {"type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code} | (
                text if kind == "keyDown" else {}
            )
            self._call("Input.dispatchKeyEvent", event)

    def resize(self, width: int, height: int = 900) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", size)

    def scheme(self, value: str) -> None:
        """The system's colour scheme: dark or light."""
        self._call("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": value}]})

    def screenshot(self, path: Path, most: int = 12000) -> None:
        """The whole page, down to ``most`` pixels."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most), "scale": 1}
        found = self._call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.profile, ignore_errors=True)

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
