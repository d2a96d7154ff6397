"""Run the code cells of a notebook without Jupyter, and store it with their outputs.

    python scripts/run_notebook.py docs/examples/first_run.ipynb

What a cell prints, and the picture of its last expression, become its outputs, as Jupyter would store them.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def run_cell(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Execute a cell in `names`; returns its outputs."""
    tree, value = ast.parse(source), None
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, f"cell {number}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": [f"<{type(value).__name__}>"]} if hasattr(value, "_repr_png_") else {}
        picture = base64.b64encode(value._repr_png_()).decode() if data else ""
        data |= {"image/png": picture} if data else {"text/plain": lines(repr(value))}
        outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
    return outputs


def lines(text: str) -> list[str]:
    """A text as notebooks store it."""
    return text.splitlines(keepends=True)


def main(notebook: Path, target: Path) -> None:
    """Run a notebook and write it to `target`."""
    content = json.loads(notebook.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate((c for c in content["cells"] if c["cell_type"] == "code"), start=1):
        cell |= {"execution_count": number, "outputs": run_cell("".join(cell["source"]), names, number)}
    target.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[-1]))
