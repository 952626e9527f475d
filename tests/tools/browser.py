"""A headless Chromium, driven through its debugging pipe: no port, and no package."""

import base64
import json
import os
import shutil
import subprocess

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--remote-debugging-pipe")  # fmt: skip

# Of each visible text its colour's contrast with what is behind it (WCAG 2), if below `limit`.
FAINT = """(limit => {
  const parsed = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(
    v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4
  ).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const over = ([r, g, b, a = 1], [x, y, z]) => [r*a + x*(1-a), g*a + y*(1-a), b*a + z*(1-a)];
  const behind = element => element === null ? [255, 255, 255]
    : over(parsed(getComputedStyle(element).backgroundColor), behind(element.parentElement));
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
    if (!text || !element.getClientRects().length || element.closest('title')) continue;
    const style = getComputedStyle(element), back = behind(element);
    const ink = element.namespaceURI.endsWith('svg') ? style.fill : style.color;
    const [one, two] = [light(over(parsed(ink), back)), light(back)];
    const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
    if (ratio < limit) faint.push(`${ratio.toFixed(2)} ${element.className} ${text.slice(0, 30)}`);
  }
  return [...new Set(faint)];
})(%s)"""

# Elements that reach beyond the window's right edge.
WIDE = """[...document.querySelectorAll('body *')].filter(
  x => x.getBoundingClientRect().right > innerWidth + 1
).map(x => `${x.tagName}.${x.getAttribute('class')} ${x.getBoundingClientRect().right}`)"""


def browser_path():
    """The browser that is installed, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


class Browser:
    """One page; what it logged, and the addresses that it asked for."""

    def __init__(self, profile):
        there, self._commands = os.pipe()
        self._answers, here = os.pipe()
        fds = f'exec 3<&{there} 4>&{here}; exec "$0" "$@"'
        command = [browser_path(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", fds, *command], pass_fds=(there, here), stderr=subprocess.DEVNULL
        )
        os.close(there)
        os.close(here)
        self._file, self._number, self._session = os.fdopen(self._answers, "rb"), 0, None
        self._rest, self.logged, self.requested = b"", [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._process.wait(timeout=20)
        self._file.close()
        os.close(self._commands)

    def call(self, method, **parameters):
        """Call a method of the DevTools protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, address, width, scheme):
        """Load a page in a window of this width, under a light or a dark scheme."""
        self.logged, self.requested = [], []
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=address)
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def value(self, script):
        """What a script returns on the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path):
        """Write the whole page as a picture."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _read(self):
        while b"\0" not in self._rest:
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        event = json.loads(line)
        parameters = event.get("params", {})
        match event.get("method"):
            case "Log.entryAdded":
                self.logged.append(parameters["entry"]["text"])
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown":
                self.logged.append(json.dumps(parameters))
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])
        return event
