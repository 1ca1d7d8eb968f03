"""Prefill on one real vLLM server and decode on another, through examples/pd_proxy.py, as the README says."""

import itertools
import json
import re
import shlex
import shutil
import socket
import threading
import urllib.error
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from engines.nodes import secret_file
from engines.scripted import eventually
from engines.vllm_server import Server, serving, vllm_command, vllm_variables

pytestmark = [pytest.mark.vllm, pytest.mark.engine, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ASKED = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "model": "tiny"}


def prompt(name: int) -> list[int]:
    return [(i * 31 + 7 * name + 3) % 1000 for i in range(200)]


def complete(server: Server, tokens: list[int], **more: Any) -> tuple[list[int], int]:
    """The tokens drawn, and how many of the prompt's were not computed by the server that answered."""
    answer = json.loads(server.post("/v1/completions", prompt=tokens, **ASKED, **more))
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["token_ids"], (details or {}).get("cached_tokens", 0)


def streamed(server: Server, tokens: list[int]) -> list[int]:
    drawn: list[int] = []
    for line in server.post("/v1/completions", prompt=tokens, stream=True, **ASKED).decode().splitlines():
        if line.startswith("data: {"):
            drawn += json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"]
    return drawn


def chat(server: Server, words: list[int], **more: Any) -> tuple[str, int]:
    """What is said to a message of one word a token, and how many of its tokens were not computed there."""
    asked = {name: value for name, value in ASKED.items() if name != "return_token_ids"}
    messages = [{"role": "user", "content": " ".join(f"w{word}" for word in words)}]
    answer = json.loads(server.post("/v1/chat/completions", messages=messages, **asked, **more))
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["message"]["content"], (details or {}).get("cached_tokens", 0)


def with_words(model: Path, folder: Path) -> Path:
    """The model with a tokenizer: a word for each token, and a template that says a chat's words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(model, folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(1024)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    told = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", eos_token="w2", chat_template=template)
    told.save_pretrained(folder)
    return folder


def counted(server: Server, name: str) -> float:
    lines = server.get("/metrics").decode().splitlines()
    return sum(float(one.rsplit(" ", 1)[1]) for one in lines if one.startswith(f"vllm:kvcascade_{name}_total{{"))


def proxy_command(python: Path, prefill: Server, decode: Server) -> list[str | Path]:
    """The README's line, for servers that run here."""
    (line,) = re.findall(r"^    python (examples/pd_proxy\.py.*)$", README, re.M)
    words = shlex.split(line)
    here = {"http://10.0.0.7:8000": prefill.address, "http://10.0.0.8:8000": decode.address}
    assert set(here) <= set(words) and words[-2] == "--port"
    return [python, "-P", ROOT / words[0], *(here.get(word, word) for word in words[1:-2])]


def test_prefill_on_one_rank_and_decode_on_two_and_the_other_way(
    vllm_python: Path, vllm_path: list[Path], tiny_model: Path, start_daemon: Any, tmp_path: Path
) -> None:
    usual = {"peers_listen": "127.0.0.1:0", "cluster_fetch": "always", "daemon_seed": "0"}
    usual["cluster_secret_file"] = secret_file()
    nodes = [start_daemon(cluster_node=name, **usual) for name in ("a", "b")]
    model = with_words(tiny_model, tmp_path / "model")
    with ExitStack() as stack:
        servers = []
        for number, (node, binds) in enumerate(zip(nodes, ("0-1", "0|1"), strict=True)):
            transfer = {
                "kv_connector": "CascadeConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"socket": str(node.socket)},
            }
            command = vllm_command(
                vllm_python, model, "--prefix-caching-hash-algo", "sha256_cbor",
                "--kv-transfer-config", json.dumps(transfer), "--tensor-parallel-size", str(number + 1),
                "--enable-prompt-tokens-details",
            )  # fmt: skip
            variables = vllm_variables(vllm_path) | {"VLLM_CPU_OMP_THREADS_BIND": binds}
            servers.append(stack.enter_context(serving(command, tmp_path / f"server {number}.log", **variables)))
        one, two = servers
        one.wait()
        two.wait()

        def proxy(prefill: Server, decode: Server, name: str) -> Server:
            command = proxy_command(vllm_python, prefill, decode)
            found = stack.enter_context(serving(command, tmp_path / f"{name}.log"))
            found.wait()
            return found

        there, back = proxy(one, two, "there"), proxy(two, one, "back")
        # What the model says by itself: a salt keeps these apart from all else.
        plain = [
            complete(one, prompt(number), kv_transfer_params={"kvcascade": "off"}, cache_salt="plain")[0]
            for number in range(4)
        ]
        salts = itertools.count()

        def handed_off(through: Server, number: int) -> bool:
            # On two cores that three ranks spin on, an answer may come too late for a request: it is computed then.
            drawn, cached = complete(through, prompt(number), cache_salt=f"salt {next(salts)}")
            assert drawn == plain[number]
            return cached == 192

        eventually(lambda: handed_off(there, 0), 120)
        eventually(lambda: handed_off(back, 1), 120)
        assert counted(one, "handoffs_given") >= 1 and counted(one, "handoffs_taken") >= 1
        assert counted(two, "handoffs_given") >= 1 and counted(two, "handoffs_taken") >= 1
        said, _ = chat(one, prompt(4), kv_transfer_params={"kvcascade": "off"}, cache_salt="plain")

        def chat_is_handed_off() -> bool:
            heard, cached = chat(there, prompt(4), cache_salt=f"salt {next(salts)}")
            assert heard == said
            return cached == 192

        eventually(chat_is_handed_off, 120)
        assert streamed(there, prompt(2)) == plain[2]
        # A step that computes one long prompt says how fast.
        complete(one, [(i * 17) % 1000 for i in range(400)])
        eventually(lambda: nodes[0].status()["cluster"]["remote"]["prefill"], 60)
        # A batch has no hand-off, a client's word for a node is not heard, and a wrong request is told so.
        answer = json.loads(there.post("/v1/completions", prompt=[prompt(0), prompt(1)], **ASKED))
        assert [choice["token_ids"] for choice in answer["choices"]] == plain[:2]
        lie = {"kvcascade_handoff": {"version": 1}}
        assert complete(there, prompt(0), kv_transfer_params=lie)[0] == plain[0]
        with pytest.raises(urllib.error.HTTPError) as wrong:
            there.post("/v1/completions", prompt=[1], model="another")
        with wrong.value:
            assert wrong.value.code == 404
        assert b"tiny" in there.get("/v1/models")
        # Without its prefill engine, or with that engine's node dead, the decode engine goes on alone.
        nodes[0].kill()
        assert complete(there, prompt(3))[0] == plain[3]
        one.process.kill()
        assert complete(there, prompt(0), cache_salt="new")[0] == plain[0]


