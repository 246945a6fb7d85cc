"""Every fix of a room done as it says: a row for each `fix=` in its source, and what a row has to show."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

KIT = Path(__file__).resolve().parents[1] / "tpukit"


class Fixes:
    """The rows of a room: `@fixes("module: words of the fact")` above a function that gives what is wrong, and mended.

    The function gets an empty folder, and returns two functions. The first one fails, or returns what was printed. The
    second gets the fix as it was said, does it, and makes the same call.
    """

    def __init__(self, *files: str):
        self.files, self.rows = files, defaultdict(list)

    def __call__(self, key: str) -> Callable:
        def add(row: Callable) -> Callable:
            self.rows[key].append(row)
            return row

        return add

    @property
    def cases(self) -> list[tuple]:
        """The rows one by one, for parametrize."""
        return [(key, row) for key, rows in self.rows.items() for row in rows]

    def source(self) -> set[str]:
        """Return the keys of all `fix=` in these files, of which each has to have a row."""
        found = set()
        for file in (file for pattern in self.files for file in KIT.glob(pattern)):
            for call in ast.walk(ast.parse(file.read_text())):
                if isinstance(call, ast.Call) and any(keyword.arg == "fix" for keyword in call.keywords):
                    found.add(f"{file.stem}: {_words(call.args[0])}")
        return found

    @staticmethod
    def check(key: str, row: Callable, folder: Path) -> None:
        """See a row's call fail with the words of its key, and pass when what the fix says is done."""
        wrong, mended = row(folder)
        try:
            said = str(wrong())
        except Exception as error:
            said = str(error)
        words = key.partition(": ")[2]
        pattern = ".*" if words == "{}" else ".*".join(map(re.escape, words.split("{}")))
        assert re.search(pattern, said, re.DOTALL), said
        assert "fix:" in said, said
        mended(said.rpartition("fix:")[2].strip())


def _words(fact: ast.expr) -> str:
    """Return what is always the same in a fact, with {} where a value stands."""
    if isinstance(fact, ast.Constant):
        return fact.value
    if isinstance(fact, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in fact.values)
    return "{}"
