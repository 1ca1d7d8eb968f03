"""Bytes: an engine's paged tensors into the pool and back, against memcpy of the same bytes in the same process.

A round copies everything once by memcpy, stores it as new chains (reserve, gather, commit), again by memcpy, loads it
(lookup, load, scatter, generations, release), again by memcpy. Each is compared with the memcpys around it. The pool is
a little larger than what a round stores, so that every store also evicts, as in a cache that is in use.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcascade.connectors.layout import Gatherer, PoolSlots, describe_paged
from kvcascade.daemon.attachment import Session
from kvcascade.tiers.block import KVGroup

from .harness import (
    GB,
    Bench,
    Daemon,
    Engine,
    Row,
    at_least,
    check,
    median_ratio,
    namespace,
    pool_size,
    process_cpu,
    ratio_below,
    session,
)

HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class Case:
    """One size of block in one layout, moved in batches: a batch is a request with a chain of its own."""

    label: str
    layout: str
    group: KVGroup
    blocks: int
    batch: int
    throughput: float
    cpu: float | None

    @property
    def block_bytes(self) -> int:
        return self.group.block_bytes(2)

    @property
    def total(self) -> int:
        return self.blocks * self.block_bytes


# A block of an 8B model (32 layers, 8 KV heads of 128, bf16) and one of a small shard.
LARGE = KVGroup(block_tokens=16, layers=32, kv_heads=8, head_dim=128)
SMALL = KVGroup(block_tokens=16, layers=4, kv_heads=2, head_dim=128)


def cases(bench: Bench) -> list[Case]:
    """vLLM's layout with the heads outermost, and one of older engines with K and V apart and the heads innermost."""
    large, small, layouts = (128, 1024, ["LBHNC"]) if bench.quick else (512, 4096, ["LKBNHD", "LBHNC"])
    return [
        *(Case("2 MiB", layout, LARGE, large, large, throughput=0.85, cpu=1.3) for layout in layouts),
        *(Case("64 KiB", layout, SMALL, small, 512, throughput=0.65, cpu=None) for layout in layouts),
    ]


def run(bench: Bench) -> list[Row]:
    rows: list[Row] = []
    for case in cases(bench):
        bench.say(f"{case.blocks} blocks of {case.label}, {case.layout}")
        room = case.total + case.total // 4
        with (
            Daemon(bench, "data", "--dram", pool_size(room), "--leases-budget-share", "100%") as daemon,
            Engine(engine, daemon.socket, daemon.pid, case, bench.rounds(9, 3)) as worker,
        ):
            rows += report(case, worker.receive())
    return rows


def report(case: Case, seen: dict[str, Any]) -> list[Row]:
    rows = []
    for way in ("store", "load"):
        wall, cpu = seen[way]["wall"], seen[way]["cpu"]
        memcpy_wall, memcpy_cpu = seen[way]["memcpy_wall"], seen[way]["memcpy_cpu"]
        what = f"{way} {case.blocks} x {case.label}, {case.layout}"
        if case.batch != case.blocks:
            what += f", batches of {case.batch}"
        rate = case.total / GB
        rows.append(
            Row(
                f"{what} / memcpy",
                rate / statistics.median(wall),
                "GB/s",
                rate / statistics.median(memcpy_wall),
                median_ratio(memcpy_wall, wall),
                at_least(case.throughput),
            )
        )
        rows.append(
            Row(
                f"{what}: CPU of client + daemon / memcpy",
                statistics.median(cpu) * 1000 / rate,
                "ms/GB",
                statistics.median(memcpy_cpu) * 1000 / rate,
                median_ratio(cpu, memcpy_cpu),
                None if case.cpu is None else ratio_below(case.cpu),
            )
        )
        rows.append(
            Row(
                f"{what}: control plane's share",
                statistics.median(seen[way]["control"]) * 1000,
                "ms",
                statistics.median(wall) * 1000,
                median_ratio(seen[way]["control"], wall),
            )
        )
    return rows


# ---- the engine's process


def engine(connection: Connection, socket: str, daemon: int, case: Case, rounds: int) -> None:
    torch.set_num_threads(1)
    with session(socket, namespace(case.group, case.layout)) as attached:
        connection.send(_Worker(attached, daemon, case).measure(rounds))


