"""The disk tier's directory: what it is, whose it is, what its records stand for; and its check while no daemon runs.

The rule: a directory that is not plainly ours, of our version and free is refused by a ConfigError that names
`disk.directory`, before anything in it is touched.
"""

import errno
import fcntl
import mmap
import os
import re
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcascade.config.errors import ConfigError, TierUnavailable

from .folder import Folder, read_whole, write_durably
from .journal import RECORD, Journal, Replay, namespace_tag, put_record
from .slabfile import (
    HASH_BYTES,
    PAGE,
    ReadJob,
    Scratch,
    claims,
    errno_name,
    read_slots,
    slot_size,
    unpack_header,
)

U32 = npt.NDArray[np.uint32]

FORMAT_VERSION: Final = 1
DIRECT: Final = "direct"
_REBUILD: Final = "`kvcascade check DIRECTORY --repair` takes back what its slots prove; or empty it to start afresh"
_OURS: Final = re.compile(r"slab-\d+\.dat|(journal|snapshot)-\d{8}|namespace-[0-9a-f]{64}")


class OldFormat(ConfigError):
    """A directory that an earlier version wrote, of format `version`."""

    def __init__(self, text: str, version: int) -> None:
        super().__init__(text)
        self.version = version


class LostFormat(ConfigError):
    """A directory that looks like ours, but whose file 'format' is missing or says nothing."""


@dataclass(slots=True, frozen=True)
class Located:
    """The records of a replay that a slot can stand for, each block once."""

    records: npt.NDArray[np.void]
    namespaces: list[tuple[bytes, bytes]]
    ns: U32
    sizes: dict[int, int]  # bytes of each slab file, by slot size
    dropped: Counter[str]


def slab_name(slot_bytes: int) -> str:
    return f"slab-{slot_bytes}.dat"


def slab_files(folder: Folder) -> dict[int, str]:
    """Names of the slab files by slot size."""
    found = {}
    for name in folder.names():
        number = name.removeprefix("slab-").removesuffix(".dat")
        if number.isdecimal() and name == slab_name(int(number)) and int(number) % PAGE == 0 and int(number) > PAGE:
            found[int(number)] = name
    return found


def locate(folder: Folder, replay: Replay) -> Located:
    dropped = Counter(replay.dropped)
    sizes = {slot_bytes: folder.stat(name).st_size for slot_bytes, name in slab_files(folder).items()}
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
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"disk.directory {directory} is not a directory; name one, it is made if need be") from error
    except OSError as error:
        raise ConfigError(f"disk.directory {directory} cannot be made: {error.strerror}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"disk.directory {directory} is not writable for user {os.geteuid()}")


def open_folder(directory: Path, folder: Callable[[Path], Folder] = Folder) -> Folder:
    try:
        return folder(directory)
    except OSError as error:
        if not _is_refusal(error):
            raise
        raise ConfigError(f"disk.directory {directory} cannot be opened: {error.strerror}") from error


def _is_refusal(error: OSError) -> bool:
    """Whether the operator can help, rather than the device be waited for."""
    return error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.ENOLCK)


