"""A page of the explorer in a browser, and what can be read from it."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from explore.served import Served, link, unlink

# What was asked of the planner is in the footer as a command; it changes with the newest answer.
COMMAND = ".command"
# Every width, and both themes: a theme is colours alone, so not each at each.
WIDTHS_AND_THEMES = ((380, "dark"), (1280, "light"), (2560, "dark"))


@dataclass
class Opened:
    """A page. `said`: errors of the console, dialogs, and requests to anywhere but its own origin."""

    page: Any
    served: Served
    said: list[str] = field(default_factory=list[str])

    def go(
        self, question: dict[str, Any] | None = None, pp_rank: int | None = None, view: str = "memory", **more: Any
    ) -> None:
        """Open the page on a question, and wait until it is priced. A page that is open follows the link.

        more  other parts of the state
        """
        fragment = link(question, pp_rank, view, **more) if question else ""
        answers = self.page.query_selector("main[data-answers]")
        if not fragment or not answers:
            self.page.goto("about:blank")
            self.page.goto(f"{self.served.origin}/{fragment}")
        elif self.page.evaluate("location.hash") != fragment:
            before = int(answers.get_attribute("data-answers"))
            self.page.evaluate("(hash) => { location.hash = hash; }", fragment)
            self.until("Number(document.querySelector('main').dataset.answers) > arg", before)
        self.settled()

    def settled(self) -> None:
        """Wait for the newest price."""
        self.page.wait_for_selector('main[aria-busy="false"] .sum, main[aria-busy="false"] .wrong', timeout=30_000)

    def rested(self) -> None:
        """Wait for the curve too, and the changes the schedules or other questions."""
        self.page.wait_for_selector("#fits .done, #schedules .done, #what-if .done", timeout=60_000)

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)

    def texts(self, selector: str) -> list[str]:
        return [one.text_content() for one in self.page.query_selector_all(selector)]

    def until(self, condition: str, arg: Any = None, seconds: float = 20.0) -> None:
        """Wait until a JavaScript expression (of `arg`) is true. The page's policy lets no text become code in it."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(f"(arg) => {condition}", arg):
            assert time.monotonic() < end, condition
            self.page.wait_for_timeout(50)

    def asked(self, words: str) -> None:
        """Wait until the newest answer is to a command with these words."""
        shown = "(document.querySelector('.command')?.textContent ?? '').replaceAll(',', ' ')"
        self.until(f"`${{{shown}}} `.includes(arg)", f"{words.strip()} ")
        self.settled()

    def serious(self, axe: str, what: str = "document", rules: str = "") -> list[str]:
        """What axe finds that keeps people out. `what`: the part of the page; `rules`: the only ones, else all. The
        page tells what is wrong, not all that is right, which is a hundred times as long."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(f"() => {{ {axe} }}")
        only = f", runOnly: {rules}" if rules else ""
        found = f"axe.run({what}, {{ resultTypes: ['violations']{only} }})"
        return [
            f"{v['id']}: {node['html'][:160]} {node['any'][0]['message'] if node['any'] else ''}"
            for v in self.page.evaluate(f"{found}.then((found) => found.violations)")
            if v["impact"] in ("serious", "critical") for node in v["nodes"]
        ]  # fmt: skip

    def command(self) -> str:
        return self.text(COMMAND)

    def state(self) -> dict[str, Any]:
        """The state in the address."""
        return unlink(self.page.evaluate("location.hash"))


@contextmanager
def opened(browser: Any, served: Served, **how: Any) -> Generator[Opened]:
    """A page of its own, with the session's cookie. `how`: options of the browser's context."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **how})
    if served.cookie:
        name, _, value = served.cookie.partition("=")
        context.add_cookies([{"name": name, "value": value, "url": served.origin}])
    found = Opened(context.new_page(), served)
    found.page.on("console", lambda m: found.said.append(m.text) if m.type in ("error", "warning") else None)
    found.page.on("pageerror", lambda error: found.said.append(str(error)))
    found.page.on("dialog", lambda dialog: (found.said.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    own = (served.origin, "data:", "blob:", "about:")
    found.page.on("request", lambda r: None if r.url.startswith(own) else found.said.append(r.url))
    try:
        yield found
    finally:
        context.close()
