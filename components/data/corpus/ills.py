"""The source list and its web: good rows, the web's ills in known numbers, and what every data stage should find.

Each ill row has exactly one ill, and rows that repeat a picture stand after that picture's own rows, so the outcome of
every row is known: reason by reason, row by row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from components.data.corpus.params import WebParams
from components.data.corpus.render import re_encode
from components.data.corpus.scenes import Scene
from components.data.corpus.server import RESPONSES_FILE
from components.io.errors import UserError
from components.io.outcomes import Reason

HOST, DEAD_HOST = "http://corpus.test", "http://dead.test"
LIST_FILE, ILLS_FILE, WEB_FOLDER = "pairs.tsv", "ills.json", "web"
STAGES = ("download", "clean", "deduplicate")  # in the order in which rows meet them
HTML = (
    "<!DOCTYPE html>\n<html><head><title>Picture {}</title></head><body><p>This picture has moved.</p></body></html>\n"
)
FORBIDDEN = (  # addresses of the reader's own network, as lists that mean harm have them
    "http://127.0.0.1/admin.jpg?{}",
    "http://169.254.169.254/latest/meta-data/{}",
    "http://[::1]/{}.jpg",
    "http://10.0.0.7/{}.jpg",
    "http://localhost:8080/{}.jpg",
    "http://192.168.1.1/{}.jpg",
)
KEPT = (Reason.CAPTION_TRUNCATED, Reason.MERGED)


@dataclass(frozen=True)
class Row:
    """One line of the list and its fate: the stage that decides and the reason; both None for a good row."""

    line: bytes
    place: float  # in [0, 1): the list is sorted by it
    stage: str | None = None
    reason: Reason | None = None


class Web:
    """The list and the web while they are being made."""

    def __init__(self, folder: Path, rng: np.random.Generator) -> None:
        self.folder = folder
        self.rng = rng
        self.rows: list[Row] = []
        self.responses: dict[str, dict[str, Any]] = {}

    def row(
        self,
        caption: str,
        url: str,
        stage: str | None = None,
        reason: Reason | None = None,
        *,
        after: Sequence[Row] = (),
    ) -> Row:
        """Add a row at a random place, behind the rows `after`."""
        return self.line(f"{caption}\t{url}".encode(), stage, reason, after=after)

    def line(self, line: bytes, stage: str | None, reason: Reason | None, *, after: Sequence[Row] = ()) -> Row:
        """Add a line as it is."""
        first = max((row.place for row in after), default=0.0)
        row = Row(line, first + (1 - first) * float(self.rng.random()), stage, reason)
        self.rows.append(row)
        return row

    def file(self, path: str, data: bytes) -> str:
        """Put a file on the web; returns its URL."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        return f"{HOST}/{path}"

    def answer(self, path: str, **response: Any) -> str:
        """Say what the server answers for a path; returns the URL."""
        self.responses[f"/{path}"] = response
        return f"{HOST}/{path}"


