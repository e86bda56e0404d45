"""A class that comes from a Moodle by LTI 1.3: the Hub in a frame of its page, in Chromium, behind nginx.

`make hub` runs these tests: they need root and a JupyterHub.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hub.browser import CHROMIUM, LONG_MS, chromium, picture
from tests.hub.class_on_hub import ClassOnHub, class_on_hub, missing
from tests.hub.small_moodle import CLIENT, SmallMoodle, small_moodle
from tests.hub.tls import certificate, nginx_command

if TYPE_CHECKING:
    from playwright.sync_api import FrameLocator, Page

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="NOT TESTED HERE: a Hub in a browser (install chromium)"),
    pytest.mark.skipif(
        shutil.which("nginx") is None or shutil.which("openssl") is None,
        reason="NOT TESTED HERE: TLS in front of a Hub (apt-get install nginx openssl)",
    ),
]
# Two sites for a browser: cookies of one in a page of the other are those of a third party.
MOODLE, HUB = "moodle.test", "hub.test"
RESOLVE = f"--host-resolver-rules=MAP {MOODLE} 127.0.0.1, MAP {HUB} 127.0.0.1"
ACCEPTS = {"profile": {"cookie_controls_mode": 0, "block_third_party_cookies": False}}
"""Chromium's preferences: without them it refuses these cookies."""
TABLE = """
[lti]
issuer = "https://{moodle}:{port}"
client_id = "{client}"
authorize_url = "https://{moodle}:{port}/auth.php"
keys_url = "https://localhost:{port}/certs.php"
"""


@pytest.fixture(scope="module")
def ports() -> tuple[int, int, int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    found = tuple(probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    return found


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The certificate of the Moodle, and its key."""
    return certificate(tmp_path_factory.mktemp("tls"), MOODLE, "localhost")


@pytest.fixture(scope="module")
def hub(ports: tuple[int, int, int], keys: tuple[Path, Path]) -> Iterator[ClassOnHub]:
    if reason := missing():
        pytest.skip(f"NOT TESTED HERE: a real JupyterHub ({reason})")
    more = TABLE.format(moodle=MOODLE, port=ports[0], client=CLIENT)
    # The Hub reads the keys of the Moodle by TLS.
    variables = {"SSL_CERT_FILE": str(keys[0])}
    with class_on_hub(("ada", "head"), more=more, second=False, variables=variables) as running:
        running.enrol("deep", running.person("ada"))
        yield running


@pytest.fixture(scope="module")
def moodle(
    hub: ClassOnHub,
    ports: tuple[int, int, int],
    keys: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SmallMoodle]:
    folder = tmp_path_factory.mktemp("nginx")
    web = subprocess.Popen([*nginx_command(folder, HUB, ports[1:], hub.url), "-g", "daemon off;"])
    addresses = (f"https://{MOODLE}:{ports[0]}", f"https://{HUB}:{ports[2]}")
    try:
        with small_moodle(*keys, *addresses) as running:
            yield running
    finally:
        web.terminate()
        web.wait()


@pytest.fixture
def page(moodle: SmallMoodle, tmp_path: Path) -> Iterator[Page]:
    """A page of a browser with a profile, which accepts the cookies of third parties."""
    preferences = tmp_path / "profile" / "Default" / "Preferences"
    preferences.parent.mkdir(parents=True)
    preferences.write_text(json.dumps(ACCEPTS))
    with chromium(RESOLVE, profile=tmp_path / "profile") as context:
        yield context.new_page()


@pytest.fixture
def strict_page(moodle: SmallMoodle) -> Iterator[Page]:
    """A private page of a browser, which refuses the cookies of third parties."""
    with chromium(RESOLVE) as browser:
        page = browser.new_context(ignore_https_errors=True).new_page()
        page.set_default_timeout(LONG_MS)
        yield page


def works_in(frame: FrameLocator | Page) -> None:
    from playwright.sync_api import expect

    expect(frame.get_by_role("heading", name="00 · Start here")).to_be_visible()
    expect(frame.locator("[data-status=idle]").first).to_be_visible()  # by a WebSocket


def test_a_student_works_in_a_frame_of_moodle(
    hub: ClassOnHub, moodle: SmallMoodle, page: Page, tmp_path: Path
) -> None:
    moodle.custom = {"login": hub.person("ada")}
    page.goto(f"{moodle.issuer}/course")
    works_in(page.frame_locator("iframe"))
    picture(page, tmp_path, "moodle_frame")
    cookies = [one for one in page.context.cookies() if one["domain"] == HUB]
    assert len(cookies) >= 3  # the Hub's session, its login, and the login of the server
    assert {(one["sameSite"], one["secure"]) for one in cookies} == {("None", True)}


def test_without_cookies_of_third_parties_a_new_window_works(
    hub: ClassOnHub, moodle: SmallMoodle, strict_page: Page, tmp_path: Path
) -> None:
    moodle.custom = {"login": hub.person("ada")}
    strict_page.goto(f"{moodle.issuer}/course")
    strict_page.frame_locator("iframe").get_by_text("OAuth state missing from cookies").first.wait_for()
    strict_page.goto(moodle.launch_url)
    works_in(strict_page)
    picture(strict_page, tmp_path, "moodle_window")


@pytest.mark.parametrize(
    ("custom", "said"),
    [
        ({}, "Moodle sent no custom_login"),
        ({"login": "$User.username"}, "Moodle sent no custom_login"),
        ({"login": "root"}, 'no account "root" of a person on this machine'),
        ({"login": "ada@example.org"}, 'no account "ada@example.org" of a person on this machine'),
    ],
)
def test_a_launch_without_an_account_is_refused_with_the_reason(
    moodle: SmallMoodle, page: Page, custom: dict[str, str], said: str
) -> None:
    moodle.custom = custom
    page.goto(f"{moodle.issuer}/course")
    page.frame_locator("iframe").get_by_text(said).wait_for()


def test_http_leads_to_https(moodle: SmallMoodle, ports: tuple[int, int, int]) -> None:
    with socket.create_connection(("127.0.0.1", ports[1])) as connection:
        connection.sendall(f"GET /hub/ HTTP/1.0\r\nHost: {HUB}\r\n\r\n".encode())
        answer = connection.recv(4096).decode()
    assert answer.startswith("HTTP/1.1 301")
    assert f"Location: https://{HUB}/hub/" in answer
