"""What `kvcascade status`, `lookup` and `check` print for people: what is wrong first, then tables.

Texts that came from elsewhere (an engine's name, a path) are printed as they are, without markup and with control
characters shown: nobody paints on the operator's terminal.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvcascade.config import VERSION
from kvcascade.config.settings import format_bytes

# Where there is no terminal to measure: wide enough that no column is cut.
PLAIN_WIDTH = 160
SHOWN_SESSIONS = 50
SHOWN_CALLERS = 10

Answer = Mapping[str, Any]


def show_status(status: Answer) -> None:
    console = _console()
    problems = list(status["problems"])
    if status["version"] != VERSION:
        problems.append(f"the daemon runs version {status['version']}, this command is {VERSION}: restart the daemon")
    _problems(console, problems)
    _line(
        console,
        f"kvcascade {status['version']}  up {_duration(status['uptime_s'])}  pid {status['pid']}  "
        f"boot {status['boot'][:8]}  {status['socket']}",
    )
    _line(
        console,
        f"keys: {status['hash_algo']}  {status['key_scheme']}  seed fingerprint {status['seed_fingerprint']}",
    )
    _tiers(console, status["tiers"])
    _recovered(console, status.get("recovered", {}))
    _hits(console, status["hits"])
    _cluster(console, status.get("cluster", {}))
    # This command's own session says nothing to whoever runs it.
    _sessions(console, [one for one in status["sessions"] if one["pid"] != os.getpid()])
    _namespaces(console, status["namespaces"])
    leases = status["leases"]
    oldest = "".join(f"; {one['owner']} {_duration(one['age_s'])} ({one['pins']} pins)" for one in leases["oldest"][:3])
    _line(console, f"\nleases: {leases['live']} with {leases['pins']} pins{oldest}")
    index = status["index"]
    _line(console, f"index: {index['blocks']} blocks in {format_bytes(index['bytes'])}")


def show_lookup(answer: Answer) -> None:
    console = _console()
    total = answer["tokens"]
    if not answer["namespaces"]:
        _line(
            console,
            f"0 of {total} tokens are present: no blocks are held, and no engine is here",
        )
        if why := answer.get("why"):
            _line(console, f"why: {why}")
    for one in answer["namespaces"]:
        _line(
            console,
            f"{one['present_tokens']} of {total} tokens are present in namespace {one['namespace'][:12]} "
            f"(model {one['model'][:24]}, {one['kv_dtype']})",
        )
        for group in one["groups"]:
            _group(console, group, total, len(one["groups"]) > 1)


def _group(console: Console, group: Answer, total: int, named: bool) -> None:
    size = group["block_tokens"]
    title = f"group {group['group']}" if named else ""
    rows = [
        (
            title,
            f"{part['start']} to {part['end'] - 1}",
            (part["end"] - part["start"]) // size,
            ", ".join(part["tiers"]),
        )
        for part in group["parts"]
    ]
    end = group["parts"][-1]["end"] if group["parts"] else 0
    full = group["blocks"] * size
    if end < full:
        rows.append((title, f"{end} to {full - 1}", (full - end) // size, "missing (from the first block that is)"))
    if full < total:
        rows.append((title, f"{full} to {total - 1}", "", f"no full block of {size}, so never stored"))
    _table(console, "", ["", "tokens", ">blocks", "where"], rows)
    if elsewhere := group.get("elsewhere"):
        for source in elsewhere["sources"]:
            part = f", from the {source['from'] + 1}. on" if source["fetch"] and source["from"] else ""
            link = f"{source['latency_ms']:.1f} ms, {format_bytes(int(source['bandwidth']))}/s"
            told = f"{source['name']} ({link}) has {source['blocks']} blocks more"
            _line(console, f"{told}, {source['fetch']} would be fetched{part}")
        if prefill := elsewhere["prefill"]:
            _line(console, f"the engine computes {_speeds(prefill)}")
        _line(console, f"why: {elsewhere['why']}")


def show_check(report: Answer) -> None:
    console = _console()
    violations = report["violations"]
    _problems(console, violations)
    for example in report.get("examples", ()):
        _line(console, f"  {example}")
    if "blocks" in report:
        size = format_bytes(report["disk_bytes"])
        _line(console, f"{report['blocks']} blocks of {report['namespaces']} namespaces in {size} of disk")
        _line(console, f"{report['verified']} of them proved by their slots")
    for reason, count in report.get("dropped", {}).items():
        _line(console, f"{count} records dropped: {reason}")
    for done in report.get("repaired", ()):
        _line(console, f"repaired: {done}")
    if not violations:
        _line(console, "all invariants hold")


SHOW: dict[str, Callable[[Answer], None]] = {"status": show_status, "lookup": show_lookup, "check": show_check}


# ---- the parts of a status


def _tiers(console: Console, tiers: Sequence[Answer]) -> None:
    columns = [
        *("tier", "state", ">capacity", ">limit", ">used", ">free", ">blocks", ">dirty", ">pinned", ">quarantined"),
        "memory",
    ]
    rows = []
    for tier in _with_drives(tiers):
        name = f"{tier['name']} ({tier['device']})" if tier["name"] == "hbm" else tier["name"]
        state = f"{tier['state']}: {tier['reason']}" if tier.get("reason") else tier["state"]
        online = tier.get("online", tier["capacity"])
        if online < tier["capacity"]:
            state = f"{state} {online * 100 // tier['capacity']}%"
        # What others' files leave of it, where that is less.
        limit = format_bytes(tier["limit"]) if tier.get("limit", tier["capacity"]) < tier["capacity"] else ""
        sizes = [format_bytes(tier["capacity"]), limit, *(format_bytes(tier[key]) for key in ("used", "free"))]
        counts = [tier.get(key, "") for key in ("blocks", "dirty", "pinned", "quarantined")]
        rows.append((name, state, *sizes, *counts, _where(tier)))
    _table(console, "", columns, rows)


def _with_drives(tiers: Sequence[Answer]) -> Iterable[Answer]:
    """The tiers, and below one of several drives each of these."""
    for tier in tiers:
        drives = tier.get("drives", ())
        if len(drives) < 2:
            yield tier
            continue
        yield {**tier, "directory": f"{len(drives)} drives", "reason": "" if tier["state"] == "ok" else "see below"}
        for number, drive in enumerate(drives):
            yield {**drive, "name": f"  drive {number}"}


def _where(tier: Answer) -> str:
    """What the tier's bytes lie in: a directory, or memory and why it is not pinned or not of huge pages."""
    if "memory" not in tier:
        return str(tier.get("directory", ""))
    pinned, reason = tier["memory"]["pinned"], tier["memory"]["reason"]
    told = "pinned" if pinned else f"not pinned: {reason}"
    huge = tier.get("huge_pages", {}).get("reason")
    return f"{told}; no huge pages: {huge}" if huge else told


