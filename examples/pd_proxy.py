"""Prefill on one vLLM server, decode on another: a reverse proxy for /v1/completions and /v1/chat/completions.

    python examples/pd_proxy.py --prefill http://10.0.0.7:8000 --decode http://10.0.0.8:8000 --port 8080

Each request goes to a prefill server first, for one token, with `kv_transfer_params: {"do_remote_decode": true}`; what
comes back in that field goes to a decode server with the request as the client sent it, and its answer is passed on as
it comes. Both run with `CascadeConnector`, beside daemons that reach one another (README, "Prefill and decode on
different engines"). Either option may be given several times: requests go round. Runs in vLLM's own environment, which
has aiohttp.

Rule: the prefill is a help and never a condition. Where it fails, is refused or gives no hand-off, the decode server
computes the prompt; it says itself what is wrong with a request.
"""

import argparse
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aiohttp import ClientConnectionResetError, ClientError, ClientSession, ClientTimeout, web

PATHS = ("/v1/completions", "/v1/chat/completions")
FIELD = "kv_transfer_params"
CONNECT_S = 5.0
PREFILL_S = 300.0
MOST_BODY = 64 << 20
# Of one connection, or made anew for the next.
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length"}

log = logging.getLogger("pd_proxy")


def for_prefill(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same prompt, for one token, which nobody reads: the decode server draws all of them."""
    asked = {name: value for name, value in body.items() if name not in ("stream_options", "best_of")}
    asked |= {"max_tokens": 1, "n": 1, "stream": False, FIELD: {"do_remote_decode": True}}
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    if "min_tokens" in asked:
        asked["min_tokens"] = 0
    return asked


def several(body: Mapping[str, Any]) -> bool:
    """Whether it is a batch of prompts: the field has room for one hand-off."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


def passed_on(headers: Mapping[str, str], *, but: Iterable[str] = ()) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in {*HOP_BY_HOP, *but}}


class Proxy:
    """Passes requests on; `client` is open for as long as the application runs."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self._prefill: Iterator[str] = itertools.cycle(prefill)
        self._decode: Iterator[str] = itertools.cycle(decode)
        self._client: ClientSession

    async def client(self, app: web.Application) -> Any:
        timeout = ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with ClientSession(timeout=timeout, auto_decompress=False) as self._client:
            yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return web.json_response({"error": {"message": "the body must be a JSON object", "code": 400}}, status=400)
        # Which node a daemon turns to is not for clients to say.
        body.pop(FIELD, None)
        if not several(body):
            given = await self._prefilled(request, body)
            if given is not None:
                body[FIELD] = given
        return await self._passed(request, json=body)

    async def _prefilled(self, request: web.Request, body: Mapping[str, Any]) -> Any:
        """The hand-off; None where there is none."""
        server = next(self._prefill)
        headers = passed_on(request.headers, but=("accept-encoding", "content-type"))
        headers["Accept-Encoding"] = "identity"
        try:
            async with self._client.post(
                server + request.path, json=for_prefill(body), headers=headers, timeout=ClientTimeout(PREFILL_S)
            ) as answer:
                answer.raise_for_status()
                told = await answer.json()
                return told.get(FIELD) if isinstance(told, dict) else None
        except (ClientError, TimeoutError, ValueError, RecursionError) as error:
            log.warning("not prefilled server=%s reason=%s: %s", server, type(error).__name__, error)
            return None

    async def other(self, request: web.Request) -> web.StreamResponse:
        return await self._passed(request, data=await request.read())

    async def _passed(self, request: web.Request, **body: Any) -> web.StreamResponse:
        server = next(self._decode)
        headers = passed_on(request.headers, but=("content-type",) if "json" in body else ())
        response: web.StreamResponse | None = None
        try:
            async with self._client.request(
                request.method, server + request.path_qs, headers=headers, **body
            ) as answer:
                response = web.StreamResponse(status=answer.status, headers=passed_on(answer.headers))
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                await response.write_eof()
                return response
        except ClientConnectionResetError:
            raise  # our client has left
        except (ClientError, TimeoutError) as error:
            log.warning("no answer server=%s reason=%s: %s", server, type(error).__name__, error)
            if response is not None:
                raise  # what has been sent cannot be taken back: the client's connection is cut
            return web.json_response({"error": {"message": f"{server} does not answer", "code": 502}}, status=502)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL", help="a server that prefills")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="a server that decodes")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    proxy = Proxy([url.rstrip("/") for url in arguments.prefill], [url.rstrip("/") for url in arguments.decode])
    app = web.Application(client_max_size=MOST_BODY)
    app.cleanup_ctx.append(proxy.client)
    for path in PATHS:
        app.router.add_post(path, proxy.complete)
    app.router.add_route("*", "/{path:.*}", proxy.other)
    # What a client asked for that has left is not computed to its end.
    web.run_app(app, host=arguments.host, port=arguments.port, access_log=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
