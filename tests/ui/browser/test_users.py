"""The dashboard with users and under TLS: who signs in sees what they may; who may not reads what to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import raftkv
from raftkv.client.admin import interval
from tests.procs import RAFTKV, Cluster
from tests.secure import Files, secured
from tests.ui.browser.chromium import Chromium, Page

pytestmark = pytest.mark.long

REFUSED = ("400 (Bad Request)", "401 (Unauthorized)", "403 (Forbidden)")


@pytest.fixture(scope="module")
def guarded(chromium: Chromium) -> Iterator[Cluster]:
    """One member with users: root, and alice, who may read below /app/ and nothing else."""
    with Cluster(RAFTKV, size=1) as one, raftkv.connect(one.endpoints[0]) as kv:
        kv.users.add("root", "secret")
        kv.users.add("alice", "wonder")
        kv.roles.add("root")
        kv.roles.add("reader")
        kv.roles.grant("reader", "read", *interval("/app/", prefix=True))
        kv.users.grant_role("root", "root")
        kv.users.grant_role("alice", "reader")
        kv.put("/app/colour", b"green")
        kv.users.enable_auth()
        yield one


def sign_in(page: Page, user: str, password: str, where: str = "#tools") -> None:
    page.locator(where).get_by_role("button", name="Sign in").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("User").fill(user)
    dialog.get_by_label("Password").fill(password)
    dialog.get_by_role("button", name="Sign in").click()


def test_strangers_are_asked_to_sign_in_and_a_wrong_password_is_refused(chromium: Chromium, guarded: Cluster) -> None:
    with chromium.page(f"http://{guarded.endpoints[0]}", "#/contests") as page:
        page.allowed = REFUSED
        page.locator("#main").get_by_role("button", name="Sign in").first.wait_for()
        page.check_accessible("signed out")
        sign_in(page, "alice", "wrong")
        page.get_by_role("dialog").get_by_text("authentication failed").wait_for()
        page.check_accessible("sign-in that failed")
        page.keyboard.press("Escape")
        sign_in(page, "root", "secret")
        page.get_by_text("No lock is held and no election runs here.").wait_for()
        page.locator("#tools").get_by_role("button", name="Sign out").click()
        page.locator("#main").get_by_role("button", name="Sign in").first.wait_for()


def test_a_user_without_rights_sees_what_to_do(chromium: Chromium, guarded: Cluster) -> None:
    with chromium.page(f"http://{guarded.endpoints[0]}", "#/runs") as page:
        page.allowed = REFUSED
        sign_in(page, "alice", "wonder")
        page.get_by_text("ask an administrator for permission").first.wait_for()
        page.check_accessible("without rights")
        page.show("#/contests?prefix=/app/")
        page.get_by_text("No lock is held and no election runs here.").wait_for()


def test_who_uses_the_member_is_shown_to_root_alone(chromium: Chromium, guarded: Cluster) -> None:
    with chromium.page(f"http://{guarded.endpoints[0]}", "#/cluster") as page:
        page.allowed = REFUSED
        sign_in(page, "alice", "wonder")
        page.wait_text("leads in term")
        with page.expect_response("**/debug/identities") as refused:
            page.reload()
        assert refused.value.status == 403
        assert not page.get_by_role("heading", name="Who uses this member").is_visible()
        page.locator("#tools").get_by_role("button", name="Sign out").click()
        sign_in(page, "root", "secret")
        page.wait_text("address 127.0.0.0/24")
        page.check_accessible("users of the member")


def test_a_member_that_was_killed_comes_back_without_a_reload(chromium, guarded, tmp_path):
    with chromium.page(f"http://{guarded.endpoints[0]}", "#/runs") as page:
        page.allowed, page.allow_lost = REFUSED, True
        sign_in(page, "root", "secret")
        page.get_by_text("There are no runs yet.").wait_for()
        page.evaluate("window.isSame = true")
        with raftkv.connect(guarded.endpoints[0], user="root", password="secret") as kv:
            kv.snapshot(tmp_path / "db")  # what the database holds is not replayed, so the token will be forgotten
        guarded.members[0].kill()
        page.locator("#notice").get_by_text("does not answer").wait_for()
        guarded.members[0].restart()
        page.wait_for_function("() => document.getElementById('notice').textContent === ''")
        sign_in(page, "root", "secret", "#main")  # tokens end with the member that gave them
        with raftkv.connect(guarded.endpoints[0], user="root", password="secret") as kv:
            kv.put("/raftkv/train/later/node/n-1", b'{"id":"n-1","host":"n"}')
        page.get_by_role("link", name="later").wait_for()
        assert page.evaluate("window.isSame") is True


def test_the_dashboard_works_under_tls(chromium: Chromium, tmp_path_factory: pytest.TempPathFactory) -> None:
    files = Files.make(tmp_path_factory.mktemp("tls"))
    own = ("--client-cert-auth", "--trusted-ca-file")
    flags = [flag for flag in files.server_flags if not flag.startswith(own)]
    with secured(Cluster(RAFTKV, size=1, flags=flags)) as cluster:
        origin = f"https://{cluster.endpoints[0]}"
        with chromium.page(origin, "#/runs", insecure=True) as page:
            page.get_by_text("There are no runs yet.").wait_for()