def write_web(
    folder: Path,
    params: WebParams,
    *,
    train: Sequence[Scene],
    evaluation: Sequence[Scene],
    pictures: Path,
    spare: dict[str, str],
    seed: int,
) -> dict[str, Any]:
    """Write ``pairs.tsv`` and ``web/`` into `folder`; returns the content of ``ills.json``.

    `pictures` holds the scenes' files; `spare` gives, by scene name, a further true caption.
    Raises ValueError when there are fewer scenes than ills that need one of their own, UserError when too few scenes
    have a caption to spare.
    """
    if len(train) < params.train_scenes or len(evaluation) < params.evaluation_scenes:
        raise ValueError("more ills than scenes")
    rng = np.random.default_rng([seed, 3])
    web = Web(folder / WEB_FOLDER, rng)
    shuffled = [train[index] for index in rng.permutation(len(train))]
    # pictures with a spare fact first go where one is needed
    merged = [scene for scene in shuffled if scene.name in spare][: params.merged_duplicates]
    if len(merged) < params.merged_duplicates:
        raise UserError(
            f"synthesize: only {len(merged)} scenes have a caption to spare: lower `synthesize.web.merged_duplicates` "
            "or `synthesize.captions`"
        )
    taken = {scene.name for scene in merged}
    own = iter([scene for scene in shuffled if scene.name not in taken])

    moved = {scene.name for scene in _take(own, params.redirects)}
    good: dict[str, list[Row]] = {}
    for scene in train:
        url = web.file(f"pictures/{scene.file}", (pictures / scene.file).read_bytes())
        if scene.name in moved:
            url = _redirect(web, scene, url)
        good[scene.name] = [web.row(caption, url) for caption in scene.captions]

    _plant_list_ills(web, params, train)
    _plant_url_ills(web, params, train)
    _plant_answers(web, params, train)
    for scene in _take(own, params.repeated_lines):
        repeated = good[scene.name][0]
        web.line(repeated.line, "download", Reason.DUPLICATE_ROW, after=[repeated])
    for scene in _take(own, params.truncated_files):
        data = (pictures / scene.file).read_bytes()
        url = web.file(f"cut/{scene.file}", data[: int(len(data) * rng.uniform(0.4, 0.8))])
        web.row(scene.captions[0], url, "clean", Reason.TRUNCATED_IMAGE)
    for number, scene in enumerate(_take(own, params.empty_captions)):
        caption = ("", "   ", "...", "?!", "<br/>", "&nbsp;")[number % 6]
        web.row(caption, f"{HOST}/pictures/{scene.file}", "clean", Reason.CAPTION_EMPTY)
    for scene in _take(own, params.long_captions):
        web.row(long_caption(scene), f"{HOST}/pictures/{scene.file}", "clean", Reason.CAPTION_TRUNCATED)
    for scene in _take(own, params.exact_duplicates):
        url = web.file(f"copies/{scene.file}", (pictures / scene.file).read_bytes())
        caption = scene.captions[int(rng.integers(len(scene.captions)))]
        web.row(caption, url, "deduplicate", Reason.DUPLICATE_EXACT, after=good[scene.name])
    for scene in merged:
        url = web.file(f"copies/{scene.file}", (pictures / scene.file).read_bytes())
        web.row(spare[scene.name], url, "deduplicate", Reason.MERGED, after=good[scene.name])
    for number, scene in enumerate(_take(own, params.near_duplicates)):
        url = web.file(f"near/{scene.file}", disguised((pictures / scene.file).read_bytes(), number))
        caption = scene.captions[int(rng.integers(len(scene.captions)))]
        web.row(caption, url, "deduplicate", Reason.DUPLICATE_NEAR, after=good[scene.name])

    leaking = iter([evaluation[index] for index in rng.permutation(len(evaluation))])
    for scene in _take(leaking, params.exact_leaks):
        url = web.file(f"found/{scene.file}", (pictures / scene.file).read_bytes())
        web.row(scene.captions[0], url, "deduplicate", Reason.LEAK_EXACT)
    for number, scene in enumerate(_take(leaking, params.near_leaks)):
        url = web.file(f"found/{scene.file}", disguised((pictures / scene.file).read_bytes(), number))
        web.row(scene.captions[0], url, "deduplicate", Reason.LEAK_NEAR)

    _exchange_captions(web, list(own), good, train, params.wrong_captions)
    web.rows.sort(key=lambda row: row.place)
    (folder / LIST_FILE).write_bytes(b"".join(row.line + b"\n" for row in web.rows))
    table = json.dumps(web.responses, indent=0, sort_keys=True)
    (folder / WEB_FOLDER / RESPONSES_FILE).write_text(table + "\n", encoding="utf-8")
    return fates(web.rows)


def fates(rows: Sequence[Row]) -> dict[str, Any]:
    """What each data stage should find: rows in, rows per reason, and which rows (0-based lines) each ill has hit."""
    content: dict[str, Any] = {"enabled": True, "rows_in": len(rows)}
    entering = list(enumerate(rows))
    for stage in STAGES:
        hit = [(number, row) for number, row in entering if row.stage == stage and row.reason is not None]
        counts = Counter(str(row.reason) for _, row in hit)
        counts[str(Reason.OK)] = len(entering) - len(hit)
        by_reason = {
            reason: [number for number, row in hit if row.reason == reason]
            for reason in sorted(counts)
            if reason != Reason.OK
        }
        content[stage] = {"rows_in": len(entering), "counts": dict(sorted(counts.items())), "rows": by_reason}
        gone = {number for number, row in hit if row.reason not in KEPT}
        entering = [(number, row) for number, row in entering if number not in gone]
    return content


def long_caption(scene: Scene) -> str:
    """More than 30 words, all true: the scene's captions one after the other, as alt texts of the web ramble."""
    text = f"a picture of a plain floor on which {' and '.join(scene.captions)}"
    while len(text.split()) <= 30:
        text += " and nothing else can be seen anywhere on the floor"
    return text


def disguised(data: bytes, number: int) -> bytes:
    """The same picture to the eye in other bytes, in one of three ways."""
    quality, scale = ((82, 1.0), (90, 0.85), (85, 0.9))[number % 3]
    return re_encode(data, quality=quality, scale=scale)


def _take(scenes: Iterator[Scene], count: int) -> list[Scene]:
    return [next(scenes) for _ in range(count)]


def _any_captions(web: Web, train: Sequence[Scene], count: int) -> Iterator[tuple[int, str]]:
    """`count` numbers, each with some scene's caption: for rows whose picture nobody will see."""
    for number in range(count):
        scene = train[int(web.rng.integers(len(train)))]
        yield number, scene.captions[0]


