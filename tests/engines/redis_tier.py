"""A Redis tier for tests, and blocks whose bytes name them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from kvcascade.config.settings import RedisSettings
from kvcascade.tiers.codec import Codec
from kvcascade.tiers.redis import RedisTier
from kvcascade.tiers.remote import BlockName, Fetch, Secret, Send

SIZE = 64 << 10
SECRET = Secret(b"sixteen bytes and more")


def settings(url: str, **more: object) -> RedisSettings:
    limits = {"deadline": "1s", "connect_timeout": "1s"}
    return RedisSettings(url=url, **(limits | more))  # type: ignore[arg-type]


@asynccontextmanager
async def opened(
    url: str, secret: Secret = SECRET, codec: Codec = Codec.RAW, **more: object
) -> AsyncIterator[RedisTier]:
    tier = RedisTier(settings(url, **more), secret, codec=lambda: codec)
    await tier.open()
    try:
        await probed(tier)
        yield tier
    finally:
        await tier.close()


def name(number: int) -> BlockName:
    return BlockName(b"n" * 32, 0, number.to_bytes(32, "big"))


def pattern(number: int, size: int = SIZE) -> bytes:
    """Bytes that name their block."""
    return np.random.default_rng(number).bytes(size)


def sends(numbers: range, size: int = SIZE) -> list[Send]:
    return [Send(name(n), name(n - 1).block_hash if n else b"", memoryview(pattern(n, size)), 2) for n in numbers]


def fetches(numbers: range, size: int = SIZE) -> list[Fetch]:
    return [Fetch(name(n), memoryview(bytearray(size))) for n in numbers]


def check(jobs: list[Fetch], reasons: list[str | None], numbers: range) -> None:
    for job, reason, number in zip(jobs, reasons, numbers, strict=True):
        if reason is None:
            assert bytes(job.into) == pattern(number, len(job.into))


async def probed(tier: RedisTier) -> None:
    """Until it is known whether Redis is there: a busy machine takes longer than `open` waits."""
    for _ in range(1000):
        if tier.status()["reason"] != "not connected yet":
            return
        await asyncio.sleep(0.02)
    raise AssertionError(tier.status())


async def available(tier: RedisTier, wanted: bool = True) -> None:
    for _ in range(1000):
        if tier.available == wanted:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(tier.status())
