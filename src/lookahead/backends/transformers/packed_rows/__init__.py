"""Several texts on one model: rows that come and go, packed into one row of tokens, or padded."""

from lookahead.backends.transformers.packed_rows.cache import Row
from lookahead.backends.transformers.packed_rows.padded_runner import PaddedRowsRunner
from lookahead.backends.transformers.packed_rows.rows_runner import RowsRunner
from lookahead.backends.transformers.packed_rows.runner import PackedRowsRunner

__all__ = ["PackedRowsRunner", "PaddedRowsRunner", "Row", "RowsRunner"]
