"""config: what is set, where it comes from, and what is wrong with a file."""

import os
from pathlib import Path

import click

from node.cli.connection import call
from node.cli.daemon import config_options, split_settings
from node.cli.output import json_option, print_json, say
from node.rpc.api import Nothing, daemon


@click.group()
def config() -> None:
    """Show and check the configuration."""


@config.command()
@config_options
@click.option("--running", is_flag=True, help="What the running daemon has in force.")
@json_option
def show(config_path: Path | None, settings: tuple[str, ...], running: bool, as_json: bool) -> None:
    """Print every setting as TOML, with where its value comes from. Secrets are not shown."""
    if running:
        if config_path is not None or settings:
            raise click.UsageError("--running shows what the daemon has: it takes no --config and no --set")
        found = call(daemon.CONFIG, Nothing())
        if as_json:
            print_json(found)
        else:
            say(f"# {found.path or 'no file: defaults'}")
            say(_toml(found.config))
        return
    from node.config import as_toml, explain, load_with_origins

    loaded = load_with_origins(split_settings(settings), os.environ, config_path)
    if as_json:
        print_json({"path": str(loaded.path or ""), "settings": explain(loaded)})
    else:
        say(f"# {loaded.path or 'no file: defaults'}")
        say(as_toml(loaded).rstrip("\n"))


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@json_option
def check(file: Path | None, as_json: bool) -> None:
    """Read the configuration (or FILE) and say what is wrong with it. Exit status 125 when something is."""
    from node.config import load_with_origins

    loaded = load_with_origins({}, os.environ, file)
    path = str(loaded.path or "")
    if as_json:
        print_json({"path": path, "ok": True})
    else:
        say(f"{path} is well" if path else "there is no configuration file: the defaults hold")


@config.command()
@json_option
def path(as_json: bool) -> None:
    """Print where the configuration file is looked for."""
    from node.config import default_path

    where = os.environ.get("GPUNODE_CONFIG") or str(default_path())
    print_json({"path": where}) if as_json else say(where)


def _toml(tree: dict[str, object], prefix: str = "") -> str:
    """Return a tree as dotted TOML keys, one a line."""
    import json

    lines = []
    for key, value in tree.items():
        name = f"{prefix}{key if key.replace('_', '').replace('-', '').isalnum() else json.dumps(key)}"
        if isinstance(value, dict):
            lines.append(_toml(value, f"{name}."))
        else:
            lines.append(f"# {name} is not set" if value is None else f"{name} = {json.dumps(value)}")
    return "\n".join(line for line in lines if line)
