"""run: quote, agree, submit, follow."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import click

from node.cli import jobfile, plan, staging, values
from node.cli.connection import connect
from node.cli.failures import EXIT_INTERRUPTED
from node.cli.follow import Follower, exit_status_of, tell_end
from node.cli.output import ask, format_command, json_option, print_json, say, tell
from node.cli.requirement import requirement_from, requirement_options, time_option, with_whole_provider
from node.errors import EXIT_OWN, BadArgument, NoMatch
from node.rpc.api import jobs, market
from node.rpc.client import Client
from protocol.units import Price, cost


class Wanted(NamedTuple):
    """A job as typed: everything but the files' contents and the price."""

    requirement: market.Requirement
    command: tuple[str, ...]
    name: str
    variables: dict[str, str]
    inputs: list[values.InputArgument]
    ignored: tuple[str, ...]
    """Patterns of what is not sent."""
    outputs: list[values.OutputArgument]
    time_ms: int
    max_spend: int | None
    prepay_ms: int


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARG]...")
@click.option("-f", "--file", type=click.Path(path_type=Path), metavar="FILE", help="Read flags from a job.toml.")
@click.option("--name", metavar="NAME", help="A name to call the job by; else one is made up.")
@click.option("-d", "--detach", is_flag=True, help="Return at once, and print the job's id.")
@click.option("--dry-run", is_flag=True, help="Show the plan, and buy nothing.")
@click.option("-y", "--yes", is_flag=True, help="Agree to the plan without being asked.")
@requirement_options
@time_option
@click.option("-w", "--workdir", type=click.Path(path_type=Path), metavar="DIR", help="Send DIR, and run in it.")
@click.option("-i", "--input", "inputs", multiple=True, metavar="SRC[:DST]", help="Send a file or folder.")
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    metavar="PATTERN",
    help="Leave out of inputs, as .gpunodeignore does.",
)
@click.option(
    "-o", "--output", "outputs", multiple=True, metavar="DIR[:LOCAL]", help="Bring a file or folder back."
)
@click.option("-e", "--env", "variables", multiple=True, metavar="K[=V]", help="Set a variable of the job.")
@click.option("--max-spend", type=values.credits_amount, metavar="$",
              help="Most for the whole job; else max price x GPUs x time.")  # fmt: skip
@click.option("--prepay", type=values.duration, metavar="TIME",
              help="Pay so far ahead, so that the job goes on while this machine is away.")  # fmt: skip
@json_option
@click.pass_context
def run(
    context: click.Context,
    /,
    command: tuple[str, ...],
    file: Path | None,
    as_json: bool,
    **given: Any,  # noqa: ANN401 - the remaining flags
) -> int:
    """Run a command on somebody's GPU.

    Shows the plan and asks; sends the inputs; prints the output as it comes; brings the outputs back. Ctrl-C
    leaves the job running. Paths of inputs and outputs in the job are relative to where its command runs.

    \b
      gpunode run --gpus A100:1 --max-price 0.40 -w . -o results -- python train.py
    """  # noqa: D301 - click wants the very character \b here
    wanted, flags = _read(context, command, file, given)
    with connect() as client:
        wanted = wanted._replace(requirement=with_whole_provider(wanted.requirement, client))
        quote = client.call(
            market.QUOTE, market.QuoteParams(requirement=wanted.requirement, duration_ms=wanted.time_ms)
        )
        max_price, max_spend = _limits(wanted, quote)
        if flags["dry_run"]:
            return _show_dry_run(quote, wanted, max_price, max_spend, as_json=as_json)
        outputs = staging.check_outputs(wanted.outputs)
        if not _agreed(quote, wanted, max_price, max_spend, yes=flags["yes"]):
            tell("nothing was bought")
            return EXIT_OWN
        params = jobs.RunParams(
            requirement=_priced(wanted.requirement, max_price),
            command=wanted.command,
            name=wanted.name,
            variables=wanted.variables,
            inputs=staging.scan_inputs(wanted.inputs, wanted.ignored),
            outputs=outputs,
            time_limit_ms=wanted.time_ms,
            max_spend=max_spend,
            prepay_ms=wanted.prepay_ms,
        )
        submitted = _submit(client, params)
    if flags["detach"]:
        print_json(submitted) if as_json else say(submitted.job)
        return 0
    tell(f"job {submitted.job} ({submitted.name})")
    return follow_to_end(submitted.job, as_json=as_json)