def paged(case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The storage of all layers in one piece, and the tensor that an engine has for each layer."""
    group, blocks = case.group, case.blocks
    if case.layout == "LKBNHD":
        shape: tuple[int, ...] = (group.layers, 2, blocks, group.block_tokens, group.kv_heads, group.head_dim)
    else:
        shape = (group.layers, blocks, group.kv_heads, group.block_tokens, 2 * group.head_dim)
    whole = torch.empty(shape, dtype=torch.bfloat16)
    return whole, list(whole)


class _Worker:
    def __init__(self, attached: Session, daemon: int, case: Case) -> None:
        self._session, self._daemon, self._case = attached, daemon, case
        whole, tensors = paged(case)
        layout = describe_paged(tensors, case.group, "bfloat16")
        assert layout.layout == case.layout, layout
        self._gatherer = Gatherer(layout, tensors, case.group)
        self._bytes: NDArray[np.uint8] = whole.view(torch.uint8).numpy().reshape(case.blocks, case.block_bytes)
        self._other = np.zeros_like(self._bytes)
        self._random = np.random.default_rng(1)
        # The bits do not matter, but equal ones would prove nothing.
        self._random.random(out=self._bytes.reshape(-1).view(np.float64))
        # Pages of an engine in use are scattered.
        self._ids = self._random.permutation(case.blocks).tolist()
        self._chains: list[bytes] = []
        self._control = 0.0

    def measure(self, rounds: int) -> dict[str, Any]:
        self._prove_and_warm()
        seen: dict[str, dict[str, list[float]]] = {
            way: {name: [] for name in ("wall", "cpu", "memcpy_wall", "memcpy_cpu", "control")}
            for way in ("store", "load")
        }
        before = self._timed(self._memcpy)
        for _ in range(rounds):
            for way, move in (("store", self._store), ("load", self._load)):
                self._control = 0.0
                moved = self._timed(move)
                after = self._timed(self._memcpy)
                for name, value in zip(("wall", "cpu"), moved, strict=True):
                    seen[way][name].append(value)
                for name, place in (("memcpy_wall", 0), ("memcpy_cpu", 1)):
                    seen[way][name].append((before[place] + after[place]) / 2)
                seen[way]["control"].append(self._control)
                before = after
        return seen

    def _prove_and_warm(self) -> None:
        """What comes back is what was stored; and every page of the pool and of ours is mapped from here on."""
        expected = self._bytes.copy()
        self._store()
        self._bytes[:] = 0
        self._load()
        check(bool((self._bytes == expected).all()), "loaded bytes are not those that were stored")
        for pool in self._session.pools.values():
            pool.array()[::4096].sum()
        self._store()
        self._memcpy()

    def _timed(self, move: Callable[[], None]) -> tuple[float, float]:
        cpu = time.process_time() + process_cpu(self._daemon)
        start = time.perf_counter()
        move()
        wall = time.perf_counter() - start
        return wall, time.process_time() + process_cpu(self._daemon) - cpu

    def _memcpy(self) -> None:
        for source, target in zip(self._bytes, self._other, strict=True):
            np.copyto(target, source)

    def _store(self) -> None:
        case, attached = self._case, self._session
        self._chains = []
        for first in range(0, case.blocks, case.batch):
            chain = os.urandom(case.batch * HASH_BYTES)
            ids = self._ids[first : first + case.batch]
            start = time.perf_counter()
            reservation = attached.reserve(chain, request=chain[:8])
            reserved = time.perf_counter()
            check(len(reservation.blocks) == case.batch, "not all blocks got a slot")
            with attached.copying(reservation) as pools:
                self._gatherer.store(ids, PoolSlots(pools[0].array(), reservation.pages))
            copied = time.perf_counter()
            committed = attached.commit(reservation.lease, reservation.blocks)
            self._control += reserved - start + time.perf_counter() - copied
            check(committed.ready == case.batch, "not all blocks were committed")
            self._chains.append(chain)

    def _load(self) -> None:
        case, attached = self._case, self._session
        for number, chain in enumerate(self._chains):
            ids = self._ids[number * case.batch : (number + 1) * case.batch]
            start = time.perf_counter()
            match = attached.lookup(chain, request=chain[:8])
            check(match.ready == case.batch, "not all blocks are there")
            load = attached.load(match.lease, case.batch)
            found = time.perf_counter()
            with attached.copying(load) as pools:
                self._gatherer.load(ids, PoolSlots(pools[0].array(), load.pages))
            check(bool(attached.intact(load).all()), "a slot was handed on during a load")
            copied = time.perf_counter()
            attached.release(match.lease)
            self._control += found - start + time.perf_counter() - copied
