"""money: who owes whom and why, and putting payments on record."""

import click

from node.cli import values
from node.cli.connection import call
from node.cli.output import (
    ask,
    format_time,
    json_option,
    print_json,
    say,
    short_hash,
    short_peer,
    simulated_mark,
    table,
    tell,
)
from node.errors import EXIT_OWN
from node.rpc.api import Nothing
from node.rpc.api import money as api
from protocol.units import format_amount, format_duration, format_price


@click.group()
def money() -> None:
    """Who owes whom, and why."""


@money.command()
@json_option
def ledger(as_json: bool) -> None:
    """Show the account of every peer, and settlements that wait for one side."""
    found = call(api.LEDGER, Nothing())
    if as_json:
        print_json(found)
        return
    say(f"owed to us {format_amount(found.owed_to_us)}, owed by us {format_amount(found.owed_by_us)}")
    say(f"strangers: {format_amount(found.strangers_exposure)} of {format_amount(found.strangers_limit)} at risk")
    if found.accounts:
        say()
        heads = (
            "peer",
            "owes us>",
            "we owe>",
            "earned>",
            "spent>",
            "paid to us>",
            "paid by us>",
            "at risk>",
            "credit>",
        )
        table(heads, (_account_row(account) for account in found.accounts))
    if found.pending:
        say()
        _print_settlements(found.pending)


def _account_row(account: api.Account) -> tuple[str, ...]:
    return (
        short_peer(account.peer),
        format_amount(account.balance) if account.balance > 0 else "",
        format_amount(-account.balance) if account.balance < 0 else "",
        format_amount(account.earned),
        format_amount(account.spent),
        format_amount(account.settled_to_us),
        format_amount(account.settled_by_us),
        format_amount(account.exposure),
        "stranger" if account.credit_limit is None else format_amount(account.credit_limit),
    )


def _print_settlements(entries: tuple[api.SettlementEntry, ...]) -> None:
    waits = {
        api.SettlementState.AWAITING_PEER: "waits for the peer",
        api.SettlementState.AWAITING_US: "accept it: gpunode money accept",
        api.SettlementState.ACCEPTED: "accepted",
    }
    table(
        ("settlement", "peer", "way", "amount>", "owes us then>", "when", "reference", "state"),
        (
            (
                short_hash(entry.settlement),
                short_peer(entry.peer),
                "we paid" if entry.paid_by_us else "paid to us",
                format_amount(entry.amount),
                format_amount(entry.balance_after),
                format_time(entry.settled_at),
                entry.reference,
                waits[entry.state],
            )
            for entry in entries
        ),
    )


@money.command()
@click.option("--job", metavar="JOB", help="Only this job's.")
@click.option("--peer", metavar="PEER", help="Only those with this peer.")
@click.option(
    "-n", "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="How many at most."
)
@json_option
def receipts(job: str | None, peer: str | None, limit: int, as_json: bool) -> None:
    """List receipts, newest first."""
    params = api.ReceiptsParams(job=job, peer=peer.removeprefix("..") if peer else None, limit=limit)
    found = call(api.RECEIPTS, params)
    if as_json:
        print_json(found)
    elif not found.receipts:
        say("no receipts")
    else:
        heads = (
            "receipt",
            "ended",
            "way",
            "peer",
            "job",
            "metered>",
            "price>",
            "GPUs>",
            "amount>",
            "outcome",
            "note",
        )
        table(heads, (_receipt_row(receipt) for receipt in found.receipts))


def _receipt_row(receipt: api.ReceiptEntry) -> tuple[str, ...]:
    signed = "" if receipt.accepted else "one signature"
    return (
        short_hash(receipt.receipt),
        format_time(receipt.ended_at),
        "earned" if receipt.earned else "spent",
        short_peer(receipt.peer),
        receipt.job or "",
        format_duration(receipt.metered_ms),
        format_price(receipt.price),
        str(receipt.quantity),
        format_amount(receipt.amount),
        receipt.outcome.replace("_", " "),
        ", ".join(note for note in (simulated_mark(receipt.simulated), signed) if note),
    )


@money.command()
@click.argument("peer")
@click.argument("amount", type=values.credits_amount)
@click.option("--paid", "way", flag_value="paid", help="We paid the peer.")
@click.option("--received", "way", flag_value="received", help="The peer paid us.")
@click.option("--reference", default="", metavar="TEXT", help="How: a bank reference, for example.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def settle(peer: str, amount: int, way: str | None, reference: str, yes: bool, as_json: bool) -> int:
    """Put on record that AMOUNT dollars were paid outside.

    gpunode moves no money: it signs what was paid and asks the peer to sign, too. Until both have, nothing
    changes.
    """
    if way is None:
        raise click.UsageError("say who paid: --paid (we did) or --received (the peer did)")
    paid = way == "paid"
    line = f"we paid {format_amount(amount)} to" if paid else f"we received {format_amount(amount)} from"
    if not yes and not ask(f"sign that {line} {peer}?", refusal="there is no terminal to ask on: add --yes"):
        tell("nothing was signed")
        return EXIT_OWN
    params = api.SettleParams(peer=peer.removeprefix(".."), amount=amount, paid_by_us=paid, reference=reference)
    _print_settled(call(api.SETTLE, params), as_json=as_json)
    return 0


@money.command()
@click.argument("settlement")
@json_option
def accept(settlement: str, as_json: bool) -> None:
    """Agree with a SETTLEMENT that a peer put on record (see: gpunode money ledger)."""
    _print_settled(call(api.ACCEPT, api.AcceptParams(settlement=settlement)), as_json=as_json)


def _print_settled(found: api.SettleResult, *, as_json: bool) -> None:
    print_json(found) if as_json else _print_settlements((found.entry,))
