"""Collect the files that a job sends, and raise an error for files that look like a secret."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpukit.essentials.display import InvalidValueError, PathNotFoundError
from tpukit.essentials.environment import RELEASES

# The names of key files, such as id_rsa, server.pem, kaggle.json, my-credentials.yaml, .netrc.
_KEY_NAME = re.compile(
    r"(?i)^id_(rsa|dsa|ecdsa|ed25519)$|[.](pem|key|p12|pfx|jks|keystore|ppk|kdbx|gpg|token|env)$"
    r"|^(kaggle|token|.*(secret|credential|account).*)[.](json|toml|ya?ml|ini)$"
    r"|^(token|credentials|[_.]?netrc)$"
)
# The JSON keys are those of Google's credentials for a user and for a service account.
_KEY_CONTENT = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY|\"(refresh_token|private_key)\"\s*:")
_LONGEST_KEY_FILE = 100_000  # bytes; larger files are not keys, and are not read
_SHOWN = 8  # a message lists at most this many files
_OUTSIDE = "is not below the notebook's folder"
# Lines of a requirements.txt that refer to a file, such as "-e .", "-r more.txt", "./wheels/a.whl",
# "name @ file:///a.whl".
_LOCAL_PATH = re.compile(
    r"^\s*(?:(?:-r|-c|-e|-f|--requirement|--constraint|--editable|--find-links)"
    r"[\s=]*(?![\s=]|https?:|git\+)|[./~]|file:)"
    r"|^\s*(?!https?:)[^\s#@]+[.](?:whl|zip|tar[.]gz)\b|@\s*file:"
)
# Text that looks like a token, a password or a private key.
_NAME = r"(?i:token(?!iz)|secret|passwo?r?d|passwd|api_?key|access_?key)\w*"
_SHAPES = (
    r"\bhf_[A-Za-z0-9]{20,}",  # Hugging Face
    r"\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}",
    r"\bsk-[A-Za-z0-9_-]{20,}|\bnvapi-[\w-]{20,}|\br8_[A-Za-z0-9]{30,}",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",  # Amazon
    r"\bAIza[\w-]{35}|\bya29[.][\w-]{20,}|\b1//0[\w-]{20,}|\bGOCSPX-[\w-]{20,}",  # Google
    r"\bxox[abeprs]-[\w-]{10,}|hooks[.]slack[.]com/services/\w+/\w+/\w+",
    r"\bnpm_[A-Za-z0-9]{36}|\bpypi-[\w-]{50,}",
    r"\beyJ[\w-]{10,}[.]eyJ[\w-]{10,}[.][\w-]+",  # a JSON web token
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\"private_key\"\s*:\s*\"[^\"]",
    r"https?://[^\s/:@\"']+:[^\s/@\"'{}$]{6,}@",  # a password in an address
    r"(?i:bearer)\s+[A-Za-z0-9._~+/-]{20,}",
    # By the name before it: token = "...", {"api_key": "..."}, os.environ["X_TOKEN"] = "...".
    _NAME + r"[\"']?\]?\s*(?::\s*str\s*)?[=:]\s*[rRbBuU]?[\"'][^\"'\s{}]{8,}[\"']",
    # A key is often an ordinary word, so its value must have at least three digits.
    r"(?i:key)[\"']?\]?\s*[=:]\s*[\"'](?=(?:[^\"'\d]*\d){3})[A-Za-z0-9+/_=-]{20,}[\"']",
    r"\blogin\(\s*[\"'][^\"'\s]{20,}[\"']",
    # In a line for the shell, without quotes: %env HF_TOKEN=..., !wandb login ...
    r"(?m:^\s*[%!].*" + _NAME + r"[=\s]\s*[^\s\"'${}<|=-][^\s\"'${}]{11,})",
    r"(?m:^\s*[%!].*\blogin\s+(?:--?\w+\s+)*[A-Za-z0-9]{20,})",
)
_SECRET = re.compile("|".join(f"(?:{shape})" for shape in _SHAPES))
_SHORTEST_ALLOWED = 8  # characters; a shorter text in not_secret could be part of a real secret


def named_files(
    folder: Path, named: Sequence[str | os.PathLike], *, not_secret: Sequence[str] = ()
) -> dict[str, Path]:
    """Return the paths of the files to send, by their paths relative to the notebook's folder.

    It is an error if a listed folder contains a hidden file, a file that looks like a key, or a
    link out of this folder. Such a file is sent only if the user has listed the file itself.

    Args:
        folder: the notebook's folder.
        named: the files and folders that the user has listed, relative to `folder`.
        not_secret: texts that look like a secret but are not.

    Raises:
        PathNotFoundError: a listed file does not exist.
        InvalidValueError: a file must not be sent; the message lists such files.
    """
    found = {}
    refused = []
    listed = {Path(os.path.relpath(folder / one, folder)).as_posix() for one in named}
    for one in named:
        place = folder / one
        if not place.exists():
            raise PathNotFoundError(
                f"no such file: {place}", fix=f"pass a path relative to {folder}"
            )
        files = [place]
        if place.is_dir():
            inside = sorted(place.rglob("*"))
            # A link to a folder is listed too, because it must be refused instead of left out.
            files = [path for path in inside if path.is_symlink() or not path.is_dir()]
        for file in files:
            name = Path(os.path.relpath(file, folder)).as_posix()
            if name in listed and file.is_dir():
                continue  # a link to a folder: its files follow by its own entry in `named`
            # A listed folder does not refuse a file that is listed, too.
            inside_of = place if place.is_dir() and name not in listed else None
            reason = _reason_against(file, name, inside_of)
            if reason:
                refused.append(f"{name} {reason}")
                continue
            # Users write secrets into code. Other files are often large, and are not read here.
            if file.suffix == ".py":
                text = file.read_text(encoding="utf-8", errors="replace")
                refuse_secret(text, name, allowed=not_secret)
            found[name] = file
    if refused:
        found_text = "; ".join(refused[:_SHOWN])
        if len(refused) > _SHOWN:
            found_text += f", and {len(refused) - _SHOWN} more"
        fix = "list only files that the job needs; to send one of these files all the same, "
        fix += "add its own path to files="
        if _OUTSIDE in found_text:
            fix = f"copy such files into {folder}, and list the copies"
        raise InvalidValueError(
            f"{len(refused)} of the listed files cannot be sent", found=found_text, fix=fix
        )
    return found


def _reason_against(file: Path, name: str, place: Path | None) -> str:
    """Return the reason why a file must not be sent; "" if it may be sent.

    Args:
        file: the path of the file.
        name: the path relative to the notebook's folder.
        place: the listed folder that contains the file; None if the file itself was listed.
    """
    if name.startswith("../") or Path(name).is_absolute():
        return _OUTSIDE
    # The user has named this very file, so it may be hidden, a link or a key.
    if place is None:
        return "" if file.is_file() else "is not a file"
    if any(part.startswith(".") for part in Path(name).parts):
        return "is hidden"
    if file.is_dir():
        return "is a link to a folder"
    if not file.exists():
        return "is a broken link"
    if not file.resolve().is_relative_to(place.resolve()):
        return f"is a link out of {place.name}"
    if not file.is_file():
        return "is not a file"
    if _looks_like_a_key(file):
        return "looks like a key"
    return ""


def _looks_like_a_key(file: Path) -> bool:
    """Return whether the name or the contents of a file are those of a key."""
    if _KEY_NAME.search(file.name):
        return True
    is_short = file.stat().st_size <= _LONGEST_KEY_FILE
    return is_short and bool(_KEY_CONTENT.search(file.read_bytes()))


def read_requirements(
    path: Path, packages: Sequence[str], *, not_secret: Sequence[str] = ()
) -> bytes:
    """Return the contents of a requirements file after checking that a job can install it.

    Args:
        path: the path of the requirements file.
        packages: the packages that every job installs, as lines "name==version".
        not_secret: texts that look like a secret but are not.

    Raises:
        PathNotFoundError: the file does not exist.
        InvalidValueError: the file is not UTF-8; or a line refers to a file of this machine,
            contradicts one of `packages`, contains a secret, or installs JAX without libtpu.
    """
    if not path.is_file():
        raise PathNotFoundError(f"no such file: {path}", fix='requirements="requirements.txt"')
    text = read_utf8(path)
    refuse_secret(text, path.name, allowed=not_secret)
    pins = dict(line.partition(";")[0].split("==") for line in packages if "==" in line)
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"line {number} of {path.name}"
        if _LOCAL_PATH.search(line):
            raise InvalidValueError(
                f"{place} names a file of this machine, which the job does not have",
                found=line.strip(),
                fix=f"if that file lists packages, copy its lines into {path.name}; for a package, "
                "add its wheel to files=, and install it in a cell: %pip install NAME.whl",
            )
        _check_requirement(line, place, pins)
    return text.encode()


def read_utf8(path: Path) -> str:
    """Return the text of a file, without the byte order mark that some editors write.

    Raises:
        InvalidValueError: the file is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        fix = "save it as UTF-8 in your editor"
        raise InvalidValueError(f"{path.name} is not UTF-8", found=error, fix=fix) from None


