"""Patterns that keep files out of a job's inputs, as a `.gpunodeignore` file has them.

The part of gitignore's language that people use: a pattern without "/" matches a name anywhere, one with "/"
the path from the tree's top; "*", "?" and "[...]" stay within a name, "**" crosses directories; a trailing "/"
matches directories only; "!" takes files back in; the last pattern that matches decides. What lies below an
ignored directory cannot be taken back in. Refuses to read the tree.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase


def parse_ignore_file(text: str) -> tuple[str, ...]:
    """Return the patterns of an ignore file: its lines, without blank ones and comments ("#")."""
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


class IgnoreRules:
    """A list of patterns, ready to match."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._rules: list[tuple[bool, bool, list[str]]] = []
        for pattern in patterns:
            is_ignored = not pattern.startswith("!")
            text = pattern if is_ignored else pattern[1:]
            names = text.strip("/").split("/")
            if "/" not in text.rstrip("/"):
                names = ["**", *names]
            self._rules.append((is_ignored, text.endswith("/"), names))

    def is_ignored(self, path: str, *, is_directory: bool) -> bool:
        """Return whether the entry at `path` (below the tree's top) is left out."""
        result = False
        names = path.split("/")
        for is_ignored, directories_only, pattern in self._rules:
            if result != is_ignored and (is_directory or not directories_only) and _matches(pattern, names):
                result = is_ignored
        return result


def _matches(pattern: list[str], names: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        if len(pattern) == 1:  # what lies below, not the directory itself
            return bool(names)
        return any(_matches(pattern[1:], names[start:]) for start in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _matches(pattern[1:], names[1:])
