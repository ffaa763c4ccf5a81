"""Headless Chromium for the tests, over the DevTools protocol through two pipes: no package to pin, no open port."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import signal
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.helpers import wait_until

FLAGS = ("--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
         "--disable-background-networking", "--disable-extensions", "--hide-scrollbars", "--mute-audio")  # fmt: skip
KEYS = {"Tab": ("Tab", 9, ""), "Enter": ("Enter", 13, "\r"), " ": ("Space", 32, " "), "End": ("End", 35, ""),
        "Home": ("Home", 36, ""), "ArrowLeft": ("ArrowLeft", 37, ""), "ArrowRight": ("ArrowRight", 39, "")}  # fmt: skip


class Browser:
    """One browser process.  A context manager; leaves no process behind."""

    PATIENCE = 60.0  # seconds for an answer

    def __init__(self, executable: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # above 4, so that neither is lost when they become the 3 and 4 that the browser reads and writes
        commands, answers = (fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 5) for theirs in (theirs_in, theirs_out))
        root = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses to run as root
        self._pid = os.posix_spawn(
            executable,
            [executable, *FLAGS, *root, f"--user-data-dir={self._profile.name}"],
            os.environ,
            file_actions=[(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                          (os.POSIX_SPAWN_DUP2, commands, 3), (os.POSIX_SPAWN_DUP2, answers, 4)],
            setpgroup=0,
        )  # fmt: skip
        for descriptor in (theirs_in, theirs_out, commands, answers):
            os.close(descriptor)
        self._number, self._received = 0, b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """The answer to a command; what happens meanwhile is kept in `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        os.write(self._to, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            if not select.select([self._from], [], [], self.PATIENCE)[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._from, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)  # the browser then ends by itself
        os.close(self._from)
        if not wait_until(lambda: os.waitpid(self._pid, os.WNOHANG) != (0, 0), 10):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._profile.cleanup()


class Page:
    """A tab of its own, closed at the end of the `with` statement.

    `media` are features that the user has set, by name: prefers_color_scheme="dark".
    """

    def __init__(self, browser: Browser, width: int = 1000, height: int = 900, **media: str) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.call = partial(browser.call, session=self._session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, file: Path) -> None:
        """Load a file, and wait until it is loaded."""
        self._browser.events.clear()
        self.call("Page.navigate", url=file.absolute().as_uri())
        if not wait_until(lambda: self.run("location.protocol == 'file:' && document.readyState == 'complete'")):
            raise TimeoutError(f"{file} is not loaded")

    def events(self, method: str) -> list[dict[str, Any]]:
        """The parameters of all events of a kind since the page was opened."""
        self.run("0")  # earlier events arrive before the answer
        return [event["params"] for event in self._browser.events
                if event.get("sessionId") == self._session and event["method"] == method]  # fmt: skip

    def problems(self) -> list[str]:
        """All messages of the console, and every error of a script."""
        logged = [str(event["entry"]["text"]) for event in self.events("Log.entryAdded")]
        called = [str(event["args"]) for event in self.events("Runtime.consoleAPICalled")]
        return logged + called + [str(event["exceptionDetails"]) for event in self.events("Runtime.exceptionThrown")]

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        """Press and release one of KEYS."""
        code, number, text = KEYS[key]
        shared: dict[str, Any] = {"key": key, "code": code, "windowsVirtualKeyCode": number, "modifiers": 8 * shift}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    def screenshot(self, file: Path) -> None:
        """The whole page as a PNG."""
        picture = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(picture))

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)
