"""Every fix of a subpackage carried out as it says: a block for each `fix=` in its source."""

import ast
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "tpukit"


class Fix:
    """The fix of a refusal as it was printed, known when the block that is refused has ended."""

    def __init__(self, names: dict):
        self.text, self.names = "", names

    def __contains__(self, words: str) -> bool:
        return words in self.text

    def code(self, pattern: str, **names):
        """Run the code in the fix that the pattern finds, and return its value."""
        found = re.search(pattern, self.text)
        assert found, f"no {pattern} in {self.text}"
        return self.run(found[0], **names)

    def run(self, code: str, **names):
        """Run code that a test took from the fix, with the names that a user's notebook has."""
        return eval(code, self.names | names)


class Fixes:
    """The fixes of some modules, each with its test.

    `with fixes("module: words of the fact") as fix:` goes around a call that is refused, or that
    prints advice. {} stands for a value, and " ..." at the end for the rest of the fact. Below the
    block the test does what `fix` says, and makes the call again. `names` are the names that the
    code in a fix may use.
    """

    def __init__(self, *files: str, names: dict):
        self.files, self.names = files, names

    @contextlib.contextmanager
    def __call__(self, key: str) -> Iterator[Fix]:
        """See the block fail, or print, with the words of the key and a fix."""
        fix, printed = Fix(self.names), io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                yield fix
            text = printed.getvalue()
        except Exception as error:
            text = str(error)
        words = key.partition(": ")[2]
        pattern = ".*" if words == "{}" else _pattern(words)
        assert re.search(pattern, text, re.DOTALL), text
        assert "fix:" in text, text
        fix.text = text.rpartition("fix:")[2].strip()

    def source(self) -> set[str]:
        """Return the keys of all `fix=` in these modules, each of which has to have a test."""
        found = set()
        for file in self._modules():
            for call in ast.walk(ast.parse(file.read_text())):
                is_call = isinstance(call, ast.Call)
                if is_call and any(keyword.arg == "fix" for keyword in call.keywords):
                    found.add(f"{file.stem}: {_words(call.args[0])}")
        return found

    def tested(self, test_file: str) -> set[str]:
        """Return the keys that a file of tests names, in full."""
        stems = tuple(f"{file.stem}: " for file in self._modules())
        source, found = self.source(), set()
        for node in ast.walk(ast.parse(Path(test_file).read_text())):
            if isinstance(node, ast.Constant) and str(node.value).startswith(stems):
                key = node.value
                if key.endswith(" ..."):
                    (key,) = [one for one in source if one.startswith(key.removesuffix(" ..."))]
                found.add(key)
        return found

    def _modules(self) -> list[Path]:
        found = []
        for pattern in self.files:
            found += PACKAGE.glob(pattern)
        return found


def _pattern(words: str) -> str:
    """Return a regular expression for the words of a key."""
    return ".*".join(map(re.escape, words.removesuffix(" ...").split("{}")))


def _words(fact: ast.expr) -> str:
    """Return the fixed words of a fact, with {} in the place of each value."""
    if isinstance(fact, ast.Constant):
        return fact.value
    if isinstance(fact, ast.JoinedStr):
        parts = fact.values
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)
    return "{}"
