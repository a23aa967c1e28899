"""Whether to disaggregate, from the figures of repeated rounds alone: pure rules, with threshold and why.

A round measures both servers under the very same load, one right after the other. So each round gives a ratio
of the two, in which most of what the machine did meanwhile cancels out; the noise of a figure is how far
these ratios are spread. It must not know how anything was measured.

1. Requests failed: cannot tell.
2. Something else used the machine, or the client was what was measured: cannot tell.
3. Goodput differs: it decides, as a request outside the limits is of no use (DistServe, OSDI 2024, sec. 2).
4. Some figures are better and none is worse, or the reverse: they decide.
5. Some are better, some worse: the largest factor decides, where it is larger by `BALANCE` than the largest
   one on the other side; else there is no difference that matters.
6. No figure differs: no difference that matters where each is shown to be the same, else cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, stdev

MOST_FAILED = 0.01  # one request in a hundred: beyond, p99 is about those that are not in it
MOST_CLIENT_CORES = 0.8  # the client is one thread: near 1 it is what was measured
MOST_OTHERS = 0.1  # of the cores, by other programs: of the size of the least difference that matters
BALANCE = 1.25
HELD = 0.95  # of a server's capacity: nearer, the length of the queue says how long was measured
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond, that of the last.
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class Verdict(Enum):
    """What to do."""

    DISAGGREGATE = "disaggregate"
    DONT = "don't"
    NO_DIFFERENCE = "no difference that matters"
    CANNOT_TELL = "cannot tell"


class Finding(Enum):
    """What a figure says of the disaggregated server."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"  # shown to differ by less than matters
    UNCLEAR = "unclear"  # the noise is larger than what matters


@dataclass(frozen=True, slots=True)
class Rule:
    """A figure that has a say, and from which factor on a difference matters."""

    key: str
    name: str
    threshold: float
    more_is_better: bool
    why: str


GOODPUT = Rule(
    "goodput",
    "best goodput",
    1.10,
    more_is_better=True,
    why="a tenth of the machine; less is what two starts of one server differ by",
)
CAPACITY = Rule(
    "capacity",
    "capacity",
    1.10,
    more_is_better=True,
    why="a tenth of the machine; less is what two starts of one server differ by",
)
_NOTICED = "a person notices a quarter, and hardly less"
LATENCIES = (
    Rule("ttft_p50", "TTFT p50", 1.25, more_is_better=False, why=_NOTICED),
    Rule("ttft_p90", "TTFT p90", 1.25, more_is_better=False, why=_NOTICED),
    Rule("itl_p50", "inter-token p50", 1.25, more_is_better=False, why=_NOTICED),
    Rule("itl_p99", "inter-token p99", 1.25, more_is_better=False, why=_NOTICED),
)
RULES = (GOODPUT, CAPACITY, *LATENCIES)


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both servers: geometric means over the rounds."""

    rule: Rule
    disaggregated: float
    colocated: float
    noise: float  # a factor: the true gain is within gain / noise and gain * noise, 95 times in 100

    @property
    def gain(self) -> float:
        """By which factor the disaggregated server is better; below 1, worse."""
        ratio = self.disaggregated / self.colocated
        return ratio if self.rule.more_is_better else 1 / ratio

    @property
    def finding(self) -> Finding:
        """What it says: beyond noise and threshold, within the threshold in spite of noise, or neither."""
        gain, threshold = self.gain, self.rule.threshold
        if max(gain, 1 / gain) >= max(threshold, self.noise):
            return Finding.BETTER if gain > 1 else Finding.WORSE
        within = 1 / threshold < gain / self.noise and gain * self.noise < threshold
        return Finding.SAME if within else Finding.UNCLEAR

    def say(self) -> str:
        """Say it in words, as in `inter-token p99 2.1x better`."""
        if self.rule.more_is_better:
            return f"{self.rule.name} {100 * (self.gain - 1):+.0f} %"
        factor = max(self.gain, 1 / self.gain)
        return f"{self.rule.name} {factor:.2g}x {'better' if self.gain >= 1 else 'worse'}"


def compare(rule: Rule, disaggregated: Sequence[float], colocated: Sequence[float]) -> Compared:
    """Compare a figure round by round.

    Args:
        disaggregated, colocated: values above 0, of as many rounds, two at least; those of a round belong
            together.
    """
    logs = [math.log(d / c) for d, c in zip(disaggregated, colocated, strict=True)]
    t = _T_95[min(len(logs) - 1, len(_T_95)) - 1]
    noise = math.exp(min(t * stdev(logs) / math.sqrt(len(logs)), 50.0))
    return Compared(rule, geometric_mean(disaggregated), geometric_mean(colocated), noise)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the mean that halves and doubles pull equally."""
    return math.exp(fmean(math.log(value) for value in values))


