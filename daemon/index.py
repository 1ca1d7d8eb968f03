"""The index: which blocks exist, how they chain, where their copies lie, and when they were last used.

One thread owns it. Every operation is synchronous, vectorised over a chain, and does no IO. A *row* (u32) names a block
for as long as it is resident; rows are re-used, so nobody keeps one without a pin or a busy mark. Columns are numpy
arrays; an open-addressing table of u64 entries finds rows by full-key compare.

Two rules hold throughout, and `check()` proves them:

- *Prefix-closed*: the parent of a findable block is findable or pending. A row counts its resident children (pending
  ones included) and is removed only at zero, or together with all its descendants.
- *Whole-chain stamps*: touching stamps every block of the chain, tail first, so a parent's stamp is always larger
  than its children's. Recency belongs to the block; all tiers read this one stamp.

Measured (2-core EPYC guest, 10^6 rows): 1,024 hashes found, pinned and stamped in about 0.3 ms; dict.get alone took
0.53 ms. Memory: see `nbytes`; about 110 B a row at 10^6 rows, token ids apart.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
U8 = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

NO_ROW = 0xFFFFFFFF
NO_SLOT = 0xFFFFFFFF

_EMPTY = np.uint64(0)
_HIGH = np.uint64(0xFFFFFFFF00000000)
_TOMB = np.uint64(0xFFFFFFFF)  # the low half of a live entry is row + 1, which never reaches this
_ONE = np.uint64(1)
_NO_ENTRY = np.uint64(0xFFFFFFFE)  # no row is so large
# At most a quarter of the table is used: of 1,024 keys 0.03 lie beyond these, 2.4 would lie beyond 4.
_FIRST_PLACES = np.arange(8, dtype=np.uint64)[:, np.newaxis]
_MIX = 0x9E3779B97F4A7C15
_FIRST = 1 << 40  # so that there is room below for older blocks that come later
_LATEST = np.uint64(1 << 62)  # a recorded stamp beyond it is taken for it: new ones must stay larger


class RowState:
    """FREE rows name nothing; PENDING and READY ones are in the table; DOOMED ones wait for pins and IO to end.

    Plain numbers, since reading a member of an enum takes a microsecond in Python 3.11, and a store reads thirty.
    """

    FREE: Final = 0
    PENDING: Final = 1
    READY: Final = 2
    DOOMED: Final = 3


def repeats(values: npt.NDArray[Any]) -> bool:
    """Whether a value occurs twice. By sorting: `np.unique` takes five times as long for a few hundred."""
    ordered = np.sort(values)
    return bool((ordered[1:] == ordered[:-1]).any())


def pack_keys(hashes: bytes, width: int) -> U64:
    """Concatenated block hashes of `width` (16 or 32) bytes as an (n, 4) u64 array, short ones padded with zeros."""
    words = np.frombuffer(hashes, dtype="<u8").reshape(-1, width // 8)
    if width == 32:
        return words
    keys = np.zeros((len(words), 4), dtype=np.uint64)
    keys[:, : width // 8] = words
    return keys


class TokenStore:
    """Token ids of blocks, packed: one u32 matrix a block size; 10^6 blocks of 16 tokens take 64 MB and no objects."""

    def __init__(self) -> None:
        self._matrix: dict[int, U32] = {}
        self._free: dict[int, list[int]] = {}
        self._used: dict[int, int] = {}

    def put(self, tokens: U32) -> U32:
        """Keeps `tokens` (n, block_tokens) and returns n slots."""
        count, width = tokens.shape
        matrix = self._matrix.setdefault(width, np.empty((1024, width), dtype=np.uint32))
        free = self._free.setdefault(width, [])
        used = self._used.setdefault(width, 0)
        reused = [free.pop() for _ in range(min(count, len(free)))]
        fresh = count - len(reused)
        if used + fresh > len(matrix):
            grown = np.empty((max(2 * len(matrix), used + fresh), width), dtype=np.uint32)
            grown[:used] = matrix[:used]
            self._matrix[width] = matrix = grown
        slots = np.array(reused + list(range(used, used + fresh)), dtype=np.uint32)
        self._used[width] = used + fresh
        matrix[slots] = tokens
        return slots

    def get(self, width: int, slots: U32) -> U32:
        """The token ids (n, width) kept under `slots`."""
        return self._matrix[width][slots]

    def drop(self, width: int, slots: U32) -> None:
        """Forgets `slots`."""
        self._free[width].extend(slots.tolist())

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self._matrix.values())


class Index:
    """Rows of resident blocks. A *space* (u32) numbers one (namespace, KV group); its keys never meet another's."""

    def __init__(self, rows: int = 65536) -> None:
        capacity = 1 << max(10, (rows - 1).bit_length())
        # The owner's thread alone changes these. Zeroed pages are not touched until used, so a large capacity is free.
        self.key: U64 = np.zeros((capacity, 4), dtype=np.uint64)
        self.space: U32 = np.zeros(capacity, dtype=np.uint32)
        self.parent: U32 = np.zeros(capacity, dtype=np.uint32)
        self.children: U32 = np.zeros(capacity, dtype=np.uint32)
        self.below: U32 = np.zeros(capacity, dtype=np.uint32)  # children that lie on disk
        self.pins: U32 = np.zeros(capacity, dtype=np.uint32)
        self.busy: npt.NDArray[np.uint8] = np.zeros(capacity, dtype=np.uint8)  # IO in flight that reads or fills a copy
        self.state: npt.NDArray[np.uint8] = np.zeros(capacity, dtype=np.uint8)
        self.stamp: U64 = np.zeros(capacity, dtype=np.uint64)
        self.hbm: U32 = np.full(capacity, NO_SLOT, dtype=np.uint32)
        self.dram: U32 = np.full(capacity, NO_SLOT, dtype=np.uint32)
        self.disk: U32 = np.full(capacity, NO_SLOT, dtype=np.uint32)
        self.size_class: npt.NDArray[np.uint8] = np.zeros(capacity, dtype=np.uint8)
        self.reused: U8 = np.zeros(capacity, dtype=np.uint8)  # was found by a lookup since it was stored
        self.brought: U8 = np.zeros(capacity, dtype=np.uint8)  # the source that it came from, until a lookup finds it
        self.shared_at: U32 = np.zeros(capacity, dtype=np.uint32)  # when Redis last got or kept a copy; 0: it has none
        self.named_at: U32 = np.zeros(capacity, dtype=np.uint32)  # when the directory was last told; 0: never
        self.token_slot: U32 = np.full(capacity, NO_SLOT, dtype=np.uint32)
        self.tokens = TokenStore()
        self.count = 0  # rows in the table: PENDING and READY
        self.doomed = 0
        self._clock = _FIRST  # the last stamp given
        self._first = _FIRST  # no block's is lower
        self._high = 0  # rows [0, high) have been used at some time
        self._free = np.zeros(capacity, dtype=np.uint32)
        self._free_count = 0
        self._place = np.zeros(capacity, dtype=np.uint32)  # scratch of childless_in_order, zero between calls
        self.block_tokens: dict[int, int] = {}  # space → tokens a block, filled by the owner
        self._table: U64 = np.zeros(4 * capacity, dtype=np.uint64)
        self._mask = np.uint64(len(self._table) - 1)

    _COLUMNS = (
        "key", "space", "parent", "children", "below", "pins", "busy", "state", "stamp",
        "hbm", "dram", "disk", "size_class", "reused", "brought", "shared_at", "named_at",
        "token_slot", "_free", "_place",
    )  # fmt: skip

    # ---- finding

    def find(self, space: int, keys: U64) -> U32:
        """Rows of `keys` (n, 4), NO_ROW where absent. Pending rows are found too."""
        spread = keys[:, 0] ^ self._salt(space)
        tag, position = spread & _HIGH, spread & self._mask
        # numpy's cost is by the call, so a key's first few places are read at once: nearly all lie there. What differs
        # in its tag, is empty or a tombstone becomes larger than any row.
        entries = self._table[(position + _FIRST_PLACES) & self._mask]
        lowest = ((entries ^ tag) - _ONE).min(axis=0)
        alike = lowest < _NO_ENTRY
        row = np.where(alike, lowest, _EMPTY).astype(np.uint32)
        found = alike & self._is(row, space, keys)
        if found.all():
            return row
        rows = np.where(found, row, np.uint32(NO_ROW))
        # Those that may lie further on, and those hidden by another key's entry with the same tag.
        left = np.flatnonzero(~found & (alike | (entries != _EMPTY).all(axis=0)))
        if len(left):
            rows[left] = self._find_by_place(space, keys[left], tag[left], position[left])
        return rows

    def _is(self, rows: U32, space: int, keys: U64) -> Mask:
        """Which of `rows` are those of `keys`."""
        differs = self.key[rows] ^ keys
        same: Mask = (differs[:, 0] | differs[:, 1] | differs[:, 2] | differs[:, 3]) == _EMPTY
        same &= self.space[rows] == space
        return same

    def _find_by_place(self, space: int, keys: U64, tag: U64, position: U64) -> U32:
        """`find`, one place at a time."""
        rows = np.full(len(keys), NO_ROW, dtype=np.uint32)
        index = np.arange(len(keys))
        while len(index):
            entry = self._table[position]
            row = (entry ^ tag) - _ONE
            alike = row < _NO_ENTRY
            row = np.where(alike, row, _EMPTY).astype(np.uint32)
            found = alike & self._is(row, space, keys)
            rows[index[found]] = row[found]
            again = ~found & (entry != _EMPTY)
            index, tag, keys = index[again], tag[again], keys[again]
            position = (position[again] + _ONE) & self._mask
        return rows

    def _salt(self, space: int) -> np.uint64:
        return np.uint64((space * _MIX + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF)

    # ---- adding and removing

    def insert_chain(self, space: int, keys: U64, above: U32, size_class: int) -> U32:
        """Adds absent `keys` to the chain of rows `above` (first block first; empty: they begin one), in order.

        The rows are PENDING, without copies; the whole chain is stamped. Returns the new rows.
        """
        count = len(keys)
        parent = int(above[-1]) if len(above) else NO_ROW
        rows = self._take_rows(count)
        self.key[rows] = keys
        self.space[rows] = space
        self.parent[rows[:1]] = parent
        self.parent[rows[1:]] = rows[:-1]
        self.children[rows] = 1
        self.children[rows[-1:]] = 0
        if parent != NO_ROW and count:
            self.children[parent] += 1
        self.state[rows] = RowState.PENDING
        self.size_class[rows] = size_class
        self.touch(np.concatenate([above, rows]))
        self._link(rows)
        return rows

    def insert_bulk(
        self, spaces: U32, keys: U64, parents: U64, has_parent: Mask, stamps: U64, *, oldest: bool = False
    ) -> U32:
        """Adds many READY blocks at once (recovery), with `parents` their parents' keys (n, 4).

        The keys must be absent. Returns rows, NO_ROW for those not kept: a second record of a key, or a block whose
        chain has a hole above it or no beginning. Stamps are repaired where needed, so that a parent's is larger than
        its children's; they become the newest of all, or the `oldest`. About a second for 10^6 blocks.
        """
        count = len(keys)
        rows = self._take_rows(count)
        self.key[rows] = keys
        self.space[rows] = spaces
        self.state[rows] = RowState.READY
        self.parent[rows] = NO_ROW
        self.children[rows] = 0
        self._link(rows)
        parent_row = np.full(count, NO_ROW, dtype=np.uint32)
        lost = np.zeros(count, dtype=np.bool_)
        for space in np.unique(spaces):
            mine = np.flatnonzero(spaces == space)
            lost[mine] = self.find(int(space), keys[mine]) != rows[mine]
            chained = mine[has_parent[mine] & ~lost[mine]]
            parent_row[chained] = self.find(int(space), parents[chained])
        lost |= has_parent & (parent_row == NO_ROW)
        self.parent[rows] = parent_row
        lost |= self.depth(rows) < 0
        np.add.at(self.children, parent_row[parent_row != NO_ROW], np.uint32(1))
        gone = self.with_descendants(rows[lost])
        freed, _ = self.remove(gone)
        kept = self.state[rows] == RowState.READY
        self.recycle(freed)
        self._restamp(rows[kept], stamps[kept], oldest)
        return np.where(kept, rows, np.uint32(NO_ROW)).astype(np.uint32)

    def _restamp(self, rows: U32, stamps: U64, oldest: bool) -> None:
        """Gives `rows`, of which none has a child that is not among them, fresh stamps in the order of `stamps`, each
        parent after its newest descendant."""
        stamps = np.minimum(stamps, _LATEST)
        among = np.zeros(self._high, dtype=np.bool_)
        among[rows] = True
        self.stamp[rows] = stamps
        depth = self.depth(rows)
        by_depth = rows[np.argsort(-depth, kind="stable")]
        levels = np.flatnonzero(np.diff(np.sort(-depth))) + 1
        for level in np.split(by_depth, levels):
            parents = self.parent[level]
            have = parents != NO_ROW
            have[have] = among[parents[have]]
            np.maximum.at(self.stamp, parents[have], self.stamp[level[have]])
        order = np.lexsort((-depth, self.stamp[rows]))
        if oldest:
            self._first -= len(rows)
            first = self._first
        else:
            # Later than all that was ever recorded: what the next start finds is in order, whichever start wrote it.
            self._clock = max(self._clock, int(stamps.max(initial=0)))
            first = self._clock + 1
            self._clock += len(rows)
        self.stamp[rows[order]] = np.arange(first, first + len(rows), dtype=np.uint64)

    def depth(self, rows: U32) -> npt.NDArray[np.int64]:
        """Blocks above each row in its chain, -1 where it has no beginning; by pointer doubling: O(n log depth)."""
        jump = self.parent[: self._high].astype(np.int64)
        jump[jump == NO_ROW] = self._high
        jump = np.append(jump, self._high)
        depth = (jump != self._high).astype(np.int64)
        for _ in range(self._high.bit_length()):
            if (jump == self._high).all():
                break
            depth += depth[jump]
            jump = jump[jump]
        result: npt.NDArray[np.int64] = np.where(jump == self._high, depth, -1)[rows]
        return result

    def remove(self, rows: U32) -> tuple[U32, U32]:
        """Makes `rows` unfindable. Returns (idle ones, ones that stay DOOMED until unpinned and idle).

        All resident children of `rows` must be among `rows`. The caller frees the copies of the idle rows and then
        gives the rows back with `recycle`; it does the same for the others when their last pin or IO ends.
        """
        live = rows[self.state[rows] != RowState.DOOMED]
        self._unlink(live)
        parents = self.parent[live]
        np.subtract.at(self.children, parents[parents != NO_ROW], np.uint32(1))
        parents = parents[self.disk[live] != NO_SLOT]
        np.subtract.at(self.below, parents[parents != NO_ROW], np.uint32(1))
        # A doomed row's descendants are doomed or gone with it: nothing below may follow its parent link any more.
        self.parent[live] = NO_ROW
        self.count -= len(live)
        self.state[live] = RowState.DOOMED
        self.doomed += len(live)
        held = (self.pins[live] != 0) | (self.busy[live] != 0)
        return live[~held], live[held]

    def recycle(self, rows: U32) -> None:
        """Gives DOOMED rows back once their copies are freed."""
        with_tokens = rows[self.token_slot[rows] != NO_SLOT]
        for width, chosen in self._by_width(with_tokens):
            self.tokens.drop(width, self.token_slot[chosen])
        self.token_slot[rows] = NO_SLOT
        self.hbm[rows] = NO_SLOT
        self.dram[rows] = NO_SLOT
        self.disk[rows] = NO_SLOT
        self.children[rows] = 0
        self.below[rows] = 0
        self.reused[rows] = 0
        self.brought[rows] = 0
        self.shared_at[rows] = 0
        self.named_at[rows] = 0
        self.state[rows] = RowState.FREE
        self.doomed -= len(rows)
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)

    def put_on_disk(self, rows: U32, slots: U32) -> None:
        """These rows, live and not on disk, have copies in slots there."""
        self.disk[rows] = slots
        parents = self.parent[rows]
        np.add.at(self.below, parents[parents != NO_ROW], np.uint32(1))

    def take_off_disk(self, rows: U32) -> None:
        """These rows have no copies on disk any more."""
        self.disk[rows] = NO_SLOT
        parents = self.parent[rows]
        np.subtract.at(self.below, parents[parents != NO_ROW], np.uint32(1))

    def with_descendants(self, rows: U32) -> U32:
        """`rows` and every row below them, by pointer doubling over all rows: for faults, not for the daily path."""
        if not len(rows) or not self.children[rows].any():
            return rows
        jump = np.append(self.parent[: self._high], np.uint32(NO_ROW)).astype(np.int64)
        jump[jump == NO_ROW] = self._high
        below = np.zeros(self._high + 1, dtype=np.bool_)
        below[rows] = True
        for _ in range(self._high.bit_length()):  # parents that are no chain, as records may claim, never end
            below |= below[jump]
            jump = jump[jump]
            if (jump == self._high).all():
                break
        state = self.state[: self._high]
        below[: self._high] &= (state == RowState.PENDING) | (state == RowState.READY)
        return np.flatnonzero(below[: self._high]).astype(np.uint32)

    # ---- recency

    def touch(self, rows: U32) -> None:
        """Stamps a chain (first block first): newest of all, the tail oldest among them."""
        count = len(rows)
        self.stamp[rows] = np.arange(self._clock + count, self._clock, -1, dtype=np.uint64)
        self._clock += count

    def touch_up(self, rows: U32) -> None:
        """Stamps a piece of a chain (first block first), and all that lies above it."""
        if not len(rows):
            return
        above = []
        row = int(self.parent[rows[0]])
        while row != NO_ROW:
            above.append(row)
            row = int(self.parent[row])
        self.touch(np.concatenate([np.array(above[::-1], dtype=np.uint32), rows]))

    def childless_in_order(self, rows: U32, children: U32 | None = None) -> Mask:
        """Which of `rows` (distinct) may go together and leave no child behind: all their children go with them.

        `children`: the column that counts those that matter; all, unless given.
        """
        children = self.children if children is None else children
        count = len(rows)
        # Each row's parent as its place among `rows` plus one, 0 for a parent that is not one of them.
        self._place[rows] = np.arange(1, count + 1, dtype=np.uint32)
        parents = self.parent[rows]
        have = parents != NO_ROW
        above = np.zeros(count + 1, dtype=np.int64)
        above[1:][have] = self._place[parents[have]]
        self._place[rows] = 0
        stays = np.zeros(count + 1, dtype=np.bool_)
        stays[1:] = children[rows] != np.bincount(above[1:], minlength=count + 1)[1:]
        # What stays holds all above it, by pointer doubling: a chain of thousands takes a dozen rounds.
        while above.any():
            stays[above[stays]] = True
            stays[0] = False
            above = above[above]
        chosen: Mask = ~stays[1:]
        return chosen

    # ---- tokens

    def keep_tokens(self, rows: U32, tokens: U32) -> None:
        """Keeps the token ids (n, block_tokens) of `rows`."""
        self.token_slot[rows] = self.tokens.put(tokens)

    def tokens_of(self, rows: U32, width: int) -> U32:
        """Token ids (n, width); all rows must have some."""
        return self.tokens.get(width, self.token_slot[rows])

    def _by_width(self, rows: U32) -> Iterator[tuple[int, U32]]:
        for space in np.unique(self.space[rows]):
            yield self.block_tokens[int(space)], rows[self.space[rows] == space]

    # ---- the table

    def _link(self, rows: U32) -> None:
        if 2 * (self.count + len(rows)) > len(self._table):
            raise AssertionError("the table grows with the rows")
        spread = self.key[rows, 0] ^ self._salts(self.space[rows])
        entry = (spread & _HIGH) | (rows.astype(np.uint64) + np.uint64(1))
        position = spread & self._mask
        while len(entry):
            there = self._table[position]
            open_ = (there == _EMPTY) | (there == _TOMB)
            self._table[position[open_]] = entry[open_]
            # Of several rows that chose one place the last one written has it.
            again = self._table[position] != entry
            entry = entry[again]
            position = (position[again] + np.uint64(1)) & self._mask
        self.count += len(rows)

    def _salts(self, spaces: U32) -> U64:
        return spaces.astype(np.uint64) * np.uint64(_MIX) + np.uint64(0x632BE59BD9B4E019)

    def _unlink(self, rows: U32) -> None:
        spread = self.key[rows, 0] ^ self._salts(self.space[rows])
        wanted = (spread & _HIGH) | (rows.astype(np.uint64) + np.uint64(1))
        position = spread & self._mask
        here = self._table[(position + _FIRST_PLACES) & self._mask] == wanted
        places = (position + here.argmax(axis=0).astype(np.uint64)) & self._mask
        index = np.flatnonzero(~here.any(axis=0))
        while len(index):
            found = self._table[position[index]] == wanted[index]
            places[index[found]] = position[index[found]]
            index = index[~found]
            position[index] = (position[index] + _ONE) & self._mask
        self._table[places] = _TOMB
        # A tombstone with nothing behind it is an empty place; clearing backwards keeps tombstones inside clusters
        # only, so that no rebuild is ever needed.
        while len(places):
            places = places[(self._table[places] == _TOMB) & (self._table[(places + _ONE) & self._mask] == _EMPTY)]
            self._table[places] = _EMPTY
            places = (places - _ONE) & self._mask

    # ---- rows

    def _take_rows(self, count: int) -> U32:
        reused = min(count, self._free_count)
        fresh = count - reused
        if self._high + fresh > len(self.state):
            self._grow(self._high + fresh)
        self._free_count -= reused
        old = self._free[self._free_count : self._free_count + reused].copy()
        new = np.arange(self._high, self._high + fresh, dtype=np.uint32)
        self._high += fresh
        return np.concatenate([old, new])

    def _grow(self, rows: int) -> None:
        capacity = 1 << (rows - 1).bit_length()
        old = len(self.state)
        for name in self._COLUMNS:
            column: npt.NDArray[Any] = getattr(self, name)
            grown = np.zeros((capacity, *column.shape[1:]), dtype=column.dtype)
            grown[:old] = column
            if name in ("hbm", "dram", "disk", "token_slot"):
                grown[old:] = NO_SLOT
            setattr(self, name, grown)
        self._table = np.zeros(4 * capacity, dtype=np.uint64)
        self._mask = np.uint64(len(self._table) - 1)
        live = self.rows()
        self.count -= len(live)
        self._link(live)

    def rows(self) -> U32:
        """All PENDING and READY rows."""
        state = self.state[: self._high]
        return np.flatnonzero((state == RowState.PENDING) | (state == RowState.READY)).astype(np.uint32)

    @property
    def high(self) -> int:
        """Columns are in use below this row."""
        return self._high

    @property
    def nbytes(self) -> int:
        """Bytes of the columns and the table that rows in use can touch, token ids apart."""
        share = self._high / len(self.state)
        columns = sum(getattr(self, name).nbytes for name in self._COLUMNS)
        return int(columns * share) + self._table.nbytes

    # ---- proof

    def check(self) -> list[str]:
        """Violations of what this module promises; empty when all is well. O(rows)."""
        wrong: list[str] = []
        live = self.rows()
        if len(live) != self.count:
            wrong.append(f"index: {self.count} rows counted, {len(live)} live")
        entries = self._table[(self._table != _EMPTY) & (self._table != _TOMB)]
        if len(entries) != self.count:
            wrong.append(f"index: {len(entries)} table entries for {self.count} rows")
        for space in np.unique(self.space[live]):
            mine = live[self.space[live] == space]
            if not np.array_equal(self.find(int(space), self.key[mine]), mine):
                wrong.append(f"index: rows of space {space} are not found under their own keys")
        parents = self.parent[live]
        have = parents != NO_ROW
        up = parents[have]
        if len(up):
            resident = (self.state[up] == RowState.PENDING) | (self.state[up] == RowState.READY)
            if not resident.all():
                wrong.append(f"index: {int((~resident).sum())} blocks have no resident parent")
            older = self.stamp[up] <= self.stamp[live[have]]
            if older.any():
                wrong.append(f"index: {int(older.sum())} blocks are stamped newer than their parent")
        children = np.zeros(max(self._high, 1), dtype=np.uint32)
        np.add.at(children, up, np.uint32(1))
        off = live[children[live] != self.children[live]]
        if len(off):
            wrong.append(f"index: {len(off)} rows count their children wrongly")
        below = np.zeros(max(self._high, 1), dtype=np.uint32)
        np.add.at(below, up[self.disk[live[have]] != NO_SLOT], np.uint32(1))
        if (below[live] != self.below[live]).any():
            wrong.append("index: rows count their children on disk wrongly")
        doomed = np.flatnonzero(self.state[: self._high] == RowState.DOOMED)
        if len(doomed) != self.doomed:
            wrong.append(f"index: {self.doomed} doomed rows counted, {len(doomed)} found")
        idle = doomed[(self.pins[doomed] == 0) & (self.busy[doomed] == 0)]
        if len(idle):
            wrong.append(f"index: {len(idle)} doomed rows are neither pinned nor busy")
        ready = live[self.state[live] == RowState.READY]
        nowhere = (self.hbm[ready] == NO_SLOT) & (self.dram[ready] == NO_SLOT) & (self.disk[ready] == NO_SLOT)
        if nowhere.any():
            wrong.append(f"index: {int(nowhere.sum())} ready blocks have no copy")
        if self._place.any():
            wrong.append("index: scratch column is dirty")
        return wrong