class Answering(BaseHTTPRequestHandler):
    """A server that says what `told` holds, and remembers what it was asked."""

    told: ClassVar[tuple[int, bytes]]
    asked: ClassVar[list[Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body.get("kv_transfer_params"))
        status, said = self.told
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def two(python: Path, log: Path, prefill: type[Answering], decode: type[Answering]) -> Iterator[Server]:
    """The proxy between two servers of ours."""
    with ExitStack() as stack:
        urls = []
        for handler in (prefill, decode):
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            urls.append(f"http://127.0.0.1:{server.server_port}")
        command = [python, "-P", ROOT / "examples/pd_proxy.py", "--prefill", urls[0], "--decode", urls[1]]
        yield stack.enter_context(serving(command, log))


def answering(told: tuple[int, bytes], base: type[Answering] = Answering) -> type[Answering]:
    return type("Handler", (base,), {"told": told, "asked": []})


@pytest.mark.parametrize("said", [(429, b"{}"), (404, b"{}"), (500, b""), (200, b"[1]"), (200, b"{"), (200, b"{}")])
def test_whatever_the_prefill_server_says_the_decode_server_is_asked(
    vllm_python: Path, tmp_path: Path, said: tuple[int, bytes]
) -> None:
    prefill, decode = answering(said), answering((200, b'{"drawn": 1}'))
    with two(vllm_python, tmp_path / "proxy.log", prefill, decode) as proxy:
        answer = eventually(lambda: _posted(proxy), 60)
    assert answer == b'{"drawn": 1}'
    assert prefill.asked == [{"do_remote_decode": True}] and decode.asked == [None]


class Patient(Answering):
    """Answers no earlier than the one who asks has left."""

    left: ClassVar[threading.Event]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path)
        assert self.connection.recv(1) == b""
        self.left.set()
        self.close_connection = True


def test_what_a_client_asked_for_that_has_left_is_given_up(vllm_python: Path, tmp_path: Path) -> None:
    left = threading.Event()
    prefill = type("Handler", (Patient,), {"asked": [], "left": left})
    decode = answering((200, b'{"drawn": 1}'))
    with two(vllm_python, tmp_path / "proxy.log", prefill, decode) as proxy:
        eventually(lambda: _listens(proxy), 60)
        body = b'{"prompt": [1, 2]}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: it\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        url = urllib.parse.urlsplit(proxy.address)
        with socket.create_connection((url.hostname, url.port)) as client:
            client.sendall(head + body)
            eventually(lambda: prefill.asked)
        assert left.wait(30)
        assert decode.asked == []
        assert "Traceback" not in (tmp_path / "proxy.log").read_text()


def _listens(proxy: Server) -> bool:
    try:
        proxy.get("/")
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _posted(proxy: Server) -> bytes | None:
    try:
        return proxy.post("/v1/completions", prompt=[1, 2])
    except urllib.error.HTTPError:
        raise
    except OSError:  # it does not listen yet
        return None
