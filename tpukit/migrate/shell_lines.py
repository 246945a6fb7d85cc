"""Lines for the shell, without what set a TPU up in 2020."""

import re
from collections.abc import Container

DEAD_VARIABLES = ("XRT_TPU_CONFIG", "XLA_TENSOR_ALLOCATOR_MAXSIZE", "COLAB_TPU_ADDR")
SETUP = re.compile(
    r"env-setup\.py|tpu-pytorch/wheels|cloud-tpu-client|libtpu-releases|torch_xla-[^\s/]*\.whl"
    r"|(?<![\w-])torch(vision|text|audio)?-(\d|\{|nightly)[^\s/]*\.whl"
)
_OURS = re.compile(r"[\"']?torch(vision|text|audio|[-_]xla)?[\"']?")  # of the image: torch_xla needs them as they are
_BELONGS = re.compile(r"[\"']?(torch|torchvision|torchtext|torchaudio)[=~<>]=|[\"']?(torch[-_]xla|libtpu)")
_TAKE_A_VALUE = {"-f", "--find-links", "-i", "--index-url", "--extra-index-url"}
_SETS = re.compile(rf"\s*%(?:set_)?env\s+(?:{'|'.join(DEAD_VARIABLES)})\b")
# One command, quoted text as a whole, and what stands between it and the next.
_COMMANDS = re.compile(r"""((?:"[^"]*"|'[^']*'|[^;&"']|&(?!&)|["'])*?)(\s*(?:&&|;)\s*|$)""")


def logical_lines(text: str) -> list[str]:
    """Return the lines of a shell's text, one that goes on with a backslash together with what follows it."""
    return re.findall(r"(?:[^\n\\]|\\\n|\\(?!\n))*\n?", text)[:-1]


def is_setup(text: str, names: Container[str] = ()) -> bool:
    """Return whether a text for the shell sets a TPU up, or holds a variable that says how."""
    return bool(SETUP.search(text)) or any(one in names for one in re.findall(r"[${](\w+)", text))


def without_setup(line: str, names: Container[str] = ()) -> str | None:
    """Return a line without the commands, and the arguments of pip, that fetched a TPU's software; None for nothing.

    `names` are the notebook's variables that hold such software's names.
    """
    if _SETS.match(line):
        return None
    if not (is_setup(line, names) or "uninstall" in line) or re.match(r"\s*(:\s*)?#", line):
        return line
    begin = re.match(r"\s*(?:[\w.]+\s*=\s*)?[!%]*", line)[0]
    parts = [(_command(command, names), then) for command, then in _COMMANDS.findall(line[len(begin) :])]
    left = [(command, then) for command, then in parts if command and command.strip()]
    text = "".join(command + then for command, then in left[:-1]) + "".join(command for command, _ in left[-1:])
    return begin + text if left else None


def _command(text: str, names: Container[str]) -> str | None:
    pip = re.search(r"\bpip3?\b.*?\b(install|uninstall)\b", text, re.DOTALL)
    if not (is_setup(text, names) or (pip and pip[1] == "uninstall")):
        return text
    if not pip:
        return None
    goes = _BELONGS.match if pip[1] == "install" else _OURS.fullmatch
    kept, real, words = [], False, re.findall(r"(?:[^\s\\]|\\(?!\n))+(?:\s|\\\n)*|(?:\s|\\\n)+", text)
    installs = next(number for number, word in enumerate(words) if word.strip(" \t\\\n") == pip[1])
    takes = ""
    for number, word in enumerate(words):
        bare = word.strip(" \t\\\n")
        if bare in _TAKE_A_VALUE:
            takes = word
        elif number > installs and (is_setup(word, names) or goes(bare)):
            takes = ""  # an option goes with its value
        else:
            real = real or (number > installs and not takes and bare != "" and not bare.startswith("-"))
            kept += [takes, word]
            takes = ""
    return "".join(kept).rstrip(" \t\\\n") if real else None
