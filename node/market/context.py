"""What every part of the market needs, handed in by the composition root."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from node.errors import StoreError
from node.keys import LeaseKey
from node.ports import Clock, Network
from node.store import RecordRow, Store
from protocol import codec
from protocol.envelope import Sealed, kind_of, seal
from protocol.errors import MalformedRecord
from protocol.identity import NetworkId, NodeId, Signer

T = TypeVar("T")

TRADE_PROTOCOL = "trade/1"
"""One signed record in, one signed record out."""


HasEnded = Callable[[], bool]
"""Whether a process has ended."""


class KeeperHost(Protocol):
    """Starts keepers: plain processes, or transient systemd units."""

    def socket_path(self, lease: bytes) -> Path:
        """Return where the lease's keeper listens (at most 100 bytes)."""

    async def start(self, directory: Path, socket: Path, uid: int, gid: int) -> HasEnded:
        """Start a keeper for `directory` as `uid`; it outlives the daemon. Raises NodeError.

        Returns what tells whether it has ended already; False also when nobody can know.
        """

    def expect(self, linger_s: float) -> None:
        """Prepare for a keeper to be started within `linger_s` seconds."""


class Context(NamedTuple):
    """The surroundings of the market."""

    store: Store
    network: Network
    signer: Signer
    network_id: NetworkId
    network_name: str
    clock: Clock
    keepers: KeeperHost
    lease_root: Path

    @property
    def node(self) -> NodeId:
        """Our own id."""
        return NodeId(self.signer.public_key)

    def seal(self, record: T) -> Sealed[T]:
        """Sign a record for this network with the node key."""
        return seal(record, self.signer, self.network_id)

    def record_row(
        self, sealed: Sealed[Any], *, lease: bytes | None = None, reply_to: bytes | None = None
    ) -> RecordRow:
        """Return the row that remembers a record."""
        return RecordRow(
            id=sealed.id,
            kind=kind_of(type(sealed.record)),
            signer=sealed.signer,
            lease=lease,
            reply_to=reply_to,
            data=sealed.data,
            at=self.clock.now(),
        )

    def lease_directory(self, lease: bytes) -> Path:
        """Return the lease's directory."""
        return self.lease_root / lease.hex()


def decode_stored(data: bytes, record_type: type[T], what: str, size_max: int = codec.RECORD_SIZE_MAX) -> T:
    """Return what the database holds in CBOR; raise StoreError, with `what` it is, when that is damaged."""
    try:
        return codec.decode_untrusted(data, record_type, size_max)
    except MalformedRecord as error:
        raise StoreError(
            f"the database holds a damaged {what}: {error}",
            hint="restore it from a copy, or move it away: peers and lease directories tell what it had forgotten",
        ) from None


RandomBytes = Callable[[int], bytes]
random_bytes: RandomBytes = secrets.token_bytes


def new_lease_key() -> tuple[bytes, bytes]:
    """Return a fresh Ed25519 key as (32-byte seed, 32-byte public key), to be delegated to one lease."""
    key = LeaseKey.new()
    return key.reveal_seed(), key.public_key
