"""exec: another command in a running job's sandbox.

Refuses to read stdin: the command's input is empty, and it has no terminal.
"""

import sys

import click

from node.cli.connection import connect
from node.cli.jobs import complete_job
from node.cli.output import json_option, print_json
from node.rpc.api import jobs as api
from node.rpc.client import ConnectionLost


@click.command("exec", context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.argument("job", shell_complete=complete_job)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND [ARG]...")
@json_option
def execute(job: str, command: tuple[str, ...], as_json: bool) -> int:
    r"""Run another command in a running job's sandbox.

    Beside the job, within its limits, and at most as long as it runs. The command's input is empty and it has no
    terminal: neither stdin nor keys reach it. Ctrl-C ends it, and not the job. The exit status is the command's;
    with --json its output goes to stderr.

    \b
      gpunode exec - -- nvidia-smi
    """
    command = command[1:] if command[0] == "--" else command  # click leaves it after JOB
    if not command:
        raise click.UsageError("there is no command to run: put it last, after --")
    sinks = {
        api.LogStream.STDOUT: sys.stderr.buffer if as_json else sys.stdout.buffer,
        api.LogStream.STDERR: sys.stderr.buffer,
    }
    with connect() as client:
        for piece in client.stream(api.EXEC, api.ExecParams(job=job, command=command)):
            if piece.exit_status is not None:
                if as_json:
                    print_json({"job": job, "exit_status": piece.exit_status})
                return piece.exit_status
            if piece.stream is not None:
                sinks[piece.stream].write(piece.data)
                sinks[piece.stream].flush()
    raise ConnectionLost("the daemon did not say how the command ended", "look at: gpunode jobs")
