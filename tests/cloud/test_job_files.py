"""The files of a job: those that were named, and no secret by accident."""

import os
import shutil

import pytest
from packaging.requirements import Requirement

from tpukit.cloud.job_files import named_files, read_requirements

HIDDEN_OR_KEY = [
    ".env", ".git/config", "sub/.netrc", "id_ed25519", "server.pem", "kaggle.json", "prod.env", "token",
    "application_default_credentials.json", "client_secret_123.json", "secrets.toml",
]  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN_OR_KEY)
def test_hidden_files_and_keys_are_refused_in_a_folder_and_sent_by_name(tmp_path, name):
    file = tmp_path / "project" / name
    file.parent.mkdir(parents=True)
    file.write_text("x")
    (tmp_path / "project/classes.txt").write_text("cat")
    with pytest.raises(ValueError, match="hidden|key") as caught:
        named_files(tmp_path, ["project"])
    assert name in str(caught.value)
    assert list(named_files(tmp_path, [f"project/{name}"])) == [f"project/{name}"]


def test_a_requirements_file_of_a_windows_editor_is_checked_from_its_first_line(tmp_path):
    path = tmp_path / "requirements.txt"
    path.write_bytes(b"\xef\xbb\xbftorch==2.5.0\r\n")
    with pytest.raises(ValueError, match="line 1 of requirements.txt contradicts torch==2.9.0"):
        read_requirements(path, ["torch==2.9.0"])
    path.write_bytes("# größer\n".encode("latin-1"))
    with pytest.raises(ValueError, match="requirements.txt is not UTF-8"):
        read_requirements(path, [])


def test_a_key_is_known_by_its_content_too(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/my-project-1234.json").write_text(
        '{"type": "service_account", "private_key": "x"}'
    )
    with pytest.raises(ValueError, match="looks like a key"):
        named_files(tmp_path, ["data"])


def test_the_fix_for_a_hidden_file_works_beside_its_folder(tmp_path):
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / ".env").write_text("A=1")
    (tmp_path / "kit" / "code.py").write_text("a = 1")
    with pytest.raises(ValueError, match="add its own path to files="):
        named_files(tmp_path, ["kit"])
    for named in (["kit", "kit/.env"], ["kit/.env", "kit"], ["kit", "kit/../kit/.env"]):
        found = named_files(tmp_path, named)
        assert sorted(found) == ["kit/.env", "kit/code.py"]


def test_links_out_of_a_folder_are_refused_unless_named(tmp_path):
    (tmp_path / "book/data/inside").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("x")
    (tmp_path / "book/data/a.txt").write_text("a")
    (tmp_path / "book/data/link.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ValueError, match=r"data/link.txt is a link out of data"):
        named_files(tmp_path / "book", ["data"])
    assert list(named_files(tmp_path / "book", ["data/link.txt"])) == ["data/link.txt"]
    (tmp_path / "book/data/link.txt").unlink()
    (tmp_path / "book/data/same.txt").symlink_to("a.txt")
    assert sorted(named_files(tmp_path / "book", ["data"])) == ["data/a.txt", "data/same.txt"]
    (tmp_path / "book/data/folder").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="data/folder is a link to a folder"):
        named_files(tmp_path / "book", ["data"])


@pytest.mark.parametrize("name", ["../secret.txt", "absolute", "missing.txt", "socket"])
def test_what_the_machine_could_not_have_is_refused(tmp_path, name):
    (tmp_path / "book").mkdir()
    (tmp_path / "secret.txt").write_text("x")
    os.mkfifo(tmp_path / "book/socket")
    named = tmp_path / "secret.txt" if name == "absolute" else name
    with pytest.raises(
        (ValueError, FileNotFoundError), match=r"not below|no such file|is not a file"
    ):
        named_files(tmp_path / "book", [named])


def test_a_file_outside_of_the_notebooks_folder_is_refused_with_a_fix_that_works(tmp_path):
    (tmp_path / "book").mkdir()
    (tmp_path / "data.csv").write_text("x")
    with pytest.raises(ValueError, match=r"data.csv is not below") as caught:
        named_files(tmp_path / "book", ["../data.csv"])
    assert caught.value.fix == f"copy such files into {tmp_path / 'book'}, and list the copies"
    shutil.copy(tmp_path / "data.csv", tmp_path / "book")
    assert list(named_files(tmp_path / "book", ["data.csv"])) == ["data.csv"]


def test_a_link_to_a_folder_is_sent_if_it_is_listed_besides_its_folder(tmp_path):
    (tmp_path / "book/data").mkdir(parents=True)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/a.txt").write_text("x")
    (tmp_path / "book/data/link").symlink_to(tmp_path / "shared")
    with pytest.raises(ValueError, match=r"data/link is a link to a folder"):
        named_files(tmp_path / "book", ["data"])
    assert list(named_files(tmp_path / "book", ["data", "data/link"])) == ["data/link/a.txt"]


def test_a_module_with_a_token_is_refused(tmp_path):
    (tmp_path / "helpers.py").write_text("TOKEN = 'hf_" + "a" * 34 + "'")
    with pytest.raises(ValueError, match=r"helpers.py contains text that looks like a secret"):
        named_files(tmp_path, ["helpers.py"])
    assert named_files(tmp_path, ["helpers.py"], not_secret=("hf_aaaaaaaa",))


def test_names_are_paths_from_the_notebook(tmp_path):
    (tmp_path / "data/deep").mkdir(parents=True)
    (tmp_path / "data/deep/a b.txt").write_text("x")
    (tmp_path / "top.txt").write_text("x")
    found = named_files(tmp_path, ["./data", tmp_path / "top.txt", "data/deep/a b.txt"])
    assert sorted(found) == ["data/deep/a b.txt", "top.txt"]


@pytest.mark.parametrize("line", ["jax", "JAX==0.7.2", "jax[cuda12]>=0.6  # on a GPU"])
def test_the_fix_for_jax_without_libtpu_is_a_line_that_is_accepted(tmp_path, line):
    path = tmp_path / "requirements.txt"
    path.write_text(line)
    with pytest.raises(ValueError, match="installs JAX without libtpu") as caught:
        read_requirements(path, [])
    path.write_text(caught.value.fix)
    requirement = read_requirements(path, []).partition(b"#")[0]
    assert Requirement(requirement.decode()).extras == {"tpu"}
