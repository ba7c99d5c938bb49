"""Table of fields in docs/server.md, made from the server's declarations.

python tools/field_table.py            compare
python tools/field_table.py --update   write it anew
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from lookahead.server.anthropic import MessagesRequest
from lookahead.server.fields import ANY, CHAT, COMPLETIONS, MESSAGES, OTHER_NAMES, RESPONSES, UNUSED, Unused
from lookahead.server.requests import ChatRequest, CompletionRequest
from lookahead.server.responses_request import ResponsesRequest

PAGE = Path(__file__).resolve().parents[1] / "docs/server.md"
_TABLE = re.compile(r"(?s)(<!-- table: fields, by tools/field_table.py -->\n).*?(\n<!-- end -->)")
_BODIES = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest, RESPONSES: ResponsesRequest, MESSAGES: MessagesRequest}


def field_table() -> str:
    """A row for each field: its name, the endpoints that have it, what happens."""
    places: dict[tuple[str, str], list[str]] = {}
    for place, body in _BODIES.items():
        for name, field in body.model_fields.items():
            if not field.description:
                raise ValueError(f"{body.__name__}.{name} has no description")
            places.setdefault((name, field.description), []).append(place)
    rows = [(name, tuple(endpoints), description) for (name, description), endpoints in places.items()]
    for name, (field, *part) in OTHER_NAMES.items():
        endpoints = [place for place, body in _BODIES.items() if field in body.model_fields]
        rows.append((name, tuple(endpoints), f"another name of `{'.'.join((field, *part))}`"))
    rows += [(one.name, tuple(place for place in one.places if place in _BODIES), _fate(one)) for one in UNUSED]
    lines = ["| field | endpoints | what happens |", "| --- | --- | --- |"]
    for name, endpoints, description in rows:
        if endpoints:
            scope = "all" if len(endpoints) == len(_BODIES) else ", ".join(endpoints)
            lines.append(f"| `{name}` | {scope} | {description} |")
    return "\n".join(lines)


def _fate(unused: Unused) -> str:
    """What happens to a field that is not used."""
    if unused.harmless is ANY:
        return f"ignored: {unused.reason}"
    if not unused.harmless:
        return f"refused: {unused.reason}"
    values = " or ".join(f"`{json.dumps(value)}`" for value in unused.harmless)
    return f"{values} is ignored, all else is refused: {unused.reason}"


def renewed(page: str) -> str:
    """A page with the table as it should be."""
    made, count = _TABLE.subn(lambda found: f"{found[1]}\n{field_table()}\n{found[2]}", page)
    if count != 1:
        raise ValueError(f"{PAGE} has no place for the table")
    return made


def main() -> int:
    """Compare or write; the exit status is 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    page = PAGE.read_text()
    made = renewed(page)
    if parser.parse_args().update:
        PAGE.write_text(made)
        return 0
    if made != page:
        print("docs/server.md has another table of fields: python tools/field_table.py --update")
    return int(made != page)


if __name__ == "__main__":
    sys.exit(main())
