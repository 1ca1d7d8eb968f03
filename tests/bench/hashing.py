"""Block hashes of a long prompt against the plainest way to the same bytes: cbor2 and hashlib, a block at a time."""

import hashlib
import random
import statistics
import time
from collections.abc import Callable

import cbor2

from kvcascade.tiers.block import block_hashes, none_hash

from .harness import SEED, Bench, Row, at_least, check, median_ratio

TOKENS = 128 * 1024
BLOCK = 16
VOCABULARY = 128_000


def run(bench: Bench) -> list[Row]:
    bench.say("hashing 128k tokens")
    tokens = [random.randrange(VOCABULARY) for _ in range(TOKENS)]
    check(plain(tokens) == ours(tokens), "the hashes are not byte-equal")
    times: list[float] = []
    references: list[float] = []
    for number in range(bench.rounds(31, 9)):
        # Each goes first every other time: the one that follows finds warmer caches.
        for way in (plain, ours) if number % 2 else (ours, plain):
            (times if way is ours else references).append(cpu_of(way, tokens))
    blocks = TOKENS // BLOCK
    return [
        Row(
            f"hashing {TOKENS >> 10}k tokens at block size {BLOCK} / plain cbor2 + hashlib",
            blocks / statistics.median(times),
            "blocks/s",
            blocks / statistics.median(references),
            median_ratio(references, times),
            at_least(1.0),
        )
    ]


def cpu_of(way: Callable[[list[int]], list[bytes]], tokens: list[int]) -> float:
    start = time.thread_time()
    way(tokens)
    return time.thread_time() - start


def ours(tokens: list[int]) -> list[bytes]:
    return list(block_hashes(tokens, BLOCK, seed=SEED))


def plain(tokens: list[int]) -> list[bytes]:
    parent: bytes = none_hash(SEED)
    hashes = []
    for start in range(0, len(tokens), BLOCK):
        preimage = cbor2.dumps((parent, tuple(tokens[start : start + BLOCK]), None), canonical=True)
        parent = hashlib.sha256(preimage).digest()
        hashes.append(parent)
    return hashes
