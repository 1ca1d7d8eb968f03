"""The disk tier's directory: what it is, whose it is, what its records stand for; and its check while no daemon runs.

The rule: a directory that is not plainly ours, of our version and free is refused by a ConfigError that names
`disk.directory`, before anything in it is touched.
"""

import fcntl
import mmap
import os
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcascade.config.errors import ConfigError, TierUnavailable

from .journal import Journal, Replay, write_durably
from .slabfile import HASH_BYTES, PAGE, ReadJob, Scratch, errno_name, names, read_slots, unpack_header

U32 = npt.NDArray[np.uint32]

FORMAT_VERSION: Final = 1
DIRECT: Final = "direct"


@dataclass(slots=True, frozen=True)
class Located:
    """The records of a replay that a slot can stand for, each block once."""

    records: npt.NDArray[np.void]
    namespaces: list[tuple[bytes, bytes]]
    ns: U32
    sizes: dict[int, int]  # bytes of each slab file, by slot size
    dropped: Counter[str]


def locate(directory: Path, replay: Replay) -> Located:
    dropped = Counter(replay.dropped)
    sizes = {}
    for path in directory.glob("slab-*.dat"):
        number = path.name.removeprefix("slab-").removesuffix(".dat")
        if number.isdecimal() and int(number) % PAGE == 0 and int(number) > PAGE:
            sizes[int(number)] = path.stat().st_size
    records = replay.records

    def drop(bad: npt.NDArray[np.bool_], reason: str) -> None:
        nonlocal records
        if bad.any():
            dropped[reason] += int(np.count_nonzero(bad))
            records = records[~bad]

    slots_in = np.zeros(len(records), dtype=np.int64)
    for slot_bytes, size in sizes.items():
        slots_in[records["pages"] == slot_bytes // PAGE] = size // slot_bytes
    drop(records["index"] >= slots_in, "slot outside its file")
    payload_pages = -(-records["length"].astype(np.int64) // PAGE)
    drop((payload_pages + 1 != records["pages"]) | (payload_pages == 0), "length contradicts slot")
    tags = np.array(sorted(replay.namespaces), dtype=np.uint64)
    at = np.searchsorted(tags, records["namespace"])
    known = tags[np.minimum(at, len(tags) - 1)] == records["namespace"] if len(tags) else np.zeros(len(at), dtype=bool)
    drop(~known, "unknown namespace")
    drop(_older_copies(records), "older copy")
    used = np.unique(records["namespace"])
    ns = np.searchsorted(used, records["namespace"]).astype(np.uint32)
    return Located(records, [replay.namespaces[int(tag)] for tag in used], ns, sizes, dropped)


def _older_copies(records: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Which records name a block that a later record names too."""
    older = np.zeros(len(records), dtype=bool)
    words = np.ascontiguousarray(records["hash"]).view("<u8").reshape(len(records), HASH_BYTES // 8)
    # Equal keys are equal here; keys that are only equal here are told apart below.
    short = words[:, 0] ^ words[:, 1] ^ records["namespace"] ^ records["group"].astype(np.uint64)
    order = np.argsort(short, kind="stable")
    twins = np.flatnonzero(short[order][1:] == short[order][:-1])
    seen: dict[tuple[int, int, bytes], int] = {}
    for row in np.unique(np.concatenate([order[twins], order[twins + 1]])).tolist():
        record = records[row]
        key = (int(record["namespace"]), int(record["group"]), record["hash"].tobytes())
        if key in seen:
            older[seen[key]] = True
        seen[key] = row
    return older


def make_directory(directory: Path) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"disk.directory {directory} is not a directory; name one, it is made if need be")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"disk.directory {directory} cannot be made: {error.strerror}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"disk.directory {directory} is not writable for user {os.geteuid()}")


def lock(directory: Path) -> int:
    """Take the directory's lock, whose owner is this process until the descriptor is closed."""
    try:
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"disk.directory {directory} is not writable: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()}\n".encode(), 0)
    except BlockingIOError as error:
        holder = os.pread(fd, 100, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(
            f"disk.directory {directory} is in use by another process ({holder}); a directory serves one daemon"
        ) from error
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"disk.directory {directory} cannot be locked: {error.strerror}") from error
    return fd


def read_format(directory: Path, *, create: bool) -> bytes:
    """The id of a directory of our format; an empty one becomes such a directory if `create`."""
    path = directory / "format"
    try:
        with path.open("rb") as file:
            text = file.read(PAGE).decode("ascii", "replace")
    except FileNotFoundError:
        strangers = sorted(
            entry.name
            for entry in directory.iterdir()
            if entry.name not in ("lock", "lost+found") and not entry.name.endswith(".tmp")
        )
        if strangers or not create:
            what = f"holds {strangers[0]!r} but no file 'format'" if strangers else "has no file 'format'"
            raise ConfigError(f"disk.directory {directory} is not kvcascade's: it {what}; name an empty one") from None
        identity = uuid.uuid4().bytes
        write_durably(path, f"kvcascade disk {FORMAT_VERSION}\npage {PAGE}\nid {identity.hex()}\n".encode())
        return identity
    except OSError as error:
        raise ConfigError(f"disk.directory {directory}: 'format' cannot be read: {error.strerror}") from error
    lines = text.splitlines()
    if len(lines) != 3 or not lines[0].startswith("kvcascade disk "):
        raise ConfigError(f"disk.directory {directory}: 'format' is damaged; empty the directory to start afresh")
    if lines[0] != f"kvcascade disk {FORMAT_VERSION}" or lines[1] != f"page {PAGE}":
        raise ConfigError(
            f"disk.directory {directory} has format {lines[0].removeprefix('kvcascade disk ')!r}, {lines[1]!r}; this"
            f" version reads {FORMAT_VERSION}, 'page {PAGE}': empty the directory or name another"
        )
    try:
        identity = bytes.fromhex(lines[2].removeprefix("id "))
    except ValueError:
        identity = b""
    if len(identity) != 16:
        raise ConfigError(f"disk.directory {directory}: 'format' is damaged; empty the directory to start afresh")
    return identity


def probe_direct(directory: Path) -> str:
    """DIRECT if the file system takes aligned direct IO, else "buffered: why"."""
    path = directory / "probe.tmp"
    page = mmap.mmap(-1, PAGE)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
        try:
            if os.pwrite(fd, page, 0) != PAGE or os.preadv(fd, [page], 0) != PAGE:
                return "buffered: short direct IO"
        finally:
            os.close(fd)
    except OSError as error:
        return f"buffered: direct IO gave {errno_name(error)}"
    finally:
        page.close()
        path.unlink(missing_ok=True)
    return DIRECT


def default_capacity(directory: Path, share: float = 0.5) -> int:
    """Limit where the operator named none: a share of what the file system has left or this directory already uses."""
    existing = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    figures = os.statvfs(existing)
    ours = sum(path.stat().st_blocks * 512 for path in directory.glob("slab-*.dat"))
    return int((figures.f_bavail * figures.f_frsize + ours) * share) // PAGE * PAGE


# -- offline


@dataclass(slots=True, frozen=True)
class DirectoryReport:
    """What `check_directory` found.

    `blocks`, `disk_bytes`: what the records name, and what its slots take. `verified`: blocks whose slots prove them.
    `damaged`: reason → blocks whose slots do not, each a miss when it is read; `examples` names some of them.
    """

    blocks: int
    disk_bytes: int
    namespaces: list[tuple[bytes, bytes]]
    dropped: dict[str, int]
    verified: int
    damaged: dict[str, int]
    examples: list[str]

    @property
    def ok(self) -> bool:
        """Nothing was lost or damaged. A torn tail alone is what any crash leaves."""
        lost = {reason for reason in self.dropped if not reason.startswith("torn ")}
        return not self.damaged and not lost


def check_directory(path: Path, *, deep: bool, progress: Callable[[int, int], None] | None = None) -> DirectoryReport:
    """Verify a directory that no daemon uses; changes nothing in it.

    Reads records and slot headers; `deep` reads payloads too and compares every checksum. `progress(done, total)` in
    blocks. Raises ConfigError for a directory that is not kvcascade's or is in use, naming the process.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"disk.directory {directory} is not a directory")
    if not (directory / "format").exists():
        read_format(directory, create=False)
    held = lock(directory)
    try:
        identity = read_format(directory, create=False)
        try:
            located = locate(directory, Journal(directory, identity).replay())
            return _verify(directory, located, deep, progress)
        except OSError as error:
            raise TierUnavailable(f"disk.directory {directory}: {error.strerror or error}") from error
    finally:
        os.close(held)


def _verify(
    directory: Path, located: Located, deep: bool, progress: Callable[[int, int], None] | None
) -> DirectoryReport:
    records, damaged, examples = located.records, Counter[str](), list[str]()
    scratch = Scratch()
    done = 0
    for slot_bytes in located.sizes:
        rows = np.flatnonzero(records["pages"] == slot_bytes // PAGE)
        rows = rows[np.argsort(records["index"][rows])]
        path = directory / f"slab-{slot_bytes}.dat"
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        buffer = np.empty(slot_bytes - PAGE, dtype=np.uint8)
        try:
            for row in rows.tolist():
                record = records[row]
                index, length = int(record["index"]), int(record["length"])
                fingerprint = located.namespaces[int(located.ns[row])][0]
                job = ReadJob(0, fingerprint, record["hash"].tobytes(), int(record["group"]), length, buffer[:length])
                reason = _verify_slot(fd, index * slot_bytes, job, deep, scratch)
                if deep:
                    # A whole directory would push everything else out of the page cache.
                    os.posix_fadvise(fd, index * slot_bytes, slot_bytes, os.POSIX_FADV_DONTNEED)
                if reason is not None:
                    damaged[reason] += 1
                    if len(examples) < 20:
                        examples.append(f"{path.name} slot {index}: {reason}")
                done += 1
                if progress is not None and (done % 64 == 0 or done == len(records)):
                    progress(done, len(records))
        finally:
            os.close(fd)
    return DirectoryReport(
        blocks=len(records),
        disk_bytes=int(records["pages"].astype(np.int64).sum()) * PAGE,
        namespaces=located.namespaces,
        dropped=dict(located.dropped),
        verified=len(records) - sum(damaged.values()),
        damaged=dict(damaged),
        examples=examples,
    )


def _verify_slot(fd: int, offset: int, job: ReadJob, deep: bool, scratch: Scratch) -> str | None:
    if deep:
        return read_slots(fd, offset, [job], False, scratch)[0]
    try:
        if os.preadv(fd, [scratch.headers[0]], offset) != PAGE:
            return "short read"
    except OSError as error:
        return errno_name(error)
    header = unpack_header(scratch.headers[0])
    if isinstance(header, str):
        return header
    return None if names(header, job) else "foreign key"
