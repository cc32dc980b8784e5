#!/usr/bin/env bash
# datasets 5.2.0 (pyarrow 26.0.1, pandas 3.1.1), no torch; run on 2026-11-30.
#
# A folder of Parquet files may have a part of zero rows, such as the result of a filter that leaves no row of it.
# pyarrow and pandas write such a table as one row group of zero rows, and both read the folder. `load_dataset` fails on
# it, with streaming and without, because the default batch size is the number of rows of the first row group, which is
# 0 here. The error names a batch size that nobody has set; the file is only in the log. With streaming the error comes
# when the iteration reaches the file, after all rows before it. A file without any row group, as `Dataset.to_parquet`
# writes it, and an explicit `batch_size` both work.
#
# Seen:
#   pyarrow reads ['a', 'b', 'c', 'd'], pandas reads ['a', 'b', 'c', 'd']
#   row groups: 1 in the empty part, 0 in one of Dataset.to_parquet
#   ordinary  with the empty part: ArrowInvalid: BatchSize must be greater than 0, got 0; rows before: []
#   ordinary  without it: ['a', 'b', 'c', 'd']
#   ordinary  with one of Dataset.to_parquet: ['a', 'b', 'c', 'd']
#   ordinary  with the empty part, batch_size=100: ['a', 'b', 'c', 'd']
#   streaming with the empty part: ArrowInvalid: BatchSize must be greater than 0, got 0; rows before: ['a', 'b']
#   streaming without it: ['a', 'b', 'c', 'd']
#   streaming with one of Dataset.to_parquet: ['a', 'b', 'c', 'd']
#   streaming with the empty part, batch_size=100: ['a', 'b', 'c', 'd']
#   unchanged
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/home" venv/bin/python -W ignore - <<'PYTHON'
import logging
import sys
from pathlib import Path

import datasets
import pandas
import pyarrow
import pyarrow.parquet

logging.disable(logging.ERROR)
datasets.disable_progress_bars()
NONE = pyarrow.table({"text": pyarrow.array([], pyarrow.string())})
ALL, ERROR = list("abcd"), "ArrowInvalid: BatchSize must be greater than 0, got 0"
Path("parts").mkdir()
pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), "parts/part-0.parquet")
pyarrow.parquet.write_table(NONE, "parts/part-1.parquet")
pyarrow.parquet.write_table(pyarrow.table({"text": ["c", "d"]}), "parts/part-2.parquet")
datasets.Dataset(NONE).to_parquet("other.parquet")
full = ["parts/part-0.parquet", "parts/part-2.parquet"]


def loaded(streaming, **given):
    rows = []
    try:
        for row in datasets.load_dataset("parquet", split="train", streaming=streaming, **given):
            rows.append(row["text"])
    except Exception as error:
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {cause}; rows before: {rows}"
    return rows


by_pyarrow = pyarrow.parquet.read_table("parts").column("text").to_pylist()
by_pandas = pandas.read_parquet("parts")["text"].tolist()
print(f"pyarrow reads {by_pyarrow}, pandas reads {by_pandas}")
groups = [pyarrow.parquet.ParquetFile(file).num_row_groups for file in ("parts/part-1.parquet", "other.parquet")]
print(f"row groups: {groups[0]} in the empty part, {groups[1]} in one of Dataset.to_parquet")
is_same = by_pyarrow == by_pandas == ALL and groups == [1, 0]
for streaming, before in ((False, []), (True, ["a", "b"])):
    found = {"with the empty part": loaded(streaming, data_files="parts/*.parquet")}
    found["without it"] = loaded(streaming, data_files=full)
    found["with one of Dataset.to_parquet"] = loaded(streaming, data_files=[full[0], "other.parquet", full[1]])
    found["with the empty part, batch_size=100"] = loaded(streaming, data_files="parts/*.parquet", batch_size=100)
    for what, rows in found.items():
        print(f"{'streaming' if streaming else 'ordinary '} {what}: {rows}")
    is_same &= list(found.values()) == [f"{ERROR}; rows before: {before}", ALL, ALL, ALL]
print("unchanged" if is_same else "it behaves otherwise now")
sys.exit(not is_same)
PYTHON
