"""Runs the cells of examples/plan.ipynb one after the other, without a notebook's server: part of `make test-all`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "plan.ipynb"


def main() -> int:
    """Exit code 0 if every cell runs and every code cell but the first leaves a figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names: dict[str, Any] = {}
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        exec(compile("".join(cell["source"]), f"{NOTEBOOK.name}, cell {number}", "exec"), names)
        assert len(pyplot.get_fignums()) == number - 1, f"cell {number} leaves no figure"
    print(f"{NOTEBOOK.name}: {len(cells)} cells, {len(pyplot.get_fignums())} figures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