def _check_requirement(line: str, place: str, pins: Mapping[str, str]) -> None:
    """Check one line of a requirements file.

    Args:
        line: the line.
        place: the line's number and file, for messages.
        pins: the version of each package that every job installs.

    Raises:
        InvalidValueError: the line contradicts a pin, or installs JAX without libtpu.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(re.split(r"\s#|\s--", line)[0].strip())
    except InvalidRequirement:  # an empty line, an option, or a mistake that uv reports later
        return
    name = re.sub(r"[-_.]+", "_", wanted.name.lower())
    pinned = pins.get(name)
    if pinned and not wanted.specifier.contains(pinned, prereleases=True):
        raise InvalidValueError(
            f"{place} contradicts {name}=={pinned}, the version that the job installs",
            found=line.strip(),
            fix=f'remove the line; or choose torch {", ".join(RELEASES)} or "none": '
            'JobOptions(torch="...")',
        )
    if name == "jax" and not pins and "tpu" not in wanted.extras:
        raise InvalidValueError(
            f"{place} installs JAX without libtpu: JAX would train on the CPU of the TPU's machine",
            found=line.strip(),
            fix=re.sub(r"^jax(\s*\[.*?\])?", "jax[tpu]", line.strip(), flags=re.IGNORECASE),
        )


def find_secret(text: str, allowed: Sequence[str] = ()) -> re.Match | None:
    """Return the first match that looks like a secret and contains none of the allowed texts."""
    for match in _SECRET.finditer(text):
        is_allowed = any(one in match[0] for one in allowed)
        if not is_allowed:
            return match
    return None


def refuse_secret(text: str, place: str, *, allowed: Sequence[str] = ()) -> None:
    """Raise InvalidValueError if a text contains something that looks like a secret.

    The message shows only the beginning of the secret.

    Args:
        text: the text to search.
        place: the name of the text, for the message.
        allowed: texts that look like a secret but are not.
    """
    found = find_secret(text, allowed)
    if found is None:
        return
    line = text.count("\n", 0, found.start()) + 1
    beginning = found[0].strip()[: min(12, len(found[0]) // 2)]
    raise InvalidValueError(
        f"{place} contains text that looks like a secret",
        found=f"line {line}: {beginning}...; everybody who may read the job's folder could read it",
        fix='for a secret, pass secrets={"HF_TOKEN": ...}, and read os.environ["HF_TOKEN"] in the '
        'notebook; for another text, pass options=JobOptions(not_secret=("the text",))',
    )


def check_allowed(texts: Sequence[str]) -> None:
    """Raise InvalidValueError if a text of not_secret has fewer than 8 characters."""
    short = [text for text in texts if len(text) < _SHORTEST_ALLOWED]
    if short:
        raise InvalidValueError(
            f"not_secret={short[0]!r} is too short",
            fix=f"give at least {_SHORTEST_ALLOWED} characters of the text that is not a secret",
        )
