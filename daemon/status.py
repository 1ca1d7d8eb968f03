"""What `kvcascade status` is told: the daemon's state as one map, what is wrong first."""

import os
import time
from typing import TYPE_CHECKING, Any

from kvcascade.config import VERSION
from kvcascade.config.settings import format_bytes
from kvcascade.tiers.slabfile import slot_size
from kvcascade.tiers.slots import PooledMemory

from .protocol import Tier

if TYPE_CHECKING:
    from .server import Daemon

OLDEST = 5
# So that the reply stays below what a frame may hold (protocol.MAX_ITEMS) with limits.sessions sessions.
MOST_NAMESPACES = 512
MOST_PROBLEMS = 50


def describe(daemon: "Daemon") -> dict[str, Any]:
    """The reply to `status`; every value is plain CBOR. O(rows)."""
    tiers = _tiers(daemon)
    cache, residency = daemon.cache, daemon.residency
    leases = [lease for attachment in cache.attachments.values() for lease in attachment.leases.values()]
    leases.sort(key=lambda lease: lease.created)
    now = daemon.clock()
    problems = _problems(daemon, tiers)
    uptime = now - daemon.started
    return {
        "version": VERSION,
        "boot": daemon.boot.hex(),
        "pid": os.getpid(),
        "uptime_s": uptime,
        "started": time.time() - uptime,
        "seed_fingerprint": daemon.none_hash.hex()[:16],
        "hash_algo": daemon.settings.daemon.hash_algo,
        "key_scheme": daemon.settings.daemon.key_scheme,
        "socket": str(daemon.socket_path),
        "problems": problems[:MOST_PROBLEMS]
        + ([f"and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []),
        "tiers": tiers,
        "sessions": _sessions(daemon, now),
        "namespaces": _namespaces(daemon),
        "hits": {
            "tokens": {name: cache.hit_tokens[name] for name in ("hbm", "dram", "disk", "redis", "peer", "miss")},
            **{name: residency.counters[name] for name in ("lookups", "loads", "stores")},
        },
        "leases": {
            "live": len(leases),
            "pins": sum(len(lease.rows) for lease in leases),
            "oldest": [
                {"owner": lease.attachment.engine, "age_s": now - lease.created, "pins": len(lease.rows)}
                for lease in leases[:OLDEST]
            ],
        },
        "index": {"blocks": residency.index.count, "bytes": residency.index.nbytes + residency.index.tokens.nbytes},
        "counters": {**residency.counters, **daemon.counters},
        "recovered": daemon.recovered,
        "cluster": {} if daemon.cluster is None else daemon.cluster.status(),
        "kept": {} if daemon.keeper is None else daemon.keeper.counts(),
    }


def _tiers(daemon: "Daemon") -> list[dict[str, Any]]:
    residency = daemon.residency
    tiers = []
    if residency.hbm is not None:
        tiers.append(_pool(daemon, Tier.HBM, residency.hbm))
    tiers.append(_pool(daemon, Tier.DRAM, residency.dram))
    if residency.disk is not None:
        tiers.append(
            residency.disk.status()
            | {"blocks": residency.blocks_in(Tier.DISK), "dirty": 0, "pinned": residency.pinned_in(Tier.DISK)}
        )
    return tiers


def _pool(daemon: "Daemon", tier: Tier, pool: PooledMemory) -> dict[str, Any]:
    residency = daemon.residency
    return pool.status() | {
        "blocks": residency.blocks_in(tier),
        "dirty": residency.dirty_in(tier),
        "pinned": residency.pinned_in(tier),
        "quarantined": sum(counts.quarantined for counts in pool.pool.counts().values()),
    }


def _sessions(daemon: "Daemon", now: float) -> list[dict[str, Any]]:
    sessions = []
    for session in sorted(daemon.sessions, key=lambda one: one.since):
        if not session.role:
            continue
        one: dict[str, Any] = {
            "pid": session.pid,
            "uid": session.uid,
            "role": session.role,
            "engine": session.engine,
            "since_s": now - session.since,
        }
        attachment = session.attachment
        if attachment is not None:
            one |= {
                "rank": session.rank,
                "ranks": attachment.ranks,
                "attachment": attachment.token.hex()[:8],
                "namespace": attachment.spaces[0].fingerprint.hex(),
                "leases": len(attachment.leases),
                "pins": sum(len(lease.rows) for lease in attachment.leases.values()),
                "quarantined": attachment.quarantined_bytes,
            }
        sessions.append(one)
    return sessions


def _namespaces(daemon: "Daemon") -> list[dict[str, Any]]:
    """Those that an engine uses or that hold most blocks: weights that are trained have been in thousands."""
    residency = daemon.residency
    used = {attachment.spaces[0].fingerprint for attachment in daemon.cache.attachments.values()}
    namespaces: dict[bytes, dict[str, Any]] = {}
    counts = zip(residency.blocks_by_space(), residency.blocks_by_space(Tier.DISK), strict=True)
    for space, (blocks, on_disk) in zip(residency.spaces, counts, strict=True):
        if not blocks and space.fingerprint not in used:
            continue
        one = namespaces.setdefault(
            space.fingerprint,
            {
                "fingerprint": space.fingerprint.hex(),
                "fields": space.namespace.to_map(),
                **dict.fromkeys(("blocks", "bytes", "disk_blocks", "disk_bytes"), 0),
            },
        )
        one["blocks"] += blocks
        one["bytes"] += blocks * space.block_bytes
        one["disk_blocks"] += on_disk
        one["disk_bytes"] += on_disk * slot_size(space.slot_bytes)
    order = sorted(namespaces, key=lambda fingerprint: (fingerprint not in used, -namespaces[fingerprint]["blocks"]))
    return [namespaces[fingerprint] for fingerprint in order[:MOST_NAMESPACES]]


def _problems(daemon: "Daemon", tiers: list[dict[str, Any]]) -> list[str]:
    problems = []
    for tier in tiers:
        if tier["state"] == "sick":
            problems.append(f"tier {tier['name']} is sick: {tier['reason']}")
        for drive in tier.get("drives", ()):
            if drive["limit"] < drive["capacity"]:
                problems.append(
                    f"disk.capacity {format_bytes(drive['capacity'])} is more than {drive['directory']} can give: "
                    f"its file system leaves {format_bytes(drive['limit'])} above disk.reserve"
                )
    if daemon.cluster is not None:
        problems += daemon.cluster.problems()
    if "cluster" in daemon.recovered:
        problems.append(f"this node serves without others: {daemon.recovered['cluster']}")
    if daemon.draining:
        problems.append("the daemon is ending")
    cache = daemon.cache
    counters = daemon.residency.counters
    if counters["hash_collisions"]:
        problems.append(
            f"{counters['hash_collisions']} blocks had the hash of other tokens (a collision, or an attack)"
        )
    if counters["failed_promotions"]:
        problems.append(f"{counters['failed_promotions']} blocks on disk were not byte-true and were forgotten")
    if daemon.counters["internal_errors"]:
        problems.append(f"{daemon.counters['internal_errors']} requests failed by a defect of the daemon: see its log")
    quarantined = sum(a.quarantined_bytes for a in cache.attachments.values())
    if quarantined:
        problems.append(
            f"{quarantined} bytes are quarantined for late writers ({daemon.lost_sessions} of them without a socket)"
        )
    namespaces = {a.spaces[0].fingerprint: a.spaces[0].namespace for a in cache.attachments.values()}
    for fingerprint, namespace in namespaces.items():
        problems += [f"namespace {fingerprint.hex()[:12]}: {text}" for text in daemon.differences(namespace)]
    return problems
