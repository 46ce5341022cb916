"""Every view shows what is in a live cluster, is accessible in light and dark, and fits a phone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import raftkv
from tests.procs import Cluster
from tests.ui.browser.chromium import DESKTOP, PHONE, Chromium, Page
from tests.ui.browser.world import RUN, VIEWS, World

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def page(chromium: Chromium, cluster: Cluster, world: World) -> Iterator[Page]:
    """One tab for all views: they are left for one another, as people do."""
    with raftkv.connect(cluster.endpoints[0]) as kv:
        kv.get("/app/log-level")  # a member that was restarted has no users to show until it is asked something
    opened = chromium.page(f"http://{cluster.endpoints[0]}")
    page = chromium.run(opened.__enter__)
    yield page
    chromium.run(opened.__exit__, None, None, None)


@pytest.mark.parametrize("place", VIEWS)
def test_a_view_shows_the_store_and_is_accessible(chromium: Chromium, page: Page, place: str) -> None:
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(DESKTOP)
    page.show(place)
    for text in VIEWS[place]:
        page.wait_text(text)
    page.check_accessible(f"{place}, light")
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size(PHONE)
    page.check_accessible(f"{place}, dark, on a phone")
    page.check_fits(place)
    assert not page.troubles, page.troubles


def test_keys_lead_through_the_views(chromium: Chromium, page: Page) -> None:
    page.set_viewport_size(DESKTOP)
    page.show("#/cluster")
    page.get_by_role("heading", name="Cluster").wait_for()
    for keys, title in (("gr", "Runs"), ("gp", "Checkpoints"), ("go", "Locks and elections")):
        for key in keys:
            page.keyboard.press(key)
        page.get_by_role("heading", name=title, exact=True).wait_for()
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.get_by_role("link", name=RUN, exact=True).first.wait_for()
    page.keyboard.press("/")
    page.keyboard.type("bert")
    page.get_by_role("link", name="resnet-50").wait_for(state="detached")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=RUN, exact=True).wait_for()


def test_link_of_a_view_opens_it_again(chromium: Chromium, page: Page) -> None:
    place = "#/keys?prefix=config%2F&flat=1"
    page.set_viewport_size(DESKTOP)
    page.show(place)
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.get_by_role("button", name="Copy a link to this view").click()
    page.wait_text("Link copied")
    link = page.evaluate("window.copied")
    page.show("#/cluster")
    assert link.endswith(place)
    page.show(place)
    page.get_by_label("Keys that begin with").wait_for()
    assert page.get_by_label("Keys that begin with").input_value() == "config/"


def test_keys_are_searched_by_value(chromium: Chromium, page: Page) -> None:
    page.set_viewport_size(DESKTOP)
    page.show("#/keys?prefix=%2Fapp%2F&find=web%3A7")
    page.get_by_role("link", name="/app/config/07").wait_for()
    assert page.get_by_role("list", name="Keys").get_by_role("link").count() == 1
    page.get_by_label("Values that contain").fill("no such text")
    page.wait_text("No value contains no such text")
    page.get_by_label("Values that contain").fill("")
    page.get_by_role("link", name="config/").first.wait_for()