def lock(folder: Folder) -> int:
    """Take the directory's lock, whose owner is this process until the descriptor is closed.

    Raises ConfigError, and OSError when it is the device that fails.
    """
    directory = folder.path
    try:
        fd = folder.open("lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if not _is_refusal(error):
            raise
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
        if not _is_refusal(error):
            raise
        raise ConfigError(f"disk.directory {directory} cannot be locked: {error.strerror}") from error
    return fd


def read_format(folder: Folder, *, create: bool) -> bytes:
    """The id of a directory of our format; an empty one becomes such a directory if `create`.

    Raises OldFormat for one that an earlier version wrote, LostFormat where it may be ours but does not say so,
    ConfigError for what is not ours, and OSError when it is the device that fails.
    """
    directory = folder.path
    try:
        text = read_whole(folder, "format", PAGE).decode("ascii", "replace")
    except FileNotFoundError:
        strangers = sorted(
            name for name in folder.names() if name not in ("lock", "lost+found") and not name.endswith(".tmp")
        )
        if strangers or not create:
            if slab_files(folder):
                raise LostFormat(f"disk.directory {directory}: 'format' is missing; {_REBUILD}") from None
            what = f"holds {strangers[0]!r} but no file 'format'" if strangers else "has no file 'format'"
            raise ConfigError(f"disk.directory {directory} is not kvcascade's: it {what}; name an empty one") from None
        identity = uuid.uuid4().bytes
        _write_format(folder, identity)
        return identity
    except OSError as error:
        if not _is_refusal(error):
            raise
        raise ConfigError(f"disk.directory {directory}: 'format' cannot be read: {error.strerror}") from error
    lines = text.splitlines()
    if len(lines) != 3 or not lines[0].startswith("kvcascade disk "):
        raise LostFormat(f"disk.directory {directory}: 'format' is damaged; {_REBUILD}")
    version = lines[0].removeprefix("kvcascade disk ")
    if version.isdecimal() and int(version) < FORMAT_VERSION:
        raise OldFormat(
            f"disk.directory {directory} has format {version}, of an earlier version; this one reads {FORMAT_VERSION}:"
            " empty the directory, name another, or set disk.old_format = discard",
            int(version),
        )
    if lines[0] != f"kvcascade disk {FORMAT_VERSION}" or lines[1] != f"page {PAGE}":
        raise ConfigError(
            f"disk.directory {directory} has format {version!r}, {lines[1]!r}; this"
            f" version reads {FORMAT_VERSION}, 'page {PAGE}': empty the directory or name another"
        )
    try:
        identity = bytes.fromhex(lines[2].removeprefix("id "))
    except ValueError:
        identity = b""
    if len(identity) != 16:
        raise LostFormat(f"disk.directory {directory}: 'format' is damaged; {_REBUILD}")
    return identity


def _write_format(folder: Folder, identity: bytes) -> None:
    write_durably(folder, "format", f"kvcascade disk {FORMAT_VERSION}\npage {PAGE}\nid {identity.hex()}\n".encode())


def discard_content(folder: Folder) -> int:
    """Remove all that a version of kvcascade keeps in a directory, `format` last; returns the number of slab files,
    segments and snapshots."""
    ours = [name for name in folder.names() if _OURS.fullmatch(name)]
    for name in ours:
        folder.unlink(name)
    folder.sync()
    folder.unlink("format")
    folder.sync()
    return sum(not name.startswith("namespace-") for name in ours)


def probe_direct(folder: Folder) -> str:
    """DIRECT if the file system takes aligned direct IO, else "buffered: why"."""
    page = mmap.mmap(-1, PAGE)
    try:
        fd = folder.open("probe.tmp", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            if folder.write(fd, [memoryview(page)], 0) != PAGE or folder.read(fd, [memoryview(page)], 0) != PAGE:
                return "buffered: short direct IO"
        finally:
            folder.close_file(fd)
    except OSError as error:
        return f"buffered: direct IO gave {errno_name(error)}"
    finally:
        page.close()
        folder.unlink("probe.tmp")
    return DIRECT


# -- offline


@dataclass(slots=True, frozen=True)
class DirectoryReport:
    """What `check_directory` found.

    `blocks`, `disk_bytes`: what the records name, and what its slots take. `verified`: blocks whose slots prove them.
    `damaged`: reason → blocks whose slots do not, each a miss when it is read; `examples` names some of them.
    `repaired`: what was done about it, in words; empty unless a repair was asked for and needed.
    """

    blocks: int
    disk_bytes: int
    namespaces: list[tuple[bytes, bytes]]
    dropped: dict[str, int]
    verified: int
    damaged: dict[str, int]
    examples: list[str]
    repaired: list[str]

    @property
    def ok(self) -> bool:
        """Nothing was lost or damaged. A torn tail alone is what any crash leaves."""
        lost = {reason for reason in self.dropped if not reason.startswith("torn ")}
        return not self.damaged and not lost


def check_directory(
    path: Path, *, deep: bool, repair: bool = False, progress: Callable[[int, int], None] | None = None
) -> DirectoryReport:
    """Verify a directory that no daemon uses; changes nothing in it unless `repair`.

    Reads records and slot headers; `deep` reads payloads too and compares every checksum. `progress(done, total)` in
    blocks. `repair` writes the records anew, without those that prove false: the report tells what was found before.
    Where records were lost it also looks through all slots, and takes back each block that proves itself whole; among
    them may be blocks that had been evicted, which are as true as the others. So it is where 'format' is damaged or
    missing, which makes all records unreadable. A crash in a repair leaves the directory as it was, repaired, or to be
    repaired again. Raises ConfigError for a directory that is not kvcascade's or is in use, naming the process.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"disk.directory {directory} is not a directory")
    try:
        folder = open_folder(directory)
        try:
            if "format" not in folder.names() and not (repair and slab_files(folder)):
                read_format(folder, create=False)
            held = lock(folder)
            try:
                try:
                    identity = read_format(folder, create=False)
                except LostFormat as lost:
                    if not repair:
                        raise
                    return _rebuild(folder, lost, progress)
                return _examine(folder, Journal(folder, identity), deep, repair, progress)
            finally:
                os.close(held)
        finally:
            folder.close()
    except OSError as error:
        raise TierUnavailable(f"disk.directory {directory}: {error.strerror or error}") from error


def _examine(
    folder: Folder, journal: Journal, deep: bool, repair: bool, progress: Callable[[int, int], None] | None
) -> DirectoryReport:
    replay = journal.replay()
    located = locate(folder, replay)
    records = located.records
    reasons = _verify(folder, located, deep, progress)
    bad = np.array(sorted(reasons), dtype=np.intp)
    repaired = []
    if repair and (reasons or located.dropped or any(name.endswith(".tmp") for name in folder.names())):
        repaired = _repair(folder, journal, replay, located, bad)
    examples = [
        f"{slab_name(int(records['pages'][row]) * PAGE)} slot {int(records['index'][row])}: {reasons[row]}"
        for row in bad[:20].tolist()
    ]
    return DirectoryReport(
        blocks=len(records),
        disk_bytes=int(records["pages"].astype(np.int64).sum()) * PAGE,
        namespaces=located.namespaces,
        dropped=dict(located.dropped),
        verified=len(records) - len(reasons),
        damaged=dict(Counter(reasons.values())),
        examples=examples,
        repaired=repaired,
    )


def _rebuild(folder: Folder, lost: LostFormat, progress: Callable[[int, int], None] | None) -> DirectoryReport:
    """Make a new format, and records of the blocks that their slots prove: the old ones need the old format's id."""
    strangers = [
        name
        for name in folder.names()
        if not _OURS.fullmatch(name) and name not in ("lock", "format", "lost+found") and not name.endswith(".tmp")
    ]
    if strangers:
        raise ConfigError(f"{lost}; it cannot be repaired, since it holds {strangers[0]!r}, which is not kvcascade's")
    identity = uuid.uuid4().bytes
    journal = Journal(folder, identity)
    replay = journal.replay()
    located = locate(folder, replay)
    found = _unrecorded(folder, replay, located, located.records, progress)
    if not len(found):
        raise ConfigError(f"disk.directory {folder.path}: no slot proves a block: empty the directory to start afresh")
    # In this order: with a new format and none of its records a daemon would start empty.
    journal.rewrite(found)
    journal.forget_namespaces({replay.namespaces[int(tag)][0] for tag in np.unique(found["namespace"])})
    _write_format(folder, identity)
    after = locate(folder, replace(replay, records=found))
    return DirectoryReport(
        blocks=len(found),
        disk_bytes=int(found["pages"].astype(np.int64).sum()) * PAGE,
        namespaces=after.namespaces,
        dropped={},
        verified=len(found),
        damaged={},
        examples=[],
        repaired=["'format' made anew", f"{len(found)} blocks without a record taken back"],
    )


def _verify(
    folder: Folder, located: Located, deep: bool, progress: Callable[[int, int], None] | None
) -> dict[int, str]:
    """Why a record's slot does not hold its block, by row."""
    records, reasons = located.records, dict[int, str]()
    scratch = Scratch()
    done = 0
    for slot_bytes in located.sizes:
        rows = np.flatnonzero(records["pages"] == slot_bytes // PAGE)
        rows = rows[np.argsort(records["index"][rows])]
        fd = folder.open(slab_name(slot_bytes), os.O_RDONLY)
        buffer = np.empty(slot_bytes - PAGE, dtype=np.uint8)
        try:
            for row in rows.tolist():
                record = records[row]
                index, length = int(record["index"]), int(record["length"])
                fingerprint = located.namespaces[int(located.ns[row])][0]
                job = ReadJob(0, fingerprint, record["hash"].tobytes(), int(record["group"]), length, buffer[:length])
                reason = _verify_slot(folder, fd, index * slot_bytes, job, deep, scratch)
                if deep:
                    # A whole directory would push everything else out of the page cache.
                    os.posix_fadvise(fd, index * slot_bytes, slot_bytes, os.POSIX_FADV_DONTNEED)
                if reason is not None:
                    reasons[row] = reason
                done += 1
                if progress is not None and (done % 64 == 0 or done == len(records)):
                    progress(done, len(records))
        finally:
            folder.close_file(fd)
    return reasons


def _verify_slot(folder: Folder, fd: int, offset: int, job: ReadJob, deep: bool, scratch: Scratch) -> str | None:
    if deep:
        return read_slots(folder, fd, offset, [job], False, scratch)[0]
    failure = _read_page(folder, fd, offset, scratch)
    claim = claims(scratch.headers[0], job) if failure is None else failure
    return claim if isinstance(claim, str) else None


def _read_page(folder: Folder, fd: int, offset: int, scratch: Scratch) -> str | None:
    """Read a slot's header page; why it could not be read."""
    try:
        return None if folder.read(fd, [scratch.headers[0]], offset) == PAGE else "short read"
    except OSError as error:
        return errno_name(error)


def _repair(folder: Folder, journal: Journal, replay: Replay, located: Located, bad: npt.NDArray[np.intp]) -> list[str]:
    """Write the records that hold anew, sweep the rest; what was done, in words."""
    done = []
    keep = np.delete(located.records, bad)
    if len(bad):
        done.append(f"{len(bad)} damaged blocks forgotten")
    lost = {reason: count for reason, count in located.dropped.items() if reason != "older copy"}
    if any("record" in reason or reason.startswith(("unreadable", "torn")) for reason in lost):
        found = _unrecorded(folder, replay, located, keep)
        if len(found):
            keep = np.concatenate([keep, found])
            done.append(f"{len(found)} blocks without a record taken back")
    journal.rewrite(keep)
    journal.forget_namespaces({replay.namespaces[int(tag)][0] for tag in np.unique(keep["namespace"])})
    for name in folder.names():
        if name.endswith(".tmp"):
            folder.unlink(name)
            done.append(f"left-over {name} removed")
    done += [f"{count} records dropped for good: {reason}" for reason, count in located.dropped.items()]
    return done


def _unrecorded(
    folder: Folder,
    replay: Replay,
    located: Located,
    keep: npt.NDArray[np.void],
    progress: Callable[[int, int], None] | None = None,
) -> npt.NDArray[np.void]:
    """Records for blocks that no record names, and that their slots prove whole."""
    fingerprints = {entry[0] for entry in replay.namespaces.values()}
    known = {(int(r["namespace"]), int(r["group"]), r["hash"].tobytes()) for r in keep}
    found = bytearray()
    scratch = Scratch()
    done, slots = 0, sum(size // slot_bytes for slot_bytes, size in located.sizes.items())
    for slot_bytes, size in located.sizes.items():
        named = set(keep["index"][keep["pages"] == slot_bytes // PAGE].tolist())
        buffer = np.empty(slot_bytes - PAGE, dtype=np.uint8)
        fd = folder.open(slab_name(slot_bytes), os.O_RDONLY)
        try:
            for index in range(size // slot_bytes):
                done += 1
                if progress is not None and (done % 64 == 0 or done == slots):
                    progress(done, slots)
                if index in named or _read_page(folder, fd, index * slot_bytes, scratch) is not None:
                    continue
                header = unpack_header(scratch.headers[0])
                if isinstance(header, str) or slot_size(header.meta.length) != slot_bytes:
                    continue
                meta = header.meta
                tag = namespace_tag(meta.namespace)
                block = (tag, meta.group, meta.block_hash)
                job = ReadJob(0, meta.namespace, meta.block_hash, meta.group, meta.length, buffer[: meta.length])
                if block in known or meta.namespace not in fingerprints:
                    continue
                if read_slots(folder, fd, index * slot_bytes, [job], False, scratch)[0] is None:
                    known.add(block)
                    numbers = (meta.group, meta.length, slot_bytes // PAGE, index)
                    found += put_record(meta.namespace, meta.stamp, meta.block_hash, meta.parent, *numbers)
        finally:
            folder.close_file(fd)
    return np.frombuffer(found, dtype=RECORD)
