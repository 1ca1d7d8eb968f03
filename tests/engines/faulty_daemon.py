"""A real daemon whose disk obeys rules of faults: a program, and what a test needs to start and to instruct it.

    python faulty_daemon.py RULES [--takeover] FLAG VALUE ...

RULES is a file with a rule a line, `operation name what skip` (see engines/faults.py), read again whenever it changes;
the flags are those of `kvcascade serve`. An empty file makes the disk well again, and lets go what hangs.
"""

import os
import sys
import threading
import time
from pathlib import Path

from engines.faults import Faults

from kvcascade.config.errors import CascadeError
from kvcascade.config.load import load_settings
from kvcascade.daemon.server import run


class Rules:
    """The test's side: a daemon's command line, and the file that instructs it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()
        self.command = [sys.executable, "-P", __file__, str(path)]

    def set(self, *rules: str) -> None:
        """`operation name what skip` each; a two-word `what` with an underscore. In force once this returns."""
        seen = self._path.with_suffix(".seen")
        seen.unlink(missing_ok=True)
        self.set_quietly(*rules)
        deadline = time.monotonic() + 10
        while not seen.exists() or seen.read_text() != "\n".join(rules):
            assert time.monotonic() < deadline, "the daemon does not read its rules"
            time.sleep(0.005)

    def set_quietly(self, *rules: str) -> None:
        """For the next start."""
        beside = self._path.with_suffix(".new")
        beside.write_text("\n".join(rules))
        beside.rename(self._path)


def _obey(path: Path, faults: Faults) -> None:
    last = ""
    while True:
        text = path.read_text()
        if text != last:
            last = text
            faults.clear()
            faults.released = threading.Event()
            for rule in text.splitlines():
                operation, name, what, skip = rule.split()
                faults.add(operation, name, what.replace("_", " "), skip=int(skip))
        path.with_suffix(".seen").write_text(last)
        time.sleep(0.01)


def main() -> int:
    rules, flags = Path(sys.argv[1]), sys.argv[2:]
    takeover = "--takeover" in flags
    if takeover:
        flags.remove("--takeover")
    faults = Faults()
    threading.Thread(target=_obey, args=(rules, faults), daemon=True).start()
    named = {name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    try:
        return run(load_settings(environ=os.environ, flags=named), folder=faults.folder, takeover=takeover)
    except CascadeError as error:
        print(f"kvcascade: {error}", file=sys.stderr)
        return 4


if __name__ == "__main__":
    sys.exit(main())
