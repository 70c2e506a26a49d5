"""Plots as SVG text that takes its colours and font from the page, so that one drawing serves light and dark."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

# Drawn in colours that occur nowhere else, then replaced by the page's own (see style.css).
COLOURS = {
    "#0a0001": "var(--ink)",
    "#0a0002": "var(--muted)",
    "#0a0003": "var(--line)",
    "#0a0004": "var(--series-1)",
    "#0a0005": "var(--series-2)",
    "#0a0006": "var(--series-3)",
}
INK, MUTED, LINE, FIRST, SECOND, THIRD = COLOURS
POINTS = 400  # of a curve: more cannot be seen at this width
SIZE = (4.0, 2.5)  # inches; the page shows a plot at about 360 pixels

SETTINGS = {
    "svg.fonttype": "none",  # real text: small, and in the page's font
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "axes.axisbelow": True,
}


@dataclass(frozen=True)
class Plot:
    """An SVG element with a title, and the text that says what it shows to whoever cannot see it."""

    title: str
    svg: str
    alt: str


def curve_plot(name: str, title: str, steps: Sequence[int], values: Sequence[float]) -> Plot:
    """One training curve: the points thinly, their running mean boldly."""
    x, y = _thin(np.asarray(steps, float), np.asarray(values, float))
    finite = np.isfinite(y)
    with mpl.rc_context(SETTINGS):
        figure, axes = _axes()
        smooth = _running_mean(y, max(1, len(y) // 25))
        if len(y) >= 25:
            axes.plot(x, y, color=FIRST, linewidth=0.8, alpha=0.35)
        axes.plot(x, smooth if len(y) >= 25 else y, color=FIRST, linewidth=1.8, marker="o" if len(y) == 1 else None)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        svg = _svg(figure, name)
    low, high = (float(y[finite].min()), float(y[finite].max())) if finite.any() else (float("nan"),) * 2
    alt = (
        f"{title} over {steps[-1]:,} steps: from {values[0]:.4g} to {values[-1]:.4g}, between {low:.4g} and {high:.4g}"
    )
    return Plot(title, svg, alt)


def cutoffs(limit: int) -> list[int]:
    """Some K from 1 to `limit`, closer together where recall rises."""
    return [int(k) for k in np.unique(np.geomspace(1, max(2, limit), 40).round())]


def recall_plot(
    name: str, title: str, itc: NDArray[np.int64], itm: NDArray[np.int64], chance: Mapping[int, float]
) -> Plot:
    """Recall against K on a logarithmic axis: re-ranked, by similarity, and by `chance`, whose keys are the K."""
    ks = list(chance)

    def recall(ranks: NDArray[np.int64]) -> list[float]:
        return [100 * float((ranks <= k).mean()) for k in ks]

    by_itc, by_itm = recall(itc), recall(itm)
    with mpl.rc_context(SETTINGS):
        figure, axes = _axes()
        axes.plot(ks, list(chance.values()), color=MUTED, linewidth=1.2, linestyle=(0, (1, 1.6)))
        axes.plot(ks, by_itc, color=SECOND, linewidth=1.6, linestyle=(0, (5, 1.5)))
        axes.plot(ks, by_itm, color=FIRST, linewidth=2)
        axes.set_xscale("log")
        axes.set_xlim(1, ks[-1])
        axes.set_ylim(0, 102)
        ticks = [k for k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if k <= ks[-1]]
        axes.set_xticks(ticks, [str(k) for k in ticks])
        axes.minorticks_off()
        axes.set_xlabel("K")
        axes.yaxis.set_major_locator(MaxNLocator(5))
        svg = _svg(figure, name)
    return Plot(
        title,
        svg,
        f"{title}: at 1, {by_itm[0]:.1f} % re-ranked and {by_itc[0]:.1f} % by similarity alone; "
        f"at {ks[-1]}, {by_itm[-1]:.1f} % and {by_itc[-1]:.1f} %",
    )


def embedding_plot(
    name: str, title: str, pictures: Sequence[Sequence[float]], captions: Sequence[Sequence[float]]
) -> Plot:
    """Pictures and their captions in the plane, each pair joined by a line."""
    own, texts = np.asarray(pictures, float), np.asarray(captions, float)  # (P, 2) each
    with mpl.rc_context(SETTINGS | {"axes.grid": False, "axes.spines.bottom": False}):
        figure, axes = _axes()
        axes.add_collection(
            LineCollection(list(np.stack([own, texts], axis=1)), colors=MUTED, linewidths=0.5, alpha=0.6)
        )
        axes.scatter(own[:, 0], own[:, 1], s=9, color=FIRST, linewidths=0)
        axes.scatter(texts[:, 0], texts[:, 1], s=9, facecolors="none", edgecolors=SECOND, linewidths=0.9)
        axes.set_xticks([])
        axes.set_yticks([])
        svg = _svg(figure, name)
    apart = np.linalg.norm(own[:, None] - texts[None], axis=2)  # (P, P)
    nearest = 100 * float((apart.argmin(axis=1) == np.arange(len(own))).mean())
    return Plot(
        title, svg, f"{title}: of {len(own)} pictures {nearest:.0f} % lie nearest to their own caption in this plane"
    )


def histogram_plot(name: str, title: str, unit: str, counts: Mapping[int, int]) -> Plot:
    """How often each whole number occurs; many numbers are put into about 30 bars."""
    values, times = np.array(sorted(counts)), np.array([counts[value] for value in sorted(counts)])
    low, high = int(values[0]), int(values[-1])
    width = max(1, -(-(high - low + 1) // 30))
    edges = np.arange(low, high + width + 1, width) - 0.5
    heights, _ = np.histogram(values, bins=edges, weights=times)
    with mpl.rc_context(SETTINGS):
        figure, axes = _axes()
        axes.bar(edges[:-1] + width / 2, heights, width=width * 0.86, color=FIRST, linewidth=0)
        if low == high:
            axes.set_xlim(low - 5, high + 5)
        axes.set_xlabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        svg = _svg(figure, name)
    total = int(times.sum())
    mean = float((values * times).sum() / total)
    return Plot(title, svg, f"{title}: {total:,} in all, from {low:,} to {high:,} {unit}, {mean:.1f} on average")


def _axes() -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.subplots()
    axes.patch.set_alpha(0)
    return figure, axes


def _short(value: float, _: Any = None) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    if 0 < abs(value) < 1e-3:
        digits, exponent = f"{value:.3e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{round(value, 10):g}"


def _thin(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most POINTS points, each the mean of as many neighbours; the last step stays the last."""
    if len(x) <= POINTS:
        return x, y
    parts = np.array_split(np.arange(len(x)), POINTS)
    return np.array([x[part[-1]] for part in parts]), np.array([y[part].mean() for part in parts])


def _running_mean(y: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Means over `width` points around each point, fewer at the ends."""
    kernel = np.ones(width)
    counts = np.convolve(np.ones(len(y)), kernel, mode="same")[: len(y)]
    result: NDArray[np.float64] = np.convolve(y, kernel, mode="same")[: len(y)] / counts
    return result


def _svg(figure: Figure, name: str) -> str:
    """The figure as an ``svg`` element of the page: no header, no sizes, its own ids, the page's colours and font."""
    sink = io.StringIO()
    empty = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(sink, format="svg", metadata=empty)
    svg = sink.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>\s*", "", svg, flags=re.DOTALL)  # its rules would hold page-wide
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"([^>]*?)', r"<svg \1\2", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?)\sheight="[^"]*"', r"\1", svg, count=1)
    svg = svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)
    prefix = re.sub(r"[^A-Za-z0-9]+", "-", name)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}-', svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}-", svg)
    for drawn, shown in COLOURS.items():
        svg = svg.replace(drawn, shown)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    return re.sub(r"font-family: [^;\"]*;?", "", svg).strip()
