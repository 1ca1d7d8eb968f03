"""What a start brings back: blocks of an earlier daemon's DRAM, of the disk, and of a drive that comes later.

A block is kept where the whole chain above it is here too; the slots of the others are freed. Like all of
`residency.py` this is synchronous, and runs on the loop's thread.
"""

import logging

import numpy as np

from kvcascade.config.errors import CascadeError, Refused
from kvcascade.tiers.block import CRYPTOGRAPHIC
from kvcascade.tiers.drives import Drives
from kvcascade.tiers.namespace import Namespace
from kvcascade.tiers.pool import SlotState
from kvcascade.tiers.recovery import Recovery

from .index import NO_ROW, NO_SLOT, U32, Index, RowState
from .plans import Recovered, Space, Warm
from .protocol import Tier, decode_body
from .residency import Residency

log = logging.getLogger("kvcascade.recovery")


def warm_pieces(residency: Residency, most: int) -> list[tuple[Space, U32]]:
    """The ready rows in DRAM, in pieces of at most `most` rows of one space. Valid while nothing changes."""
    rows = np.flatnonzero(residency.resident(Tier.DRAM)).astype(np.uint32)
    pieces = []
    for space in residency.spaces:
        mine = rows[residency.index.space[rows] == space.number]
        pieces += [(space, mine[start : start + most]) for start in range(0, len(mine), most)]
    return pieces


def describe(index: Index, space: Space, rows: U32) -> Warm:
    """What `adopt` needs to know of rows of a space, those that are ready in DRAM still."""
    rows = rows[(index.state[rows] == RowState.READY) & (index.dram[rows] != NO_SLOT)]
    parents = index.parent[rows]
    has_parent = parents != NO_ROW
    keys_above = np.zeros((len(rows), 4), dtype=np.uint64)
    keys_above[has_parent] = index.key[parents[has_parent]]
    has_tokens = index.token_slot[rows] != NO_SLOT
    width = space.shape.block_tokens
    tokens = index.tokens_of(rows[has_tokens], width) if has_tokens.any() else np.empty((0, width), np.uint32)
    return Warm(
        space=space,
        keys=index.key[rows],
        parents=keys_above,
        has_parent=has_parent,
        pages=index.dram[rows],
        stamps=index.stamp[rows],
        reused=index.reused[rows],
        has_tokens=has_tokens,
        tokens=tokens,
    )


def adopt(residency: Residency, warm: list[Warm], recovery: Recovery | None) -> tuple[int, int]:
    """Takes over blocks of an earlier daemon's DRAM, and those that the disk holds; how many of each are kept.

    At the start alone. A block is kept where the whole chain above it is here, in either place; the slots of the
    others are free. ValueError where `warm` names slots that cannot be.
    """
    disk = _recovered(residency, recovery)
    index = residency.index
    if not warm and not len(disk.slots):
        return 0, 0
    # Blocks in both places stand twice; the first of two is kept, and DRAM knows the later stamp.
    parts = [(w.space.number, w.keys, w.parents, w.has_parent, w.stamps) for w in warm]
    parts.append((disk.space, disk.keys, disk.parents, disk.has_parent, disk.stamps))  # type: ignore[arg-type]
    rows = index.insert_bulk(
        np.concatenate([np.broadcast_to(np.asarray(p[0], np.uint32), len(p[4])) for p in parts]),
        *(np.concatenate([part[column] for part in parts]) for column in range(1, 5)),
    )
    warm_kept = sum(_adopt_warm(residency, piece) for piece in warm)
    disk_kept = _attach_disk(residency, disk, _find(index, disk) if warm else rows)
    residency.counters["recovered_blocks"] += disk_kept
    residency.counters["recovery_unreachable_blocks"] += len(disk.slots) - disk_kept
    dirty = np.flatnonzero(residency.resident(Tier.DRAM) & (index.disk[: index.high] == NO_SLOT))
    for size_class in range(len(residency.classes)):
        residency.stored(dirty[index.size_class[dirty] == size_class].astype(np.uint32), size_class)
    return warm_kept, disk_kept


def _adopt_warm(residency: Residency, warm: Warm) -> int:
    index, space = residency.index, warm.space
    rows = index.find(space.number, warm.keys)
    kept = rows != NO_ROW
    mine = rows[kept]
    if len(np.unique(mine)) != len(mine):
        raise ValueError("a block is named twice")
    if space.keeps_tokens and not warm.has_tokens.all():
        raise ValueError("a block whose hash can collide comes without its tokens")
    residency.dram.pool.restore(space.slot_bytes, warm.pages[kept], SlotState.READY)
    index.dram[mine] = warm.pages[kept]
    index.size_class[mine] = space.size_class
    index.reused[mine] = warm.reused[kept] != 0
    told = kept & warm.has_tokens
    if told.any():
        index.keep_tokens(rows[told], warm.tokens[told[warm.has_tokens]])
    return len(mine)


