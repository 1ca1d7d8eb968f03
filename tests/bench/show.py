"""The figures as a table for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .harness import Row


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def show(console: Console, rows: Sequence[Row]) -> None:
    table = Table(title="kvcascade bench", title_justify="left")
    table.add_column("figure / limit", ratio=1)
    for name in ("value", "limit", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        verdict = {True: "[green]ok[/]", False: "[bold red]missed[/]", None: ""}[row.ok]
        table.add_row(
            row.name,
            f"{number(row.value)} {row.unit}",
            "" if row.reference is None else number(row.reference),
            "" if row.ratio is None else number(row.ratio),
            "" if row.target is None else str(row.target),
            verdict,
        )
    console.print(table)


def missed(rows: Sequence[Row]) -> list[str]:
    """One line for each target that was not met: by how much."""
    lines = []
    for row in rows:
        if row.ok is False:
            measured = row.value if row.target is not None and row.target.on == "value" else row.ratio
            assert measured is not None and row.margin is not None
            lines.append(f"{row.name}: {number(measured)}, target {row.target} ({1 - row.margin:.0%} short)")
    return lines
