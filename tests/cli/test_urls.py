"""URLs of members beside Go's: what etcd takes, and with which words it refuses the rest."""

from __future__ import annotations

import pytest

from raftkv import errors
from raftkv.urls import check_url, parse_urls, split_url

TAKEN = [
    "http://a:1", "https://a:1", "unix://a:1", "unixs://a:1", "http://a:", "http://a:0", "http://ä:1", "http://a<b:1",
    "http://a>b:1", 'http://a"b:1', "http://a_b:1", "http://a..b:1", "http://.a:1", "http://a.:1", "http://*:1",
    "http://a;b:1", "http://a=b:1", "http://a$b:1", "http://a&b:1", "http://a'b:1", "http://a(b):1", "http://a!b:1",
    "http://a~b:1", "http://a+b:1", "http://a%25b:1", "http://%c3%a4:1", "http://[::1]:1", "http://[::1]:",
    "http://[fe80::1%25eth0]:1", "http://[fe80::1%25e%20h]:1", "http://[zz]:1", "http://u@a:1", "http://u:p@a:1",
    "http://@a:1", "http://u@b@a:1", "http://a:1?q", "http://a:1?", "http://a:1#f", "http://a:1#", "http://a:1?%zz",
    "HTTP://a:1", "hTTps://A:1", "unix://MySock:1", "unix://mysock:007", "unix://mysock:", "unix:///abs/path",
    "unix:///abs:1", "unixs:///abs", "http://:1", "http://0:1", "http://999.1.1.1:1", "http://127.0.0.1:02380",
    "http://[::1%25]:1", "http://:p@a:1",
]  # fmt: skip
FORM, HOST, PORT, ESCAPE, PATH = "host:port", "in host name", "after host", "invalid URL escape", "contain a path"
SCHEME = "URL scheme must be"
REFUSED = {
    FORM: "http://a http://[::1] http:a:1 http:///a:1 http:/a:1 http:// http: unix://mysock unix:abs http://a?b:1",
    HOST: "http://a\\b:1 http://a^b:1 http://a`b:1 http://a{b:1 http://a|b:1 http://[a^b]:1",
    PORT: "http://a:x http://a:-1 http://a:+1 http://a:1:x http://[::1]x:1 http://a:٣ http://[::1]:1x",
    ESCAPE: "http://ho%zz:1 http://ho%20x:1 http://ho%41x:1 http://a%2fb:1 http://a%b:1 http://a%:1 http://a%00:1 "
    "http://%61:1 http://[fe80::1%eth0]:1 http://u%zz@a:1 http://a:1/%zz http://a:1#%zz http://[::1%25%zz]:1",
    PATH: "http://a:1/ http://a:1/p http://a:1/?q http://a:1// unix://a:1/x",
    SCHEME: "a:1 a ftp://a:1 h-t+p.://a:1 http//a:1 //a:1 /a:1 *",
    "missing protocol scheme": "://a:1 :1",
    "first path segment": ".http://a:1 1http://a:1 127.0.0.1:1",
    "missing ']'": "http://[::1 http://[a:1",
    "invalid userinfo": "http://u[@a:1 http://ü@a:1",
    "at most 65535": "http://a:65536 http://a:99999",
}
SPACED = {
    HOST: ("http:// a:1", "http://a b:1", "http://[a b]:1"),
    "control character": ("http://a\tb:1", "http://a\x00b:1", "http://a\x7fb:1", "http://a:1\x1f", "\x1chttp://a:1"),
    "invalid userinfo": ("http://u p@a:1",),
    "after host": ("http://a: 1",),
}
ALL = [
    *((text, words) for words, texts in REFUSED.items() for text in texts.split()),
    *((text, words) for words, texts in SPACED.items() for text in texts),
]


def test_a_url_that_go_reads_is_taken() -> None:
    for text in TAKEN:
        assert parse_urls(text) == (text,)
        split_url(text)


def test_a_url_that_go_refuses_is_refused_in_its_words() -> None:
    for text, words in ALL:
        with pytest.raises(errors.ConfigError) as error:
            check_url(text)
        assert words in str(error.value), text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("http://[::1]:1", ("http", "::1", 1)),
        ("HTTP://A.example:", ("http", "a.example", 0)),
        ("unix://MySock:1", ("unix", "MySock:1", 0)),
        ("unix://mysock:007", ("unix", "mysock:007", 0)),
        ("unix://mysock:", ("unix", "mysock:", 0)),
        ("unix:///run/a:1", ("unix", "/run/a:1", 0)),
        ("http://[fe80::1%25eth0]:1", ("http", "fe80::1%eth0", 1)),
    ],
)
def test_the_parts_of_a_url(text: str, parts: tuple[str, str, int]) -> None:
    assert split_url(text) == parts


def test_space_around_a_url_is_none_of_it() -> None:
    assert parse_urls("\u00a0http://a:1\u2003, \thttp://b:1\n") == ("http://a:1", "http://b:1")
