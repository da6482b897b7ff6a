"""peers: who is out there, and how far each is trusted with credit."""

import click

from node.cli import values
from node.cli.connection import call
from node.cli.output import (
    fields,
    format_time,
    json_option,
    print_json,
    say,
    short_peer,
    simulated_mark,
    table,
    tell,
)
from node.rpc.api import Nothing
from node.rpc.api import peers as api
from protocol.units import format_amount

NO_LIMIT = "none"


@click.group()
def peers() -> None:
    """Who is out there, and who has credit."""


@peers.command()
@click.option("-c", "--connected", is_flag=True, help="Only those connected now.")
@json_option
def ls(connected: bool, as_json: bool) -> None:
    """List the peers, connected ones first."""
    found = call(api.LIST, Nothing())
    shown = tuple(peer for peer in found.peers if peer.connected or not connected)
    if as_json:
        print_json(api.PeersListResult(peers=shown))
    elif not shown:
        say("no peers; connect to one with: gpunode peers connect ADDRESS")
    else:
        table(
            ("peer", "connected", "ping>", "credit>", "owes us>", "agent", "address"),
            (_row(peer) for peer in shown),
        )


def _row(peer: api.PeerEntry) -> tuple[str, ...]:
    way = ("in" if peer.inbound else "out") if peer.connected else "no"
    return (
        short_peer(peer.node),
        way,
        "" if peer.latency_ms is None else f"{peer.latency_ms} ms",
        "stranger" if peer.credit_limit is None else format_amount(peer.credit_limit),
        format_amount(peer.balance),
        peer.agent,
        peer.address,
    )


@peers.command()
@click.argument("address")
@json_option
def connect(address: str, as_json: bool) -> None:
    """Connect to a peer: a multiaddr (/ip4/.../tcp/.../p2p/...) or an invitation token."""
    found = call(api.CONNECT, api.ConnectParams(address=address))
    print_json(found) if as_json else say(f"connected to {found.node} at {found.address}")


@peers.command()
@json_option
def invite(as_json: bool) -> None:
    """Make an invitation, to be used with: gpunode peers connect TOKEN."""
    found = call(api.INVITE, Nothing())
    if as_json:
        print_json(found)
        return
    if found.secret:
        tell(f"the token contains the key of network {found.network}: give it to nobody else")
    say(found.token)


@peers.command()
@click.argument("peer")
@json_option
def show(peer: str, as_json: bool) -> None:
    """Show all about PEER: its id, or the beginning or the end of it."""
    found = call(api.SHOW, api.PeerParams(peer=peer.removeprefix("..")))
    if as_json:
        print_json(found)
        return
    entry = found.entry
    offers = (
        f"{offer.free} x {offer.model} ({offer.listing}) {simulated_mark(offer.simulated)}"
        for offer in found.offers
    )
    fields(
        (
            ("peer", entry.node),
            ("connected", "yes" if entry.connected else "no"),
            ("last seen", format_time(found.last_seen_at)),
            ("agent", entry.agent),
            ("addresses", "\n".join(found.addresses)),
            ("offers", "\n".join(offer.rstrip() for offer in offers)),
            ("credit", "a stranger" if entry.credit_limit is None else format_amount(entry.credit_limit)),
            (
                "owes us",
                f"{format_amount(entry.balance)}, and may come to owe {format_amount(found.exposure)} more",
            ),
            (
                "receipts",
                f"{found.receipts}: earned {format_amount(found.earned)}, spent {format_amount(found.spent)}",
            ),
            ("misdeeds", "\n".join(found.misdeeds)),
        )
    )


@peers.command()
@click.argument("peer")
@click.argument("amount")
@json_option
def limit(peer: str, amount: str, as_json: bool) -> None:
    """Let PEER owe at most AMOUNT dollars; "none" makes it a stranger again.

    Strangers share one small limit among them all (ledger.stranger_credit).
    """
    credit = None if amount == NO_LIMIT else values.credits_amount(amount)
    entry = call(api.LIMIT, api.LimitParams(peer=peer.removeprefix(".."), credit_limit=credit)).entry
    if as_json:
        print_json(entry)
    elif entry.credit_limit is None:
        say(f"{entry.node} is a stranger")
    else:
        say(
            f"{entry.node} may owe {format_amount(entry.credit_limit)}; now it owes {format_amount(entry.balance)}"
        )
