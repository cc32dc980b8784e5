"""Parquet and Arrow files: read in batches, sent on as Arrow streams, and turned into rows where they are parsed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_fsdp.data.files import Chunk, Position, reading
from lit_fsdp.errors import DataError

_ROWS = 1000
_CHUNK_BYTES = 2**20
_MAGIC = b"ARROW1"


def parquet_chunks(path: Path, start: Position | None) -> Iterator[Chunk]:
    """Batches of a Parquet file. Position: row group, rows of it already read, and number of the row."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    first_group, skipped, number = start or (0, 0, 0)
    try:
        with reading(path) as file, pyarrow.parquet.ParquetFile(file) as opened:
            for group in range(first_group, opened.num_row_groups):
                about = opened.metadata.row_group(group)
                size = _batch_rows(about.num_rows, about.total_byte_size)
                done = 0
                for batch in opened.iter_batches(batch_size=size, row_groups=[group]):
                    left = batch.slice(max(0, skipped - done))
                    done += len(batch)
                    if len(left):
                        yield arrow_chunk(str(path), left, number, [group, done - len(left), number])
                        number += len(left)
                skipped = 0
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise _broken(path, number, error) from None


def arrow_chunks(path: Path, start: Position | None) -> Iterator[Chunk]:
    """Batches of an Arrow file, as a file or as a stream. Position: batch, rows of it, and number of the row."""
    import pyarrow

    first_batch, skipped, number = start or (0, 0, 0)
    try:
        with reading(path) as file:
            for index, batch in enumerate(_batches(file)):
                if index < first_batch:
                    continue
                size = _batch_rows(len(batch), batch.nbytes)
                for done in range(skipped if index == first_batch else 0, len(batch), size):
                    part = batch.slice(done, size)
                    yield arrow_chunk(str(path), part, number, [index, done, number])
                    number += len(part)
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise _broken(path, number, error) from None


def _batches(file: Any) -> Iterator[Any]:
    import pyarrow.ipc  # type: ignore[import-untyped]

    is_file = file.read(len(_MAGIC)) == _MAGIC
    file.seek(0)
    if not is_file:
        with pyarrow.ipc.open_stream(file) as stream:
            yield from stream
        return
    with pyarrow.ipc.open_file(file) as opened:
        for index in range(opened.num_record_batches):
            yield opened.get_batch(index)


def _batch_rows(rows: int, size: int) -> int:
    return max(1, min(_ROWS, _CHUNK_BYTES * rows // max(1, size)))


def _broken(path: Path, number: int, error: Exception) -> DataError:
    if isinstance(error, DataError):
        return error
    kind = "a Parquet file" if path.suffix == ".parquet" else "an Arrow file"
    return DataError(
        f"{path}: not {kind}, broken after row {number} "
        f"({' '.join(str(error).split())[:200]})\n  fix:     copy or write the file again"
    )


def arrow_chunk(name: str, batch: Any, number: int, start: Position) -> Chunk:
    """A chunk of a record batch or table; ``number`` is that of its first row."""
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
        stream.write(batch)
    return Chunk(name, number, sink.getvalue().to_pybytes(), _arrow_rows, start)


def _arrow_rows(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    import pyarrow

    try:
        with pyarrow.ipc.open_stream(chunk.content) as stream:
            table = stream.read_all()
        table.validate(full=True)  # a damaged file may hold offsets that point beside the text
        nested = [field.name for field in table.schema if "struct<" in str(field.type)]
        rows = table.to_pylist()
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise _broken(Path(chunk.name), chunk.first, error) from None
    for number, row in enumerate(rows, start=chunk.first):
        for name in nested:
            row[name] = _without_empty(row[name])
        yield f"{chunk.name}: row {number}", row


def _without_empty(value: Any) -> Any:
    """Without the keys that Arrow adds to every struct because some other row has them."""
    if isinstance(value, dict):
        return {key: _without_empty(part) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_empty(part) for part in value]
    return value