def deciding_rate(rates: Sequence[float], capacities: Sequence[float]) -> float | None:
    """Return the rate whose latencies have a say: the highest that all servers hold; None: they hold none.

    The higher the rate, the more prompts come while others decode; but beyond a server's capacity its queue
    grows, and latencies say no more than for how long it did.
    """
    return max((rate for rate in rates if rate <= HELD * min(capacities)), default=None)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that the verdict is made of."""

    figures: Mapping[str, Compared]  # by the key of a rule; one that was not measured is left out
    failed: Mapping[str, float]  # share of requests, by server
    client_cores: float  # processor time of the client, a second
    others: float | None = None  # share of the cores that other programs took; None: not known
    most_others: float = MOST_OTHERS


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict, the rule that gave it (as numbered above), and the reason in words."""

    verdict: Verdict
    rule: int
    reason: str


def judge(evidence: Evidence) -> Judgement:
    """Give the verdict."""
    if doubt := _doubt(evidence):
        return doubt
    better, worse, unclear = (
        sorted(_found(evidence, finding), key=_factor, reverse=True)
        for finding in (Finding.BETTER, Finding.WORSE, Finding.UNCLEAR)
    )
    goodput = evidence.figures.get(GOODPUT.key)
    if goodput in better or goodput in worse:
        verdict = Verdict.DISAGGREGATE if goodput in better else Verdict.DONT
        return Judgement(verdict, 3, f"goodput decides: {_list(better, worse)}")
    if better and not worse:
        return Judgement(Verdict.DISAGGREGATE, 4, _list(better, worse))
    if worse and not better:
        return Judgement(Verdict.DONT, 4, _list(better, worse))
    if better and worse:
        return _weigh(better, worse)
    if unclear or not evidence.figures:
        return Judgement(Verdict.CANNOT_TELL, 6, _noise(unclear))
    said = _list(list(evidence.figures.values()), ())
    return Judgement(Verdict.NO_DIFFERENCE, 6, f"nothing differs by as much as matters: {said}")


def _doubt(evidence: Evidence) -> Judgement | None:
    """Return why nothing can be told."""
    for server, share in evidence.failed.items():
        if share > MOST_FAILED:
            reason = f"failures: {100 * share:.1f} % of the requests to the {server} server failed"
            return Judgement(Verdict.CANNOT_TELL, 1, reason)
    if evidence.others is not None and evidence.others > evidence.most_others:
        reason = f"the machine was busy: other programs took {100 * evidence.others:.0f} % of its cores"
        return Judgement(Verdict.CANNOT_TELL, 2, reason)
    if evidence.client_cores > MOST_CLIENT_CORES:
        reason = f"the client was what was measured: it took {evidence.client_cores:.2f} cores"
        return Judgement(Verdict.CANNOT_TELL, 2, reason)
    return None


def _found(evidence: Evidence, finding: Finding) -> list[Compared]:
    return [figure for figure in evidence.figures.values() if figure.finding is finding]


def _factor(figure: Compared) -> float:
    return max(figure.gain, 1 / figure.gain)


def _weigh(better: Sequence[Compared], worse: Sequence[Compared]) -> Judgement:
    gain, loss = _factor(better[0]), _factor(worse[0])
    said = _list(better, worse)
    if gain >= BALANCE * loss:
        return Judgement(Verdict.DISAGGREGATE, 5, f"it gains more than it loses: {said}")
    if loss >= BALANCE * gain:
        return Judgement(Verdict.DONT, 5, f"it loses more than it gains: {said}")
    return Judgement(Verdict.NO_DIFFERENCE, 5, f"it loses about as much as it gains: {said}")


def _list(better: Sequence[Compared], worse: Sequence[Compared]) -> str:
    gains, losses = (", ".join(figure.say() for figure in figures) for figures in (better, worse))
    return f"{gains}; but {losses}" if gains and losses else gains or losses


def _noise(unclear: Sequence[Compared]) -> str:
    if not unclear:
        return "nothing was measured"
    said = ", ".join(f"{figure.say()} (noise {min(figure.noise, 99):.2g}x)" for figure in unclear)
    return f"the noise is larger than the difference: {said}"
