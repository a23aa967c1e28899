"""Keys on disk: made once, for this user alone; what is no key, or open to others, is refused by name."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner

from cli import baton
from common.addresses import check_listen, listen_towards
from common.api_key import read_api_key
from common.errors import ConfigError
from common.keys import KEY_FILE, load_keys, make_keys


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_made_keys_are_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = make_keys(tmp_path / "deep" / "keys")
    finally:
        os.umask(before)
    assert path == tmp_path / "deep" / "keys" / KEY_FILE
    assert (mode(path.parent), mode(path)) == (0o700, 0o600)


def test_both_keys_come_from_the_file(tmp_path: Path) -> None:
    secret = make_keys(tmp_path).read_bytes().strip()
    keys = load_keys(str(tmp_path))
    assert keys is not None
    assert (keys.secret, keys.public) == (secret, zmq.curve_public(secret))
    assert secret.decode() not in repr(keys)
    assert keys.public.decode() not in repr(keys)


def test_no_two_clusters_have_the_same(tmp_path: Path) -> None:
    assert len({make_keys(tmp_path / str(i)).read_bytes() for i in range(20)}) == 20


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    before = make_keys(tmp_path).read_bytes()
    with pytest.raises(ConfigError, match="exists: remove it first"):
        make_keys(tmp_path)
    assert (tmp_path / KEY_FILE).read_bytes() == before


def test_no_folder_is_no_keys() -> None:
    assert load_keys(None) is None


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o644, 0o666, 0o777])
def test_a_key_that_others_reach_is_refused(tmp_path: Path, bits: int) -> None:
    make_keys(tmp_path).chmod(bits)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_keys(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"x", b"\x00" * 40, b"0" * 41, b"0" * 39, os.urandom(5000)])
def test_what_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    make_keys(tmp_path).write_bytes(content)
    with pytest.raises(ConfigError, match="is no key"):
        load_keys(str(tmp_path))


def test_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; `baton keys` makes it"):
        load_keys(str(tmp_path))


def test_the_command_makes_them_and_says_where(tmp_path: Path) -> None:
    result = CliRunner().invoke(baton, ["keys", str(tmp_path / "k")])
    assert result.output == f"{tmp_path / 'k' / KEY_FILE}\n"
    assert load_keys(str(tmp_path / "k")) is not None


# Addresses at the start -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["decode", "--join", "tcp://10.0.0.1:7000"], "needs keys: make them with `baton keys FOLDER`"),
        (["prefill", "--join", "tcp://127.0.0.1:7000", "--listen", "tcp://10.0.0.1:*"], "needs keys"),
        (["gateway", "--port", "0", "--nodes", "tcp://*:7000"], "needs keys"),
        (
            ["decode", "--join", "tcp://10.0.0.1:7000", "--keys", "/nowhere"],
            "cannot read /nowhere/cluster.key",
        ),
        (["gateway", "--port", "0", "--nodes", "ipc:///tmp/x.sock"], "others may enter /tmp"),
        (["decode", "--join", "ipc://@x"], "open to all users of this host"),
        (["serve", "--port", "0", "--keys", "/nowhere"], "cannot read /nowhere/cluster.key"),
        (["serve", "--port", "0", "--api-key", "@/nowhere"], "cannot read /nowhere"),
        (["gateway", "--port", "0", "--api-key", "a b"], "only visible ones of ASCII"),
    ],
)
def test_what_is_not_safe_is_refused_before_a_model_is_loaded(
    tiny_model: Path, args: list[str], words: str
) -> None:
    result = CliRunner().invoke(baton, [args[0], str(tiny_model), *args[1:]])
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize("address", ["tcp://*:7000", "tcp://0.0.0.0:*", "tcp://[::]:1"])
def test_an_address_that_others_cannot_connect_to_is_not_announced(address: str) -> None:
    with pytest.raises(ConfigError, match="name this host's own address"):
        check_listen(address)


def test_where_a_node_listens_follows_from_where_its_gateway_is() -> None:
    assert listen_towards("tcp://127.0.0.1:7000") == "tcp://127.0.0.1:*"
    assert listen_towards("tcp://localhost:7000") == "tcp://127.0.0.1:*"
    with pytest.raises(ConfigError, match="--listen"):
        listen_towards("tcp://no.such.host.invalid:7000")


# The key of the HTTP API ----------------------------------------------------------------------------------


def test_an_api_key_is_said_or_read(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("  from-a-file\n")
    assert read_api_key(None) is None
    assert read_api_key("said") == "said"
    assert read_api_key(f"@{file}") == "from-a-file"


@pytest.mark.parametrize("key", ["", "a b", "a\n", "ä", "\x7f"])
def test_a_key_that_cannot_stand_in_a_header_is_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="visible"):
        read_api_key(key)
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="visible"):
        read_api_key(f"@{tmp_path / 'empty'}")
