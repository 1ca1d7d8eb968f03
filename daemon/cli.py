"""The `kvcascade` command: serve, status, lookup, check, config, version.

`status` is what people and probes run all the time, so it must be instant: under 0.2 s of process time with the
interpreter's start. That is why the arguments are read by argparse and not by typer, whose import and first parse
(which loads pydantic) took 115 ms here against 10, and why each command imports what it needs when it runs.
"""

import argparse
import contextlib
import itertools
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvcascade.config import VERSION
from kvcascade.config.errors import CascadeError, ConfigError, DaemonUnavailable

if TYPE_CHECKING:
    from kvcascade.tiers.namespace import Namespace

    from .client import Client

EXIT_OK = 0
EXIT_PROBLEM = 1
EXIT_USAGE = 2
EXIT_NO_DAEMON = 3
EXIT_REFUSED = 4

EXIT_CODES = """\
exit codes:
  0  done, and all is well
  1  done, and something is wrong (status, check), or nothing of the prompt is present (lookup)
  2  the command line, the settings or the input cannot be used
  3  no daemon answers at the socket
  4  the daemon, or this machine, cannot do what was asked
"""

# A daemon answers in microseconds, one that is busy starting takes longer; one that never answers is as good as none.
TIMEOUT = 5.0
# Proving the invariants walks the whole index: about a second at 10^6 blocks.
CHECK_TIMEOUT = 120.0
EXPLAIN_TIMEOUT = 30.0  # s; the daemon answers by its own deadline

