"""The pages in docs/ say what the code does."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_tables_are_those_of_the_code():
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for name in tables.PAGES:
        assert tables.page(name) == (DOCS / name).read_text(), "run `make docs`"
