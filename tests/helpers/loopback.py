"""A server on the loopback interface that stands in for Google's APIs: it answers as it is told, and keeps requests."""

import json
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

HANG, LOSE = "hang", "lose"  # in place of an answer: none at all, or the connection closed


def refusal(status, message, reason=None):
    """Return an answer as Google's APIs refuse."""
    details = [
        {
            "@type": "type.googleapis.com/google.rpc.ErrorInfo",
            "reason": reason,
            "domain": "googleapis.com",
        }
    ]
    return status, {
        "error": {"code": status, "message": message, "details": details if reason else []}
    }


@contextmanager
def loopback(answer):
    """Serve; `answer(request)` returns a status and what becomes JSON, or HANG, or LOSE."""
    done, requests = threading.Event(), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = SimpleNamespace(
                method=self.command,
                path=self.path,
                body=body,
                headers=dict(self.headers),
                number=len(requests),
            )
            requests.append(request)
            given = answer(request)
            if given == HANG:
                done.wait(60)
            if given in (HANG, LOSE):
                self.close_connection = True
                self.connection.close()
                return
            status, content = given
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json; charset=UTF-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, *arguments):
            pass

        def finish(self):
            with suppress(OSError, ValueError):  # the connection that was lost on purpose
                super().finish()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield SimpleNamespace(address=f"http://127.0.0.1:{server.server_port}", requests=requests)
    finally:
        done.set()
        server.shutdown()
        server.server_close()
        thread.join()
