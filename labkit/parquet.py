"""Reading Parquet files of unknown origin: what a file claims is looked at before anything of its size is allocated."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from labkit.errors import InputError
from labkit.schema import TEXT

# Far above any real run; a small file can claim far more (a decompression bomb). Rows hold measured times, which do not
# compress: a file that expands more than so many times holds none.
MAX_ROWS, MAX_TABLE_BYTES = 50_000_000, 4 << 30
MAX_EXPANSION, FREE_EXPANSION_BYTES = 1000, 256 << 20
_THRIFT_LIMITS = {"thrift_string_size_limit": 1 << 24, "thrift_container_size_limit": 1 << 20}


def read_table(path: Path) -> pa.Table:
    """The rows of one Parquet file as they are, with no look at the sidecar.

    Raises InputError: missing, no Parquet file, larger than any run, or one that expands beyond reason.
    """
    try:
        # With a buffer nothing of a column is read until its values are asked for.
        with pq.ParquetFile(path, buffer_size=4096, **_THRIFT_LIMITS) as file:
            _check_size(path, file)
            texts = [field.name for field in file.schema_arrow if pa.types.is_string(field.type)]
        # Texts come as dictionaries first: one long text in each of many rows is a bomb as well.
        with pq.ParquetFile(path, read_dictionary=texts, **_THRIFT_LIMITS) as file:
            table = file.read()
        table.validate(full=True)  # indices within dictionaries, and texts in UTF-8: nothing below looks again
        _check_expansion(path, sum(_text_bytes(table[name]) for name in texts))
        for name in texts:
            table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(TEXT))
        return table
    except FileNotFoundError:
        raise InputError(f"{path}: missing; wanted a run file") from None
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path}: wanted a Parquet file, got {problem}") from error


def _check_size(path: Path, file: Any) -> None:
    metadata = file.metadata
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    if metadata.num_rows > MAX_ROWS:
        raise InputError(f"{path}: {metadata.num_rows} rows; wanted at most {MAX_ROWS}")
    for index, group in enumerate(groups):
        # `group.column` ends the process where a chunk contradicts the schema: nothing in pyarrow catches what is
        # thrown there. A reader of no rows looks at the same chunks, and there it is caught and raised.
        if group.num_columns != metadata.num_columns:
            raise InputError(
                f"{path}: row group {index} has {group.num_columns} columns, wanted {metadata.num_columns}"
            )
        next(file.reader.iter_batches(0, [index]), None)
    chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
    if sum(chunk.total_compressed_size for chunk in chunks) > path.stat().st_size:
        raise InputError(f"{path}: its columns overlap; wanted a Parquet file")
    _check_expansion(path, sum(max(8 * chunk.num_values, chunk.total_uncompressed_size) for chunk in chunks))


def _check_expansion(path: Path, num_bytes: int) -> None:
    limit = min(MAX_TABLE_BYTES, max(FREE_EXPANSION_BYTES, MAX_EXPANSION * path.stat().st_size))
    if num_bytes > limit:
        raise InputError(
            f"{path}: {num_bytes >> 20} MiB when read; wanted at most {limit >> 20} MiB of a file of its size"
        )


def _text_bytes(column: pa.ChunkedArray) -> int:
    total = 0
    for chunk in column.chunks:
        lengths = pc.binary_length(chunk.dictionary).to_numpy(zero_copy_only=False)
        counts = np.bincount(chunk.indices.drop_null().to_numpy(zero_copy_only=False), minlength=len(lengths))
        total += int((counts * lengths).sum())
    return total
