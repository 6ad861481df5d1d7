"""scripts/audit.sh: a known vulnerability fails the check; a service that cannot be reached is said in one line."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.support.pages import ROOT

VULNERABLE = "leaky-lib"
ADVISORY = {
    "id": "TEST-2026-1",
    "summary": "leaks",
    "affected": [{"package": {"name": VULNERABLE, "ecosystem": "PyPI"}, "ranges": []}],
}


class Advisories(BaseHTTPRequestHandler):
    """A service that knows of one vulnerable package."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = [ADVISORY] if asked["package"]["name"] == VULNERABLE else []
        answer = json.dumps({"vulns": known} if known else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Advisories) as server:
        thread = Thread(target=server.serve_forever, name="advisories")
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def audit(folder: Path, pins: str, service: str) -> subprocess.CompletedProcess[str]:
    requirements = folder / "pins.txt"
    requirements.write_text(pins)
    return subprocess.run(
        [ROOT / "scripts" / "audit.sh", requirements],
        env=os.environ | {"PIP_AUDIT_OSV_URL": service},
        capture_output=True,
        text=True,
        check=False,
    )


def test_known_vulnerability_fails_the_audit(service: str, tmp_path: Path) -> None:
    done = audit(tmp_path, f"good-lib==1.0\n{VULNERABLE}==2.0\n", service)
    assert done.returncode == 1
    assert "TEST-2026-1" in done.stderr
    assert "Found 1 known vulnerability in 1 package" in done.stderr


def test_requirements_without_known_vulnerability_pass(service: str, tmp_path: Path) -> None:
    done = audit(tmp_path, "good-lib==1.0\n", service)
    assert (done.returncode, done.stdout, done.stderr) == (0, "No known vulnerabilities found\n", "")


def test_unreachable_service_is_said_in_one_line(tmp_path: Path) -> None:
    done = audit(tmp_path, f"{VULNERABLE}==2.0\n", "http://127.0.0.1:1/")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1
    assert done.stdout.startswith("pip-audit: not run, its vulnerability database cannot be reached")


@pytest.mark.parametrize("pins", ["leaky-lib ===\n", "leaky-lib>=2\n"])
def test_requirement_without_exact_version_fails_the_audit(pins: str, service: str, tmp_path: Path) -> None:
    assert audit(tmp_path, pins, service).returncode == 1
