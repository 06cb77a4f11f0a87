"""Imported records and steps as Parquet, written while they are read; what is nested (details, kernels) is JSON."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from labkit.engines.record import Record
from labkit.errors import InputError
from labkit.paths import make_folder

_CHUNK = 5000  # rows of a row group, all that is held in memory


def _type(annotation: Any) -> pa.DataType:
    """Arrow type of a field of `Record`."""
    name = str(getattr(annotation, "__name__", annotation)).removesuffix(" | None")
    lists = {"list[str]": pa.list_(pa.string()), "list[float]": pa.list_(pa.float64())}
    numbers = {"int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    return (lists | numbers).get(str(annotation).removesuffix(" | None")) or numbers.get(name, pa.string())


RECORDS = pa.schema([(name, _type(kind)) for name, kind in Record.__annotations__.items()])


def write(items: Iterable[Any], path: Path, plain: Callable[[Any], Any]) -> Iterator[Any]:
    """Pass the items on and write them, as ``plain`` gives them, into a file that is whole or absent."""
    if path.is_dir():
        raise InputError(f"{path}: wanted a file to write, this is a folder")
    temporary, items = path.with_name(f".{path.name}.tmp"), iter(items)
    writer: pq.ParquetWriter | None = None
    try:
        while chunk := list(itertools.islice(items, _CHUNK)):
            rows = [plain(item) for item in chunk]
            columns = {name: _column([row[name] for row in rows]) for name in rows[0]}
            if writer is None:
                make_folder(path.parent, "out")  # only now: bad input leaves nothing behind
                schema = RECORDS if isinstance(chunk[0], Record) else pa.table(columns).schema
                writer = pq.ParquetWriter(temporary, schema, compression="zstd")
            writer.write_table(pa.table(columns, schema=writer.schema))
            yield from chunk
        if writer is not None:
            writer.close()
            temporary.replace(path)
    finally:
        if writer is not None:
            writer.close()
        if temporary.exists():
            temporary.unlink()


def _column(values: list[Any]) -> list[Any]:
    some = next((value for value in values if value is not None), None)
    return [_cell(value) for value in values] if isinstance(some, str | list | dict) else values


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        # JSON may hold half of a surrogate pair.
        return value if value.isascii() else value.encode("utf-8", "replace").decode()
    if isinstance(value, list) and not any(isinstance(item, dict) for item in value):
        return [_cell(item) for item in value]
    return json.dumps(value) if isinstance(value, dict | list) else value
