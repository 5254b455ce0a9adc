#!/usr/bin/env python3
# tests/page_check.py - the status page in headless Chromium.
#
# Responsible for: it loads without errors, asks for the key, asks nobody else for anything, shows
# names as text, both colour schemes, small screens; one picture of it.
# Not responsible for: what is counted (test_http.c).
#
# Usage: page_check.py CHROMIUM STAGE [PICTURE.png]. The last line is `N passed, N failed`.
import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

chromium, stage = sys.argv[1], sys.argv[2]
LIMIT_S = 60
SCRIPT = "<script>document.title='broken'</script>"


class Browser:
    """The browser's protocol over its pipe: JSON texts that end with a zero byte."""

    def __init__(self):
        self.home = tempfile.mkdtemp()
        theirs_in, self.out = os.pipe()
        self.into, theirs_out = os.pipe()

        def place():
            a, b = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
             "--disable-dev-shm-usage", "--no-first-run", "--user-data-dir=" + self.home,
             "--force-device-scale-factor=1", "about:blank"],
            preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.number, self.rest, self.session, self.events = 0, b"", None, []

    def read(self, until):
        while b"\0" not in self.rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.into], [], [], left)[0]:
                raise TimeoutError("the browser says nothing")
            self.rest += os.read(self.into, 1 << 20)
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT_S
        while True:
            said = self.read(until)
            if said.get("id") == self.number:
                assert "error" not in said, (method, said)
                return said["result"]
            self.events.append(said)

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True,
                           awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression):
        until = time.monotonic() + LIMIT_S
        guarded = "(() => { try { return %s; } catch { return false; } })()" % expression
        while not self.value(guarded):  # the page may still be on its way
            assert time.monotonic() < until, "never true: " + expression
            self.value("new Promise(done => setTimeout(done, 50))")

    def open(self, url):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        self.size(1120, 840)
        self.call("Page.navigate", url=url)

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": name}])

    def close(self):
        self.session = None
        self.call("Browser.close")
        self.process.wait()
        shutil.rmtree(self.home, ignore_errors=True)

    def complaints(self):
        bad = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                bad.append(params)
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] != "verbose":
                bad.append(params["entry"])
            elif event["method"] == "Runtime.consoleAPICalled":
                bad.append(params)
        return bad

    def requests(self):
        return [e["params"]["request"]["url"] for e in self.events
                if e["method"] == "Network.requestWillBeSent"]


server = subprocess.Popen([stage], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
base, key = next(line for line in server.stdout if line.startswith("http")).split()
browser = Browser()


def it_asks_for_the_key():
    browser.open(base + "/")
    browser.wait("!document.getElementById('ask').hidden")
    assert browser.value("document.getElementById('all').hidden")
    assert browser.value("document.activeElement.id") == "key"
    browser.call("Input.insertText", text=key)
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r")
    browser.wait("document.querySelectorAll('#sessions tr').length >= 4")
    assert browser.value("document.getElementById('ask').hidden")
    assert browser.value("document.getElementById('key').value") == ""


def names_are_text():
    names = browser.value(
        "[...document.querySelectorAll('#sessions td.name')].map(x => x.textContent)")
    assert SCRIPT in names, names
    assert browser.value("document.title") == "coldplane"
    assert browser.value("document.querySelectorAll('main script').length") == 0


def bars_are_told_in_words():
    rows = browser.value(
        "[...document.querySelectorAll('#sessions tr')].map(r => [r.querySelector('svg')"
        ".getAttribute('aria-label'), r.cells[1].textContent, r.cells[4].textContent])")
    for label, state, words in rows:
        assert len(state.split()) >= 2, state  # a mark and a word
        assert label and words == label, (label, words)
    assert "on disk" in rows[2][2] and "in RAM" in rows[3][2], rows


def it_refreshes():
    before = browser.value("document.getElementById('live').textContent")
    browser.wait("document.getElementById('live').textContent !== " + json.dumps(before))
    assert browser.value("document.querySelector('#figures dd').textContent") is not None


def nothing_goes_elsewhere():
    urls = browser.requests()
    assert len(urls) >= 3, urls
    assert all(url.startswith(base + "/") or url.startswith("data:") for url in urls), urls
    kept = browser.value("JSON.stringify([localStorage.length, sessionStorage.length,"
                         " document.cookie])")
    assert kept == '[0,0,""]', kept


def nothing_complains():
    assert browser.complaints() == [], browser.complaints()


def both_schemes_and_small_screens():
    seen = set()
    for scheme in ("light", "dark"):
        browser.scheme(scheme)
        seen.add(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2, seen
    browser.size(380, 700)
    assert browser.value("document.documentElement.scrollWidth") <= 380
    browser.size(1120, 840)


def a_picture_is_taken():
    if len(sys.argv) < 4:
        return
    browser.scheme("light")
    height = browser.value("document.documentElement.scrollHeight")
    browser.size(1120, height)
    data = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
    with open(sys.argv[3], "wb") as file:
        file.write(data)
    assert 5000 < len(data) < 150000, len(data)


def a_wrong_key_is_told():
    browser.value("key = 'wrong'; refresh()")
    browser.wait("document.getElementById('told').textContent.includes('does not know')")
    assert browser.value("document.getElementById('all').hidden")


TESTS = [
    it_asks_for_the_key,
    names_are_text,
    bars_are_told_in_words,
    it_refreshes,
    nothing_goes_elsewhere,
    nothing_complains,
    both_schemes_and_small_screens,
    a_picture_is_taken,
    a_wrong_key_is_told,
]
failed = 0
for test in TESTS:
    try:
        test()
        print(test.__name__, "passed")
    except Exception as error:  # one failure must not hide the others
        failed += 1
        print(test.__name__, "FAILED:", type(error).__name__, error)
browser.close()
server.stdin.close()
failed += server.wait() != 0
print("%d passed, %d failed" % (len(TESTS) - failed, failed))
sys.exit(failed > 0)
