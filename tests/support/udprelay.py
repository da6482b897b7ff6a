"""A UDP relay on loopback between a client and a server: a NAT that can forget, and a cable that can be cut."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio


class UdpRelay:
    """Made by `open_relay`. The client dials `port`; the server sees the relay's outer address."""

    def __init__(self, server_port: int) -> None:
        self.is_cut = False
        """Drop everything, both ways."""
        self.forwarded = 0
        self._server = ("127.0.0.1", server_port)
        self._client: tuple[str, int] | None = None
        self._inner = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
        self._outer = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
        self._nursery: trio.Nursery | None = None

    @property
    def port(self) -> int:
        """Where the client dials."""
        port: int = self._inner.getsockname()[1]
        return port

    @property
    def outer_port(self) -> int:
        """Where the server sees the client."""
        port: int = self._outer.getsockname()[1]
        return port

    async def rebind(self) -> None:
        """Forget the old outer address and take another one."""
        new = trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM)
        await new.bind(("127.0.0.1", 0))
        self._outer.close()
        self._outer = new
        assert self._nursery is not None
        self._nursery.start_soon(self._from_server, self._outer)

    async def start(self, nursery: trio.Nursery) -> None:
        """Bind both sockets and begin to forward."""
        self._nursery = nursery
        await self._inner.bind(("127.0.0.1", 0))
        await self._outer.bind(("127.0.0.1", 0))
        nursery.start_soon(self._from_client)
        nursery.start_soon(self._from_server, self._outer)

    def close(self) -> None:
        """Close both sockets."""
        self._inner.close()
        self._outer.close()

    async def _from_client(self) -> None:
        while True:
            data, self._client = await self._inner.recvfrom(65_535)
            if not self.is_cut:
                self.forwarded += 1
                await self._outer.sendto(data, self._server)

    async def _from_server(self, outer: trio.socket.SocketType) -> None:
        try:
            while True:
                data, _ = await outer.recvfrom(65_535)
                if not self.is_cut and self._client is not None:
                    self.forwarded += 1
                    await self._inner.sendto(data, self._client)
        except (trio.ClosedResourceError, OSError):
            return


@asynccontextmanager
async def open_relay(server_port: int) -> AsyncIterator[UdpRelay]:
    """Run a relay to 127.0.0.1:`server_port`."""
    relay = UdpRelay(server_port)
    async with trio.open_nursery() as nursery:
        await relay.start(nursery)
        try:
            yield relay
        finally:
            nursery.cancel_scope.cancel()
            relay.close()
