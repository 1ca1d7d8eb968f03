"""A node of a fleet in a process of its own, to be killed: it makes itself and one entry known, says so, and waits.

fleet_node.py URL SECRET LEASE_SECONDS RECORD ENTRY-HASH
"""

import asyncio
import sys

from kvcascade.config.settings import RedisSettings
from kvcascade.daemon import fleet
from kvcascade.tiers.redis import RedisTier
from kvcascade.tiers.remote import Secret


async def main(url: str, secret_text: str, lease: str, record: str, block_hash: str) -> None:
    fleet.LEASE_S, fleet.RENEW_S = float(lease), float(lease) / 6  # type: ignore[misc]
    secret = Secret(secret_text.encode())
    tier = RedisTier(RedisSettings(url=url), secret)
    await tier.open()
    me = fleet.NodeInfo.unpack(bytes.fromhex(record))
    async with fleet.Fleet(tier, secret, me, entry_ttl=60, timeout=5) as one:
        one.announce(b"n" * 32, 0, [bytes.fromhex(block_hash)])
        for _ in range(1000):
            if one.counters["entries_written"]:
                break
            await asyncio.sleep(0.02)
        print("known", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
