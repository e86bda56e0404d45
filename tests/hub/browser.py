"""Chromium on a Hub: log in, and look at nbgrader's pages."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.hub.class_on_hub import PICTURES, ClassOnHub

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
LONG_MS = 120_000


@contextlib.contextmanager
def chromium(*options: str, profile: Path | None = None) -> Iterator[Any]:
    """A browser for the duration of the context.

    Args:
        profile: a folder for a user's profile; the result is then its context, and not a browser, whose
            contexts are private.
    """
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=LONG_MS)  # the machine may have other load
    with sync_playwright() as playwright:
        asked: dict[str, Any] = {"executable_path": CHROMIUM, "args": [*QUIET, *options]}
        if profile is None:
            browser = playwright.chromium.launch(**asked)
        else:
            asked |= {"ignore_https_errors": True, "viewport": {"width": 1400, "height": 900}}
            browser = playwright.chromium.launch_persistent_context(profile, **asked)
            browser.set_default_timeout(LONG_MS)
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


def terminal(page: Page) -> None:
    """Open a terminal by the menu of JupyterLab, and go to it."""
    page.get_by_role("menuitem", name="File", exact=True).click()
    menus = page.locator(".lm-Menu")
    menus.get_by_text("New", exact=True).hover()
    menus.get_by_text("Terminal", exact=True).click()
    page.locator(".jp-Terminal .xterm-screen:visible").last.click()


def picture(page: Page, tmp_path: Path, name: str) -> None:
    """Keep a screenshot, in the folder that ``$DLO_HUB_PICTURES`` names if it does."""
    page.screenshot(path=str(Path(PICTURES or tmp_path) / f"{name}.png"))


def assignments(page: Page) -> None:
    """Open nbgrader's Assignment List in JupyterLab."""
    page.get_by_role("menuitem", name="Nbgrader").first.click()
    page.get_by_text("Assignment List", exact=True).click()