def _exchange_captions(
    web: Web, scenes: Sequence[Scene], good: dict[str, list[Row]], train: Sequence[Scene], count: int
) -> None:
    """Give `count` good rows of these `scenes`, which have no ill of their own, a caption of another scene."""
    own = [(scene, row) for scene in scenes for row in good[scene.name]]
    taken = {scene.name: set(scene.captions) for scene in scenes}  # one that stands there already would be a duplicate
    changed: dict[int, Row] = {}
    for place in web.rng.permutation(len(own))[:count]:
        scene, row = own[place]
        caption = scene.captions[0]
        while caption in taken[scene.name]:
            other = train[int(web.rng.integers(len(train)))]
            caption = other.captions[int(web.rng.integers(len(other.captions)))]
        taken[scene.name].add(caption)
        changed[id(row)] = replace(row, line=caption.encode() + row.line[row.line.index(b"\t") :])
    web.rows = [changed.get(id(row), row) for row in web.rows]


def _redirect(web: Web, scene: Scene, url: str) -> str:
    """A URL that leads to `url`, by one step (relative or absolute) or two."""
    path = f"moved/{scene.file}"
    way = int(web.rng.integers(3))
    if way == 0:
        return web.answer(path, status=301, location=f"/pictures/{scene.file}")
    if way == 1:
        return web.answer(path, status=302, location=url)
    web.answer(f"on/{path}", status=307, location=url)
    return web.answer(path, status=308, location=f"/on/{path}")


def _plant_list_ills(web: Web, params: WebParams, train: Sequence[Scene]) -> None:
    for number, caption in _any_captions(web, train, params.malformed_lines):
        line = (
            caption.encode(),
            f"{caption}\t{HOST}/a.jpg\t{number}".encode(),
            f"{caption} caf\xe9\t{HOST}/b.jpg".encode("latin-1"),
            f"{HOST}/c.jpg".encode(),
        )[number % 4]
        web.line(line, "download", Reason.MALFORMED_ROW)
    for _, caption in _any_captions(web, train, params.missing_urls):
        web.row(caption, "", "download", Reason.MISSING_URL)


def _plant_url_ills(web: Web, params: WebParams, train: Sequence[Scene]) -> None:
    for number, caption in _any_captions(web, train, params.invalid_urls):
        url = (f"corpus.test/{number}.jpg", f"http:///{number}.jpg", f"http://corpus.test:99999/{number}.jpg")[
            number % 3
        ]
        web.row(caption, url, "download", Reason.URL_INVALID)
    for number, caption in _any_captions(web, train, params.foreign_schemes):
        url = (
            f"ftp://corpus.test/{number}.jpg",
            f"data:image/gif;base64,R0lGODlhAQABAAAAACw=#{number}",
            f"file:///etc/hosts#{number}",
        )[number % 3]
        web.row(caption, url, "download", Reason.URL_SCHEME)
    for number, caption in _any_captions(web, train, params.credentials):
        web.row(caption, f"http://user:word@corpus.test/{number}.jpg", "download", Reason.URL_CREDENTIALS)
    for number, caption in _any_captions(web, train, params.long_urls):
        url = f"{HOST}/long/{number}.jpg?session={'0123456789abcdef' * 160}"
        web.row(caption, url, "download", Reason.URL_TOO_LONG)
    for number, caption in _any_captions(web, train, params.forbidden_hosts):
        url = FORBIDDEN[number % len(FORBIDDEN)].format(number)
        if number % 4 == 3:
            url = web.answer(f"trap/{number:05d}.jpg", status=302, location=url)
        web.row(caption, url, "download", Reason.URL_FORBIDDEN_HOST)


def _plant_answers(web: Web, params: WebParams, train: Sequence[Scene]) -> None:
    for number, caption in _any_captions(web, train, params.dead_hosts):
        web.row(caption, f"{DEAD_HOST}/{number:05d}.jpg", "download", Reason.DNS_FAILURE)
    for number, caption in _any_captions(web, train, params.not_found):
        url = web.answer(f"gone/{number:05d}.jpg", status=404 if number % 4 else 410)
        web.row(caption, url, "download", Reason.HTTP_NOT_FOUND)
    for number, caption in _any_captions(web, train, params.refused):
        web.row(caption, web.answer(f"refused/{number:05d}.jpg", status=403), "download", Reason.HTTP_ERROR)
    for number, caption in _any_captions(web, train, params.redirect_loops):
        there, back = f"loop/{number:05d}.jpg", f"loop/{number:05d}-back.jpg"
        web.answer(back, status=302, location=f"/{there}")
        web.row(caption, web.answer(there, status=302, location=f"/{back}"), "download", Reason.TOO_MANY_REDIRECTS)
    for number, caption in _any_captions(web, train, params.html_as_jpeg):
        path = f"html/{number:05d}.jpg"
        web.file(path, HTML.format(number).encode())
        web.row(caption, web.answer(path, content_type="image/jpeg"), "download", Reason.NOT_AN_IMAGE)
    for number, caption in _any_captions(web, train, params.empty_files):
        web.row(caption, web.file(f"empty/{number:05d}.jpg", b""), "download", Reason.EMPTY_BODY)