def join(residency: Residency, recovery: Recovery) -> int:
    """A drive that was left out is there, and holds these blocks; how many are kept. They count as the oldest.

    A block is kept where it has no other copy on disk and the whole chain above it is here. The slots of the others
    are freed.
    """
    index = residency.index
    disk = _recovered(residency, recovery)
    rows = _find(index, disk)
    new = rows == NO_ROW
    rows[new] = index.insert_bulk(
        disk.space[new], disk.keys[new], disk.parents[new], disk.has_parent[new], disk.stamps[new], oldest=True
    )
    kept = _attach_disk(residency, disk, rows)
    residency.counters["joined_blocks"] += kept
    log.warning("blocks of a drive that is back kept=%d given_up=%d", kept, len(recovery) - kept)
    on_disk = rows[rows != NO_ROW]
    for size_class in residency.classes:
        mine = on_disk[index.size_class[on_disk] == size_class.number]
        size_class.disk_victims.add(mine)
        size_class.clean_victims.add(mine[index.dram[mine] != NO_SLOT])
    return kept


def relink(residency: Residency, disk: Drives, recovery: Recovery) -> None:
    """The directory was closed and is open again, its slots numbered anew: finds the copies of the blocks again.

    What lay there alone and is there no more is forgotten. Nothing of the disk may be under way.
    """
    index, high = residency.index, residency.index.high
    had = np.flatnonzero(index.disk[:high] != NO_SLOT).astype(np.uint32)
    residency.count_clean(had[index.dram[had] != NO_SLOT], -1)
    index.take_off_disk(had)
    residency.disk = disk
    found = _recovered(residency, recovery)
    _attach_disk(residency, found, _find(index, found))
    nowhere = ~residency.in_memory(had) & (index.disk[had] == NO_SLOT) & (index.state[had] == RowState.READY)
    if nowhere.any():
        residency.forget(had[nowhere])


def _find(index: Index, disk: Recovered) -> U32:
    rows = np.full(len(disk.space), NO_ROW, dtype=np.uint32)
    for number in np.unique(disk.space).tolist():
        mine = np.flatnonzero(disk.space == number)
        rows[mine] = index.find(number, disk.keys[mine])
    return rows


def _attach_disk(residency: Residency, disk: Recovered, rows: U32) -> int:
    """Gives rows their copies on disk, and frees the slots of blocks without a row; how many have one."""
    index = residency.index
    # A row that does not exist is FREE: the column's first one lends its place.
    named = np.where(rows != NO_ROW, rows, 0)
    there = (rows != NO_ROW) & (index.state[named] == RowState.READY) & (index.disk[named] == NO_SLOT)
    there &= ~residency.descending(rows)
    first = np.zeros(len(rows), dtype=np.bool_)
    first[np.unique(rows, return_index=True)[1]] = True
    kept = there & first
    mine = rows[kept]
    classes = np.array([s.size_class for s in residency.spaces] or [0], dtype=np.uint8)
    index.put_on_disk(mine, disk.slots[kept])
    index.size_class[mine] = classes[disk.space[kept]]
    residency.count_clean(mine[index.dram[mine] != NO_SLOT], 1)
    if residency.disk is not None:
        residency.disk.free(disk.slots[~kept])
        # The capacity may have been larger in the run before.
        residency.trim_disk()
    return len(mine)


def _recovered(residency: Residency, recovery: Recovery | None) -> Recovered:
    """The blocks of a directory whose namespaces are understood; the slots of the others are freed."""
    if recovery is None or residency.disk is None:
        none = np.empty((0, 4), dtype=np.uint64)
        return Recovered(
            np.empty(0, np.uint32), none, none, np.empty(0, np.bool_), np.empty(0, np.uint64), np.empty(0, np.uint32)
        )
    spaces = np.full((len(recovery.namespaces), 256), NO_ROW, dtype=np.uint32)
    for number, (fingerprint, descriptor) in enumerate(recovery.namespaces):
        try:
            namespace = Namespace.from_map(decode_body(descriptor))
            if namespace.fingerprint() != fingerprint or namespace.hash_algo not in CRYPTOGRAPHIC:
                # Where hashes can collide token ids must be compared, and they are not read at the start.
                raise Refused("its blocks cannot be told apart by their hashes alone")
            for group in range(len(namespace.groups)):
                spaces[number, group] = residency.space(namespace, group).number
        except CascadeError:
            residency.counters["recovery_unfit_namespaces"] += 1
    space = spaces[recovery.ns, recovery.group]
    fits = space != NO_ROW
    lengths = np.array([s.slot_bytes for s in residency.spaces] or [0], dtype=np.uint32)
    fits &= lengths[np.where(fits, space, 0)] == recovery.length
    residency.disk.free(recovery.slot[~fits])
    residency.counters["recovery_unreachable_blocks"] += int((~fits).sum())
    return Recovered(
        space=space[fits],
        keys=np.ascontiguousarray(recovery.hashes).view("<u8").reshape(-1, 4)[fits],
        parents=np.ascontiguousarray(recovery.parents).view("<u8").reshape(-1, 4)[fits],
        has_parent=recovery.has_parent[fits],
        stamps=recovery.stamp[fits],
        slots=recovery.slot[fits],
    )
