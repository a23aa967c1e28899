"""`baton serve` with keys and an API key: it works as ever, and no command line of a child shows a secret."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import psutil
import pytest

from common.keys import load_keys, make_keys
from tests.system.oracle import Case
from tests.system.server import running

pytestmark = pytest.mark.system

KEY = "sk-not-for-ps"


def test_serve_with_keys_and_an_api_key(model: Path, cases: list[Case], tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    secured = ("--keys", str(tmp_path / "keys"), "--api-key", KEY)
    with running(model, *secured) as server:
        keys = load_keys(str(tmp_path / "keys"))
        assert keys is not None
        secrets = (KEY, keys.secret.decode(), keys.public.decode())
        _, *children = server.tree()  # on the own command line is what the user typed
        said = [" ".join(child.cmdline()) for child in children] + [server.process.log()]
        assert len(children) >= 3
        assert not any(secret in text for secret in secrets for text in said)
        for case in cases[:4]:
            body = case.body()
            refused = httpx.post(server.url + "/v1/completions", json={"model": server.model, **body})
            assert refused.status_code == 401
            headers = {"Authorization": f"Bearer {KEY}"}
            answer = httpx.post(
                server.url + "/v1/completions",
                json={"model": server.model, **body},
                headers=headers,
                timeout=60,
            )
            assert answer.json()["choices"][0]["token_ids"] == case.answer

        # Another user of this host could not even enter the sockets' directory.
        for path in server.sockets().values():
            assert (path.parent.stat().st_uid, path.parent.stat().st_mode & 0o777) == (os.geteuid(), 0o700)
        for process in server.tree():
            listening = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            assert listening <= {"127.0.0.1"}
