"""What the subjects share: a real daemon, engine processes, clocks, and what a figure is.

Rule: a figure counts as its ratio to a limit that was taken in the same run, turn by turn with it. Machines differ and
busy ones swing, so absolute values are shown beside it and judged only where a target is absolute.
"""

import json
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Self

from kvcascade.config.errors import CascadeError, DaemonUnavailable
from kvcascade.daemon.attachment import Session
from kvcascade.daemon.client import Client
from kvcascade.daemon.protocol import OP_CHECK, OP_STATUS
from kvcascade.tiers.block import KVGroup, none_hash, probe_hashes
from kvcascade.tiers.namespace import Namespace

ROOT = Path(__file__).parents[2]
SEED = "bench"
PATIENCE_S = 120.0
SLAB = 32 << 20
GB = 1e9


@dataclass(frozen=True, slots=True)
class Target:
    """What must hold for a row's ratio, or for its value."""

    on: Literal["ratio", "value"]
    sense: Literal[">=", "<"]
    limit: float

    def margin(self, measured: float) -> float:
        """How many times better than asked; below 1 is missed."""
        if self.sense == ">=":
            return measured / self.limit
        return self.limit / measured if measured > 0 else float("inf")

    def __str__(self) -> str:
        return f"{self.on} {self.sense} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `reference` is the limit's value in the same unit; `name` says after a slash what the limit is.

    `ratio` is value / reference, as the median of the rounds' own ratios where there were rounds.
    """

    name: str
    value: float
    unit: str
    reference: float | None = None
    ratio: float | None = None
    target: Target | None = None

    @property
    def margin(self) -> float | None:
        if self.target is None:
            return None
        measured = self.value if self.target.on == "value" else self.ratio
        assert measured is not None, self.name
        return self.target.margin(measured)

    @property
    def ok(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        margin = self.margin
        return None if margin is None else margin >= 1

    def to_map(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "reference": self.reference,
            "ratio": self.ratio,
            "target": None if self.target is None else str(self.target),
            "ok": self.ok,
        }


def at_least(limit: float) -> Target:
    """The ratio must reach `limit`."""
    return Target("ratio", ">=", limit)


def ratio_below(limit: float) -> Target:
    return Target("ratio", "<", limit)


def below(limit: float) -> Target:
    """The value must stay below `limit`."""
    return Target("value", "<", limit)


@dataclass(slots=True)
class Bench:
    """One run: how long it may take, where its files lie, and where it says what it is doing.

    Sockets have a directory of their own, because the kernel takes no path of more than 107 bytes for one.
    """

    quick: bool
    directory: Path
    sockets: Path
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)

    def rounds(self, full: int, quick: int) -> int:
        return quick if self.quick else full


class BenchError(Exception):
    """Something broke, so that there is no figure."""


# ---- numbers


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median_ratio(values: Iterable[float], references: Iterable[float]) -> float:
    """The median of the rounds' own ratios: a slow moment of the machine strikes both sides of one round."""
    return statistics.median(value / reference for value, reference in zip(values, references, strict=True))


def process_cpu(pid: int) -> float:
    """CPU seconds that all threads of a process have taken, to the nanosecond: /proc/PID/stat counts 10 ms ticks."""
    # The kernel's number of another process's CPU clock, as clock_getcpuclockid(3) computes it.
    return time.clock_gettime(~pid << 3 | 2)


