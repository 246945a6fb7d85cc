"""Recognise text that looks like a secret: a token, a password, a private key."""

import re
from collections.abc import Sequence

from tpukit.essentials.show import WrongValue

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
    # By the name beside it: token = "...", {"api_key": "..."}, os.environ["X_TOKEN"] = "...".
    _NAME + r"[\"']?\]?\s*(?::\s*str\s*)?[=:]\s*[rRbBuU]?[\"'][^\"'\s{}]{8,}[\"']",
    # A key is often an ordinary word, so its value must have at least three digits.
    r"(?i:key)[\"']?\]?\s*[=:]\s*[\"'](?=(?:[^\"'\d]*\d){3})[A-Za-z0-9+/_=-]{20,}[\"']",
    r"\blogin\(\s*[\"'][^\"'\s]{20,}[\"']",
    # In a line for the shell, without quotes: %env HF_TOKEN=..., !wandb login ...
    r"(?m:^\s*[%!].*" + _NAME + r"[=\s]\s*[^\s\"'${}<|=-][^\s\"'${}]{11,})",
    r"(?m:^\s*[%!].*\blogin\s+(?:--?\w+\s+)*[A-Za-z0-9]{20,})",
)
_SECRET = re.compile("|".join(f"(?:{shape})" for shape in _SHAPES))
_SHORTEST_ALLOWED = 8  # a shorter text would allow too much


def find_secret(text: str, allowed: Sequence[str] = ()) -> re.Match | None:
    """Return the first part that looks like a secret and contains none of the allowed texts."""
    matches = _SECRET.finditer(text)
    return next((found for found in matches if not any(one in found[0] for one in allowed)), None)


def refuse_secret(text: str, place: str, *, allowed: Sequence[str] = ()) -> None:
    """Refuse text that looks like a secret; the message has its beginning only."""
    found = find_secret(text, allowed)
    if found is None:
        return
    line = text.count("\n", 0, found.start()) + 1
    beginning = found[0].strip()[: min(12, len(found[0]) // 2)]
    raise WrongValue(
        f"{place} contains what looks like a secret",
        found=f"line {line}: {beginning}...; whoever may read the job's folder could read it",
        fix='secrets={"HF_TOKEN": ...}, and os.environ["HF_TOKEN"] in the notebook; if it is none: '
        'options=JobOptions(not_secret=("the text",))',
    )


def check_allowed(texts: Sequence[str]) -> None:
    """Refuse an allowed text that is too short to name one false alarm."""
    short = [text for text in texts if len(text) < _SHORTEST_ALLOWED]
    if short:
        raise WrongValue(f"not_secret={short[0]!r} is too short", fix=f"at least {_SHORTEST_ALLOWED} characters of it")
