"""Rows of Parquet files, whatever is in them."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from tokenformer.errors import UserError


@contextlib.contextmanager
def open_parquet(stream: BinaryIO, name: str) -> Iterator[Any]:
    """Yield a `pyarrow.parquet.ParquetFile`; a broken file is refused in a sentence, also while it is read."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{name} needs pyarrow: pip install 'tokenformer[data]'") from None
    try:
        yield parquet.ParquetFile(stream, pre_buffer=False)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name} is not a whole Parquet file ({' '.join(str(error).split())}): get it anew") from None


def rows(table: Any, columns: Sequence[str]) -> Iterator[tuple]:
    """Yield the values of these columns row by row; large rows are read one by one."""
    size = sum(table.metadata.row_group(i).total_byte_size for i in range(table.num_row_groups))
    count = max(1, min(64, (1 << 22) * table.metadata.num_rows // max(1, size)))
    for batch in table.iter_batches(batch_size=count, columns=list(columns)):
        for values in zip(*(batch.column(name) for name in columns), strict=True):
            yield tuple(value.as_py() for value in values)