NO_NODES = "this daemon deals with no other nodes (redis.url, peers.listen)"
# How a prompt is hashed depends on the engine's namespace, and nobody has told this daemon of one.
NOBODY_ASKED = (
    "other nodes were not asked: what blocks are called there depends on the engine, and none has been here; "
    "attach one to this daemon, or ask on a node where one is"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; what goes wrong is told on stderr, in a line or two."""
    _open_standard_streams()
    try:
        arguments = _parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = arguments.run
        code = run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse: help and usage errors
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    except BrokenPipeError:
        # The reader (`head`, `less`) has enough. The interpreter must not fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        return 130
    except ConfigError as error:
        return _fail(EXIT_USAGE, str(error))
    except DaemonUnavailable as error:
        hint = "Is it running? Start it with `kvcascade serve`, or name its socket: --socket PATH"
        if isinstance(error.__cause__, PermissionError):
            hint = "Ask as the user it runs as, or let a group in: daemon.socket_mode and daemon.socket_group"
        return _fail(EXIT_NO_DAEMON, f"{error}\n{hint}")
    except CascadeError as error:
        return _fail(EXIT_REFUSED, str(error))
    except OSError as error:
        # A full device behind stdout, no descriptors left: this machine's trouble, and no traceback would tell more.
        logging.getLogger("kvcascade").debug("failed", exc_info=True)
        return _fail(EXIT_REFUSED, str(error))


def _open_standard_streams() -> None:
    """Puts /dev/null where one was closed.

    The daemon's event loop or a slab file would take its number: libuv aborts when it closes that, and what a C library
    writes to stderr would go into the blocks.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _fail(code: int, text: str) -> int:
    print(f"kvcascade: {text}", file=sys.stderr)
    return code


# ---- the command line


class _Parser(argparse.ArgumentParser):
    """argparse that names the nearest valid flag, and takes no abbreviations (`--dram` is a flag of its own)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        unknown = [one for one in rest if one.startswith("-")]
        if unknown:
            from kvcascade.config.settings import did_you_mean, nearest

            name = unknown[0].partition("=")[0]
            known = [option for action in self._actions for option in action.option_strings]
            self.error(f"unknown flag {name}{did_you_mean(nearest(name, known))}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}\nSee `{self.prog} --help`.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvcascade",
        description="Keeps the KV cache of LLM engines beyond one request, one engine and one process.",
        epilog=EXIT_CODES,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str, epilog: str = "") -> _Parser:
        added = commands.add_parser(name, help=summary, description=summary, epilog=epilog + EXIT_CODES)
        added.set_defaults(run=run)
        return added

    serve = command("serve", _serve, "Run the daemon until SIGTERM or SIGINT.")
    serve.usage = "kvcascade serve [--config FILE] [--takeover] [--SECTION-SETTING VALUE ...]"
    _add_serve_flags(serve)

    status = command("status", _status, "Show what the daemon holds and, first, what is wrong.")
    status.add_argument("--json", action="store_true", help="everything, for programs")
    _add_socket_flags(status)

    lookup = command(
        "lookup",
        _lookup,
        "Say how long a prefix of a prompt is present, and in which tier each part lies.",
        "The token ids come from the arguments, a file or standard input: a JSON list, or numbers apart by spaces or\n"
        "commas. Every namespace of the daemon is asked, with its own hashes; the options above narrow that down.\n"
        "Prompts with images, LoRA adapters or cache salts have other hashes and are not found this way.\n\n",
    )
    lookup.add_argument("ids", nargs="*", metavar="ID", help="token ids; - for standard input")
    lookup.add_argument("--file", metavar="FILE", help="read the token ids from FILE; - for standard input")
    lookup.add_argument("--text", help="a text instead of token ids; needs --tokenizer")
    lookup.add_argument("--tokenizer", type=Path, metavar="DIR", help="the model's folder, or its .gguf file")
    lookup.add_argument("--namespace", default="", metavar="HEX", help="only the namespace whose fingerprint begins so")
    lookup.add_argument("--seed", help="only namespaces of this seed (PYTHONHASHSEED)")
    lookup.add_argument("--algo", help="only namespaces of this hash algorithm")
    lookup.add_argument("--block-size", type=int, metavar="TOKENS", help="only KV groups with blocks of so many tokens")
    lookup.add_argument("--explain", action="store_true", help="ask other nodes too, and say what would be fetched")
    lookup.add_argument("--json", action="store_true", help="for programs")
    _add_socket_flags(lookup)

    check = command("check", _check, "Prove the invariants of the running daemon, or of a disk directory at rest.")
    check.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="a disk tier that no daemon has open")
    check.add_argument("--deep", action="store_true", help="with DIR: also read every block and compare its checksum")
    check.add_argument(
        "--repair",
        action="store_true",
        help="with DIR: forget what proves false, take back what has lost its record, remove what is left over",
    )
    check.add_argument("--json", action="store_true", help="for programs")
    _add_socket_flags(check)

    config = command(
        "config",
        _config,
        "Print the command line with which an engine uses the running daemon.",
        "MODEL stands for the model's name or folder.\n\n",
    )
    config.add_argument("engine", choices=("vllm",), help="the engine")
    config.add_argument("--json", action="store_true", help="its parts, for programs")
    _add_socket_flags(config)

    command("version", _version, "Print the version.")
    return parser


def _add_socket_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket", metavar="PATH", help="the daemon's socket (default: KVCASCADE_SOCKET, the settings)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the daemon's settings file (KVCASCADE_CONFIG)")


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    from kvcascade.config.settings import SHORTHANDS, all_settings

    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file; kvcascade.toml is the reference")
    parser.add_argument(
        "--takeover",
        action="store_true",
        help="take memory, disk and socket over from the daemon that runs, without losing a block; it ends",
    )
    short = {dotted: f"--{name}" for name, dotted in SHORTHANDS.items()}
    groups: dict[str, Any] = {}
    for info in all_settings():
        if info.section not in groups:
            groups[info.section] = parser.add_argument_group(f"[{info.section}]")
        names = [short[info.dotted], info.flag] if info.dotted in short else [info.flag]
        text = f"{info.doc} (default: {info.default or 'empty'})".replace("%", "%%")
        groups[info.section].add_argument(
            *names, dest=names[0][2:], metavar="VALUE", default=argparse.SUPPRESS, help=text
        )


# ---- serve and version


def _serve(arguments: argparse.Namespace) -> int:
    from kvcascade.config.load import load_settings

    given = {name: value for name, value in vars(arguments).items() if name not in ("run", "config", "takeover")}
    settings = load_settings(arguments.config, flags=given)
    logging.basicConfig(
        level=settings.daemon.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # Only now: wrong settings are told at once, without waiting for what the daemon loads.
    from .server import run

    return run(settings, takeover=arguments.takeover)


def _version(arguments: argparse.Namespace) -> int:
    print(f"kvcascade {VERSION}")
    return EXIT_OK


# ---- talking to the daemon


@contextlib.contextmanager
def _daemon(arguments: argparse.Namespace) -> Iterator["Client"]:
    """A connection of a tool: it asks and pins nothing."""
    from kvcascade.config.load import load_settings

    from . import protocol
    from .client import Client

    flags = {"socket": arguments.socket} if arguments.socket else {}
    client = Client(load_settings(arguments.config, flags=flags).daemon.socket, timeout=TIMEOUT)
    client.connect()
    try:
        client.call(
            protocol.OP_ATTACH,
            {
                "protocol": protocol.PROTOCOL_VERSION,
                "role": protocol.ROLE_TOOL,
                "engine": {"family": "kvcascade", "version": VERSION},
                "pid": os.getpid(),
            },
        )
        yield client
    finally:
        client.close()


# ---- status, lookup, check


def _status(arguments: argparse.Namespace) -> int:
    with _daemon(arguments) as daemon:
        status = daemon.call("status")
    _show("status", arguments, status)
    return EXIT_PROBLEM if status["problems"] else EXIT_OK


def _lookup(arguments: argparse.Namespace) -> int:
    tokens = _token_ids(arguments)
    with _daemon(arguments) as daemon:
        asked = _asked(daemon, arguments)
        found = [_present(daemon, namespace, groups, tokens, arguments.explain) for namespace, groups in asked]
        answer: dict[str, Any] = {"tokens": len(tokens), "namespaces": found}
        if arguments.explain and not found:
            answer["why"] = NOBODY_ASKED if daemon.call("status")["cluster"] else NO_NODES
    found.sort(key=lambda one: -one["present_tokens"])
    _show("lookup", arguments, answer)
    return EXIT_OK if any(one["present_tokens"] for one in found) else EXIT_PROBLEM


def _check(arguments: argparse.Namespace) -> int:
    if arguments.directory is not None:
        report = _check_directory(arguments.directory, arguments.deep, arguments.repair)
    elif arguments.deep or arguments.repair:
        flag = "--repair" if arguments.repair else "--deep"
        raise ConfigError(f"{flag} is for a disk tier at rest: name its directory, with no daemon running on it")
    else:
        with _daemon(arguments) as daemon:
            report = daemon.call("check", timeout=CHECK_TIMEOUT)
    _show("check", arguments, report)
    return EXIT_PROBLEM if report["violations"] else EXIT_OK


def _check_directory(directory: Path, deep: bool, repair: bool) -> dict[str, Any]:
    from kvcascade.tiers.directory import check_directory

    def progress(done: int, total: int) -> None:
        print(f"\r{done} of {total} blocks", end="\n" if done == total else "", file=sys.stderr, flush=True)

    told = progress if sys.stderr.isatty() else None
    found = check_directory(directory, deep=deep, repair=repair, progress=told)
    repaired = found.repaired
    if repaired:
        # What is left is what counts. Payloads were read the first time, and a repair moves none.
        found = check_directory(directory, deep=False, progress=told)
    violations = [f"{count} blocks are damaged: {reason}" for reason, count in found.damaged.items()]
    if not found.ok:
        violations += [f"{count} records were lost: {reason}" for reason, count in found.dropped.items()]
    return {
        "violations": violations,
        "examples": found.examples,
        "blocks": found.blocks,
        "disk_bytes": found.disk_bytes,
        "verified": found.verified,
        "namespaces": len(found.namespaces),
        "dropped": found.dropped,
        "repaired": repaired,
    }


def _show(what: str, arguments: argparse.Namespace, answer: dict[str, Any]) -> None:
    if arguments.json:
        print(json.dumps(answer, indent=2, default=_hex))
    else:
        from .report import SHOW

        SHOW[what](answer)


def _hex(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} in an answer")


# ---- config: an engine's command line


def _config(arguments: argparse.Namespace) -> int:
    from kvcascade.tiers.block import DEFAULT_SEED, none_hash

    from .protocol import default_socket_path

    with _daemon(arguments) as daemon:
        status = daemon.call("status")
    algo, place = status["hash_algo"], status["socket"]
    transfer: dict[str, Any] = {
        "kv_connector": "CascadeConnector",
        "kv_connector_module_path": "kvcascade.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    if Path(place) != default_socket_path():
        transfer["kv_connector_extra_config"] = {"socket": place}
    flags = ["--prefix-caching-hash-algo", algo, "--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    environment: dict[str, str] = {}
    # The daemon tells no seed, only its fingerprint: one that gives it is the one.
    likely = [DEFAULT_SEED, os.environ.get("PYTHONHASHSEED", "0"), *(str(number) for number in range(1000))]
    seed = next((one for one in likely if none_hash(one, algo).hex()[:16] == status["seed_fingerprint"]), None)
    if seed is None:
        print("kvcascade: set PYTHONHASHSEED to the daemon's seed (daemon.seed) for every engine", file=sys.stderr)
    elif seed != DEFAULT_SEED:
        environment["PYTHONHASHSEED"] = seed
    if arguments.json:
        print(json.dumps({"environment": environment, "arguments": flags}, indent=2))
    else:
        settings = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
        print(" ".join([*settings, "vllm serve MODEL", shlex.join(flags)]))
    return EXIT_OK


# ---- lookup: the prompt, the namespaces to ask, the answer


def _token_ids(arguments: argparse.Namespace) -> list[int]:
    given = [name for name in ("ids", "file", "text") if getattr(arguments, name) not in (None, [])]
    if len(given) > 1:
        raise ConfigError("give the prompt once: as token ids, by --file, or by --text")
    if given == ["text"]:
        return _tokenize(arguments.text, arguments.tokenizer)
    if given == ["ids"] and arguments.ids != ["-"]:
        return _parse_ids(" ".join(arguments.ids))
    try:
        if given == ["file"] and arguments.file != "-":
            return _parse_ids(Path(arguments.file).read_text(encoding="utf-8"))
        if not given and sys.stdin.isatty():
            raise ConfigError("give the prompt: token ids, --file FILE, --text TEXT --tokenizer DIR, or standard input")
        return _parse_ids(sys.stdin.read())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the token ids: {error}") from error


def _parse_ids(text: str) -> list[int]:
    if text.lstrip().startswith("["):
        try:
            words = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"the token ids are not a JSON list: {error}") from error
    else:
        words = [word for word in re.split(r"[\s,]+", text) if word]
    return [_token_id(index, word) for index, word in enumerate(words)]


def _token_id(index: int, word: object) -> int:
    if isinstance(word, str) and re.fullmatch(r"\d{1,20}", word, re.ASCII):
        return int(word)
    if isinstance(word, int) and not isinstance(word, bool) and word >= 0:
        return word
    raise ConfigError(f"token {index}: {word!r:.40} is not a token id")


def _tokenize(text: str, tokenizer: Path | None) -> list[int]:
    if tokenizer is None:
        raise ConfigError("--text needs --tokenizer DIR, the folder of the model whose prompts are cached")
    if not tokenizer.exists():
        raise ConfigError(f"--tokenizer: {tokenizer} does not exist")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError("--text needs transformers: pip install 'kvcascade[huggingface]'") from error
    try:
        if tokenizer.is_file():
            loaded = AutoTokenizer.from_pretrained(tokenizer.parent, gguf_file=tokenizer.name, local_files_only=True)
        else:
            loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--tokenizer: {tokenizer} holds no tokenizer that loads: {reason}") from error
    ids: list[int] = loaded(text)["input_ids"]
    return ids


def _asked(daemon: "Client", arguments: argparse.Namespace) -> list[tuple["Namespace", list[int]]]:
    """The daemon's namespaces, each with its KV groups, that the options leave over."""
    from kvcascade.tiers.block import HASH_BYTES, none_hash
    from kvcascade.tiers.namespace import Namespace

    if arguments.algo is not None and arguments.algo not in HASH_BYTES:
        raise ConfigError(f"--algo: {arguments.algo!r} is not one of {', '.join(HASH_BYTES)}")
    held = [Namespace.from_map(one["fields"]) for one in daemon.call("status")["namespaces"]]
    asked = []
    for namespace in held:
        sizes = [group.block_tokens for group in namespace.groups]
        groups = [index for index, size in enumerate(sizes) if arguments.block_size in (None, size)]
        if (
            groups
            and namespace.fingerprint().hex().startswith(arguments.namespace.lower())
            and arguments.algo in (None, namespace.hash_algo)
            and (arguments.seed is None or none_hash(arguments.seed, namespace.hash_algo) == namespace.none_hash)
        ):
            asked.append((namespace, groups))
    if held and not asked:
        raise ConfigError(f"none of the daemon's {len(held)} namespaces fits these options; see `kvcascade status`")
    return asked


def _present(
    daemon: "Client", namespace: "Namespace", groups: list[int], tokens: list[int], explain: bool
) -> dict[str, Any]:
    """How much of the prompt one namespace holds: what all the groups asked for hold, and the parts of each."""
    from kvcascade.tiers.block import BlockHasher

    from .protocol import OP_EXPLAIN, OP_WHERE

    fingerprint = namespace.fingerprint()
    answers: list[dict[str, Any]] = []
    for index in groups:
        size = namespace.groups[index].block_tokens
        hashes = BlockHasher(size, algo=namespace.hash_algo, none_hash=namespace.none_hash).extend(tokens)
        body = {"namespace": fingerprint, "group": index, "hashes": b"".join(hashes)}
        replies = daemon.call(OP_WHERE, body)["namespaces"] if hashes else []
        bits = next((one["tiers"] for one in replies if one["namespace"] == fingerprint), b"")
        parts = _parts(bits, size)
        answer: dict[str, Any] = {"group": index, "block_tokens": size, "blocks": len(hashes), "parts": parts}
        if explain and hashes:
            told = daemon.call(OP_EXPLAIN, body, timeout=EXPLAIN_TIMEOUT)
            here: dict[str, Any] = next((one for one in told["namespaces"] if one["namespace"] == fingerprint), {})
            answer["elsewhere"] = {
                "sources": here.get("sources", []),
                "prefill": here.get("prefill", {}),
                "why": _why(told["cluster"], here),
            }
        answers.append(answer)
    present = min(one["parts"][-1]["end"] if one["parts"] else 0 for one in answers)
    return {
        "namespace": fingerprint.hex(),
        "model": namespace.model,
        "kv_dtype": namespace.kv_dtype,
        "present_tokens": present,
        "groups": answers,
    }


def _why(cluster: bool, here: dict[str, Any]) -> str:
    if not cluster:
        return NO_NODES
    return str(here.get("why") or here.get("error") or "all of it is here")


def _parts(bits: bytes, block_tokens: int) -> list[dict[str, Any]]:
    """The leading blocks that lie somewhere, as runs of tokens [start, end) that lie in the same tiers."""
    from .protocol import Tier

    parts: list[dict[str, Any]] = []
    for bit, run in itertools.groupby(bits):
        if not bit:
            break
        start = parts[-1]["end"] if parts else 0
        tiers = [tier.name.lower() for tier in Tier if bit >> tier & 1]
        parts.append({"start": start, "end": start + block_tokens * len(list(run)), "tiers": tiers})
    return parts
