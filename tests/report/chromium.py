"""A Chromium without a window, driven through a pipe: pointer and media."""

import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)


class Chromium:
    """One browser with one tab; messages of its DevTools protocol end with a zero byte."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ours = [os.pipe(), os.pipe()]
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (ours[0][0], ours[1][1])]
        said = f'exec "$0" "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        profile = f"--user-data-dir={folder / 'profile'}"
        self.process = subprocess.Popen(
            ["/bin/bash", "-c", said, PROGRAM, *FLAGS, profile, "about:blank"],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (*theirs, ours[0][0], ours[1][1]):
            os.close(end)
        self.write, self.read = ours[0][1], ours[1][0]
        self.pending, self.count, self.tab = b"", 0, ""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.tab = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Page.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command and return its result."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        message |= {"sessionId": self.tab} if self.tab else {}
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.pending:
            more = os.read(self.read, 1 << 20)
            assert more, "the browser ended"
            self.pending += more
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)

    def open(
        self, page: str, *, width: int = 1280, height: int = 800, scripts: bool = True
    ) -> None:
        """Show a page in a window of some size, as a screen that prefers light does."""
        file = self.folder / "page.html"
        file.write_text(page, encoding="utf-8")
        self.send("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.media("screen")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=file.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass
        while self.run("document.readyState + location.protocol") != "completefile:":
            pass

    def run(self, script: str) -> Any:
        """Return the value of an expression, or what its promise comes to."""
        told = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def media(self, kind: str, **features: str) -> None:
        """Pretend to be print or a screen, and to prefer something: color_scheme="dark"."""
        chosen = {"color_scheme": "light", "reduced_motion": "no-preference"} | features
        listed = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value}
            for name, value in chosen.items()
        ]
        self.send("Emulation.setEmulatedMedia", media=kind, features=listed)

    def click(self, x: float, y: float) -> None:
        """Click at a place in the window."""
        for kind in ("mousePressed", "mouseReleased"):
            press = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.send("Input.dispatchMouseEvent", type=kind, **press)

    def close(self) -> None:
        """End the browser."""
        self.tab = ""
        self.send("Browser.close")
        self.process.wait(timeout=60)
        os.close(self.read)
        os.close(self.write)
