"""Ports for servers that tests start."""

import secrets
import socket


def free_port() -> int:
    """One that nobody listens on. It lies below those that the kernel gives to connections: one of these may be taken
    before the server is there."""
    for _ in range(1000):
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no port is free")
