"""Hostile files and list rows, made by code: of every kind `EACH` different ones, each with what must become of it."""

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tests.data.making import encoded

EACH = 60
MAX_BYTES = 60_000  # of the download
CORPUS = "http://corpus.test"


@dataclass(frozen=True)
class Hostile:
    """One file or row."""

    kind: str
    name: str  # of the file, or the path on the server
    data: bytes  # the file, or the line of the list
    download: str  # its reason
    clean: str | None = None  # its reason, where download lets it pass; "a|b": one of them
    changes: tuple[str, ...] = ()  # what clean must have done to the picture


def noise(n: int, size: tuple[int, int] | None = None, mode: str = "RGB") -> Image.Image:
    """A picture of its own for each `n`: smooth, with some grain."""
    rng = np.random.default_rng(n)
    coarse = Image.fromarray(rng.integers(0, 255, (6, 8, 3), np.uint8))
    return coarse.resize(size or (40 + n, 33 + n // 2), Image.Resampling.BICUBIC).convert(mode)


def _jpeg(n: int) -> bytes:
    return encoded(noise(n), quality=50 + n % 45, progressive=n % 2 == 0)


def _turned(n: int) -> bytes:
    exif = Image.Exif()
    exif[274] = 2 + n % 7
    return encoded(noise(n), ("JPEG", "PNG", "WEBP")[n % 3], exif=exif)


def _alpha(n: int, mode: str) -> bytes:
    image = noise(n).convert("L" if mode == "LA" else "RGB")
    image.putalpha(Image.linear_gradient("L").resize(image.size).rotate(90 * (n % 4)))
    return encoded(image, ("PNG", "TIFF")[n % 2])


def _palette(n: int) -> bytes:
    image = noise(n).quantize(8 + n)
    return encoded(image, ("PNG", "GIF")[n % 2], transparency=image.getpixel((0, 0)))


def _deep(n: int) -> bytes:
    ramp = np.tile(np.linspace(0, 65535, 40 + n), (40, 1)).astype(np.uint16)
    return encoded(Image.fromarray(np.ascontiguousarray(np.roll(ramp, n, axis=1))), ("PNG", "TIFF")[n % 2])


def _animated(n: int) -> bytes:
    frames = [noise(n + 100 * index, (48, 40)) for index in range(2 + n % 3)]
    return encoded(frames[0], ("GIF", "WEBP", "PNG")[n % 3], save_all=True, append_images=frames[1:])


def _cut(n: int) -> bytes:
    grain = Image.fromarray(np.random.default_rng(n).integers(0, 255, (48, 48, 3), np.uint8))
    data = encoded(grain, ("JPEG", "PNG", "GIF", "WEBP", "BMP")[n % 5])
    return data[: int(len(data) * (0.25 + 0.7 * n / EACH))]


def _png(width: int, height: int, body: bytes = b"", depth: int = 8) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(body)) + chunk(b"IEND", b"")


def _absurd(n: int) -> bytes:
    """A small file that declares gigapixels."""
    side = 20_000 + 500 * n
    if n % 4 == 0:
        return _png(side, side, bytes(100))
    if n % 4 == 1:
        return (
            b"GIF89a"
            + struct.pack("<HHBBB", side, side, 0, 0, 0)
            + b","
            + struct.pack("<4HB", 0, 0, side, side, 0)
            + b"\x08\x02L\x01\0;"
        )
    if n % 4 == 2:
        return (
            b"BM" + struct.pack("<IHHIIiiHHIIiiII", 200, 0, 0, 54, 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0) + bytes(146)
        )
    data = bytearray(_jpeg(2 * n + 1))  # not progressive
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", side, side)
    return bytes(data)


def _garbled(n: int) -> bytes:
    data = encoded(noise(n), "PNG")
    at = data.index(b"IDAT") + 6 + n % 20
    return data[:at] + bytes([255 - n]) * 30 + data[at + 30 :]


def _page(n: int) -> bytes:
    starts = (
        b"<!DOCTYPE html><html>",
        b"<html><body>",
        b"\n\n  <HTML>",
        b"\xef\xbb\xbf<!doctype html>",
        b'{"error": 404}',
    )
    return starts[n % 5] + b"<p>no longer here %d</p>" % n * (n + 1)


def _svg(n: int) -> bytes:
    starts = (b"<svg xmlns='http://www.w3.org/2000/svg'", b"<?xml version='1.0'?>\n<svg", b"<!-- drawn -->\n<svg")
    return starts[n % 3] + b" width='%d' height='64'><image href='file:///etc/passwd'/></svg>" % (64 + n)


def _foreign(n: int) -> bytes:
    starts = (
        b"%PDF-1.7\n",
        b"%!PS-Adobe-3.0 EPSF-3.0\n",
        b"PK\x03\x04",
        b"\x7fELF\x02\x01",
        b"MZ\x90\x00",
        b"\x1f\x8b\x08",
    )
    more = (
        b"RIFF\x24\x00\x00\x00WAVEfmt ",
        b"\x00\x00\x00\x18ftypmp42",
        b"OggS",
        b"8BPS\x00\x01",
        b"#!/bin/sh\n",
        b"\x00" * 40,
    )
    return (*starts, *more)[n % 12] + bytes([n]) * 100


FILES: dict[str, tuple[Callable[[int], bytes], str, str | None, tuple[str, ...]]] = {
    "good": (_jpeg, "ok", "ok", ()),
    "turned": (_turned, "ok", "ok", ("orientation",)),
    "alpha": (lambda n: _alpha(n, "RGBA"), "ok", "ok", ("transparency",)),
    "grey_alpha": (lambda n: _alpha(n, "LA"), "ok", "ok", ("transparency",)),
    "palette": (_palette, "ok", "ok", ("transparency",)),
    "sixteen_bits": (_deep, "ok", "ok", ("deep",)),
    "cmyk": (lambda n: encoded(noise(n, mode="CMYK"), ("JPEG", "TIFF")[n % 2]), "ok", "ok", ("cmyk",)),
    "grey": (lambda n: encoded(noise(n, mode="L"), ("JPEG", "PNG")[n % 2]), "ok", "ok", ("l",)),
    "animated": (_animated, "ok", "ok", ("first_frame",)),
    "cut": (_cut, "ok", "truncated_image", ()),
    "absurd": (_absurd, "ok", "image_too_large", ()),
    "tiny": (lambda n: encoded(noise(n, (1 + n % 31, 20 + n))), "ok", "image_too_small", ()),
    "narrow": (lambda n: encoded(noise(n, (32 + n, (32 + n) * 6))), "ok", "image_aspect", ()),
    "garbled": (_garbled, "ok", "undecodable", ()),
    "magic_alone": (
        lambda n: (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"II*\0")[n % 4] + bytes([n]) * n,
        "ok",
        "undecodable|truncated_image|image_too_large|image_too_small",
        (),
    ),
    "empty": (lambda n: b"", "empty_body", None, ()),
    "page": (_page, "not_an_image", None, ()),
    "svg": (_svg, "not_an_image", None, ()),
    "foreign": (_foreign, "not_an_image", None, ()),
    "random": (lambda n: b"\x01" + np.random.default_rng(n).bytes(10 * n), "not_an_image", None, ()),
    "heavy": (lambda n: _jpeg(n) + bytes(MAX_BYTES + n), "too_large", None, ()),
}


def files() -> Iterator[Hostile]:
    """All files, each with a name that lies: ``KIND-17.jpg``."""
    for kind, (make, download, clean, changes) in FILES.items():
        for n in range(EACH):
            yield Hostile(kind, f"{kind}-{n}.jpg", make(n), download, clean, changes)


OWN = (
    *("127.0.0.1", "10.0.0.8", "192.168.1.1", "172.16.3.4", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
    *("[::1]", "[fe80::1]", "[fd00::1]", "[::ffff:10.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]"),
    *("localhost", "a.localhost", "metadata.internal", "2130706433", "0x7f.1", "0177.0.0.1"),
)
OTHERS = ("dead.test", "xn--mnchen-3ya.de", "m\u00fcnchen.de", "93.184.216.34")
PADS = ("", " ", "  x", "\u00e9", "\u732b")
ROWS: dict[str, tuple[Callable[[int], str | bytes], str, str | None]] = {
    # the list
    "no_tab": (lambda n: f"a caption without a URL {n}", "malformed_row", None),
    "three_fields": (lambda n: f"caption {n}\t{CORPUS}/ok/t{n}\tmore", "malformed_row", None),
    "not_utf8": (lambda n: b"caf\xe9 %d\t%b/ok/x" % (n, CORPUS.encode()), "malformed_row", None),
    "too_long_a_line": (lambda n: "x" * (5000 + n) + f"\t{CORPUS}/ok/y", "malformed_row", None),
    "no_url": (lambda n: f"caption {n}\t{' ' * (n % 5)}", "missing_url", None),
    "repeated": (lambda n: f"a cat\t{CORPUS}/ok/repeated#{n}", "ok|duplicate_row", "ok"),
    # URLs
    "unicode_path": (lambda n: f"a cat\t{CORPUS}/ok/gr\u00f6\u00dfer \u732b {n}", "ok", "ok"),
    "percent": (lambda n: f"a cat\t{CORPUS}/ok/p%20%C3%A9%2F{n}?q=a b&c=%zz#frag{n}", "ok", "ok"),
    "spelling": (lambda n: f"a cat\tHTTP://{('Corpus.Test.', 'CORPUS.test:80')[n % 2]}/ok/s{n}", "ok", "ok"),
    "padded": (lambda n: f"a cat\t  {CORPUS}/ok/w{n} \r", "ok", "ok"),
    "no_scheme": (lambda n: f"a cat\t{('corpus.test', '//corpus.test', 'www.x.org')[n % 3]}/{n}", "url_invalid", None),
    "broken_host": (
        lambda n: f"a cat\t{('http:///', 'http://:80/', 'http://a..b/', 'http://[::1/', 'http://-a.com/')[n % 5]}{n}",
        "url_invalid",
        None,
    ),
    "broken_port": (lambda n: f"a cat\t{CORPUS}:{('99999', '-1', 'x', '1e3')[n % 4]}/{n}", "url_invalid", None),
    "control": (lambda n: f"a cat\t{CORPUS}/a{chr(1 + n % 8)}b{n}", "url_invalid", None),
    "scheme": (
        lambda n: f"a cat\t{('ftp', 'file', 'data', 'javascript', 'gopher', 's3')[n % 6]}://corpus.test/{n}",
        "url_scheme",
        None,
    ),
    "credentials": (
        lambda n: f"a cat\thttp://{('u:pass-word', 'u', ':pass-word', '%75:pass-word@x')[n % 4]}@corpus.test/{n}",
        "url_credentials",
        None,
    ),
    "long_url": (lambda n: f"a cat\t{CORPUS}/{'l' * (2100 + n)}", "url_too_long", None),
    "own_network": (lambda n: f"a cat\thttp://{OWN[n % len(OWN)]}/{n}", "url_forbidden_host", None),
    "elsewhere": (lambda n: f"a cat\thttp://{OTHERS[n % len(OTHERS)]}/{n}", "dns_failure", None),
    # answers
    "gone": (lambda n: f"a cat\t{CORPUS}/status/{(404, 410)[n % 2]}/{n}", "http_not_found", None),
    "refused": (lambda n: f"a cat\t{CORPUS}/status/{(401, 403, 418, 451, 204, 304)[n % 6]}/{n}", "http_error", None),
    "ill_server": (lambda n: f"a cat\t{CORPUS}/status/{(500, 502, 503, 504, 429, 408)[n % 6]}/{n}", "http_error", None),
    "recovers": (lambda n: f"a cat\t{CORPUS}/flaky/{(500, 503, 429)[n % 3]}/{n}", "ok", "ok"),
    "moved": (lambda n: f"a cat\t{CORPUS}/to/{n % 4}/ok/m{n}", "ok", "ok"),
    "loop": (lambda n: f"a cat\t{CORPUS}/loop/{n}", "too_many_redirects", None),
    "trap": (
        lambda n: f"a cat\t{CORPUS}/away/{('http://127.0.0.1/', 'http://169.254.169.254/', 'http://[::1]/')[n % 3]}{n}",
        "url_forbidden_host",
        None,
    ),
    "led_to_a_file": (lambda n: f"a cat\t{CORPUS}/away/file:///etc/passwd?{n}", "url_scheme", None),
    "html_as_jpeg": (lambda n: f"a cat\t{CORPUS}/html/{n}", "not_an_image", None),
    "nothing": (lambda n: f"a cat\t{CORPUS}/nothing/{n}", "empty_body", None),
    "endless": (lambda n: f"a cat\t{CORPUS}/endless/{n}", "too_large", None),
    "short": (lambda n: f"a cat\t{CORPUS}/short/{n}", "connect_failure", None),
    "dribble": (lambda n: f"a cat\t{CORPUS}/dribble/{n}", "timeout", None),
    # captions of good pictures
    "empty_caption": (
        lambda n: (
            f"{('', ' ', '...', '?!', '<br/>', '&nbsp;', '- / -', 'http://a.com/x', 'bob@a.com', chr(0x200B))[n % 10]}"
            f"\t{CORPUS}/ok/e{n}"
        ),
        "ok",
        "caption_empty",
    ),
    "one_long_word": (lambda n: f"{'x' * (4000 + n)}\t{CORPUS}/ok/l{n}", "ok", "caption_too_long"),
    "many_words": (lambda n: f"{'word ' * (31 + n)}\t{CORPUS}/ok/v{n}", "ok", "caption_truncated"),
    "words_that_look_like_nothing": (
        lambda n: f"{('None', 'NA', 'nan', 'null', 'N/A', '<PERSON>', '0', 'False')[n % 8]}\t{CORPUS}/ok/n{n}",
        "ok",
        "ok",
    ),
    "marked_up": (
        lambda n: f"<p class='x'>a &amp; <b>cat</b>{PADS[n % 5]} &#x1F600; {chr(1 + n % 8)}</p>\t{CORPUS}/ok/h{n}",
        "ok",
        "ok",
    ),
}


def rows() -> Iterator[Hostile]:
    """All lines of a list, without their ends."""
    for n in range(EACH):  # kinds mixed, as in a real list
        for kind, (make, download, clean) in ROWS.items():
            line = make(n)
            yield Hostile(kind, f"{kind}-{n}", line if isinstance(line, bytes) else line.encode(), download, clean)
