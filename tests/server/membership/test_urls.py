"""The peer URLs that a client may give a member."""

from __future__ import annotations

import pytest

from raftkv import errors
from raftkv.server.services.cluster import URLS_MAX, _checked_urls


def test_their_number_is_bounded() -> None:
    """Each is checked and compared with all of the others, on every member."""
    urls = [f"http://127.0.0.1:{port}" for port in range(1, URLS_MAX + 2)]
    assert len(_checked_urls(urls[:-1])) == URLS_MAX
    with pytest.raises(errors.BadMemberURLsError):
        _checked_urls(urls)
