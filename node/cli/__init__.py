"""The command `gpunode`: reads what a person types, asks the daemon by RPC, prints the answer.

Commands are imported only when they are called, and none but `start` and `doctor` loads trio or the daemon:
`gpunode --help` answers at once. Exit status: a job's own where a job ran; 124 its time limit; 125 gpunode's own
failures and wrong usage, as docker has it; 130 after Ctrl-C. Refuses to show a traceback.
"""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit."""
    from node.cli.root import run

    sys.exit(run(sys.argv[1:], os.environ))
