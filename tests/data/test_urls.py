"""The URL rules."""

import ipaddress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from yarl import URL

from components.data.fetching.urls import check_url, forbidden_address, parse_address
from components.io.outcomes import Reason


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("http://a.com", "http://a.com/"),
        ("HTTP://EXAMPLE.com:80/a/../b#part", "http://example.com/b"),
        ("https://example.com:443/x", "https://example.com/x"),
        ("http://example.com:8080/x", "http://example.com:8080/x"),
        ("  http://a.com/x\r\n", "http://a.com/x"),
        ("http://a.com./x", "http://a.com/x"),
        ("http://münchen.de/größe?q=ü", "http://xn--mnchen-3ya.de/gr%C3%B6%C3%9Fe?q=%C3%BC"),
        ("http://a.com/a b", "http://a.com/a%20b"),
        ("http://a.com/%e4%BD%A0", "http://a.com/%E4%BD%A0"),
        ("http://a.com/x?u=http://b.com/@", "http://a.com/x?u=http://b.com/@"),
        ("http://a_b.com/x", "http://a_b.com/x"),
        ("http://134744072/x", "http://8.8.8.8/x"),
        ("http://[::ffff:8.8.8.8]/", "http://[::ffff:808:808]/"),
        ("http://[2001:4860:4860::8888]/x", "http://[2001:4860:4860::8888]/x"),
    ],
)
def test_one_spelling(text, normal):
    url = check_url(text)
    assert str(url) == normal
    assert check_url(normal) == url


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", Reason.URL_INVALID),
        ("UNLIKELY", Reason.URL_INVALID),
        ("a.com/x.jpg", Reason.URL_INVALID),
        ("http://", Reason.URL_INVALID),
        ("http:///x", Reason.URL_INVALID),
        ("http:a.com/x", Reason.URL_INVALID),
        ("http://:80/", Reason.URL_INVALID),
        ("http://a.com:99999/", Reason.URL_INVALID),
        ("http://a.com:0/", Reason.URL_INVALID),
        ("http://a.com:x/", Reason.URL_INVALID),
        ("http://a b.com/", Reason.URL_INVALID),
        ("http://a..b/", Reason.URL_INVALID),
        ("http://-a.com/", Reason.URL_INVALID),
        ("http://" + "a" * 64 + ".com/", Reason.URL_INVALID),
        ("http://" + "a." * 130 + "com/", Reason.URL_INVALID),
        ("http://%31%32%37.0.0.1/", Reason.URL_INVALID),
        ("http://1.2.3.4.5/", Reason.URL_INVALID),
        ("http://300.1.1.1/", Reason.URL_INVALID),
        ("http://a.com/\x00", Reason.URL_INVALID),
        ("http://a.com/a\nb", Reason.URL_INVALID),
        ("http://a.com/\ud800", Reason.URL_INVALID),
        ("http://a.com\\@b.com/", Reason.URL_INVALID),
        ("http://[::1", Reason.URL_INVALID),
        ("ftp://a.com/x", Reason.URL_SCHEME),
        ("file:///etc/passwd", Reason.URL_SCHEME),
        ("data:image/png;base64,AAAA", Reason.URL_SCHEME),
        ("javascript:alert(1)", Reason.URL_SCHEME),
        ("http://user:secret@a.com/x", Reason.URL_CREDENTIALS),
        ("http://user@a.com/x", Reason.URL_CREDENTIALS),
        ("http://@a.com/x", Reason.URL_CREDENTIALS),
        ("http://a.com/" + "x" * 3000, Reason.URL_TOO_LONG),
        ("http://a.com/" + "ü" * 500, Reason.URL_TOO_LONG),  # 3,000 characters as it would be asked
    ],
)
def test_refused(text, reason):
    assert check_url(text) is reason


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST", "localhost.", "x.localhost", "localhost.localdomain", "printer.local", "ⓛocalhost",
        "metadata.google.internal", "router.lan",
        "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001",
        "１２７.0.0.1", "127。0。0。1", "0", "0.0.0.0",
        "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "100.100.100.200",
        "169.254.169.254", "0xa9fea9fe", "168.63.129.16", "192.0.0.192",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "198.18.0.1",
        "[::1]", "[::]", "[fe80::1]", "[fe80::1%25eth0]", "[fc00::1]", "[fd00:ec2::254]", "[fec0::1]", "[ff02::1]",
        "[::ffff:127.0.0.1]", "[::ffff:a9fe:a9fe]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
        "[2001:db8::1]",
    ],
)  # fmt: skip
def test_our_own_network_is_not_asked(host):
    assert check_url(f"http://{host}/x") is Reason.URL_FORBIDDEN_HOST
    assert check_url(f"http://{host}:8080/x", base=URL("http://a.com/")) is Reason.URL_FORBIDDEN_HOST


@pytest.mark.parametrize(
    ("location", "result"),
    [
        ("z", "http://a.com/x/z"),
        ("/z", "http://a.com/z"),
        ("?q", "http://a.com/x/y?q"),
        ("//b.com/z", "http://b.com/z"),
        ("https://b.com/z#part", "https://b.com/z"),
        ("//u:p@b.com/", Reason.URL_CREDENTIALS),
        ("mailto:x", Reason.URL_SCHEME),
        ("//localhost/", Reason.URL_FORBIDDEN_HOST),
        ("http://[bad", Reason.URL_INVALID),
    ],
)
def test_redirects_are_relative_to_where_they_come_from(location, result):
    got = check_url(location, base=URL("http://a.com/x/y"))
    assert got is result if isinstance(result, Reason) else str(got) == result


@given(
    st.one_of(
        st.text(), st.text().map("http://".__add__), st.text("a:/@.[]%#?\\1x0é", max_size=20).map("http://".__add__)
    )
)
@example("http://[::ffff:0:0%]/")
@example("http://[]@")
def test_any_text_gives_a_url_or_a_reason(text):
    for base in (None, URL("http://a.com/x")):
        url = check_url(text, base=base)
        if isinstance(url, Reason):
            continue
        assert url.scheme in ("http", "https")
        assert url.raw_user is None
        assert url.raw_fragment == ""
        address = parse_address(url.raw_host or "")
        assert address is None or not forbidden_address(address)
        assert check_url(str(url)) == url


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_is_judged_alike_in_every_disguise(address):
    number = int(address)
    spellings = [str(number), hex(number), f"0{number:o}", f"[::ffff:{address}]", f"[64:ff9b::{address}]"]
    verdicts = {isinstance(check_url(f"http://{text}/"), Reason) for text in [str(address), *spellings]}
    assert verdicts == {forbidden_address(address)}
    assert address.is_global or forbidden_address(address)


@given(st.ip_addresses(v=6))
def test_no_local_ipv6_address_passes(address):
    if not address.is_global and not forbidden_address(address):
        assert address.ipv4_mapped is not None
    assert isinstance(parse_address(str(address)), ipaddress.IPv6Address)
