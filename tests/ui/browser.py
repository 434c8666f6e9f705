"""Headless Chromium, and pages in it that note what they should not do."""

import time
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

PATIENCE_MS = 60_000
# Nothing of it is in the page: it notes what the page does.
NOTES = """
window.noted = { violations: [], long: [] };
addEventListener('securitypolicyviolation', (event) => noted.violations.push(event.blockedURI));
new PerformanceObserver((list) => noted.long.push(...list.getEntries().map((entry) => entry.duration)))
  .observe({ type: 'longtask', buffered: true });
"""


class Wrong(Exception):
    """Something is not as it should be."""


def ensure(is_so, what):
    if not is_so:
        raise Wrong(what)


class Browser:
    def __init__(self, program):
        self.program = program

    def __enter__(self):
        self.playwright = sync_playwright().start()
        flags = ["--no-sandbox", "--disable-dev-shm-usage"]
        self.chromium = self.playwright.chromium.launch(executable_path=self.program, args=flags)
        expect.set_options(timeout=PATIENCE_MS)
        return self

    def __exit__(self, *_):
        self.chromium.close()
        self.playwright.stop()

    def view(self, url, **options):
        """A page of its own session, at this address."""
        return View(self.chromium.new_context(**({"viewport": {"width": 1000, "height": 640}} | options)), url)


class View:
    def __init__(self, context, url):
        self.context, self.url, self.asked, self.said = context, url, [], []
        context.set_default_timeout(PATIENCE_MS)
        context.on("request", lambda request: self.asked.append(request.url))
        self.page = context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.add_init_script(NOTES)
        self.page.goto(url)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self.judge()
        finally:
            self.context.close()

    def judge(self):
        """What must be so of every view, whatever it was for."""
        host = urlsplit(self.url).netloc
        others = [url for url in self.asked if urlsplit(url).netloc != host]
        ensure(self.asked and not others, f"asked elsewhere: {others}")
        violations = self.page.evaluate("noted.violations")
        ensure(not violations, f"its policy forbade {violations}")
        # Whoever does not answer is told of by the browser, too.
        wrong = [text for text in self.said if not text.startswith("Failed to load resource")]
        ensure(not wrong, f"its console has {wrong}")
        ensure(not self.page.evaluate("window.hit ?? false"), "a name was run as a script")

    def expect(self, selector):
        return expect(self.page.locator(selector))

    def text(self, selector):
        return self.page.locator(selector).text_content()

    def wait(self, script):
        """Until it is so. The page's policy forbids what the driver has for that."""
        due = time.monotonic() + PATIENCE_MS / 1000
        while not self.page.evaluate(script):
            ensure(time.monotonic() < due, f"it is not so yet: {script}")
            self.page.wait_for_timeout(50)

    def axe(self, what):
        found = Axe().run(self.page).response["violations"]
        rows = [f"{of['id']}: {of['help']}: {[node['html'][:160] for node in of['nodes'][:3]]}" for of in found]
        ensure(not rows, f"{what}: axe found {rows}")

    def forbids(self, script):
        """Runs what the page's policy should forbid, and forgets that it did."""
        self.page.evaluate(script)
        self.wait("noted.violations.length > 0")
        self.said.clear()
        return self.page.evaluate("noted.violations.splice(0)")
