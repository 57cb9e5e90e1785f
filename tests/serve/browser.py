"""A headless Chromium for tests, driven through its DevTools protocol over two pipes."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_ANSWER_S = 60


def find_browser():
    """The program's path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def browsing():
    """A browser with one empty page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # Above those numbers that they get in the browser.
        pipes = [[fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in os.pipe()] for _ in range(2)]
        (theirs_in, ours_out), (ours_in, theirs_out) = pipes

        def give_pipes():
            os.dup2(theirs_in, 3)
            os.dup2(theirs_out, 4)

        process = subprocess.Popen(
            [
                find_browser(), "--headless", "--remote-debugging-pipe", "--no-sandbox",
                "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
                f"--user-data-dir={profile}", "about:blank",
            ],
            preexec_fn=give_pipes,
            close_fds=False,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(ours_in, ours_out)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(ours_in)
            os.close(ours_out)


class Page:
    """The browser's page. `errors` are what its console and its scripts complained of."""

    def __init__(self, fd_in, fd_out):
        self._in, self._out = fd_in, fd_out
        self._data = b""
        self._count = 0
        self._session = None
        self.errors = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, url):
        self._call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def show(self, width, height, *, dark=True, scale=1, mobile=False):
        """Sets the size of the window and the colours that its user likes."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=mobile,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, script):
        """The value of an expression, which may be a promise."""
        answer = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def wait(self, condition, seconds=30):
        """Waits until an expression is true, and returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(condition)):
            assert time.monotonic() < end, f"never true: {condition}"
            time.sleep(0.05)
        return value

    def press(self, key, text=""):
        """A key, by its name; with `text` it also writes."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=text)

    def move(self, x, y):
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, whole=False):
        """A PNG of the window, or of the whole page."""
        answer = self._call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, fromSurface=True
        )
        return base64.b64decode(answer["data"])

    def _call(self, method, **params):
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _note(self, event):
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        if method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def _read(self):
        while b"\0" not in self._data:
            assert select.select([self._in], [], [], _ANSWER_S)[0], "the browser does not answer"
            part = os.read(self._in, 1 << 20)
            assert part, "the browser has ended"
            self._data += part
        message, _, self._data = self._data.partition(b"\0")
        return json.loads(message)
