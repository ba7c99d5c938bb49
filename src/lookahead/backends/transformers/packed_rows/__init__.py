"""Several texts in one row of tokens: rows that come and go, without padding between them."""

from lookahead.backends.transformers.packed_rows.cache import Row
from lookahead.backends.transformers.packed_rows.runner import PackedRowsRunner

__all__ = ["PackedRowsRunner", "Row"]
