"""Who may do what, and that no page gives away a secret or runs what somebody has written into a name."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.authentication import AuthCredentials, SimpleUser
from starlette.testclient import TestClient

import dualwrite
from console.console_scene import PATH, Browser, ConsoleScene
from dualwrite.console import Console, Role, TokenAccess, access, console
from dualwrite.console.app import SECTIONS, TABS
from dualwrite.console.pages import ASSETS
from dualwrite.stores.base import Resolution
from fixtures.pace import LIMIT
from fixtures.tables import table

NOBODY = "127.0.0.1:1"
VENDORED = Path(console.__code__.co_filename).parent / "static" / "vendor"
LICENCES = Path(__file__).parents[2] / "src/dualwrite/console/static/vendor"  # a wheel has them among its licences


_opened: list[Console] = []


@pytest.fixture
def quiet(sqlite_url: str) -> Iterator[dualwrite.Settings]:
    """A database, and a broker that does not exist. At its end, what was made is closed."""
    yield dualwrite.Settings(database_url=sqlite_url, kafka={"bootstrap.servers": NOBODY})
    while _opened:
        _opened.pop().close()


def made(settings: dualwrite.Settings, **options: Any) -> Browser:
    _opened.append(console(settings=settings, **options))
    return Browser(_opened[-1])


def operator(request: Any) -> Role:
    del request
    return Role.OPERATOR


def lost_on(scene: dualwrite.Settings, name: str) -> None:
    with dualwrite.store_from_url(scene.database_url or "") as store:
        claim = store.claim(name, "test", timeout=LIMIT)
        store.record_resolution(claim, Resolution(resolved_generation=0))


# --- roles ------------------------------------------------------------------------------------------------------------


def test_a_mounted_console_is_read_only_by_default(quiet: dualwrite.Settings) -> None:
    browser = made(quiet)
    assert "You are</dt><dd>viewer" in browser.get("/")
    assert "<form" not in browser.get("/")
    refused = browser.send("recover", [("token", _token(browser)), ("id", "shop")])
    assert (refused.status_code, "Only operators may do this" in refused.text) == (403, True)


def test_authorize_decides(quiet: dualwrite.Settings) -> None:
    async def by_header(request: Any) -> Role | None:
        return {"a": Role.VIEWER, "b": Role.OPERATOR}.get(request.headers.get("x-who", ""))

    browser = made(quiet, authorize=by_header)
    pages = ("/", "/jobs", "/consumers", "/section/ids", "/section/jobs", "/id/shop", "/detail/shop")
    assert {page: browser.http.get(f"{PATH}{page}").status_code for page in pages} == dict.fromkeys(pages, 401)
    assert browser.http.post(f"{PATH}/act/recover").status_code == 401
    assert browser.http.get(f"{PATH}/", headers={"x-who": "a"}).status_code == 200
    assert "Only operators may do this" in browser.http.post(f"{PATH}/act/recover", headers={"x-who": "a"}).text
    assert "operator" in browser.http.get(f"{PATH}/", headers={"x-who": "b"}).text


def test_the_command_s_page_needs_its_token(quiet: dualwrite.Settings) -> None:
    role = TokenAccess(Role.OPERATOR)
    browser = made(quiet, authorize=role)
    assert "You have no access" in browser.get("/", 401)
    assert browser.http.get(f"{PATH}/?token=wrong").status_code == 401
    opened = browser.http.get(f"{PATH}/?token={role.token}", follow_redirects=False)
    assert (opened.status_code, opened.headers["location"]) == (303, f"{PATH}/"), "the token is no longer in the address"
    cookie = opened.headers["set-cookie"].lower()
    assert all(word in cookie for word in ("httponly", "samesite=strict", f"path={PATH}"))
    assert role.token not in cookie
    assert "operator" in browser.get("/")


def test_who_is_logged(quiet: dualwrite.Settings) -> None:
    class Request:
        def __init__(self, **scope: Any) -> None:
            self.state = type("State", (), scope.pop("state", {}))()
            self.scope = scope
            self.client = type("Client", (), {"host": "10.0.0.7"})()

    found = [
        Request(state={"who": "anna"}),
        Request(user=SimpleUser("bert"), auth=AuthCredentials()),
        Request(),
    ]
    assert [access.who(each) for each in found] == ["anna", "bert", "10.0.0.7"]  # type: ignore[arg-type]


# --- forged forms -----------------------------------------------------------------------------------------------------


@table(
    "headers",
    [
        {"origin": "https://evil.example.com"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "", "sec-fetch-site": "cross-site"},
        {"origin": "http://ops.example.com.evil.example.com"},
    ],
)
def test_a_form_of_another_page_is_refused(quiet: dualwrite.Settings, headers: dict[str, str]) -> None:
    browser = made(quiet, authorize=operator)
    fields = [("token", _token(browser)), ("id", "shop")]
    refused = browser.send("recover", fields, **headers)
    assert (refused.status_code, "The form was not accepted" in refused.text) == (403, True)
    assert browser.send("recover", fields).status_code == 303, "the same form of our own page"


def test_a_form_needs_the_token_of_its_browser(quiet: dualwrite.Settings) -> None:
    browser, other = made(quiet, authorize=operator), made(quiet, authorize=operator)
    for token in ("", "x", _token(other)):
        _token(browser)
        assert browser.send("recover", [("token", token), ("id", "shop")]).status_code == 403
    without_cookie = made(quiet, authorize=operator)
    assert without_cookie.send("recover", [("token", ""), ("id", "shop")]).status_code == 403


def test_the_origin_of_a_proxy_can_be_allowed(quiet: dualwrite.Settings) -> None:
    browser = made(quiet, authorize=operator, origins=["https://public.example.com"])
    fields = [("token", _token(browser)), ("id", "shop")]
    assert browser.send("recover", fields, origin="https://public.example.com").status_code == 303


def test_only_posts_act(quiet: dualwrite.Settings) -> None:
    assert made(quiet, authorize=operator).http.get(f"{PATH}/act/recover").status_code == 405


def _token(browser: Browser) -> str:
    browser.get("/")
    return browser.http.cookies[access.FORM_COOKIE]


# --- what pages contain -----------------------------------------------------------------------------------------------


def test_names_are_escaped(quiet: dualwrite.Settings) -> None:
    name = "<script>alert(1)</script>\"'&"
    lost_on(quiet, name)
    browser = made(quiet, authorize=operator)
    pages = [browser.get("/ids"), browser.section("ids"), browser.get("/id/%3Cscript%3Ealert(1)%3C%2Fscript%3E%22'%26")]
    assert not any("<script>alert" in page for page in pages)
    assert all("&lt;script&gt;alert(1)&lt;/script&gt;&#34;&#39;&amp;" in page for page in pages)


def test_secrets_are_not_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = dualwrite.Settings(
        database_url="postgresql+psycopg://app:hunter2@127.0.0.1:1/shop",
        kafka={
            "bootstrap.servers": NOBODY,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "app",
            "sasl.password": "hunter3",
        },
    )
    browser = made(settings, authorize=operator)
    with caplog.at_level(logging.DEBUG):
        pages = [browser.get("/"), browser.get("/detail/shop")]
        pages += [browser.section(name) for name in SECTIONS]
    assert "127.0.0.1" in pages[0]
    assert not re.search("hunter[23]", "".join([*pages, caplog.text]))


def test_the_log_of_a_service_has_nothing_of_alembic(quiet: dualwrite.Settings, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert "Looked at" in made(quiet).section("doctor")
        logging.getLogger("alembic.runtime.migration").info("what the service's own migrations say")
    assert [record.getMessage() for record in caplog.records if record.name.startswith("alembic")] == [
        "what the service's own migrations say"
    ]


def test_the_policy_allows_no_script_and_style_but_our_files(quiet: dualwrite.Settings) -> None:
    browser = made(quiet)
    found = browser.http.get(f"{PATH}/")
    policy = found.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert (found.headers["x-content-type-options"], found.headers["cache-control"]) == ("nosniff", "no-store")
    assert not re.search(r'\son\w+="|style="|<style|<script>|https?://(?!www\.w3)', found.text), (
        "nothing inline, nothing from elsewhere"
    )
    for address, integrity in re.findall(r'(?:src|href)="([^"]+)" integrity="([^"]+)"', found.text):
        asset = browser.http.get(address)
        assert "immutable" in asset.headers["cache-control"]
        assert integrity == f"sha384-{base64.b64encode(hashlib.sha384(asset.content).digest()).decode()}"
    assert found.text.count("integrity=") == 3


def test_files_outside_are_not_served(quiet: dualwrite.Settings) -> None:
    browser = made(quiet)
    for name in ("../app.py", "%2e%2e/app.py", "vendor/vendored.json", "nothing"):
        assert browser.http.get(f"{PATH}/static/{name}").status_code == 404


def test_vendored_files_are_those_of_their_packages() -> None:
    """Their hashes were taken from the packages; each has its licence."""
    listed = json.loads((VENDORED / "vendored.json").read_text())
    assert {path.name for path in VENDORED.iterdir() if path.suffix in (".js", ".css")} == set(listed)
    for name, facts in listed.items():
        digest = hashlib.sha384((VENDORED / name).read_bytes()).digest()
        assert facts["integrity"] == f"sha384-{base64.b64encode(digest).decode()}" == ASSETS[f"vendor/{name}"].integrity
        assert "permission" in (LICENCES / facts["licence"]).read_text().lower()


# --- behind a proxy, and while something is down ----------------------------------------------------------------------


def test_addresses_have_the_path_of_a_proxy(quiet: dualwrite.Settings) -> None:
    mounted = made(quiet, authorize=operator).http.app
    browser = TestClient(mounted, base_url="http://ops.example.com", root_path="/ops")
    pages = [browser.get(f"/ops/dualwrite/{tab}").text for tab in ("", *list(TABS)[1:])]
    addresses = re.findall(r'(?:href|src|action|hx-get)="(/[^"]*)"', "".join(pages))
    assert f"/ops/dualwrite/{list(TABS)[-1]}" in addresses
    assert all(each.startswith("/ops/dualwrite/") for each in addresses), addresses


@pytest.mark.usefixtures("impatient")
def test_a_database_and_a_broker_that_are_down(tmp_path: Path) -> None:
    """The page says so, each section by itself, and does not wait for long."""
    kafka = {"bootstrap.servers": NOBODY}
    settings = dualwrite.Settings(database_url="postgresql+psycopg://nobody@127.0.0.1:1/shop", kafka=kafka)
    browser = made(settings)
    assert "The partitions could not be read" in browser.until("stuck", "could not be read")
    assert "The ids could not be read" in browser.until("ids", "The ids could not be read")
    for name in ("journals", "letters", "jobs"):
        assert f"The {name.replace('letters', 'dead letters')} could not be read" in browser.until(name, "could not be read")
    assert "The positions could not be read" in browser.until("consumers", "The positions could not be read")
    assert "database" in browser.until("doctor", "broken")
    todo = browser.until("todo", "Not read: ids, journals, dead letters, jobs.", "Not read: partitions, coordinators.")
    assert todo.count("<li>") == 2, "the doctor says the same, which is not repeated"
    verdict = browser.section("verdict")
    assert "Not all is well: Kafka and the database do not answer." in verdict
    assert verdict.count("does not answer</span>") == 2
    assert browser.get("/detail/shop").count("could not be read") == 1
    assert browser.get("/")


def test_nothing_to_show_is_refused() -> None:
    with pytest.raises(dualwrite.ConfigurationError, match="Neither a database nor Kafka"):
        console(settings=dualwrite.Settings())


def test_a_console_of_kafka_alone(quiet_scene: ConsoleScene) -> None:
    settings = dualwrite.Settings(kafka={"bootstrap.servers": quiet_scene.servers})
    found: Console = console(settings=settings)
    browser = Browser(found)
    browser.until("stuck", "No consumer waits")
    assert "No database is given" in browser.section("ids")
    found.close()
