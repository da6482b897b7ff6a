"""Where the settings come from: flags over environment over file over defaults, merged and converted once.

Refuses a file that others can read when it holds the network's key, unknown names in all three places, and to
fall back to anything silently: an explicit file that is not there is an error.
"""

import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs

from node.config import strict
from node.config.settings import Config, Reads
from node.config.text import SECRET_SIZE_MAX, Secret
from node.errors import ConfigError

FILE_SIZE_MAX = 1024 * 1024
PREFIX = "GPUNODE_"
OTHER_VARIABLES = ("GPUNODE_SOCKET", "GPUNODE_CONFIG")
"""Variables with our prefix that are no settings: where to find the daemon, and the configuration file."""
TEST_PREFIX = "GPUNODE_TEST_"
"""Variables for tests of running daemons; no settings either."""


class Loaded(NamedTuple):
    """A configuration, and where each of its values came from."""

    config: Config
    origins: dict[str, str]
    """Dotted path -> "default", "file PATH", "environment NAME" or "flag"."""
    raw: dict[str, Any]
    """The merged tree as it was written, but for secrets."""
    path: Path | None
    """The file that was read; None when there was none."""


def load(flags: Mapping[str, object], environ: Mapping[str, str], path: Path | None = None) -> Config:
    """Return the configuration; see `load_with_origins`."""
    return load_with_origins(flags, environ, path).config


def load_with_origins(flags: Mapping[str, object], environ: Mapping[str, str], path: Path | None = None) -> Loaded:
    """Merge and convert all settings.

    `flags` maps dotted paths ("network.name") to values as TOML has them or to their texts; None is "not given".
    `environ` is searched for `GPUNODE_` + the path in capitals (GPUNODE_NETWORK_NAME). `path` None: the file that
    GPUNODE_CONFIG names, else the default one, which need not exist. Raises ConfigError.
    """
    explicit = path or (Path(environ["GPUNODE_CONFIG"]) if environ.get("GPUNODE_CONFIG") else None)
    found = explicit or default_path()
    raw, used = _read_file(found, must_exist=explicit is not None)
    origins = dict.fromkeys(_written(raw), f"file {found}")
    leaves = {leaf.name: leaf for leaf in strict.leaves()}
    words: list[tuple[str, object, str]] = [
        *_from_environment(environ, leaves),
        *((name, value, "flag") for name, value in flags.items() if value is not None),
    ]
    for name, value, origin in words:
        leaf = leaves.get(name)
        if leaf is None:
            raise strict.unknown("setting", name, list(leaves))
        _put(raw, leaf, value, origin)
        origins[name] = origin
    for name, directory in default_directories().items():
        raw.setdefault(name, str(directory))
    config = strict.convert(_with_key(raw))
    if "key" in raw.get("network", {}):
        # From here on the text is only inside a Secret, which nothing prints.
        raw["network"]["key"] = config.network.key
    if "network.key_file" in origins:
        origins["network.key"] = origins["network.key_file"]
    for name in leaves:
        origins.setdefault(name, "default")
    return Loaded(config, origins, raw, found if used else None)


def default_path() -> Path:
    """Return where the configuration file is looked for: /etc for root, else the user's own folder."""
    if os.geteuid() == 0:
        return Path("/etc/gpunode/gpunode.toml")
    return platformdirs.user_config_path("gpunode", appauthor=False) / "gpunode.toml"


def default_directories() -> dict[str, Path]:
    """Return the default state and runtime directories, by setting."""
    if os.geteuid() == 0:
        return {"state_dir": Path("/var/lib/gpunode"), "runtime_dir": Path("/run/gpunode")}
    return {
        "state_dir": platformdirs.user_state_path("gpunode", appauthor=False),
        "runtime_dir": platformdirs.user_runtime_path("gpunode", appauthor=False),
    }


def variable_of(leaf: strict.Leaf) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + "_".join(leaf.path).upper()


def _from_environment(
    environ: Mapping[str, str], leaves: Mapping[str, strict.Leaf]
) -> list[tuple[str, object, str]]:
    variables = {variable_of(leaf): leaf.name for leaf in leaves.values()}
    found: list[tuple[str, object, str]] = []
    for name, word in environ.items():
        if not name.startswith(PREFIX) or name.startswith(TEST_PREFIX) or name in OTHER_VARIABLES:
            continue
        if name not in variables:
            raise strict.unknown("environment variable", name, [*variables, *OTHER_VARIABLES])
        found.append((variables[name], word, f"environment {name}"))
    return found


def _read_file(path: Path, *, must_exist: bool) -> tuple[dict[str, Any], bool]:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(FILE_SIZE_MAX + 1)
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"there is no configuration file {path}", "check the path") from None
        return {}, False
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", "check its type and permissions") from None
    if len(data) > FILE_SIZE_MAX:
        raise ConfigError(f"{path} is larger than {FILE_SIZE_MAX} bytes", "is it a configuration file?")
    try:
        raw = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", "mend that line") from None
    network = raw.get("network")
    if isinstance(network, dict) and "key" in network and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"network.key is in {path}, which others can read",
            f"chmod 600 {path}, or put the key into a file of its own and name it in network.key_file",
        )
    return raw, True


def _put(raw: dict[str, Any], leaf: strict.Leaf, value: object, origin: str) -> None:
    """Write one setting into the merged tree."""
    if isinstance(value, str):
        try:
            value = strict.from_word(leaf.type, value)
        except ValueError as error:
            raise ConfigError(f"{leaf.name} ({origin}) is {value!r}", f"allowed: {error}") from None
    elif isinstance(value, tuple):
        value = list(value)
    table = raw
    for step in leaf.path[:-1]:
        table = table.setdefault(step, {})
        if not isinstance(table, dict):
            raise strict.wrong(leaf.path[:-1], table, "a table")
    table[leaf.path[-1]] = value


def _with_key(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with the contents of network.key_file as network.key."""
    network = raw.get("network")
    if not isinstance(network, dict) or "key_file" not in network:
        return raw
    if "key" in network:
        raise ConfigError("network.key and network.key_file are both set", "keep one of them")
    key_file = strict.WAYS[Reads.PATH]
    try:
        path = key_file.parse(network["key_file"])
    except ValueError as error:
        raise strict.wrong(("network", "key_file"), network["key_file"], str(error)) from None
    return {**raw, "network": {**network, "key": _read_key(path)}}


def _read_key(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(SECRET_SIZE_MAX + 2)
    except OSError as error:
        raise ConfigError(f"network.key_file {path} can't be read: {error.strerror}", "check the path") from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"network.key_file {path} can be read by others", f"chmod 600 {path}")
    try:
        key = data.decode().strip()
        Secret(key)
    except ValueError as error:
        raise ConfigError(f"network.key_file {path} holds no key", f"allowed: {error}") from None
    return key


def _written(raw: dict[str, Any], path: tuple[str, ...] = ()) -> list[str]:
    """Return the dotted paths of all values in a tree."""
    names: list[str] = []
    for key, value in raw.items():
        here = (*path, key)
        names.extend(_written(value, here) if isinstance(value, dict) else [strict.dotted(here)])
    return names
