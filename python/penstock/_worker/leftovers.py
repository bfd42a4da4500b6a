"""Finds resources that an app leaves open when it is loaded, and that forks cannot share."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

DESCRIPTORS = "/proc/self/fd"


def open_descriptors() -> dict[int, str]:
    """Return the target of each open descriptor of this process, as in ``/proc``; empty where there is no ``/proc``."""
    found: dict[int, str] = {}
    with suppress(OSError):
        for number in map(int, os.listdir(DESCRIPTORS)):
            with suppress(OSError):  # the listing itself
                found[number] = os.readlink(f"{DESCRIPTORS}/{number}")
    return found


def warnings_since(before: dict[int, str]) -> Iterator[str]:
    """Yield a warning for each kind of resource opened since then that children must not share."""
    now = open_descriptors()
    new = {number: to for number, to in now.items() if before.get(number) != to}
    loops = open_loops() if any("eventpoll" in to or "kqueue" in to for to in new.values()) else []
    if loops:
        yield warning_of_loops(loops)
    # Each loop has its own pair of sockets, to be woken by.
    of_loops = {own.fileno() for loop in loops for own in vars_of(loop, "_ssock", "_csock")}
    sockets = {number: describe(number) for number, to in new.items() if to.startswith("socket:")}
    for number in of_loops:
        sockets.pop(number, None)
    if sockets:
        yield warning_of_sockets(sorted(sockets.values()))


def warning_of_sockets(sockets: list[str]) -> str:
    shown = ", ".join(sockets[:4]) + (f" and {len(sockets) - 4} more" if len(sockets) > 4 else "")
    return (
        f"the app left {len(sockets)} socket(s) open while it was loaded ({shown}); all processes that run jobs share"
        " them, so what they send and receive gets mixed up. Open connections in @app.on_process_start, or close them"
        " at the end of @app.on_worker_start"
    )


def warning_of_loops(loops: list[asyncio.AbstractEventLoop]) -> str:
    running = sum(loop.is_running() for loop in loops)
    state = f"{running} of them running in threads, which do not exist there" if running else "none running"
    return (
        f"the app left {len(loops)} event loop(s) open while it was loaded ({state}); processes that run jobs share"
        " what the loops wait for, so callbacks get lost. Make loops in tasks or in @app.on_process_start, and use"
        " asyncio.run() for what has to be awaited before"
    )


def describe(descriptor: int) -> str:
    """Describe the target of a socket: ``to 10.0.0.5:5432``, ``listening on 127.0.0.1:8000``."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as opened:
            for words, address_of in (("to", opened.getpeername), ("listening on", opened.getsockname)):
                with suppress(OSError):
                    if shown := show(address_of()):
                        return f"{words if words == 'to' or listens(opened) else 'bound to'} {shown}"
            return "connected to nothing" if opened.family != socket.AF_UNIX else "one of a pair"
    except OSError:
        return f"descriptor {descriptor}"


def listens(opened: socket.socket) -> bool:
    with suppress(OSError):
        return bool(opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def show(address: Any) -> str:
    if isinstance(address, tuple):
        host, port = map(str, address[:2])  # pyright: ignore[reportUnknownArgumentType]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if isinstance(address, bytes):
        return "@" + address.strip(b"\0").decode(errors="backslashreplace")
    return str(address)


def open_loops() -> list[asyncio.AbstractEventLoop]:
    asyncio = sys.modules.get("asyncio")
    if asyncio is None:
        return []
    # Compared by type, because `isinstance` may run code of objects that pretend to be of another class.
    loops = [each for each in gc.get_objects() if issubclass(type(each), asyncio.AbstractEventLoop)]
    return [loop for loop in loops if not loop.is_closed()]


def vars_of(loop: object, *names: str) -> list[socket.socket]:
    found = [getattr(loop, name, None) for name in names]
    return [each for each in found if isinstance(each, socket.socket)]
