"""Which URLs may be asked, and in which spelling: the rules before any connection, and after every redirect.

A list of URLs is untrusted: it must not make this machine talk to its own network. Names are judged here; the
addresses that they resolve to are judged by :func:`forbidden_address` at connection time, since only then they count.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from functools import lru_cache

from yarl import URL

from components.io.outcomes import Reason

MAX_URL_LENGTH = 2083
HOST_LENGTH = 253  # of a name in DNS, RFC 1035
LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.IGNORECASE)  # "_" is no host name, but lives on the web
SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
LOCAL_NAMES = ("localhost", "local", "localdomain", "internal", "intranet", "lan", "home.arpa")  # and below them
FORBIDDEN_NETWORKS = tuple(
    ipaddress.ip_network(text)
    for text in (
        "168.63.129.16/32",  # Azure's metadata, within public space
        "192.0.0.0/24",  # protocol assignments; Oracle's metadata
        "192.88.99.0/24",  # 6to4 relays
        "fec0::/10",  # site-local, deprecated
    )
)
CREDENTIALS = re.compile(
    r"(?:(?<=//)|(?<=\\\\)|^(?=[^/?#]*:))[^/?#\s]*@"
)  # after // or \\\\, or "user:word@" at the start
UNPARSABLE = (ValueError, IndexError)  # the second from yarl 1.25 on "http://[]@"
NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))


def check_url(text: str, *, max_length: int = MAX_URL_LENGTH, base: URL | None = None) -> URL | Reason:
    """The URL to ask for `text`, or the reason why it must not be asked.

    The result is in one spelling: scheme and host in lower case, host in IDNA, path and query percent-encoded, no
    default port, no dot at the host's end, no fragment; `max_length` counts its characters. `base` is the URL
    whose answer redirects to `text`.
    """
    text = text.strip(" \t\r\n\f")
    if len(text) > max_length:
        return Reason.URL_TOO_LONG
    if CONTROL.search(text):
        return Reason.URL_INVALID
    scheme = SCHEME.match(text)
    if scheme is not None and scheme[1].lower() not in ("http", "https"):
        return Reason.URL_SCHEME
    if scheme is None and base is None:
        return Reason.URL_INVALID
    try:
        url = URL(text) if base is None else base.join(URL(text))
        host, port = url.raw_host, url.port
        netloc = url.raw_authority if base is not None else text.split("//", 1)[-1].replace("?", "/").split("/", 1)[0]
    except UNPARSABLE:
        return Reason.URL_INVALID
    if url.raw_user is not None or url.raw_password is not None or "@" in netloc.split("#", 1)[0]:
        return Reason.URL_CREDENTIALS
    if not host or not port:
        return Reason.URL_INVALID
    known = check_host(host.removesuffix("."))
    if isinstance(known, Reason):
        return known
    try:
        url = url.with_fragment(None) if known == host else url.with_host(known).with_fragment(None)
        url = url.with_port(None) if url.explicit_port and url.is_default_port() else url
        if url.raw_path == "/":
            url = url.with_path("/", keep_query=True)  # a bare host is asked for "/"
    except UNPARSABLE:
        return Reason.URL_INVALID
    return url if len(str(url)) <= max_length else Reason.URL_TOO_LONG


def mask_credentials(text: str) -> str:
    """`text` with what stands before an "@" in the place of a URL's host masked: no password goes into an outcome."""
    return CREDENTIALS.sub("***@", text)


@lru_cache(maxsize=1 << 16)
def check_host(host: str) -> str | Reason:
    """A host (a name in IDNA, or an address, without brackets) in its one spelling, or why it must not be asked."""
    address = parse_address(host)
    if address is not None:
        return Reason.URL_FORBIDDEN_HOST if forbidden_address(address) else str(address)
    if ":" in host or len(host) > HOST_LENGTH or not all(LABEL.fullmatch(label) for label in host.split(".")):
        return Reason.URL_INVALID
    name = host.lower()
    if any(name == local or name.endswith("." + local) for local in LOCAL_NAMES) or name.startswith("localhost."):
        return Reason.URL_FORBIDDEN_HOST
    if re.fullmatch(r"[0-9]+|0x[0-9a-f]*", name.rsplit(".", 1)[-1]):
        return Reason.URL_INVALID  # ends like an address, is none: 1.2.3.4.5, 300.1.1.1
    return name


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` spells, also in the short, octal and hexadecimal ways of the C library; else None."""
    try:
        return ipaddress.ip_address(host.split("%", 1)[0] if ":" in host else host)
    except ValueError:
        pass
    if not re.fullmatch(r"[0-9a-fx.]+", host, re.IGNORECASE):
        return None
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


def forbidden_address(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address lies anywhere but in the public internet, also when it is wrapped in an IPv6 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(address in network for network in NAT64) or int(address) >> 32 == 0:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        wrapped = [one for one in inner if one is not None]
        if wrapped:
            return any(forbidden_address(one) for one in wrapped)
    if not address.is_global or address.is_multicast:
        return True
    return any(address.version == network.version and address in network for network in FORBIDDEN_NETWORKS)
