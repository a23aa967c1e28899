"""Keys between two ends of a link: the same ones work, others or none are refused, and both ends live on."""

from __future__ import annotations

import logging
import pickle
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from common.acceptor import Acceptor
from common.connector import REFUSED_RETRY_S, Connector
from common.context import ZAP_DOMAIN, NodeContext, open_context
from common.errors import ConfigError
from common.keys import Keys, load_keys, make_keys
from common.messages import Abort, Quiesced
from common.sockets import FrameSocket
from tests.system import zmtp
from tests.wire.hellos import DECODE, PREFILL
from tests.wire.loop import until
from tests.wire.net import D_EPOCH, P_EPOCH, Net, no_status


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Keys, Keys]:
    """The keys of two clusters."""
    made = []
    for name in ("ours", "others"):
        folder = tmp_path_factory.mktemp(name)
        make_keys(folder)
        loaded = load_keys(str(folder))
        assert loaded is not None
        made.append(loaded)
    return made[0], made[1]


class Hosts(Net):
    """A Net whose two ends are in contexts of their own, as processes are."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        super().__init__(self.open(None), "tcp://127.0.0.1:*")
        stack.callback(self.close)

    def open(self, keys: Keys | None) -> NodeContext:
        """A process's context."""
        context = open_context(keys)
        self._stack.callback(context.destroy, linger=0)
        return context

    def bind(self, keys: Keys | None) -> Acceptor:
        """P, with these keys."""
        self.context = self.open(keys)
        acceptor = self.acceptor()
        self.target = acceptor.address
        return acceptor

    def connect(self, keys: Keys | None) -> Connector:
        """D, with these keys."""
        self.context = self.open(keys)
        return self.connector()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(stack)


def refusals(caplog: pytest.LogCaptureFixture, node_id: str) -> list[str]:
    return [line for line in caplog.messages if f"{node_id}: link refused" in line]


def test_libzmq_has_curve() -> None:
    assert zmq.has("curve")


def test_the_same_keys_work_both_ways(hosts: Hosts, keys: tuple[Keys, Keys]) -> None:
    p, d = hosts.bind(keys[0]), hosts.connect(keys[0])
    hosts.until_up(p, d)
    for id_ in range(1, 51):
        hosts.peer(d).send(Abort(id_))
        hosts.peer(p).send(Quiesced(id_))
    hosts.until(lambda: len(hosts.messages(p)) == 50 == len(hosts.messages(d)))
    assert not any(p.counters.values())
    assert not any(d.counters.values())


def overheard(keys: Keys | None, target: str, word: bytes) -> bytes:
    """What a wiretap sees of a word that is sent."""
    context = open_context(keys)
    with ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        router = stack.enter_context(closing(FrameSocket.router(context, target)))
        tap = stack.enter_context(closing(Wiretap(router.address)))
        dealer = stack.enter_context(closing(FrameSocket.dealer(context, tap.address)))
        dealer.send([word])
        got: list[bytes] = []

        def arrived() -> bool:
            tap.pump()
            message = router.receive()
            got.extend([] if message is None else map(bytes, message.frames))
            return bool(got)

        until(arrived, lambda: [*router.pollables(), *tap.filenos()])
        assert got == [word]
        return bytes(tap.seen)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_nothing_can_be_read_on_the_way(keys: tuple[Keys, Keys], address: str, transport: str) -> None:
    word = b"the quick brown fox jumps over the lazy dog" * 10
    target = address if transport == "ipc" else "tcp://127.0.0.1:*"
    assert word in overheard(None, target, word)  # the wiretap sees what there is to see
    assert b"quick" not in overheard(keys[0], target, word)


class Wiretap:
    """A TCP proxy that keeps what passes, driven by the test."""

    def __init__(self, target: str) -> None:
        self.seen = bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.setblocking(False)
        self._target = target
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"

    def filenos(self) -> list[int]:
        """What to wait for."""
        return [self._server.fileno(), *(end.fileno() for pair in self._pairs for end in pair)]

    def pump(self) -> None:
        """Pass on what is there."""
        try:
            front, _ = self._server.accept()
            if self._target.startswith("ipc://"):
                back = socket.socket(socket.AF_UNIX)
                back.connect(self._target.removeprefix("ipc://"))
            else:
                back = socket.create_connection(("127.0.0.1", int(self._target.rpartition(":")[2])))
            self._pairs.append((front, back))
        except BlockingIOError:
            pass
        for front, back in self._pairs:
            for source, sink in ((front, back), (back, front)):
                source.setblocking(False)
                try:
                    data = source.recv(1 << 16)
                except (BlockingIOError, ConnectionError):
                    continue
                finally:
                    source.setblocking(True)
                self.seen += data
                sink.sendall(data)

    def close(self) -> None:
        """Hang up."""
        for end in (self._server, *(end for pair in self._pairs for end in pair)):
            end.close()


