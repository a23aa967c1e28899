"""What a row works with: a server, its client, the oracle, fault points; and the servers that rows share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

from conformance.client import Client, Outcome, greedy
from conformance.model import write_tiny_model
from conformance.reference import Reference
from conformance.rows import Needs, Proof, Row
from conformance.server import Server

WAIT_S = 30.0  # for an answer; no row needs a tenth of it
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
        models: Models | None = None,
        server: Server | None = None,
        proof: Proof | None = None,
    ) -> None:
        self.client = client
        self._models = models
        self._server = server
        self._proof = proof or Proof("")
        self._stack = ExitStack()
        self._since = 0

    @property
    def is_remote(self) -> bool:
        """There is a URL and nothing else: of which model is not known."""
        return self._models is None

    @property
    def server(self) -> Server:
        """The processes."""
        assert self._server is not None
        return self._server

    @property
    def models(self) -> Models:
        """The models of this run."""
        assert self._models is not None
        return self._models

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
        """Have these things go wrong meanwhile (common/faults.py has the language)."""
        self._since = len(self.server.log)
        self.server.set_faults("; ".join(filter(None, (rules, self._proof.faults))))
        try:
            yield
        finally:
            self.server.set_faults(self._proof.faults)

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
    def serving(self, *options: str, model: Path | None = None) -> Iterator[Setup]:
        """Run another server for a while; yields what works with it."""
        with running(self.models, options, self._proof, model) as server:
            yield Setup(
                Client(server.url, server.model, self.client.wait_s), self._models, server, self._proof
            )
            check_pages(Client(server.url, server.model, self.client.wait_s))


def check_pages(client: Client) -> None:
    """All pages are free, or are within what is promised."""
    client.assert_ledger_clean()


def prompt(seed: int, length: int) -> list[int]:
    """Some tokens, none of them special."""
    return [3 + (seed * 7919 + i * i * 31 + i * 17) % 317 for i in range(length)]


@contextmanager
def running(
    models: Models, options: Sequence[str], proof: Proof | None = None, model: Path | None = None
) -> Iterator[Server]:
    """Run a server for a while."""
    # Its path is short: pytest's folders are too deep for sockets.
    with tempfile.TemporaryDirectory(prefix="bc-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        server = Server(Path(folder), model or models.tiny, options, patch=proof.patch if proof else "")
        try:
            server.wait_ready()
            yield server
            if server.process.poll() is None:
                server.stop()
        finally:
            server.kill()


class Servers:
    """The servers that rows share: one at a time, of the options that were asked for last."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._stack = ExitStack()
        self._server: Server | None = None
        self._options: tuple[str, ...] | None = None

    def run(self, row: Row) -> None:
        """Try a row.

        Raises:
            AssertionError: the fault is there.
        """
        if row.needs is Needs.FRESH:
            with running(self.models, row.options) as server:
                _try(row, self.models, server, WAIT_S)
            return
        if self._server is None or self._options != row.options:
            self.close()
            self._options = row.options
            self._server = self._stack.enter_context(running(self.models, row.options))
        before = self._server.nodes()
        try:
            _try(row, self.models, self._server, WAIT_S)
            check_pages(Client(self._server.url, self._server.model, WAIT_S))
            after = self._server.nodes()
            assert before == after, f"a process ended: {before}, then {after}\n{self._server.tail()}"
        except BaseException:
            self._server.kill()  # nobody else shall find what is left of it
            self.close()
            raise

    def prove(self, row: Row) -> bool:
        """Put a row's fault back in; say whether the row fails then."""
        assert row.proof is not None
        try:
            with running(self.models, row.options, row.proof) as server:
                _try(row, self.models, server, PROOF_WAIT_S, row.proof)
                check_pages(Client(server.url, server.model, PROOF_WAIT_S))
        except (AssertionError, OSError, ValueError, LookupError):
            return True
        return False

    def close(self) -> None:
        """End what runs."""
        stack, self._stack, self._server = self._stack, ExitStack(), None
        stack.close()


def _try(row: Row, models: Models, server: Server, wait_s: float, proof: Proof | None = None) -> None:
    setup = Setup(Client(server.url, server.model, wait_s), models, server, proof)
    server.set_faults(setup._proof.faults)
    row.run(setup)
    server.set_faults("")
