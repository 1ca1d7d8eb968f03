"""What a drive's directory held at the start, as its records tell it: no payload is read."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from .directory import locate
from .opened import Opened
from .slabfile import PAGE
from .slabfiles import SlabFiles

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]


@dataclass(slots=True, frozen=True)
class Recovery:
    """Row i of each array is one block, in the order in which they were written.

    `namespaces`: (fingerprint, descriptor); `ns`: (n,) u32, index into it. `hashes`, `parents`: (n, 32) u8, padded with
    zeros. `has_parent`: (n,) bool. `group`: (n,) u8. `slot`, `length` (bytes): (n,) u32. `stamp`: (n,) u64 as it was
    written. `dropped`: records and files not taken, by reason. `seconds`: what it took.
    """

    namespaces: list[tuple[bytes, bytes]]
    ns: U32
    hashes: U8
    parents: U8
    has_parent: npt.NDArray[np.bool_]
    group: U8
    slot: U32
    length: U32
    stamp: U64
    dropped: dict[str, int]
    seconds: float

    def __len__(self) -> int:
        return len(self.slot)

    @classmethod
    def joined(cls, parts: Sequence[Self], seconds: float) -> Self:
        """Those of several drives, at least one, as one; their slots must be numbered apart already."""
        namespaces: dict[bytes, bytes] = {}
        for part in parts:
            namespaces |= dict(part.namespaces)
        place = {fingerprint: index for index, fingerprint in enumerate(namespaces)}
        dropped: Counter[str] = Counter()
        ns = []
        for part in parts:
            dropped.update(part.dropped)
            names = np.array([place[fingerprint] for fingerprint, _ in part.namespaces] or [0], dtype=np.uint32)
            ns.append(names[part.ns])

        def joined(name: str) -> Any:
            return np.concatenate([getattr(part, name) for part in parts])

        return cls(
            namespaces=list(namespaces.items()),
            ns=np.concatenate(ns),
            hashes=joined("hashes"),
            parents=joined("parents"),
            has_parent=joined("has_parent"),
            group=joined("group"),
            slot=joined("slot"),
            length=joined("length"),
            stamp=joined("stamp"),
            dropped=dict(dropped),
            seconds=seconds,
        )


def recover(opened: Opened, files: SlabFiles, began: float) -> Recovery:
    """Replay the journal, fill `files` with what it names, sweep what it does not. Blocks; raises OSError."""
    replay = opened.journal.replay()
    replay.dropped.update(opened.discarded)
    located = locate(opened.folder, replay)
    records = located.records
    slots = np.empty(len(records), dtype=np.uint32)
    for slot_bytes, size in located.sizes.items():
        file = files.of_size(slot_bytes)
        rows = np.flatnonzero(records["pages"] == slot_bytes // PAGE)
        if not len(rows):
            # Nothing in it is known any more: its space is worth more than its name.
            opened.folder.unlink(file.name)
            continue
        file.fd = opened.open_file(file.name)
        index = records["index"][rows]
        sparse = opened.folder.fstat(file.fd).st_blocks * 512 < size // slot_bytes * slot_bytes
        file.restore(index, size // slot_bytes, sparse)
        slots[rows] = files.encode(file, index)
    opened.journal.sweep()
    opened.journal.forget_namespaces({fingerprint for fingerprint, _ in located.namespaces})
    return Recovery(
        namespaces=located.namespaces,
        ns=located.ns,
        hashes=np.ascontiguousarray(records["hash"]),
        parents=np.ascontiguousarray(records["parent"]),
        has_parent=records["has_parent"].astype(bool),
        group=np.ascontiguousarray(records["group"]),
        slot=slots,
        length=np.ascontiguousarray(records["length"]),
        stamp=np.ascontiguousarray(records["stamp"]),
        dropped=dict(located.dropped),
        seconds=time.monotonic() - began,
    )
