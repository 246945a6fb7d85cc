"""`make headers` in a copy of the repository: badges, links and first cells, with an address, without one, and back."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = "jane-doe/my.kit"
HUB = "github.com"  # apart from the name: no address that somebody made up stands in the repository
FIRST = "notebooks/01_setup.ipynb"


@pytest.fixture
def copy(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(
        ROOT / "notebooks",
        folder / "notebooks",
        ignore=shutil.ignore_patterns("data", "runs", "__pycache__"),
    )
    shutil.copy(ROOT / "README.md", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)  # ruff's settings
    headers(folder)  # the repository itself may have an address by now
    return folder


def headers(folder, *options, repository=""):
    environ = {**os.environ, "REPOSITORY": repository}
    command = [sys.executable, folder / "notebooks" / "headers.py", *options]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def git(folder, *words):
    subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)


def files(folder):
    return {
        path.name: path.read_text()
        for path in [folder / "README.md", *folder.glob("notebooks/*.ipynb")]
    }


@pytest.mark.parametrize(
    ("origin", "found"),
    [
        (f"https://{HUB}/{NAME}", True),
        (f"https://{HUB}/{NAME}.git", True),
        (f"https://{HUB}/{NAME}/", True),
        (f"https://x-access-token:secret@{HUB}/{NAME}.git", True),
        (f"git@{HUB}:{NAME}.git", True),
        (f"ssh://git@{HUB}/{NAME}.git", True),
        (f"https://gitlab.com/{NAME}.git", False),
        (f"https://{HUB}.example.com/{NAME}.git", False),
        (f"https://{HUB}/only-an-owner", False),
        ("../elsewhere", False),
    ],
)
def test_the_address_is_that_of_the_origin_where_that_is_on_github(origin, found, copy):
    before = files(copy)
    git(copy, "init", "--quiet")
    git(copy, "remote", "add", "origin", origin)
    said = headers(copy)
    assert said.returncode == 0, said.stderr
    after = files(copy)
    assert (after != before) == found
    assert any(NAME in text for text in after.values()) == found
    assert not any("secret" in text for text in after.values())


def test_without_an_address_there_is_no_badge_no_link_and_one_sentence(copy):
    assert headers(copy).stdout.count("`make headers` after you have pushed") == 1
    for name, text in files(copy).items():
        assert not re.search(
            r"colab-badge|open-in-kaggle|research\.google\.com/github|kernels/welcome", text
        ), name
    contributing = (ROOT / "CONTRIBUTING.md").read_text().replace("\n", " ")
    assert contributing.count("is on GitHub, run `make headers`") == 1


def test_with_an_address_and_then_without_it_goes_back_and_twice_changes_nothing(copy):
    before = files(copy)
    headers(copy, repository=NAME)
    badged = files(copy)
    for name, text in badged.items():
        notebooks = 1 if name != "README.md" else len(badged)  # each notebook, and one badge above
        assert text.count(f"/github/{NAME}/blob/main/notebooks/") == notebooks, name
        assert text.count(f"src=https://{HUB}/{NAME}/blob/main/notebooks/") == notebooks, name
        assert text.count(f"https://{HUB}/{NAME} tpukit-clone") == (name != "README.md"), (
            "what the first cell clones"
        )
    assert headers(copy, repository=NAME).stdout == ""
    assert files(copy) == badged
    headers(copy)
    assert files(copy) == before


def test_both_states_pass_the_check_and_a_mixture_does_not(copy):
    assert headers(copy, "--check", repository=NAME).returncode == 0
    headers(copy, repository=NAME)
    assert headers(copy, "--check").returncode == 0
    text = (copy / FIRST).read_text()
    (copy / FIRST).write_text(text.replace(NAME, "somebody/else"))
    said = headers(copy, "--check")
    assert said.returncode == 1
    assert "would change" in said.stdout


def test_what_is_written_for_a_long_address_is_as_ruff_wants_it(copy):
    headers(copy, repository=f"{'o' * 39}/tpukit")
    for command in (["check", "--select", "E501"], ["format", "--check"]):
        subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--no-cache", copy / "notebooks"], check=True
        )


def test_the_origin_of_a_folder_around_it_is_not_its_own(copy):
    git(copy.parent, "init", "--quiet")
    git(copy.parent, "remote", "add", "origin", f"https://{HUB}/{NAME}")
    before = files(copy)
    headers(copy)
    assert files(copy) == before


@pytest.mark.parametrize("wrong", ["owner", "a/b/c", "https://example.com/a/b", "a b/c"])
def test_a_repository_that_is_none_is_refused(wrong, copy):
    said = headers(copy, repository=wrong)
    assert said.returncode == 1
    assert repr(wrong) in said.stderr
    assert "fix: owner/name" in said.stderr


def test_the_first_cell_is_the_same_everywhere_short_and_folded():
    cells = [
        json.loads(path.read_text())["cells"][1]
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    ]
    assert all(
        cell["source"] == cells[0]["source"] and cell["metadata"] == cells[0]["metadata"]
        for cell in cells
    )
    code = [line for line in cells[0]["source"] if line.strip() and not line.startswith("#")]
    assert len(code) <= 12
    assert cells[0]["metadata"]["jupyter"]["source_hidden"]