def follow_to_end(job: str, *, as_json: bool) -> int:
    """Follow a job, say how it ended, and return the exit status; Ctrl-C detaches."""
    try:
        event = Follower(job, logs_to_stderr=as_json).follow()
    except KeyboardInterrupt:
        tell(f"\ndetached: the job goes on. Attach again: gpunode attach {job}; end it: gpunode cancel {job}")
        return EXIT_INTERRUPTED
    tell_end(event)
    if as_json:
        print_json(event)
    return exit_status_of(event.entry)


def _read(
    context: click.Context, command: tuple[str, ...], file: Path | None, given: dict[str, Any]
) -> tuple[Wanted, dict[str, Any]]:
    """Return what is wanted, and the remaining flags."""
    base, variables = Path.cwd(), {}
    flags = given
    table: dict[str, Any] = {}
    if file is not None:
        table = jobfile.read(file)
        flags = jobfile.merge(context, given, table, file)
        command = command or jobfile.command_of(table, file)
        variables = jobfile.variables_of(table, file)
    if not command:
        raise click.UsageError("there is no command to run: put it last, after --", context)
    file_base = base if file is None else file.absolute().parent

    def base_of(name: str) -> Path:
        source = context.get_parameter_source(name)
        return base if source is click.core.ParameterSource.COMMANDLINE else file_base

    try:
        variables |= dict(values.parse_variable(text, os.environ) for text in flags["variables"])
        inputs = [values.parse_input(text, base_of("inputs")) for text in flags["inputs"]]
        outputs = [values.parse_output(text, base_of("outputs")) for text in flags["outputs"]]
    except ValueError as error:
        raise BadArgument(str(error), "see: gpunode run --help") from None
    if flags["workdir"] is not None:
        # The job starts in its own directory, so the tree goes there, and inputs go beside what it holds.
        inputs.insert(0, values.InputArgument((base_of("workdir") / flags["workdir"]).absolute(), "."))
    return (
        Wanted(
            requirement=requirement_from(flags),
            command=command,
            name=flags["name"] or "",
            variables=variables,
            inputs=inputs,
            ignored=tuple(flags["ignored"]),
            outputs=outputs,
            time_ms=flags["time_ms"],
            max_spend=flags["max_spend"],
            prepay_ms=flags["prepay"] or 0,
        ),
        flags,
    )


def _limits(wanted: Wanted, quote: market.QuoteResult) -> tuple[int, int]:
    """Return (max price, max spend); raise NoMatch when nothing matches and no price was named to wait for."""
    max_price = wanted.requirement.max_price if wanted.requirement.max_price is not None else quote.max_price
    if max_price is None:
        reasons = "; ".join(rejection.detail for rejection in quote.rejections[:3])
        changes = [rejection.change for rejection in quote.rejections if rejection.change]
        message = f"none of the {quote.offers_known} known offers matches" + (f": {reasons}" if reasons else "")
        advice = f"try {changes[0]}" if changes else "see what there is with: gpunode offers"
        raise NoMatch(message, f"{advice}; or give --max-price, and the job waits for a match")
    most = cost(Price(max_price), wanted.requirement.quantity, wanted.time_ms)
    return max_price, most if wanted.max_spend is None else wanted.max_spend


def _agreed(quote: market.QuoteResult, wanted: Wanted, max_price: int, max_spend: int, *, yes: bool) -> bool:
    """Show the plan, and return whether the caller agrees to it."""
    plan.print_plan(quote, stderr=True)
    plan.print_limits(wanted.requirement, wanted.time_ms, max_price, max_spend)
    if not any(candidate.affordable for candidate in quote.candidates):
        tell("nothing matches at that price now: the job will wait until something does")
    if yes:
        return True
    return ask(
        f"run {format_command(wanted.command)}?",
        refusal="there is no terminal to ask on: add --yes to agree to this plan, or --dry-run to only see it",
    )


def _show_dry_run(
    quote: market.QuoteResult, wanted: Wanted, max_price: int, max_spend: int, *, as_json: bool
) -> int:
    if as_json:
        print_json({"quote": quote, "max_price": max_price, "max_spend": max_spend})
    else:
        plan.print_plan(quote)
        plan.print_limits(wanted.requirement, wanted.time_ms, max_price, max_spend)
    return 0 if quote.candidates else EXIT_OWN


def _priced(requirement: market.Requirement, max_price: int) -> market.Requirement:
    from msgspec.structs import replace

    return replace(requirement, max_price=max_price)


def _submit(client: Client, params: jobs.RunParams) -> jobs.RunResult:
    try:
        return client.call(jobs.RUN, params)
    except KeyboardInterrupt:
        tell("\nthe job may have been submitted already: see gpunode jobs")
        raise
