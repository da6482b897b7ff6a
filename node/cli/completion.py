"""completion: the script that teaches a shell to complete gpunode's commands."""

import click

from node.cli.output import json_option, print_json, say
from node.errors import BadArgument

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@json_option
def completion(shell: str, as_json: bool) -> None:
    r"""Print the completion script of a shell.

    \b
      bash  eval "$(gpunode completion bash)"      in ~/.bashrc
      zsh   eval "$(gpunode completion zsh)"       in ~/.zshrc
      fish  gpunode completion fish | source       in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    from node.cli.root import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise BadArgument(f"there is no completion for {shell}", f"choose one of: {', '.join(SHELLS)}")
    try:
        script = kind(cli, {}, "gpunode", "_GPUNODE_COMPLETE").source()
    except (OSError, RuntimeError) as error:
        raise BadArgument(f"cannot write the completion of {shell}: {error}", f"is {shell} installed?") from None
    print_json({"shell": shell, "script": script}) if as_json else say(script)
