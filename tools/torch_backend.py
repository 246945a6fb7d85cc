"""Print uv's option for another build of torch, or nothing if PyTorch's index does not answer.

    python tools/torch_backend.py cpu

PyTorch keeps its other builds on an index of its own, which a proxy or a company's network may not let through. uv has
the last word: it looks torch up there, without a download. Any other error of uv ends the program with uv's message.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# uv waits 30 s per request and tries four times; an index that answers takes less than one second.
_ENVIRON = {"UV_HTTP_TIMEOUT": "10", "UV_HTTP_CONNECT_TIMEOUT": "10", "UV_HTTP_RETRIES": "0"}
_LONGEST = 60  # seconds, for an index that sends one byte now and then
# "Failed to fetch" is of the network alone: a full disk or a cache that cannot be written has other words. A proxy
# that answers 403, 404 or a page of its own looks to uv like an index without torch.
_NO_ANSWER = re.compile(
    r"Failed to fetch: \W?https?://\S*pytorch"
    r"|torch was not found in the package registry"
    r"|there are no versions of torch\b"
)


def option(backend: str) -> str:
    """Return `--torch-backend cpu`, or "" with a line for the reader if the index does not answer."""
    lookup = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--dry-run", "--no-deps"]
    lookup += ["--torch-backend", backend, "--constraints", "requirements.txt", "torch"]
    lookup += ["--reinstall-package", "torch"]  # uv asks the index also if torch is installed or its page in the cache
    environ = os.environ | _ENVIRON
    try:
        done = subprocess.run(lookup, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=_LONGEST)
    except subprocess.TimeoutExpired:
        done = None
    if done and done.returncode == 0:
        return f"--torch-backend {backend}"
    if done and not _NO_ANSWER.search(done.stderr):
        print(done.stderr, end="", file=sys.stderr)
        raise SystemExit(done.returncode)
    print(f"TORCH={backend}: PyTorch's own index does not answer; make takes the ordinary build", file=sys.stderr)
    return ""


if __name__ == "__main__":
    print(option(sys.argv[1]))
