"""What a row works with: a server, its client, the oracle, fault points; and the servers that rows share."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

import httpx

from conformance.client import Client, Outcome, greedy
from conformance.model import write_tiny_model
from conformance.reference import Reference
from conformance.rows import Needs, Proof, Row
from conformance.server import Server

WAIT_S = 30.0  # for an answer; no row needs a tenth of it
MOST_SERVERS = 3
FAILURES = (AssertionError, httpx.HTTPError, OSError, ValueError, LookupError, TypeError, RuntimeError)
PROOF_WAIT_S = 8.0  # where it is expected that nothing comes


class Models:
    """The tiny model and what transformers says with it, made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def tiny(self) -> Path:
        """Folder of the model that all servers serve."""
        from conformance.model import write_eos_model

        return write_eos_model(self._folder / "tiny")

    @cached_property
    def reference(self) -> Reference:
        """The oracle of that model."""
        return Reference(self.tiny)

    def other(self, name: str, **settings: object) -> Path:
        """Another tiny model, for what does not fit together."""
        folder = self._folder / name
        return folder if folder.exists() else write_tiny_model(folder, **settings)  # type: ignore[arg-type]


class Setup:
    """What a row is given. `server` and `reference` are not there where an URL was given."""

    def __init__(
        self,
        client: Client,
        servers: Servers | None = None,
        server: Server | None = None,
        proof: Proof | None = None,
    ) -> None:
        self.client = client
        self._servers = servers
        self._server = server
        self._proof = proof
        self._since = 0
        self._stand("")

    @property
    def is_remote(self) -> bool:
        """There is a URL and nothing else: of which model is not known."""
        return self._servers is None

    @property
    def server(self) -> Server:
        """The processes."""
        assert self._server is not None
        return self._server

    @property
    def models(self) -> Models:
        """The models of this run."""
        assert self._servers is not None
        return self._servers.models

    @property
    def reference(self) -> Reference:
        """The oracle."""
        return self.models.reference

    # Requests ---------------------------------------------------------------------------------------------

    def check(self, prompt: Sequence[int], outcome: Outcome, max_tokens: int) -> None:
        """Check an answer to `greedy(prompt, max_tokens)`: whole, and token for token the oracle's."""
        expected = self.reference.tokens(prompt, max_tokens)
        assert outcome.succeeded, f"no whole answer: {outcome}"
        assert outcome.token_ids == expected, f"answer {outcome.token_ids}, the oracle says {expected}"
        assert outcome.finish == "length", outcome.finish

    def ask_right(self, prompt: Sequence[int], max_tokens: int = 8) -> Outcome:
        """Ask for a greedy answer, and check it."""
        outcome = self.client.ask(greedy(prompt, max_tokens))
        self.check(prompt, outcome, max_tokens)
        return outcome

    def check_next(self, count: int = 5) -> None:
        """The next requests are answered rightly, the server's processes live, and all pages come back."""
        prompts = [prompt(seed, 7 * seed) for seed in range(1, count + 1)]
        outcomes = self.client.ask_all([greedy(each, 6) for each in prompts])
        for each, outcome in zip(prompts, outcomes, strict=True):
            self.check(each, outcome, 6)
        self.client.assert_ledger_clean()

    # Faults -----------------------------------------------------------------------------------------------

    @contextmanager
    def faults(self, rules: str) -> Iterator[None]:
        """Have these things go wrong meanwhile (docs/fault_points.md has the language)."""
        self._since = len(self.server.log)
        self._stand(rules)
        try:
            yield
        finally:
            self._stand("")

    def _stand(self, rules: str) -> None:
        """Set the rules, with those of the proof."""
        if self._server is not None:
            self._server.set_faults(
                "; ".join(filter(None, (rules, self._proof.faults if self._proof else "")))
            )

    def await_fired(self, rule: str) -> None:
        """Wait until a rule (a part of it will do) has fired since `faults`."""
        self.server.wait_for(rf"fault \S*{rule}\S* fired", self.client.wait_s, self._since)

    def gate(self, name: str = "gate") -> Path:
        """A file that is not there, for `until=`; `touch` opens it."""
        path = self.server.folder / name
        path.unlink(missing_ok=True)
        return path

    # Other servers ----------------------------------------------------------------------------------------

    @contextmanager
    def shared(self, *options: str) -> Iterator[Setup]:
        """Work with the server of other options that rows share; it must be left as it was."""
        assert self._servers is not None
        if self._proof is not None:  # nobody else may have that one
            with self.serving(*options) as other:
                yield other
            return
        with self._servers.kept(options):
            server = self._servers.get(options)
            yield Setup(Client(server.url, server.model, self.client.wait_s), self._servers, server)

    @contextmanager
    def serving(self, *options: str, model: Path | None = None) -> Iterator[Setup]:
        """Run another server for a while."""
        with running(self.models, options, self._proof, model, stops=self._proof is None) as server:
            client = Client(server.url, server.model, self.client.wait_s)
            yield Setup(client, self._servers, server, self._proof)
            client.assert_ledger_clean()


