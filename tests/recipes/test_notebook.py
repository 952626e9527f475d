"""The notebook: its file, and two steps of it in a kernel."""

import pytest
from launching import RECIPES

nbformat = pytest.importorskip("nbformat", reason="needs `pip install nbformat nbclient ipykernel`")

# As papermill does it, a cell behind the one tagged "parameters" sets other values.
TWO_STEPS = "MAX_STEPS, BATCH_SIZE, NUM_HELD_OUT = 2, 8, 2"
LENGTH, SHORTER = "max_completion_length=48", "max_completion_length=16"


@pytest.fixture
def notebook():
    return nbformat.read(RECIPES / "smollm2.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_the_notebook_is_valid_and_has_no_outputs(notebook):
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert not cell.outputs
        assert cell.execution_count is None
        compile(cell.source, cell.id, "exec")


@pytest.mark.slow
def test_two_steps_in_a_kernel_show_the_rewards_and_the_report(
    notebook, tmp_path, smollm2, monkeypatch
):
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("SMOLLM2_FOLDER", str(smollm2))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # The benchmarks set it where they are imported, and it turns TRL's bars off.
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    (at,) = [i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", ())]
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(TWO_STEPS))
    (train,) = [cell for cell in code_cells(notebook) if LENGTH in cell.source]
    train.source = train.source.replace(LENGTH, SHORTER)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = {cell.id: cell.outputs for cell in code_cells(notebook)}
    (rewards,) = [o.data for o in outputs["train"] if o.output_type == "execute_result"]
    assert "<th>reward</th>" in rewards["text/html"]
    assert rewards["text/html"].count("<tr>") == 2
    drawn = "".join(o.text for o in outputs["train"] if o.get("name") == "stderr")
    assert "rollout:   0%" in drawn
    _, erased, *_ = drawn.rpartition("rollout: ")[2].split("\r")
    assert not erased.strip()
    (report,) = [o.data for o in outputs["show"] if o.output_type == "execute_result"]
    assert "srcdoc=" in report["text/html"]
    assert "Rollout report of run" in report["text/html"]
    assert "held-out accuracy" in outputs["after"][-1].text
    assert (tmp_path / "runs" / "smollm2_notebook" / "cb_rollout" / "report.html").exists()
