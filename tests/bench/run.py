"""`make bench`: every figure that the design promises, measured on this machine, with the limit it is held against.

Prints a table, writes build/bench/results.json and build/bench/results.png. Exits 0 when everything could be measured,
whether or not the targets are met (what is missed is listed), and 1 when something broke.
"""

import argparse
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

# Run as a script with -P, so nothing of ours is on the path yet.
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.harness import ROOT, Bench, Row, machine, write_results
from bench.show import missed, show
from rich.console import Console
from rich.markup import escape

SUBJECTS = {
    "data": "store and load against memcpy",
    "lookups": "lookups at a million blocks, the index's memory, time to first token",
    "control": "round trips under load",
    "disk": "the disk tier against raw O_DIRECT",
    "disk_chains": "small blocks of a chain on disk; a start with a million of them",
    "trouble": "hits in DRAM while the disk hangs; what the ledger costs",
    "redis": "blocks and names in Redis against raw sockets and redis-py",
    "peers": "blocks of another node against raw sockets; round trips while they are served",
    "links": "time to first token over links of 10 Gbit/s to 1 Mbit/s, fetched against computed",
    "hashing": "block hashes against cbor2 and hashlib",
    "codec": "lossless packing of real KV",
    "fleet": "the directory: Redis memory a block, commands of a fleet at rest",
}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    listing = "\n".join(f"  {name:10} {what}" for name, what in SUBJECTS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"subjects:\n{listing}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller and shorter, in under a minute; less exact")
    parser.add_argument(
        "--only", metavar="SUBJECT", action="append", choices=SUBJECTS, help="only this; may be repeated"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="where results and scratch files go")
    return parser.parse_args(argv)


def measure(name: str, bench: Bench, console: Console) -> tuple[list[Row], bool]:
    """The rows of one subject, and whether it broke."""
    start = time.monotonic()
    try:
        subject: Callable[[Bench], list[Row]] = import_module(f"bench.{name}").run
        rows = subject(bench)
    except Exception:
        console.print(f"[bold red]{name} broke[/]\n{escape(traceback.format_exc())}")
        return [], True
    console.print(f"{name}: {SUBJECTS[name]} ({time.monotonic() - start:.0f} s)")
    return rows, False


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    rows: list[Row] = []
    broken: list[str] = []
    about = machine()
    options.out.mkdir(parents=True, exist_ok=True)
    with console.status("starting") as status, TemporaryDirectory(prefix="kvcascade-bench-") as sockets:
        # Scratch files lie beside the results: on the file system that a user would choose, not in /tmp.
        scratch = options.out / "scratch"
        bench = Bench(options.quick, scratch, Path(sockets), lambda text: status.update(text))
        for name in options.only or SUBJECTS:
            measured, broke = measure(name, bench, console)
            rows += measured
            broken += [name] * broke
        shutil.rmtree(scratch, ignore_errors=True)
    show(console, rows)
    for note in bench.notes:
        console.print(note)
    results = options.out / "results.json"
    write_results(results, rows, {"machine": about, "quick": options.quick, "broken": broken, "notes": bench.notes})
    # Loaded only now: it costs a second, and a figure that is measured is kept even if there is no picture.
    from bench.plot import draw

    picture = options.out / "results.png"
    draw(picture, rows, f"{about['cpu']}, {about['cores']} cores, load {about['load']:.1f} at the start")
    judged = [row for row in rows if row.ok is not None]
    short = missed(rows)
    console.print(f"\n{len(judged) - len(short)} of {len(judged)} targets met; {results}, {picture}")
    for line in short:
        console.print(f"[red]missed[/] {escape(line)}")
    if broken:
        console.print(f"[bold red]bench failed: {', '.join(broken)} broke[/]")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
