"""One side of a transfer by Mooncake, in a process of its own and in the environment of `make mooncake`.

    mooncake_side.py FD BYTES ENGINES

Both sides have so many bytes, registered with as many transfer engines: each has one thread that moves bytes, and its
own connections. A side says where it is and answers what it is told over FD, a Connection: ("read", the other side's
place, bytes of a block) brings all blocks from there and answers with the seconds, ("same", seed) whether they are what
`fill` makes, ("fill", seed) changes the memory.
"""

import ctypes
import mmap
import random
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from mooncake.engine import TransferEngine

HOST = "127.0.0.1"


class Side:
    def __init__(self, size: int, engines: int) -> None:
        self._memory = mmap.mmap(-1, size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._engines = [TransferEngine() for _ in range(engines)]
        for engine in self._engines:
            # The peers find each other by a handshake of their own: no metadata server.
            require(engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""), "initialize")
            require(engine.register_memory(self._address, size), "register_memory")

    def place(self) -> tuple[int, list[str]]:
        """Where the memory lies, and what its engines are called."""
        return self._address, [f"{HOST}:{engine.get_rpc_port()}" for engine in self._engines]

    def fill(self, seed: int) -> None:
        self._memory[:] = random.Random(seed).randbytes(len(self._memory))

    def same(self, seed: int) -> bool:
        return self._memory[:] == random.Random(seed).randbytes(len(self._memory))

    def read(self, place: tuple[int, list[str]], block: int) -> float:
        """Reads all of the other side's memory, every engine a part of it, in one batch; the seconds it took.

        Mooncake spins while it waits: one thread does, for one engine after the other, which is faster on few cores
        than a blocking call for each (1.4 times on two busy ones).
        """
        far, names = place
        share = len(self._memory) // len(names)
        began = time.perf_counter()
        batches = []
        for number, (engine, name) in enumerate(zip(self._engines, names, strict=True)):
            starts = range(number * share, (number + 1) * share, block)
            here, there = [self._address + start for start in starts], [far + start for start in starts]
            batch = engine.batch_transfer_async_read(name, here, there, [block] * len(starts))
            if not batch:
                raise RuntimeError(f"Mooncake's batch_transfer_async_read does not begin with {name}")
            batches.append(batch)
        for engine, batch in zip(self._engines, batches, strict=True):
            require(engine.get_batch_transfer_status([batch]), "get_batch_transfer_status")
        return time.perf_counter() - began


def require(outcome: int, what: str) -> None:
    if outcome:
        raise RuntimeError(f"Mooncake's {what} answered {outcome}")


def main(descriptor: int, size: int, engines: int) -> None:
    connection = Connection(descriptor)
    side = Side(size, engines)
    connection.send(side.place())
    while True:
        try:
            step, *arguments = connection.recv()
        except EOFError:
            return
        answer: Any = getattr(side, step)(*arguments)
        connection.send(answer)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
