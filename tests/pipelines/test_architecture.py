"""ARCHITECTURE.md names every module with the first line of its docstring."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_a_line_for_every_module_and_no_other():
    wanted = []
    for package in ("pipelines", "components", "models"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name != "__init__.py":
                first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]
                wanted.append(f"- `{path.stem}`: {first}")
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    written = [line for line in page.partition("## Rooms")[2].splitlines() if line.startswith("- ")]
    assert sorted(written) == sorted(wanted)
