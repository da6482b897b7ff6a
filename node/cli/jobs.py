"""jobs, why, logs, attach, fetch, cancel: what became of a job."""

import sys
from typing import Any

import click
from click.shell_completion import CompletionItem

from node.cli.connection import call, connect
from node.cli.follow import Follower, dropped_line
from node.cli.output import (
    fields,
    format_bytes,
    format_command,
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
from node.cli.plan import print_rejections
from node.cli.requirement import NAMES, requirement_from, requirement_options, with_whole_provider
from node.errors import EXIT_OWN, NodeError
from node.rpc.api import jobs as api
from protocol.units import format_amount, format_duration, format_price


def complete_job(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the caller's jobs whose name or id begins so; nothing when no daemon answers."""
    try:
        found = call(api.LIST, api.JobsListParams()).jobs
    except NodeError:
        return []
    return [
        CompletionItem(word, help=job.state.value)
        for job in found
        for word in (job.name, job.job)
        if word.startswith(incomplete)
    ]


@click.command()
@click.argument("job", required=False, shell_complete=complete_job)
@click.option("-a", "--all-users", is_flag=True, help="Also other users' jobs; for administrators.")
@click.option("-u", "--unfinished", is_flag=True, help="Only jobs that have not ended.")
@click.option(
    "-n", "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many at most."
)
@json_option
def jobs(job: str | None, all_users: bool, unfinished: bool, limit: int, as_json: bool) -> None:
    """List jobs, or show one.

    Newest first. JOB is a job's id or name, a unique prefix of either, or - for the last one.
    """
    if job is not None:
        detail = call(api.SHOW, api.JobParams(job=job))
        print_json(detail) if as_json else _print_detail(detail)
        return
    found = call(api.LIST, api.JobsListParams(all_users=all_users, unfinished=unfinished, limit=limit))
    if as_json:
        print_json(found)
    elif not found.jobs:
        say("no jobs; run one with: gpunode run --gpus 1 -- COMMAND")
    else:
        heads = ("job", "name", "state", "exit>", "created", "cost>", "GPU", "command", "note")
        table(heads, (_row(entry) for entry in found.jobs))


def _row(entry: api.JobEntry) -> tuple[str, ...]:
    outcome = entry.outcome if entry.outcome not in {"", api.OUTCOME_COMPLETED} else ""
    notes = (simulated_mark(entry.simulated), outcome.replace("_", " "), entry.detail)
    return (
        entry.job,
        entry.name,
        entry.state.value,
        "" if entry.exit_status is None else str(entry.exit_status),
        format_time(entry.created_at),
        format_amount(entry.cost),
        f"{entry.quantity} x {entry.model}" if entry.quantity > 1 else entry.model,
        format_command(entry.command, 40),
        ", ".join(note for note in notes if note),
    )


def _print_detail(detail: api.JobDetail) -> None:
    entry = detail.entry
    outcome = ", ".join(part for part in (entry.outcome.replace("_", " "), entry.detail) if part)
    fields(
        (
            ("job", f"{entry.job} ({entry.name}), of uid {entry.uid}"),
            ("state", entry.state.value + (f": {outcome}" if outcome else "")),
            ("exit status", "" if entry.exit_status is None else str(entry.exit_status)),
            ("command", format_command(entry.command, 4000)),
            ("GPUs", f"{entry.quantity} x {entry.model or 'any'} {simulated_mark(entry.simulated)}".rstrip()),
            ("variables", ", ".join(detail.variables)),
            ("created", format_time(entry.created_at)),
            ("started", format_time(entry.started_at)),
            ("ended", format_time(entry.ended_at)),
            ("time limit", format_duration(detail.time_limit_ms)),
            ("cost", f"{format_amount(entry.cost)} of at most {format_amount(entry.max_spend)}"),
            (
                "inputs",
                "\n".join(f"{i.source} -> {i.destination} ({format_bytes(i.size)})" for i in detail.inputs),
            ),
            ("outputs", "\n".join(_output_line(output) for output in detail.outputs)),
            (
                "results",
                f"kept by the provider until {format_time(detail.results_until)}" if detail.results_until else "",
            ),
        )
    )
    if detail.attempts:
        say()
        heads = ("lease", "provider", "GPU", "price>", "signed", "metered>", "cost>", "outcome", "receipt")
        table(heads, (_attempt_row(attempt) for attempt in detail.attempts))


def _output_line(output: api.OutputEntry) -> str:
    if output.missing:
        return f"{output.remote}: the job made none, or none that could be brought back"
    size = "" if output.size is None else f" ({format_bytes(output.size)})"
    return f"{output.remote} -> {output.local}{size}: {'here' if output.collected else 'not here yet'}"


def _attempt_row(attempt: api.JobAttempt) -> tuple[str, ...]:
    return (
        short_hash(attempt.lease),
        short_peer(attempt.provider),
        f"{attempt.quantity} x {attempt.model} {simulated_mark(attempt.simulated)}".rstrip(),
        format_price(attempt.price),
        format_time(attempt.signed_at),
        format_duration(attempt.metered_ms),
        format_amount(attempt.cost),
        attempt.outcome.replace("_", " "),
        short_hash(attempt.receipt),
    )


@click.command()
@click.argument("job", required=False, shell_complete=complete_job)
@requirement_options
@json_option
def why(job: str | None, as_json: bool, **given: Any) -> None:  # noqa: ANN401 - the flags of a requirement
    """Say why a job waits or failed, or why nothing matches.

    Name a JOB, or give the flags of a requirement (as for quote) to see what would have to change.
    """
    has_flags = any(given[name] not in {None, False} for name in NAMES)
    if (job is not None) == has_flags:
        raise click.UsageError("name a JOB, or give the flags of a requirement, and not both")
    with connect() as client:
        requirement = with_whole_provider(requirement_from(given), client) if has_flags else None
        found = client.call(api.WHY, api.WhyParams(job=job, requirement=requirement))
    if as_json:
        print_json(found)
        return
    say(found.summary)
    for step in found.history:
        say(f"  {format_time(step.at)}  {step.detail}")
    print_rejections(found.rejections)
    if found.advice:
        say(f"next: {found.advice}")


@click.command()
@click.argument("job", shell_complete=complete_job)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--stdout", "only", flag_value=api.LogStream.STDOUT.value, help="Only what went to stdout.")
@click.option("--stderr", "only", flag_value=api.LogStream.STDERR.value, help="Only what went to stderr.")
@json_option
def logs(job: str, follow: bool, only: str | None, as_json: bool) -> None:
    """Print a job's output.

    Byte for byte: what the job wrote to stdout goes to stdout, the rest to stderr. Of very long output only the
    beginning and the end are kept; what is missing between them is said on stderr.
    """
    streams = (api.LogStream(only),) if only else (api.LogStream.STDOUT, api.LogStream.STDERR)
    sinks = {api.LogStream.STDOUT: sys.stdout.buffer, api.LogStream.STDERR: sys.stderr.buffer}
    chunks = []
    ends = dict.fromkeys(sinks, 0)
    with connect() as client:
        for chunk in client.stream(api.LOGS, api.LogsParams(job=job, streams=streams, follow=follow)):
            if as_json:
                chunks.append(chunk)
                continue
            if chunk.offset > ends[chunk.stream]:
                tell(dropped_line(chunk, ends[chunk.stream]))
            ends[chunk.stream] = chunk.offset + len(chunk.data)
            sinks[chunk.stream].write(chunk.data)
            sinks[chunk.stream].flush()
    if as_json:
        print_json({"chunks": chunks})


@click.command()
@click.argument("job", default="-", shell_complete=complete_job)
@json_option
def attach(job: str, as_json: bool) -> int:
    """Follow a job as `run` does, until it ends.

    Prints its output from the beginning; Ctrl-C detaches again; the exit status is the job's. Without JOB it is
    the last one.
    """
    from node.cli.run import follow_to_end

    entry = call(api.SHOW, api.JobParams(job=job)).entry
    return follow_to_end(entry.job, as_json=as_json)


@click.command()
@click.argument("job", shell_complete=complete_job)
@json_option
def fetch(job: str, as_json: bool) -> int:
    """Collect outputs that are not here yet.

    For a job whose outputs could not come at its end: this machine was away, its disk was full, or the daemon
    was down. Exit status 125 when some are still not here.
    """
    found = call(api.FETCH, api.JobParams(job=job))
    if found.collecting:
        Follower(found.job, outputs_only=True).follow()
        outputs = call(api.SHOW, api.JobParams(job=found.job)).outputs
        found = api.FetchResult(job=found.job, outputs=outputs, collecting=False)
    if as_json:
        print_json(found)
    else:
        for output in found.outputs:
            say(_output_line(output))
        if not found.outputs:
            say("the job has no outputs")
    return 0 if all(output.collected or output.missing for output in found.outputs) else EXIT_OWN


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
@json_option
def cancel(names: tuple[str, ...], as_json: bool) -> None:
    """End jobs; what they used is owed.

    Outputs that are there are collected. A job that has ended already is left as it is.
    """
    with connect() as client:
        results = [client.call(api.CANCEL, api.JobParams(job=name)) for name in names]
    if as_json:
        print_json({"jobs": results})
        return
    for result in results:
        if result.changed:
            say(f"{result.job}: ending, now {result.state.value}")
        else:
            tell(f"{result.job}: had ended already ({result.state.value})")
