"""The table of fields in the documentation matches the server's declarations."""

from __future__ import annotations

from field_table import PAGE, renewed


def test_the_page_has_the_table_of_today() -> None:
    assert renewed(PAGE.read_text()) == PAGE.read_text(), "python tools/field_table.py --update"
