"""Great Expectations' HTML pages made to last: same bytes for same results, readable without a network.

As the library writes them, pages hold random identifiers and clock times, take their style and behaviour from eleven
addresses on the internet, and list the suites by JavaScript from there. DVC hashes the folder, and a gate must be
readable where there is no network; so the head, the navigation and the index are replaced, the bodies stay.
"""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from components.data.validation.docs_assets import SCRIPT, STYLE

STATIC = "static"
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_HEAD = re.compile(r"<head>.*?</head>", re.DOTALL)
_SCRIPT = re.compile(r"<script\b.*?</script>", re.DOTALL)
_LINK = re.compile(r"<link\b[^>]*>")
_BANNER = re.compile(r"<nav class=\"navbar navbar-expand-md.*?</nav>\s*</div>\s*</nav>", re.DOTALL)
_FOOTER = re.compile(r"<footer>.*?</footer>", re.DOTALL)
_INFO = re.compile(r"<div id=\"section-\d+-content-block-\d+-parent\" >.*?</table>\s*</div>\s*</div>", re.DOTALL)
_BLANK = re.compile(r"[ \t]*\n(?:[ \t]*\n)+")
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="stylesheet" href="{up}static/docs.css">
<script src="{up}static/docs.js" defer></script>
</head>
"""


def settle(docs: Path, results: Sequence[dict[str, Any]], statistics: dict[str, Any]) -> None:
    """Rewrite the site in `docs`: ``index.html``, ``validations/SUITE.html``, ``expectations/SUITE.html``.

    `statistics`, those of the stage's JSON file, give the first page its table of sources.
    """
    for suite in results:
        name = suite["suite"]
        (page,) = (docs / "validations" / name).rglob("*.html")
        text = page.read_text(encoding="utf-8")
        shutil.rmtree(docs / "validations" / name)
        text = text.replace("../../../../expectations/", "../expectations/")
        _write(docs / "validations" / f"{name}.html", text, f"{name}: what was found")
        page = docs / "expectations" / f"{name}.html"
        _write(page, page.read_text(encoding="utf-8"), f"{name}: what is expected")
    shutil.rmtree(docs / STATIC)
    (docs / STATIC).mkdir()
    (docs / STATIC / "docs.css").write_text(STYLE, encoding="utf-8")
    (docs / STATIC / "docs.js").write_text(SCRIPT, encoding="utf-8")
    (docs / "index.html").write_text(_index(results, statistics), encoding="utf-8")


def _write(path: Path, text: str, title: str) -> None:
    """One page of the library's with our head and banner, without scripts, clock times and random identifiers."""
    start, body = _PAGE.format(title=html.escape(title), up="../"), _HEAD.split(text, maxsplit=1)[1]
    body = _LINK.sub("", _SCRIPT.sub("", body))
    banner = f'<nav class="banner"><a href="../index.html">Data documentation</a> / {html.escape(title)}</nav>'
    body = _BANNER.sub(lambda _: banner, body, count=1)
    body = _FOOTER.sub("", body)
    body = _INFO.sub("", body)
    names: dict[str, str] = {}
    body = _UUID.sub(lambda found: names.setdefault(found.group(), f"part-{len(names)}"), body)
    body = body.replace('style="max-height: 65vh;"', "").replace("Data asset: None<br>", "")
    path.write_text(start + _BLANK.sub("\n", body).lstrip(), encoding="utf-8")


def _sources(statistics: dict[str, Any]) -> str:
    """Pictures and texts of each source, as ALBEF's table 8 counts them, and what they are like."""
    of_sources = statistics.get("unique", {})
    if not of_sources:
        return ""
    lines = []
    total = {"pictures": 0, "captions": 0, "words": 0.0, "bytes": 0}
    for source, its in of_sources.items():
        words = its["words_per_caption"]["mean"] or 0.0
        lines.append(_source_line(html.escape(source), its["pictures"], its["captions"], words, its["bytes"]["sum"]))
        total["pictures"] += its["pictures"]
        total["captions"] += its["captions"]
        total["words"] += words * its["captions"]
        total["bytes"] += its["bytes"]["sum"]
    words = total["words"] / total["captions"] if total["captions"] else 0.0
    lines.append(_source_line("all", int(total["pictures"]), int(total["captions"]), words, int(total["bytes"])))
    heads = ("pictures", "texts", "texts a picture", "words a text", "MB")
    head = "".join(f'<th class="number">{text}</th>' for text in heads)
    return (
        f'<h2>Sources</h2>\n<table class="table">\n<thead><tr><th>source</th>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody>\n</table>\n"
    )


def _source_line(name: str, pictures: int, captions: int, words: float, size: int) -> str:
    each = captions / pictures if pictures else 0.0
    values = (f"{pictures:,}", f"{captions:,}", f"{each:.2f}", f"{words:.1f}", f"{size / 1e6:,.1f}")
    return f"<tr><td>{name}</td>" + "".join(f'<td class="number">{value}</td>' for value in values) + "</tr>"


def _index(results: Sequence[dict[str, Any]], statistics: dict[str, Any]) -> str:
    failed = [(suite["suite"], item) for suite in results for item in suite["expectations"] if not item["success"]]
    count = sum(len(suite["expectations"]) for suite in results)
    lines = []
    for suite in results:
        name, good = html.escape(suite["suite"]), sum(item["success"] for item in suite["expectations"])
        mark = "good" if suite["success"] else "bad"
        lines.append(
            f'<tr><td><span class="mark {mark}"></span></td><td><a href="validations/{name}.html">{name}</a></td>'
            f'<td class="number">{suite["lines"]:,}</td><td class="number">{good} of {len(suite["expectations"])}</td>'
            f'<td><a href="expectations/{name}.html">what is expected</a></td></tr>'
        )
    problems = "\n".join(
        f'<li><a href="validations/{html.escape(name)}.html">{html.escape(name)}</a>: {html.escape(sentence)}</li>'
        for name, sentence in ((name, item["sentence"]) for name, item in failed)
    )
    verdict = f"{len(failed)} of {count} expectations failed" if failed else f"All {count} expectations hold"
    return (
        _PAGE.format(title="Data documentation", up="")
        + f"""<body>
<main class="index">
<h1>Data documentation</h1>
<p class="verdict {"bad" if failed else "good"}">{verdict}</p>
{f"<ul>{problems}</ul>" if problems else ""}
<table class="table">
<thead><tr><th></th><th>Suite</th><th class="number">Lines</th><th class="number">Hold</th><th></th></tr></thead>
<tbody>
{chr(10).join(lines)}
</tbody>
</table>
{_sources(statistics)}
<p class="note">A line is a picture; in suites that end in <code>-rows</code> it is a part of the stage's rows (a
source, a split, or all); in <code>shards-files</code> a problem with a file.
Checked with Great Expectations; the numbers are in <code>results.json</code> beside this folder, all offending lines in
<code>offenders.parquet</code>, and what the sources are like in <code>statistics.json</code>.</p>
</main>
</body>
</html>
"""
    )
