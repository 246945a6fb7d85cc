"""The code of the README and of the page after it, pasted into an empty session, and the README's length."""

import re
from pathlib import Path

import pytest
from helpers.kernels import Kernel

ROOT = Path(__file__).parents[1]


def block(document):
    """Return the one block of Python of a document."""
    (found,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL
    )
    return found


@pytest.fixture
def session(tmp_path):
    kernel = Kernel({"PYTHONPATH": str(ROOT)})
    kernel.run(f"import os; os.chdir({str(tmp_path)!r})")
    yield kernel
    kernel.close()


def test_the_code_of_the_readme_and_then_of_the_page_on_fit_runs_in_an_empty_session(session):
    def paste(code):
        printed = session.run(code, timeout=600)  # for a hang
        assert session.error is None, session.error[1]
        return printed

    assert "dry run" in paste(block("README.md"))
    losses = [
        float(loss)
        for loss in paste("print([loss.item() for loss in run.results])").strip("[]\n").split(",")
    ]
    assert len(losses) > 1
    assert max(losses) < 0.05  # answering 1 to every pair is wrong by 0.17, squared
    assert "4: true " in paste(
        block("docs/train_with_fit.md")
    )  # the figure's text, of its fourth image
    samples, *shape = paste("print(len(valid_set), *probabilities.shape)").split()
    assert int(samples) > 0
    assert shape == [samples, "10"]
    assert (
        paste("print(bool((0 <= probabilities).all() and (probabilities <= 1).all()))") == "True\n"
    )
    assert "best.pt" in paste("print(os.listdir('checkpoints'))")
    paste(
        "import pandas; rows = pandas.read_csv('predictions.csv'); row_of = images.rows[valid_part]"
    )
    assert paste("print((rows.SOPInstanceUID == table.SOPInstanceUID).all())") == "True\n"
    assert paste("print(rows.predicted.count() == len(valid_part))") == "True\n"
    found = "torch.tensor(rows.predicted.to_numpy()[row_of], dtype=torch.float32)"
    assert paste(f"print(torch.allclose({found}, probabilities[:, 0]))") == "True\n"
    labels = "rows.loc[row_of, list(pe.LABELS)].to_numpy()"
    assert paste(f"print((images.labels[valid_part] == {labels}).all())") == "True\n"


def test_the_readme_can_be_read_in_one_go():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
