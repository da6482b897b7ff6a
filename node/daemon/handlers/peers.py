"""peers.*: who is out there."""

from node.daemon.state import Daemon, peer_row
from node.errors import BadArgument
from node.market.credit import exposure_of
from node.market.settling import RECEIPT_KIND, balance_with
from node.ports import Peer
from node.rpc.method import Caller, Handlers, Nothing
from node.rpc.methods import peers as api
from node.store import Transaction
from node.swarm.invite import PREFIX, Invite, decode_invite, encode_invite
from protocol.identity import NodeId, peer_id

ADDRESSES_MAX = 8


def _entry(state: Daemon, node: NodeId, peer: Peer | None, tx: Transaction) -> api.PeerEntry:
    row = peer_row(tx, node)
    return api.PeerEntry(
        node=peer_id(node),
        address=peer.address if peer is not None else row.addresses.split(" ")[0],
        connected=peer is not None and peer.connected,
        inbound=peer is not None and peer.inbound,
        latency_ms=peer.latency_ms if peer is not None else None,
        agent=peer.agent if peer is not None else "",
        credit_limit=state.market.credit_limit(tx, node),
        balance=balance_with(tx, node),
    )


def _connected(state: Daemon, node: bytes) -> Peer | None:
    return next((peer for peer in state.context.network.peers() if peer.node == node), None)


def handlers(state: Daemon) -> Handlers:
    """Return the group's handlers."""
    store, network = state.context.store, state.context.network

    async def list_peers(params: Nothing, caller: Caller) -> api.PeersListResult:
        del params, caller

        def read(tx: Transaction) -> tuple[api.PeerEntry, ...]:
            known = {peer.node: peer for peer in network.peers()}
            remembered = [NodeId(row.node) for row in tx.peers.all() if row.node not in known]
            entries = [_entry(state, node, peer, tx) for node, peer in known.items()]
            return (*entries, *(_entry(state, node, None, tx) for node in remembered))

        entries = await store.transaction(read)
        return api.PeersListResult(peers=tuple(sorted(entries, key=lambda entry: not entry.connected)))

    async def connect(params: api.ConnectParams, caller: Caller) -> api.ConnectResult:
        del caller
        addresses: tuple[str, ...] = (params.address,)
        if params.address.startswith(PREFIX):
            addresses = _addresses_of_invite(state, params.address)
        node = await _dial_any(state, addresses)
        now = state.context.clock.now()

        def remember(tx: Transaction) -> None:
            row = peer_row(tx, node)
            known = [
                address for address in (*addresses, *row.addresses.split()) if address.endswith(peer_id(node))
            ]
            tx.peers.put(
                type(row)(
                    node=node,
                    label=row.label,
                    credit_limit=row.credit_limit,
                    addresses=" ".join(dict.fromkeys(known[:ADDRESSES_MAX])),
                    seen_at=now,
                )
            )

        await store.transaction(remember)
        return api.ConnectResult(node=peer_id(node), address=addresses[0])

    async def invite(params: Nothing, caller: Caller) -> api.InviteResult:
        del params, caller
        config = state.loaded.config.network
        key = b"" if config.key is None else config.key.reveal()
        token = encode_invite(
            Invite(network_name=config.name, network_key=key, addresses=network.addresses[:ADDRESSES_MAX])
        )
        return api.InviteResult(
            token=token, network=config.name, addresses=network.addresses[:ADDRESSES_MAX], secret=bool(key)
        )

    async def show(params: api.PeerParams, caller: Caller) -> api.PeerDetail:
        del caller
        return await store.transaction(lambda tx: _detail(state, params.peer, tx))

    async def limit(params: api.LimitParams, caller: Caller) -> api.LimitResult:
        del caller

        def write(tx: Transaction) -> api.PeerEntry:
            node = state.find_peer(params.peer, tx)
            row = peer_row(tx, node)
            tx.peers.put(
                type(row)(
                    node=node,
                    label=row.label,
                    credit_limit=params.credit_limit,
                    addresses=row.addresses,
                    seen_at=row.seen_at,
                )
            )
            return _entry(state, node, _connected(state, node), tx)

        return api.LimitResult(entry=await store.transaction(write))

    return {
        api.LIST.name: list_peers,
        api.CONNECT.name: connect,
        api.INVITE.name: invite,
        api.SHOW.name: show,
        api.LIMIT.name: limit,
    }


def _addresses_of_invite(state: Daemon, token: str) -> tuple[str, ...]:
    invite, config = decode_invite(token), state.loaded.config.network
    key = b"" if config.key is None else config.key.reveal()
    if (invite.network_name, invite.network_key) != (config.name, key):
        raise BadArgument(
            f"the invitation is for the network {invite.network_name!r}, and this daemon is in {config.name!r}"
            + (" (or has another key)" if invite.network_name == config.name else ""),
            hint="set network.name and network.key as the invitation has them, and restart: gpunode config check",
        )
    return invite.addresses


async def _dial_any(state: Daemon, addresses: tuple[str, ...]) -> NodeId:
    last: Exception | None = None
    for address in addresses:
        try:
            return await state.context.network.connect(address)
        except Exception as error:
            last = error
    raise last or BadArgument("the invitation names no address")


def _detail(state: Daemon, reference: str, tx: Transaction) -> api.PeerDetail:
    node = state.find_peer(reference, tx)
    row = peer_row(tx, node)
    receipts = list(
        tx.entries.where("peer = ? and kind = ? and confirmed = 1 and simulated = 0", node, RECEIPT_KIND)
    )
    now = state.context.clock.now()
    return api.PeerDetail(
        entry=_entry(state, node, _connected(state, node), tx),
        addresses=tuple(row.addresses.split()),
        offers=tuple(
            api.PeerOffer(
                listing=offer.record.listing,
                model=offer.record.device.model,
                free=offer.record.free,
                simulated=offer.record.simulated,
            )
            for offer in state.market.book.book.offers_of(node)
            if offer.record.expires_at > now
        ),
        receipts=len(receipts),
        earned=sum(entry.amount for entry in receipts if entry.amount > 0),
        spent=-sum(entry.amount for entry in receipts if entry.amount < 0),
        exposure=exposure_of(tx, node),
        misdeeds=state.context.network.misdeeds(node),
        last_seen_at=row.seen_at or None,
    )
