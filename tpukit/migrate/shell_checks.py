"""Find shell lines and environment variables that set up a TPU as in 2020, or replace torch."""

import re
from collections.abc import Iterator

from tpukit.migrate.name_tables import Verdict, table

_OLD = "it set up a TPU as in 2020; its servers and wheels are gone"
_PINNED = "it replaces the image's torch or torch_xla, which belong together"
_KEEP = "delete it: Colab's and Kaggle's TPU images have torch and torch_xla"
# "pip install -U torch": the command, and the words up to the end of the command line.
_INSTALL = re.compile(
    r"\b(?:pip3?|conda|mamba|micromamba|uv)\b[^;&|\n]*?"
    r"\b(install|uninstall|add|remove)\b([^;&|]*)"
)
# The installer of 2020, and the buckets of the wheels of that time.
_SETUP = re.compile(r"env-setup\.py|\btpu-pytorch\b|libtpu-releases|pytorch-xla-releases")
# Packages, and wheels by their path, that replace the image's own in any version.
_ALWAYS = re.compile(
    r"(torch[-_]?xla|libtpu|libtpu-nightly|cloud[-_]tpu[-_]client)(?![\w-])"
    r"|.*(^|[/=])(torch|torchvision|torchaudio|torch_xla|libtpu)[-_][^/]*\.whl",
    re.I,
)
# Packages that replace the image's own only with a version, or with an option that reinstalls.
_TORCH = re.compile(r"(torch|torchvision|torchaudio|torchtext|pytorch)(?![\w-])(.*)", re.I)
_REPLACES = {
    "-U", "--upgrade", "--force-reinstall", "--ignore-installed", "-I", "--pre", "--reinstall"
}  # fmt: skip


def check_shell(text: str) -> Iterator[tuple[int, str, Verdict]]:
    """Yield (number, line, verdict) for each finding in a shell command.

    The number is that of the line in the command, from 0.

    Args:
        text: the command, with the lines that a backslash joins to it.
    """
    if text.lstrip().startswith("#"):
        return
    setup = _SETUP.search(text)
    word = setup[0] if setup else _replacing_word(text)
    if word:
        yield *_line_of(word, text), Verdict("install", _OLD if setup else _PINNED, _KEEP)
    for name in filter(text.count, variables()):
        verdict = Verdict("environment", **variables()[name])
        if re.match(r"\s*!\s*(export\s|\w+=\S*\s*$)", text):
            happened = f"`!` starts another shell, so setting it had no effect; {verdict.happened}"
            verdict = verdict._replace(happened=happened)
        yield *_line_of(name, text), verdict


def _line_of(word: str, text: str) -> tuple[int, str]:
    """Return the number of the line with a word, from 0, and that line."""
    below = text.count("\n", 0, text.index(word))
    return below, text.split("\n")[below].strip()


def variables() -> dict:
    """Return the old environment variables of names.json, with what happened to each."""
    return table("names", "variables")


def _replacing_word(text: str) -> str:
    """Return the requirement that replaces torch or torch_xla; "" if none does."""
    for command, rest in _INSTALL.findall(text):
        words = re.findall(r"[^\s\\\"',\[\]()]+", rest)
        # Without a version or such an option, `pip install torch` keeps the installed torch.
        replaces = command in ("uninstall", "remove") or bool(_REPLACES.intersection(words))
        for word, following in zip(words, [*words[1:], ""], strict=True):
            torch = _TORCH.match(word)
            has_version = torch and (torch[2] or re.match("[=<>~!@]", following))
            if _ALWAYS.match(word) or has_version or (torch and replaces):
                return word
    return ""
