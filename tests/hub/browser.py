"""Chromium on a Hub: log in, and look at nbgrader's pages."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.hub.class_on_hub import ClassOnHub

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
LONG_MS = 120_000


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """A browser for the duration of the context."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


def log_in(browser: Browser, hub: ClassOnHub, name: str, path: str = "/") -> Page:
    """Open ``path`` in a separate session and log in as ``name``."""
    page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
    page.set_default_timeout(LONG_MS)
    page.goto(hub.url + path)
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(hub.passwords[name])
    page.get_by_role("button", name="Sign in").click()
    return page


def assignments(page: Page) -> None:
    """Open nbgrader's Assignment List in JupyterLab."""
    page.get_by_role("menuitem", name="Nbgrader").first.click()
    page.get_by_text("Assignment List", exact=True).click()
