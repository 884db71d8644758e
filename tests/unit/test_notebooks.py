"""Notebooks are kept without outputs, so that a diff shows what somebody wrote. (pytest runs them by itself.)"""

from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_holds_no_outputs(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert [(cell.outputs, cell.execution_count) for cell in code] == [([], None)] * len(code)