def anonymous_rss(pid: int) -> int:
    """Resident bytes of a process that are its own: without pools, which are shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise BenchError(f"process {pid} is gone")


def machine() -> dict[str, Any]:
    """What the absolute values hold for."""
    model = "unknown"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


# ---- the daemon


def pool_size(size: int) -> str:
    """`--dram` for at least `size` bytes: a pool is cut down to whole slabs."""
    return f"{-(-size // SLAB) * SLAB}B"


class Daemon:
    """A `kvcascade serve` process with its whole pool online. Use as a context manager; leaving it proves `check`.

    `command` stands in its place, with the same flags; `environment` is added to ours.
    """

    def __init__(
        self,
        bench: Bench,
        name: str,
        *flags: str,
        command: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = bench.directory / name
        self._say = bench.say
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        self.socket = str(bench.sockets / f"{name}.sock")
        self._command = [
            *(command or (str(Path(sys.executable).with_name("kvcascade")), "serve")),
            *("--socket", self.socket, "--daemon-seed", SEED, "--dram-lock", "false", *flags),
        ]
        self._environment = {**os.environ, **(environment or {})}
        self._log = self._directory / "log"
        self._client = Client(self.socket)

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )
        self.pid = self._process.pid
        try:
            self._wait_online()
        except BaseException:
            self._end()
            raise
        return self

    def _wait_online(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            with suppress(DaemonUnavailable):
                if not self._client.connected:
                    self._client.connect()
                pool = next(tier for tier in self.status()["tiers"] if tier["name"] == "dram")
                self._say(f"waiting for the pool: {pool['online'] >> 20} of {pool['capacity'] >> 20} MiB")
                if pool["state"] != "onlining":
                    return
            time.sleep(0.05)
        raise BenchError(f"the daemon did not come up:\n{self._tail()}")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                violations = self._client.call(OP_CHECK, timeout=PATIENCE_S)["violations"]
                if violations:
                    raise BenchError(f"the daemon's invariants are broken: {'; '.join(violations[:5])}")
        finally:
            self._end()

    def _tail(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def _end(self) -> None:
        self._client.close()
        if sys.exc_info()[0] is not None:
            self._say("")
            print(f"the daemon's log:\n{self._tail()}", file=sys.stderr)
        # Nothing that a bench stored is worth the time of writing it down.
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def status(self) -> dict[str, Any]:
        return self._client.call(OP_STATUS, timeout=PATIENCE_S)

    def cpu(self) -> float:
        return process_cpu(self.pid)

    def rss(self) -> int:
        return anonymous_rss(self.pid)


# ---- engines


class Engine:
    """A process of its own that runs `work(connection, *arguments)`. Ends with the context."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def receive(self, timeout: float = PATIENCE_S) -> Any:
        """What the engine sends next; BenchError when it ended or says nothing."""
        if not self._connection.poll(timeout):
            raise BenchError(f"the engine process says nothing within {timeout:g} s")
        try:
            return self._connection.recv()
        except EOFError as error:
            raise BenchError("the engine process ended; its traceback is above") from error

    def send(self, message: Any) -> None:
        self._connection.send(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.kill()
        self._process.join()


def stop_asked(connection: Connection) -> bool:
    """In an engine: whether the other side has sent something or is gone."""
    return connection.poll(0)


def namespace(group: KVGroup, name: str = "bench") -> Namespace:
    return Namespace(
        model=name,
        weights_epoch="",
        kv_dtype="bfloat16",
        groups=(group,),
        kv_scales="",
        rope="",
        max_model_len=0,
        quantisation="",
        producer="bench",
        hash_algo="sha256_cbor",
        key_scheme="tagged-0.31",
        none_hash=none_hash(SEED),
    )


def session(socket: str, space: Namespace) -> Session:
    """An attached one-process engine."""
    made = Session(
        namespace=space.to_map(),
        probe=probe_hashes(algo=space.hash_algo, none_hash=space.none_hash, key_scheme=space.key_scheme),
        engine=("bench", "1"),
        socket_path=socket,
        timeout=30.0,
    )
    made.attach()
    return made


def check(condition: bool, what: str) -> None:
    """Figures of something that did not work are worth nothing."""
    if not condition:
        raise CascadeError(what)


def write_results(path: Path, rows: Sequence[Row], extra: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": [row.to_map() for row in rows], **extra}, indent=1) + "\n", encoding="utf-8")