def _recovered(console: Console, recovered: Answer) -> None:
    if not recovered:
        return
    dropped = ", ".join(f"{count} {reason}" for reason, count in recovered["dropped"].items())
    took = f" in {recovered['seconds']:.1f} s" if "seconds" in recovered else ""
    _line(console, f"\nfrom disk at the start: {recovered['blocks']} blocks{took}; dropped: {dropped or 'none'}")


def _hits(console: Console, hits: Answer) -> None:
    tokens = hits["tokens"]
    total = sum(tokens.values())
    parts = [f"{name} {count}{f' ({count * 100 / total:.1f}%)' if total else ''}" for name, count in tokens.items()]
    _line(console, f"\nhit tokens: {'  '.join(parts)}")
    _line(console, f"calls: {hits['lookups']} lookups, {hits['loads']} loads, {hits['stores']} stores")


def _sessions(console: Console, sessions: Sequence[Answer]) -> None:
    rows = [
        (
            one["pid"],
            one["uid"],
            f"{one['role']} {one['rank']} of {one['ranks']}" if one.get("ranks", 1) > 1 else one["role"],
            _engine(one.get("engine")),
            (one.get("attachment") or "")[:8],
            (one.get("namespace") or "")[:12],
            one.get("leases", 0),
            one.get("pins", 0),
            format_bytes(one.get("quarantined", 0)),
            _duration(one["since_s"]),
        )
        for one in sessions[:SHOWN_SESSIONS]
    ]
    columns = [
        ">pid",
        ">uid",
        "role",
        "engine",
        "attachment",
        "namespace",
        ">leases",
        ">pins",
        ">quarantined",
        ">since",
    ]
    _table(console, f"sessions: {len(sessions)}", columns, rows)
    if len(sessions) > SHOWN_SESSIONS:
        _line(console, f"... and {len(sessions) - SHOWN_SESSIONS} more (--json lists all)")


