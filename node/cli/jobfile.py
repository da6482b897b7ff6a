"""job.toml: the long flags of `gpunode run` in a file. Flags win; an unknown key fails, naming the nearest.

Relative paths are relative to the file. `command` is a list of texts (or one text, run by sh -c); `env` is a
table. Refuses to agree to a price: --yes is a flag only.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any

import click

from node.errors import ConfigError

FILE_SIZE_MAX = 1024 * 1024
FLAGS_ONLY = ("file", "yes", "json", "dry-run", "help")
OWN_KEYS = ("command", "env")


def read(path: Path) -> dict[str, Any]:
    """Return the file's table. Raises ConfigError."""
    try:
        if path.stat().st_size > FILE_SIZE_MAX:
            raise ConfigError(f"{path} is larger than {FILE_SIZE_MAX} bytes", "is it a job file?")
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "check the path given to --file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", "mend that line") from None


def merge(context: click.Context, given: dict[str, Any], table: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the parameters of `run` with the file's values where no flag was given. Raises ConfigError."""
    options = {_key(option): option for option in context.command.params if isinstance(option, click.Option)}
    allowed = [name for name in options if name not in FLAGS_ONLY]
    merged = dict(given)
    for key, value in table.items():
        if key in OWN_KEYS:
            continue
        if key not in allowed:
            raise _unknown(key, [*allowed, *OWN_KEYS], path)
        option = options[key]
        name = str(option.name)
        if context.get_parameter_source(name) is not click.core.ParameterSource.COMMANDLINE:
            merged[name] = _convert(context, option, key, value, path)
    return merged


def command_of(table: dict[str, Any], path: Path) -> tuple[str, ...]:
    """Return the file's command; () when it has none. Raises ConfigError."""
    command = table.get("command", [])
    if isinstance(command, str):
        return ("sh", "-c", command)
    if not isinstance(command, list) or not all(isinstance(part, str) for part in command):
        raise ConfigError(
            f"command in {path} is {command!r}", 'allowed: a list of texts such as ["python", "train.py"]'
        )
    return tuple(command)


def variables_of(table: dict[str, Any], path: Path) -> dict[str, str]:
    """Return the file's `env` table. Raises ConfigError."""
    found = table.get("env", {})
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ConfigError(f"env in {path} is not a table of texts", 'write [env] and below it NAME = "VALUE"')
    return dict(found)


def _key(option: click.Option) -> str:
    return next(name for name in option.opts if name.startswith("--")).removeprefix("--")


def _convert(context: click.Context, option: click.Option, key: str, value: Any, path: Path) -> Any:  # noqa: ANN401
    if option.is_flag:
        if not isinstance(value, bool):
            raise ConfigError(f"{key} in {path} is {value!r}", "allowed: true or false")
        return value
    items = value if option.multiple and isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
        raise ConfigError(f"{key} in {path} is {value!r}", "allowed: what the flag takes, as a text or a number")
    texts = tuple(str(item) for item in items)
    try:
        return option.type_cast_value(context, texts if option.multiple else texts[0])
    except click.BadParameter as error:
        raise ConfigError(f"{key} in {path}: {error.message}", f"see --{key} in: gpunode run --help") from None


def _unknown(key: str, allowed: list[str], path: Path) -> ConfigError:
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.5)
    if key in FLAGS_ONLY:
        return ConfigError(f"{key} in {path} is for the command line only", f"give it as --{key}")
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(allowed))}"
    return ConfigError(f"there is no key {key} in a job file ({path})", hint)
