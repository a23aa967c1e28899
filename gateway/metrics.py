"""What this gateway counts: calls and where their time went, failures, what its network side counted.

All series are there from the start, at 0. Nothing here can fail a request: what goes wrong in here is logged
once, and survived. Knows nothing of the nodes' own counters, nor of the page that shows all of it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Concatenate, ParamSpec

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)

from common.messages import Role
from gateway import histograms
from gateway.answer import Answer
from gateway.failures import FAILURES, Failure, kinds_of
from gateway.histograms import InterTokenTimes
from gateway.node_metrics import LINK_COUNTERS
from gateway.timeline import STAGES

log = logging.getLogger("baton.gateway")
_leave_out_created: Any = disable_created_metrics  # not annotated
_leave_out_created()  # they double the page, and several gateways have none

P = ParamSpec("P")
FIRST_DECODE = "first_decode"  # from the end of `transfer`, beside the others
# What the network side counts beside its links, by name.
CLIENT_COUNTERS = {
    "requests_retried": "Requests that were given to another decode node, before their first token.",
    "requests_lost": "Messages about requests that were lost: a gap in tokens, or nobody knows the request.",
    "requests_broken": "Requests that a node ended with 500.",
    "requests_without_nodes": "Requests that came while no decode node could take them.",
    "decode_nodes_lost": "Decode nodes that died, or whose link broke.",
}


class Outcome(Enum):
    """How a generating call ended."""

    SUCCESS = "success"
    CLIENT_GONE = "client_gone"
    REJECTED = "rejected"  # answered with a 4xx
    FAILED = "failed"  # answered with a 5xx, or with an error in its stream


class _Trouble:
    """Says once that counting does not work."""

    has_logged = False

    def say(self) -> None:
        """Log the exception that is being handled, if it is the first."""
        if not self.has_logged:
            self.has_logged = True
            log.exception("metrics are not complete; this is said once")


def _survived(
    count: Callable[Concatenate[RequestMetrics, P], None],
) -> Callable[Concatenate[RequestMetrics, P], None]:
    """Have a method never raise: who counts must not fail a request."""

    @functools.wraps(count)
    def counting(self: RequestMetrics, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            count(self, *args, **kwargs)
        except Exception:
            self.trouble.say()

    return counting


class RequestMetrics:
    """The gateway's own instruments, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.trouble = _Trouble()
        self.token_times = InterTokenTimes()
        self._requests = Counter(
            "baton_requests", "Generating calls, by how they ended.", ["outcome"], registry=registry
        )
        self._failures = Counter(
            "baton_failures", "Failures by kind (docs/metrics.md).", ["kind"], registry=registry
        )
        self._prompt_tokens = Counter(
            "baton_prompt_tokens", "Prompt tokens submitted to the nodes.", registry=registry
        )
        self._generation_tokens = Counter("baton_generation_tokens", "Tokens of answers.", registry=registry)
        self._running = Gauge(
            "baton_requests_running",
            "Calls being served now.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._links = {
            name: Counter(f"baton_gateway_{name}", text, registry=registry)
            for name, text in (LINK_COUNTERS | CLIENT_COUNTERS).items()
        }
        self._counted: dict[str, int] = {}  # of those, so far
        self._first_token = self._histogram(
            "baton_time_to_first_token_seconds",
            "From the first bytes of a request to its first token, written.",
            histograms.FIRST_TOKEN_S,
        )
        self._inter_token = self._histogram(
            "baton_inter_token_latency_seconds",
            "Between two tokens of an answer; those that came together share the time since the last.",
            histograms.INTER_TOKEN_S,
        )
        self._per_token = self._histogram(
            "baton_request_time_per_output_token_seconds",
            "Mean time between the tokens of an answer that has several.",
            histograms.INTER_TOKEN_S,
        )
        self._whole = self._histogram(
            "baton_e2e_request_latency_seconds",
            "From the first bytes of a request to the end of an answer to it.",
            histograms.REQUEST_S,
        )
        self._stages = self._histogram(
            "baton_request_stage_seconds",
            "Where the time of answers went: tokenize to send add up to the time to the first token.",
            histograms.STAGE_S,
            "stage",
        )
        self._prompt_lengths = self._histogram(
            "baton_request_prompt_tokens", "Tokens of a prompt.", histograms.TOKENS
        )
        self._answer_lengths = self._histogram(
            "baton_request_generation_tokens", "Tokens of an answer, whatever ended it.", histograms.TOKENS
        )
        for outcome in Outcome:
            self._requests.labels(outcome.value)
        for kind in kinds_of(Role.GATEWAY):
            self._failures.labels(kind.value)
        for stage in (*STAGES, FIRST_DECODE):
            self._stages.labels(stage)

    def _histogram(self, name: str, text: str, bounds: Sequence[float], *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=bounds, registry=self.registry)

    # What happens -------------------------------------------------------------------------------------------

    @_survived
    def call_began(self) -> None:
        """A call is being served."""
        self._running.inc()

    @_survived
    def call_ended(self, outcome: Outcome, answers: Sequence[Answer]) -> None:
        """It is over, and so are its answers."""
        self._running.dec()
        self._requests.labels(outcome.value).inc()
        self._generation_tokens.inc(sum(answer.num_tokens for answer in answers))
        for answer in answers:
            self._answer_lengths.observe(answer.num_tokens)
            self._count_times(answer)

    @_survived
    def prompt_submitted(self, num_tokens: int) -> None:
        """A prompt was given to the nodes."""
        self._prompt_tokens.inc(num_tokens)
        self._prompt_lengths.observe(num_tokens)

    @_survived
    def failed(self, kind: Failure) -> None:
        """Something failed, and this process decided so."""
        self._failures.labels(kind.value).inc()

    @_survived
    def catch_up(self, counters: dict[str, int]) -> None:
        """Take over what was counted aside: by the network side of this process, and between tokens."""
        for name, counter in self._links.items():
            more = counters.get(name, 0) - self._counted.get(name, 0)
            if more > 0:
                counter.inc(more)
                self._counted[name] = counters[name]
                for kind in kinds_of(Role.GATEWAY):
                    if name in FAILURES[kind].counters:
                        self._failures.labels(kind.value).inc(more)
        self.token_times.flush(self._inter_token)

    def _count_times(self, answer: Answer) -> None:
        """Count where an answer's time went; nothing, where it has no end of its own."""
        if answer.finish is None:
            return
        times = answer.timeline()
        for stage, us in (*times.stages_us.items(), (FIRST_DECODE, times.first_decode_us)):
            if us is not None:
                self._stages.labels(stage).observe(us / 1e6)
        if times.ttft_us is not None:
            self._first_token.observe(times.ttft_us / 1e6)
        if times.total_us is not None:
            self._whole.observe(times.total_us / 1e6)
        if answer.num_tokens > 1 and (decode_us := times.stages_us["decode"]) is not None:
            self._per_token.observe(decode_us / 1e6 / (answer.num_tokens - 1))
