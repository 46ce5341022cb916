"""Debian's Chromium for tests of the dashboard: started once, on a thread of its own, and strict with every page.

    with Chromium() as chromium:
        chromium.run(check, chromium, "http://127.0.0.1:2379")      # on the browser's thread

    def check(chromium, origin):
        with chromium.page(origin, "#/keys") as page:
            page.get_by_role("heading", name="Keys").wait_for()

A page that writes an error to the console, raises one, or asks for anything that is not its member's fails its test,
unless the test says that the member is away (``Page.allow_lost``). Nothing is waited for by time: Playwright's own
waits end when what they wait for is there.

Playwright's blocking interface keeps an event loop in its thread, where no other test could run one: hence the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Playwright, Request, sync_playwright
from playwright.sync_api import Page as Tab

from tests import installed

T = TypeVar("T")

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
LOST = ("net::ERR_CONNECTION_REFUSED", "net::ERR_CONNECTION_RESET", "net::ERR_INCOMPLETE_CHUNKED_ENCODING",
        "net::ERR_EMPTY_RESPONSE", "net::ERR_SOCKET_NOT_CONNECTED", "net::ERR_NETWORK_CHANGED")  # fmt: skip
"""What Chromium's console says of requests whose member is gone."""
FLAGS = ("--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking", "--mute-audio")


class Page:
    """A tab, with what went wrong in it.

    Attributes:
        tab: Playwright's page.
        origins: whom it may ask.
        allow_lost: whether requests may fail because a member is away.
        allowed: parts of console errors that a test expects, as of a refused call.
    """

    def __init__(self, tab: Tab, origins: tuple[str, ...]) -> None:
        self.tab = tab
        self.origins = origins
        self.allow_lost = False
        self.allowed: tuple[str, ...] = ()
        self.troubles: list[str] = []
        tab.set_default_timeout(20_000)
        tab.on("console", self._on_console)
        tab.on("pageerror", lambda error: self.troubles.append(f"error: {error}"))
        tab.on("request", self._on_request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tab, name)

    def _on_console(self, message: ConsoleMessage) -> None:
        is_expected = any(part in message.text for part in self.allowed)
        is_lost = self.allow_lost and any(part in message.text for part in LOST)
        if message.type in ("error", "warning") and not (is_expected or is_lost):
            self.troubles.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _on_request(self, request: Request) -> None:
        url = urlsplit(request.url)
        if url.scheme not in ("data", "blob") and f"{url.scheme}://{url.netloc}" not in self.origins:
            self.troubles.append(f"asks {request.url}")

    def show(self, place: str) -> None:
        """Go to another place of the dashboard, without loading anything anew."""
        self.tab.evaluate("place => { location.hash = place }", place)

    def wait_text(self, text: str, timeout_s: float = 20.0) -> None:
        """Wait until the page shows a text."""
        self.tab.get_by_text(text).first.wait_for(timeout=timeout_s * 1000)

    def text(self) -> str:
        """What the page shows, without its frame."""
        return str(self.tab.locator("#main").inner_text())

    def check_accessible(self, what: str) -> None:
        """Ask axe; it has nothing to say."""
        found = Axe().run(self.tab)
        told = [
            f"{one['id']}: {node['target']} {node['failureSummary']}"
            for one in found.response["violations"]
            for node in one["nodes"]
        ]
        assert not told, f"{what}: " + "\n".join(told)

    def check_fits(self, what: str) -> None:
        """Nothing is wider than the screen."""
        width, screen = self.tab.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
        assert width <= screen, f"{what} is {width} px wide on a screen of {screen}"


class Chromium:
    """The browser, and its thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "browser")
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None

    def run(self, work: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """Do something on the browser's thread."""
        return self._thread.submit(work, *arguments, **named).result()

    def __enter__(self) -> Self:
        self.run(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.run(self._stop)
        self._thread.shutdown()

    def _start(self) -> None:
        program = installed.program("chromium")
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(executable_path=program, args=["--no-sandbox", *FLAGS])

    def _stop(self) -> None:
        if self._browser is not None:
            self._browser.close()
        if self._playwright is not None:
            self._playwright.stop()

    @contextmanager
    def page(
        self, origin: str, place: str = "", *, origins: tuple[str, ...] = (), size: dict[str, int] = DESKTOP,
        scheme: str = "light", insecure: bool = False, **context: Any,
    ) -> Iterator[Page]:  # fmt: skip
        """Open the dashboard of a member in a new profile.

        Arguments:
            origin: of the member, as ``http://127.0.0.1:2379``.
            place: the hash of a view.
            origins: other members that the page may ask.
            size: of the window.
            scheme: ``light`` or ``dark``.
            insecure: take a certificate of an unknown authority.
            context: more of the profile.
        """
        assert self._browser is not None
        profile = self._browser.new_context(
            viewport=size, color_scheme=scheme, reduced_motion="reduce", ignore_https_errors=insecure, **context
        )
        try:
            page = Page(profile.new_page(), (origin, *origins))
            page.goto(f"{origin}/ui/{place}")
            yield page
            assert not page.troubles, "\n".join(page.troubles)
        finally:
            profile.close()