def _cluster(console: Console, cluster: Answer) -> None:
    """Other nodes: what they give and get, and how fast."""
    if not cluster:
        return
    served = cluster["server"]
    where = f"serves on {served['listen']}{' (TLS)' if served['tls'] else ''}" if served else "serves no other nodes"
    secret = "shared secret" if cluster["secret"] else "no secret"
    _line(console, f"\nnode {cluster['node']}: {where}, {secret}, fetches {cluster['fetch']}")
    rows: list[tuple[object, ...]] = []
    if redis := cluster["redis"]:
        counters = redis["counters"]
        rows.append(
            (
                "redis",
                redis["url"],
                redis["state"],
                f"{redis.get('role', '')} {redis['latency_ms']:.1f} ms",
                format_bytes(redis.get("memory", 0)),
                counters.get("fetched_blocks", 0),
                counters.get("stored_blocks", 0),
                redis["reason"],
            )
        )
    rows += [
        (
            f"node {peer['name']}",
            f"{peer['endpoint']} boot {peer['boot'][:8]}",
            peer["state"],
            f"{format_bytes(int(peer['bandwidth']))}/s",
            "",
            peer["fetched_blocks"],
            "",
            peer["reason"],
        )
        for peer in cluster["peers"]
    ]
    _table(console, "", ["source", "where", "state", ">speed", ">memory", ">fetched", ">stored", "reason"], rows)
    if redis and "lost_s" in redis:
        what = f"{redis['lost_s']:.0f} s ago ({redis['counters']['data_losses']} times in all)"
        _line(console, f"redis lost what it held {what}: what is used is sent again")
    if redis and redis.get("evicted"):
        _line(console, f"redis has evicted {redis['evicted']} keys ({redis['policy']})")
    for hint in cluster["fleet"].get("hints", []):
        _line(console, f"hint: {hint}")
    if served and served["refused"]:
        refused = served["counters"]["refused_callers"]
        _line(console, f"refused callers: {refused}, the last one {served['refused']}")
    callers = served["callers"] if served else []
    for one in callers[-SHOWN_CALLERS:]:
        what = f"{one['served_blocks']} blocks, {format_bytes(one['served_bytes'])}"
        _line(console, f"served to {one['name']} boot {one['boot'][:8]}: {what}")
    if len(callers) > SHOWN_CALLERS:
        _line(console, f"... and to {len(callers) - SHOWN_CALLERS} more (--json lists all)")
    for link in cluster["links"]:
        _line(console, f"link {link['name']}: {link['latency_ms']:.1f} ms, {format_bytes(int(link['bandwidth']))}/s")
    for one in cluster["remote"]["prefill"]:
        _line(console, f"prefill of {one['engine']}: {_speeds(one)}")


def _speeds(prefill: Answer) -> str:
    """How fast an engine computes, at the depths of a prompt where that differs."""
    told = {depth: f"{speed:,.0f}" for depth, speed in prefill["tokens_s"].items()}
    first = told.pop("0")
    behind = [f"{speed} after {int(depth):,}" for depth, speed in told.items() if speed != first]
    return f"{first} tokens/s" + (f", {', '.join(behind)}" if behind else "")


def _engine(engine: object) -> str:
    if isinstance(engine, Mapping):
        return f"{engine.get('family', '')} {engine.get('version', '')}".strip()
    return str(engine or "")


def _namespaces(console: Console, namespaces: Sequence[Answer]) -> None:
    rows = []
    for one in namespaces:
        fields = one["fields"]
        groups = [
            f"{group['layers']}x{group['kv_heads']}x{group['head_dim']} / {group['block_tokens']}"
            for group in fields["groups"]
        ]
        rows.append(
            (
                one["fingerprint"][:12],
                fields["model"][:24],
                fields["weights_epoch"],
                fields["kv_dtype"],
                ", ".join(groups),
                fields["producer"],
                fields["hash_algo"],
                one["blocks"],
                format_bytes(one["bytes"]),
                format_bytes(one["disk_bytes"]) if one.get("disk_bytes") else "",
            )
        )
    columns = [
        "namespace",
        "model",
        "epoch",
        "dtype",
        "layers x heads x dim / block",
        "engine",
        "hash",
        ">blocks",
        ">bytes",
        ">on disk",
    ]
    _table(console, f"namespaces: {len(namespaces)}", columns, rows)


# ---- printing


def _console() -> Console:
    console = Console(markup=False, highlight=False, emoji=False)
    return console if console.is_terminal else Console(width=PLAIN_WIDTH, markup=False, highlight=False, emoji=False)


def _problems(console: Console, problems: Iterable[str]) -> None:
    for problem in problems:
        _line(console, f"problem: {problem}", "bold red")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text("\n".join(_plain(line) for line in text.split("\n")), style), soft_wrap=True)


def _table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A column whose name begins with `>` holds numbers; one that is empty in every row is left out."""
    if title:
        _line(console, f"\n{title}")
    kept = [at for at in range(len(columns)) if any(str(row[at]) for row in rows)]
    if not kept:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at in kept:
        table.add_column(columns[at].lstrip(">"), justify="right" if columns[at].startswith(">") else "left")
    for row in rows:
        table.add_row(*(Text(_plain(str(row[at]))) for at in kept))
    if not title:
        console.print()
    console.print(table)


def _plain(text: str) -> str:
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _duration(seconds: float) -> str:
    for size, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} {int(seconds % size // below)} {small}"
    return f"{seconds:.1f} s"