@pytest.mark.parametrize("case", ["others", "only P", "only D"])
def test_other_keys_or_none_are_refused_and_both_ends_live_on(
    hosts: Hosts, keys: tuple[Keys, Keys], case: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, others = keys
    p_keys, d_keys = {"others": (ours, others), "only P": (ours, None), "only D": (None, others)}[case]
    p, d = hosts.bind(p_keys), hosts.connect(d_keys)

    def refused() -> bool:
        hosts.now += REFUSED_RETRY_S / 2
        return bool(d.counters["links_refused"] and (p.counters["links_refused"] or p_keys is None))

    hosts.until(refused)
    # Without keys whoever connects is on this host, and what it says is enough.
    for node_id in ("decode-0",) if p_keys is None else ("prefill-0", "decode-0"):
        [line] = refusals(caplog, node_id)  # however often it is tried
        assert hosts.target in line
        assert "start both with the same --keys" in line
    assert all(record.levelno == logging.ERROR for record in caplog.records if "refused" in record.message)

    # It goes on trying, a second apart, and nothing of it is a link.
    before = d.counters["links_refused"]
    hosts.until(lambda: refused() and d.counters["links_refused"] > before)
    assert d.counters["links_refused"] <= hosts.now / REFUSED_RETRY_S
    assert hosts.events[p] == hosts.events[d] == []

    # Whoever has P's keys is let in, beside it.
    good = hosts.connect(p_keys)
    hosts.until_up(good)
    hosts.peer(good).send(Abort(7))
    hosts.until(lambda: hosts.messages(p) == [Abort(7)])


def test_a_refused_node_comes_up_once_the_other_end_has_its_keys(
    hosts: Hosts, keys: tuple[Keys, Keys]
) -> None:
    ours, others = keys
    p, d = hosts.bind(others), hosts.connect(ours)

    def refused() -> bool:
        hosts.now += REFUSED_RETRY_S / 2
        return d.counters["links_refused"] > 0

    hosts.until(refused)
    hosts.drop(p)
    hosts.context = hosts.open(ours)

    def bound() -> bool:
        with suppress(ConfigError):  # a socket takes a moment to close
            return bool(hosts.acceptor(epoch=P_EPOCH + 1))
        return False

    def up() -> bool:
        hosts.now += REFUSED_RETRY_S / 2
        return d.peer is not None

    hosts.until(bound)
    hosts.until(up)
    hosts.peer(d).send(Abort(1))
    [p2] = [end for end in hosts.events if isinstance(end, Acceptor)]
    hosts.until(lambda: hosts.messages(p2) == [Abort(1)])


def test_who_knows_the_public_key_alone_is_not_let_in(hosts: Hosts, keys: tuple[Keys, Keys]) -> None:
    """It can encrypt to P, with a key of its own: only ZAP refuses it."""
    ours, others = keys
    p = hosts.bind(ours)
    context = hosts.open(others)
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    for name, value in (
        (zmq.CURVE_SERVERKEY, ours.public),
        (zmq.CURVE_PUBLICKEY, others.public),
        (zmq.CURVE_SECRETKEY, others.secret),
    ):
        stranger.setsockopt(name, value)
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    stranger.connect(p.address)
    stranger.send(b"let me in")
    hosts.until(lambda: bool(monitor.poll(0)))
    assert zmq.utils.monitor.parse_monitor_message(monitor.recv_multipart())["value"] == 400
    hosts.until(lambda: bool(p.counters["links_refused"]))
    assert p.counters["messages_rejected"] == 0
    stranger.disable_monitor()
    monitor.close(0)


def test_whatever_is_written_to_the_port_reaches_nobody(hosts: Hosts, keys: tuple[Keys, Keys]) -> None:
    """A port with keys is the one that other hosts can reach: garbage, handshakes that break off or lie."""
    ours, _ = keys
    p, draw = hosts.bind(ours), random.Random(8)
    curve, null = zmtp.greeting(b"CURVE"), zmtp.hand_shaken() + zmtp.frame(pickle.dumps([1]))
    hello = b"\x05HELLO\x01\x00" + bytes(72) + draw.randbytes(120)
    written = [
        *(draw.randbytes(1 << n) for n in range(16)),
        *((curve + draw.randbytes(300))[: 30 + 10 * n] for n in range(30)),
        *(curve + zmtp.frame(draw.randbytes(size), zmtp.COMMAND) for size in (0, 1, 200, 4000)),
        *(curve + zmtp.frame(hello, zmtp.COMMAND) + end for end in (b"", null, draw.randbytes(400))),
        *(curve + zmtp.frame(b"x", flags, 1 << 62) for flags in (0, zmtp.MORE, zmtp.COMMAND)),
        *(zmtp.greeting(name) + zmtp.ready() for name in (b"NULL", b"PLAIN", b"GSSAPI", b"")),
        null,
    ]
    with ExitStack() as stack:
        for data in written:
            address = "127.0.0.1", int(p.address.rpartition(":")[2])
            raw = stack.enter_context(socket.create_connection(address))
            with suppress(ConnectionError):
                raw.sendall(data)
        d = hosts.connect(ours)  # beside them
        hosts.until_up(p, d)
    assert p.counters["messages_rejected"] == 0
    hosts.peer(d).send(Abort(3))
    hosts.until(lambda: hosts.messages(p) == [Abort(3)])


def test_the_answer_to_who_may_enter_is_strict(keys: tuple[Keys, Keys]) -> None:
    ours, others = keys
    context = open_context(ours)
    good = [b"1.0", b"1", ZAP_DOMAIN, b"10.0.0.1", b"", b"CURVE", z85.decode(ours.public)]
    bad = [
        [*good[:6], z85.decode(others.public)],
        [*good[:6], b""],
        [*good[:5], b"NULL"],
        [*good[:5], b"PLAIN", b"user", b"password"],
        [*good[:2], b"elsewhere", *good[3:]],
    ]
    asks = context.socket(zmq.REQ)
    asks.connect("inproc://zeromq.zap.01")
    for request, status in [(good, b"200"), *((frames, b"400") for frames in bad), (good, b"200")]:
        asks.send_multipart(request)
        assert asks.recv_multipart()[2] == status
    context.destroy(linger=0)  # returns: the thread ends with it


@pytest.mark.parametrize(
    "address",
    [
        "tcp://*:7000",
        "tcp://0.0.0.0:7000",
        "tcp://10.1.2.3:7000",
        "tcp://[::]:7000",
        "tcp://[fe80::1]:7000",
        "tcp://example.org:7000",
        "tcp://128.0.0.1:7000",
        "tcp://localhost.example.org:7000",
    ],
)
def test_no_socket_is_reached_from_other_hosts_without_keys(address: str) -> None:
    context = open_context(None)
    for make in (FrameSocket.router, FrameSocket.dealer):
        with pytest.raises(ConfigError, match=r"`baton keys FOLDER`.*--keys FOLDER"):
            make(context, address)
    context.destroy(linger=0)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://127.1.2.3:*", "tcp://localhost:*"])
def test_loopback_needs_none(address: str, keys: tuple[Keys, Keys]) -> None:
    for own in (None, keys[0]):
        context = open_context(own)
        with closing(FrameSocket.router(context, address)) as router:
            assert router.address.startswith("tcp://127.")
        context.destroy(linger=0)


@pytest.mark.parametrize("mode", [0o770, 0o755, 0o707, 0o1777])
def test_a_socket_in_a_directory_that_others_enter_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    context = open_context(None)
    folder.chmod(mode)
    for make in (FrameSocket.router, FrameSocket.dealer):
        with pytest.raises(ConfigError, match=f"others may enter {folder}: .*mkdir -m 700"):
            make(context, f"ipc://{folder}/s")
    assert list(folder.iterdir()) == []
    folder.chmod(0o700)
    FrameSocket.router(context, f"ipc://{folder}/s").close()
    context.destroy(linger=0)


def test_a_link_by_an_address_that_may_not_be_used_is_one_clear_line(hosts: Hosts) -> None:
    with pytest.raises(ConfigError, match="needs keys"):
        Connector(hosts.context, "tcp://10.0.0.1:1", DECODE, D_EPOCH, no_status, now=0.0)
    with pytest.raises(ConfigError, match="needs keys"):
        Acceptor(hosts.context, "tcp://*:*", PREFILL, P_EPOCH, no_status)
