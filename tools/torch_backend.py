"""Print uv's option for another build of torch, or nothing if PyTorch's index does not answer.

    python tools/torch_backend.py cpu

PyTorch keeps its other builds on a separate index. A proxy or a company's network may block that
index. So uv looks torch up there first, without a download. Any other error of uv ends the program
with uv's message.
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
# uv writes "Failed to fetch" for the network alone: it has other words for a full disk or a cache
# that cannot be written. A proxy that answers 403, 404 or another page looks like an index
# without torch.
_NO_ANSWER = re.compile(
    r"Failed to fetch: \W?https?://\S*pytorch"
    r"|torch was not found in the package registry"
    r"|there are no versions of torch\b"
)


def option(backend: str) -> str:
    """Return `--torch-backend cpu`, or "" and print a line if the index does not answer."""
    lookup = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    lookup += ["--dry-run", "--no-deps", "--torch-backend", backend]
    # So uv asks the index also if torch is installed, or if the index's page is in uv's cache.
    lookup += ["--reinstall-package", "torch"]
    lookup += ["--constraints", "requirements.txt", "torch"]
    options = {"cwd": ROOT, "env": os.environ | _ENVIRON, "capture_output": True, "text": True}
    try:
        done = subprocess.run(lookup, timeout=_LONGEST, **options)
    except subprocess.TimeoutExpired:
        done = None
    if done and done.returncode == 0:
        return f"--torch-backend {backend}"
    if done and not _NO_ANSWER.search(done.stderr):
        print(done.stderr, end="", file=sys.stderr)
        raise SystemExit(done.returncode)
    message = "PyTorch's own index does not answer; make takes the ordinary build"
    print(f"TORCH={backend}: {message}", file=sys.stderr)
    return ""


if __name__ == "__main__":
    print(option(sys.argv[1]))
