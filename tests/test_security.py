"""`docs/security.md` names every module that loads or executes code, starts a program, or writes files."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/security.md"
MODULES = {
    "cloudpickle": "pickle",
    "ctypes": "ctypes",
    "marshal": "pickle",
    "pickle": "pickle",
    "runpy": "exec",
    "shelve": "pickle",
    "subprocess": "subprocess",
    "tarfile": "archive",
    "zipfile": "archive",
}
CALLS = {
    "eval": "exec",
    "exec": "exec",
    "os.system": "subprocess",
    "os.popen": "subprocess",
    "torch.load": "torch.load",
}
WRITERS = ("write_text", "write_bytes")


def kind_of(call: ast.Call) -> str | None:
    """Return the kind of a call that the page must name, such as "pickle" or "write"."""
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    if name in CALLS:
        return CALLS[name]
    if last == "exec_module" or name.startswith(("os.exec", "os.spawn")):
        return "exec"
    if name.partition(".")[0] in MODULES:
        return MODULES[name.partition(".")[0]]
    if last in WRITERS or (last in ("open", "fdopen") and opens_to_write(call)):
        return "write"
    return None


def opens_to_write(call: ast.Call) -> bool:
    arguments = [*call.args[:2], *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [one.value for one in arguments if isinstance(one, ast.Constant)]
    return any(re.fullmatch(r"[rwxabt+]*[wxa+][rwxabt+]*", str(mode)) for mode in modes)


def calls_in_the_source() -> set[tuple[str, str]]:
    found = set()
    for path in (ROOT / "tpukit").rglob("*.py"):
        name = path.relative_to(ROOT / "tpukit").as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (kind := kind_of(node)):
                found.add((name, kind))
    return found


def calls_on_the_page() -> set[tuple[str, str]]:
    found = set()
    for module, kinds in re.findall(r"^\| `([\w/]+\.py)` \| ([^|]+) \|", PAGE.read_text(), re.M):
        found |= {(module, kind) for kind in kinds.strip().split(", ")}
    return found


def test_every_call_that_loads_executes_or_writes_is_on_the_page():
    source = calls_in_the_source()
    page = calls_on_the_page()
    assert sorted(source - page) == [], "in the source, not in docs/security.md"
    assert sorted(page - source) == [], "in docs/security.md, no longer in the source"


def test_the_walk_sees_each_kind():
    code = (
        "pickle.loads(x); subprocess.run(x); torch.load(x); exec(x); ctypes.CDLL(x); "
        "zipfile.ZipFile(x); open(x, 'wb'); path.open(mode='a'); path.write_text(x); os.system(x)"
    )
    kinds = {kind_of(node) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)}
    assert kinds == {"pickle", "subprocess", "torch.load", "exec", "ctypes", "archive", "write"}
    assert kind_of(ast.parse("open(path, 'rb')", mode="eval").body) is None


def test_every_torch_load_takes_weights_only():
    for path in (ROOT / "tpukit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                words = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert words.get("weights_only") == "True", f"{path}:{node.lineno}"
