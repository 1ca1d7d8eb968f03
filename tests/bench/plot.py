"""The figures that have a target as a picture: how many times better than asked, on a logarithmic axis."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from .harness import Row
from .show import number

MET, MISSED = "#2a7f62", "#b5403a"


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    judged = [(row, row.margin) for row in rows if row.margin is not None]
    if not judged:
        return
    figure, axes = plt.subplots(figsize=(13, 1.2 + 0.42 * len(judged)), layout="constrained")
    margins = [margin for _, margin in judged]
    places = range(len(judged))
    axes.barh(places, [m - 1 for m in margins], left=1, color=[MET if m >= 1 else MISSED for m in margins], height=0.6)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlim(min(0.5, *(0.8 * m for m in margins)), max(2.0, *(3 * m for m in margins)))
    axes.set_yticks(places, [row.name for row, _ in judged], fontsize=8)
    axes.invert_yaxis()
    for place, (row, margin) in enumerate(judged):
        text = f" {number(row.value)} {row.unit}"
        if row.ratio is not None:
            text += f", ratio {number(row.ratio)}"
        axes.text(max(margin, 1.0), place, f"{text}  ({row.target})", va="center", fontsize=7)
    axes.set_xlabel("times better than the target (1: just met)")
    axes.set_title(title, fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)