def prompt(seed: int, length: int) -> list[int]:
    """Some tokens, none of them special."""
    return [3 + (seed * 7919 + i * i * 31 + i * 17) % 317 for i in range(length)]


@contextmanager
def running(
    models: Models,
    options: Sequence[str],
    proof: Proof | None = None,
    model: Path | None = None,
    *,
    stops: bool = True,
) -> Iterator[Server]:
    """Run a server for a while; `stops`: in the end it must stop as it should."""
    # Its path is short: pytest's folders are too deep for sockets.
    with tempfile.TemporaryDirectory(prefix="bc-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        server = Server(Path(folder), model or models.tiny, options, patch=proof.patch if proof else "")
        try:
            server.wait_ready()
            yield server
            if stops and server.process.popen.poll() is None:
                server.stop()
        finally:
            server.kill()


class Servers:
    """The servers that rows share: the last few, by their options."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._running: OrderedDict[tuple[str, ...], tuple[Server, ExitStack]] = OrderedDict()

    def get(self, options: tuple[str, ...]) -> Server:
        """Return a server of these options; start it if need be."""
        if options not in self._running:
            while len(self._running) >= MOST_SERVERS:
                self._end(next(iter(self._running)))
            stack = ExitStack()
            self._running[options] = stack.enter_context(running(self.models, options)), stack
        self._running.move_to_end(options)
        return self._running[options][0]

    def run(self, row: Row) -> None:
        """Try a row.

        Raises:
            AssertionError: the fault is there.
        """
        if row.needs is Needs.FRESH:
            with running(self.models, row.options) as server:
                row.run(self._setup(server, WAIT_S))
            return
        if row.needs is Needs.NOTHING:
            row.run(self._setup(None, WAIT_S))
            return
        server = self.get(row.options)
        with self.kept(row.options):
            row.run(self._setup(server, WAIT_S))

    @contextmanager
    def kept(self, options: tuple[str, ...]) -> Iterator[None]:
        """Check that a shared server is left as it was; end it if it is not."""
        server = self.get(options)
        before = server.nodes()
        try:
            yield
            server.set_faults("")
            Client(server.url, server.model, WAIT_S).assert_ledger_clean()
            after = server.nodes()
            assert before == after, f"a process ended: {before}, then {after}\n{server.tail()}"
        except BaseException:
            server.kill()
            self._end(options)
            raise

    def prove(self, row: Row) -> None:
        """Try a row with its fault put back in, on a server of its own.

        Raises:
            AssertionError, and what else `FAILURES` has: the row found it.
            NotStarted: the server did not get so far.
        """
        with ExitStack() as stack:
            server = None
            if row.needs is not Needs.NOTHING:
                server = stack.enter_context(running(self.models, row.options, row.proof, stops=False))
            setup = self._setup(server, PROOF_WAIT_S, row.proof)
            row.run(setup)
            if server is not None:
                setup.client.assert_ledger_clean()

    def close(self) -> None:
        """End what runs."""
        while self._running:
            self._end(next(iter(self._running)))

    def _setup(self, server: Server | None, wait_s: float, proof: Proof | None = None) -> Setup:
        url, model = ("http://127.0.0.1:9", "none") if server is None else (server.url, server.model)
        return Setup(Client(url, model, wait_s), self, server, proof)

    def _end(self, options: tuple[str, ...]) -> None:
        self._running.pop(options)[1].close()
