"""A table of msgspec structs: the only place where rows become structs and structs become rows.

Refuses joins and queries of its own invention: callers give a WHERE clause with placeholders.
"""

import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import sqlite_utils

R = TypeVar("R", bound=msgspec.Struct)

SqlValue = int | str | bytes | None
_COLUMN_TYPES: dict[type, type] = {int: int, str: str, bytes: bytes, bool: int}


class Table(Generic[R]):
    """Rows of type `R` in one SQLite table; the first field is the primary key."""

    def __init__(self, database: sqlite_utils.Database, name: str, row_type: type[R]) -> None:
        self._table = database.table(name)
        self._row_type = row_type
        self._fields = row_type.__struct_fields__
        self._key = self._fields[0]

    @staticmethod
    def create(database: sqlite_utils.Database, name: str, row_type: type[R], indexed: Sequence[str] = ()) -> None:
        """Create the table, with the columns of `row_type` and an index for each of `indexed`."""
        columns: dict[str, type] = {}
        required: set[str] = set()
        for field, hint in typing.get_type_hints(row_type).items():
            options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            plain = next(option for option in options if option is not types.NoneType)
            columns[field] = _COLUMN_TYPES[plain]
            if types.NoneType not in options:
                required.add(field)
        table = database.table(name)
        table.create(columns, pk=row_type.__struct_fields__[0], not_null=required, strict=True)
        for column in indexed:
            table.create_index([column])

    def put(self, row: R) -> None:
        """Insert or replace the row with this key."""
        self._table.insert(msgspec.structs.asdict(row), replace=True)

    def add(self, row: R) -> None:
        """Insert a row; sqlite3.IntegrityError when the key is taken."""
        self._table.insert(msgspec.structs.asdict(row))

    def change(self, key: SqlValue, **changes: SqlValue) -> None:
        """Set some columns of the row with this key, and leave the others as they are."""
        self._table.update(key, changes)

    def get(self, key: SqlValue) -> R | None:
        """Return the row with this key, or None."""
        return next(self.where(f"[{self._key}] = ?", key), None)

    def where(
        self, clause: str, *values: SqlValue, order_by: str | None = None, limit: int | None = None
    ) -> Iterator[R]:
        """Yield the rows that match a clause with `?` placeholders."""
        for row in self._table.rows_where(clause, values, order_by=order_by, limit=limit):
            yield self._struct(row)

    def all(self, order_by: str | None = None) -> Iterator[R]:
        """Yield every row."""
        return self.where("1", order_by=order_by)

    def count(self, clause: str = "1", *values: SqlValue) -> int:
        """Return how many rows match."""
        return int(self._table.count_where(clause, values))

    def delete(self, clause: str, *values: SqlValue) -> None:
        """Delete the rows that match."""
        self._table.delete_where(clause, values)

    def _struct(self, row: dict[str, Any]) -> R:
        # SQLite has no booleans; lax conversion turns 0 and 1 back into them.
        return msgspec.convert({field: row[field] for field in self._fields}, self._row_type, strict=False)
