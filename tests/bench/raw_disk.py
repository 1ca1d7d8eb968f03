"""What the device itself gives: the bare transfer of a bench's bytes by threads, and fio on the same file."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .harness import check

Blocks = list[NDArray[np.uint8]]

FIO_BYTES = 32 << 20  # in flight


@contextmanager
def timed(seen: dict[str, list[float]], name: str) -> Iterator[None]:
    cpu, start = time.process_time(), time.perf_counter()
    yield
    seen[name].append(time.perf_counter() - start)
    seen[f"{name} cpu"].append(time.process_time() - cpu)


class RawDisk:
    """A file with its blocks on disk, written and read with O_DIRECT in calls of `together` blocks."""

    def __init__(self, path: Path, payloads: Blocks, targets: Blocks, *, together: int, threads: int) -> None:
        self._path, self._payloads, self._targets, self._together = path, payloads, targets, together
        self._block = payloads[0].nbytes
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, len(payloads) * self._block)
        self._threads = ThreadPoolExecutor(threads)

    def write(self) -> None:
        self._all(lambda at: os.pwritev(self._file, self._payloads[at : at + self._together], at * self._block))

    def read(self) -> None:
        self._all(lambda at: os.preadv(self._file, self._targets[at : at + self._together], at * self._block))

    def _all(self, move: Callable[[int], int]) -> None:
        moved = list(self._threads.map(move, range(0, len(self._payloads), self._together)))
        check(set(moved) == {self._together * self._block}, "a raw transfer was short")

    def fio(self, way: str) -> float | None:
        """Seconds that fio says it took for the same bytes in calls as large, FIO_BYTES in flight; None without it."""
        fio = shutil.which("fio")
        if fio is None:
            return None
        size = self._together * self._block
        command = [
            *(fio, "--name=raw", f"--filename={self._path}", f"--rw={way}", f"--bs={size}"),
            *(f"--size={len(self._payloads) * self._block}", f"--iodepth={FIO_BYTES // size}"),
            *("--direct=1", "--ioengine=io_uring", "--output-format=json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][way]
        return float(job["io_bytes"] / job["bw_bytes"])

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._file)
