"""Binding the tunnel's UDP socket.

Refuses to fragment: a datagram that does not fit the path is lost, as QUIC wants it (RFC 9000, section 14).
"""

import errno
import socket

from node.errors import TunnelError

_SOCKET_BUFFER = 4 << 20
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3  # linux/in.h, linux/in6.h: never fragment
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE = 33, 32  # asm-generic/socket.h: past net.core.rmem_max, for root


def bind_udp(bind: str, port: int, port_range: tuple[int, int] | None = None) -> socket.socket:
    """Return a non-blocking UDP socket bound to the IP address `bind`.

    `port` 0 means any free port, or the first free one of `port_range` (both ends included). "::" takes IPv4 too.
    Raises TunnelError.
    """
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        _tune(sock)
        ports = range(port_range[0], port_range[1] + 1) if port == 0 and port_range is not None else (port,)
        _bind_one_of(sock, bind, ports)
    except BaseException:
        sock.close()
        raise
    return sock


def _bind_one_of(sock: socket.socket, bind: str, ports: range | tuple[int, ...]) -> None:
    for candidate in ports:
        try:
            sock.bind((bind, candidate))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and len(ports) > 1:
                continue
            raise TunnelError(
                f"cannot bind UDP {bind}:{candidate}: {error.strerror}", "choose another [tunnel] address or port"
            ) from error
        return
    raise TunnelError(
        f"every UDP port from {ports[0]} to {ports[-1]} is in use" if ports else "the range of UDP ports is empty",
        "widen [tunnel] ports",
    )


def _tune(sock: socket.socket) -> None:
    """Ask for large buffers and no fragments. What a kernel will not do is done without."""
    for force, option in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        if not _try_option(sock, socket.SOL_SOCKET, force, _SOCKET_BUFFER):
            _try_option(sock, socket.SOL_SOCKET, option, _SOCKET_BUFFER)
    _try_option(sock, socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)
    if sock.family == socket.AF_INET6:
        _try_option(sock, socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)


def _try_option(sock: socket.socket, level: int, option: int, value: int) -> bool:
    try:
        sock.setsockopt(level, option, value)
    except OSError:
        return False
    return True
