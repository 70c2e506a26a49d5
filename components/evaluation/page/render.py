"""The page as HTML. Everything from the data is escaped; only the plots and the style sheet are taken as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from components.evaluation.page.gather import Page
from components.evaluation.page.queries import Run
from components.evaluation.page.tables import METRIC_NAMES

FOLDER = Path(__file__).parent
TEMPLATE, STYLE = "report.html.j2", "style.css"
RECALL_KEYS = ("txt_r1", "txt_r5", "txt_r10", "txt_r_mean", "img_r1", "img_r5", "img_r10", "img_r_mean", "r_mean")


@dataclass(frozen=True)
class Key:
    """One of the numbers at the top."""

    name: str
    value: str
    notes: tuple[str, ...] = ()


def render(page: Page) -> str:
    """The whole HTML document."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= FILTERS
    return environment.get_template(TEMPLATE).render(
        page=page,
        style=(FOLDER / STYLE).read_text(encoding="utf-8"),
        lede=_lede(page),
        keys=_keys(page),
        recall_keys=RECALL_KEYS,
        revision=_revision(page),
    )


def _lede(page: Page) -> str:
    parts = []
    if page.steps:
        kept = sum(source.pictures for source in page.sources)
        parts.append(f"{page.steps[0].rows_in:,} listed rows became {kept:,} pictures to train on")
    trained = [shown.training.name for shown in page.trainings]
    if trained:
        parts.append(f"{_listed(trained)} {'was' if len(trained) == 1 else 'were'} trained")
    if page.runs:
        pictures = _listed([f"{shown.run.metrics['pictures']:,}" for shown in page.runs])
        parts.append(f"evaluated on {pictures} held-out pictures")
    return f"{'; '.join(parts)}." if parts else "Nothing has run yet."


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _keys(page: Page) -> list[Key]:
    """The numbers that most readers come for: of the best run, if there are several."""
    keys: list[Key] = []
    if page.runs:
        best = max((shown.run for shown in page.runs), key=lambda run: float(run.metrics["itm"]["r_mean"]))
        keys += [_recall_key("Text R@1", best, "txt_r1"), _recall_key("Image R@1", best, "img_r1")]
        keys.append(_recall_key("Mean recall", best, "r_mean"))
    if page.steps:
        rows, kept = page.steps[0].rows_in, page.steps[-1].kept
        keys.append(Key("Rows kept", _count(kept), (f"of {rows:,}", _share(100 * kept / rows if rows else 0))))
    if page.validation is not None:
        state = "all hold" if page.validation.success else f"{page.validation.total - page.validation.passed:,} fail"
        keys.append(Key("Expectations", _count(page.validation.total), (state,)))
    return keys


def _recall_key(name: str, run: Run, key: str) -> Key:
    itc, itm, chance = (float(run.metrics[scores][key]) for scores in ("itc", "itm", "chance"))
    before = f"by {run.labels[1]}" if "labels" in run.metrics else "before re-ranking"
    notes = [f"{itc:.1f} {before}", f"{chance:.1f} by chance"]
    if interval := run.metrics.get("intervals", {}).get("itm", {}).get(key):
        notes.insert(0, f"{interval[0]:.1f} to {interval[1]:.1f}, 95\u202f% interval")
    return Key(name, f"{itm:.1f}", tuple(notes))


def _revision(page: Page) -> str:
    """The git revision, where a training has recorded it."""
    return next(
        (str(s.training.lineage["revision"])[:12] for s in page.trainings if "revision" in s.training.lineage), ""
    )


def _words(name: str) -> str:
    """A reason's or a stage's name for people."""
    return " ".join(word.upper() if word in ("http", "url", "dns") else word for word in name.split("_"))


def _count(number: int) -> str:
    return f"{number:,}"


def _share(percent: float) -> str:
    """Percent; never 0 for what there is, never 100 for what is not all."""
    if 0 < percent < 0.1:
        return "<0.1\u202f%"
    if 99.9 < percent < 100:
        return ">99.9\u202f%"
    return f"{percent:.1f}\u202f%"


def _gain(points: float) -> str:
    rounded = round(points, 1)
    return "±0.0" if rounded == 0 else f"{rounded:+.1f}".replace("-", "\u2212")


def _score(value: float) -> str:
    return f"{value:.2f}".replace("-", "\u2212")


def _size(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


FILTERS: dict[str, Callable[..., str]] = {
    "count": _count,
    "share": _share,
    "recall": lambda value: f"{value:.1f}",
    "gain": _gain,
    "score": _score,
    "metric": lambda name: METRIC_NAMES.get(str(name), str(name)),
    "size": _size,
    "width": lambda percent: f"{percent:.3f}%",
    "words": lambda name: _words(str(name)),
    "drawn": lambda text: Markup(text),  # the project's own SVG and CSS, never the data's
}
