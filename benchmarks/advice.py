"""What to change, where the figures of a comparison support it: pure, one rule an advice.

It must not know how anything was measured, nor give the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.verdict import CAPACITY, Evidence, Finding, Judgement, Verdict

_WORTH_TRADING = 1.5  # what inter-token p99 must be better by, before some of it is given away


@dataclass(frozen=True, slots=True)
class SetUp:
    """What was compared."""

    num_gpus: int  # 0: the nodes shared the processor's cores
    prefill: int
    decode: int
    rounds: int
    is_known: bool = True  # False: the servers ran already, on whatever it is

    @property
    def shares(self) -> bool:
        """Both kinds of nodes compute on the same device."""
        return self.num_gpus < self.prefill + self.decode


def advise(judgement: Judgement, evidence: Evidence, set_up: SetUp) -> list[str]:
    """Return what to do, in words; nothing where no rule supports anything."""
    if judgement.verdict is Verdict.CANNOT_TELL:
        return _measure_again(judgement, set_up)
    found = {key: figure.finding for key, figure in evidence.figures.items()}
    ttft = {found.get("ttft_p50"), found.get("ttft_p90")}
    itl = {found.get("itl_p50"), found.get("itl_p99")}
    advice = []
    if judgement.verdict is Verdict.DONT:
        advice.append("serve with --colocated")
    if not set_up.is_known:
        return advice
    if Finding.WORSE in ttft and Finding.BETTER in itl:
        advice += _quicken_prompts(evidence, set_up)
    if Finding.WORSE in itl and set_up.prefill > 1:
        fewer = f"--prefill {set_up.prefill - 1}"
        more = "" if set_up.shares else f" --decode {set_up.decode + 1}"
        advice.append(f"tokens come more slowly: give prompts less of the machine ({fewer}{more})")
    if found.get(CAPACITY.key) is Finding.WORSE and set_up.shares and judgement.verdict is not Verdict.DONT:
        advice.append("both kinds of nodes share a device, which costs capacity: give each its own")
    return advice


def _measure_again(judgement: Judgement, set_up: SetUp) -> list[str]:
    match judgement.rule:
        case 1:
            return ["look at the server's log and at baton_failures_total, then measure again"]
        case 2:
            return ["stop what else runs on this machine, then measure again"]
        case _:
            return [f"measure for longer: --rounds {2 * set_up.rounds}, or more --seconds a round"]


def _quicken_prompts(evidence: Evidence, set_up: SetUp) -> list[str]:
    """First tokens come later, the others more steadily: prompts wait for what computes them."""
    if not set_up.shares:
        nodes = f"--prefill {set_up.prefill + 1}"
        if set_up.decode > 1:
            return [f"prompts wait: {nodes} --decode {set_up.decode - 1} on as many GPUs"]
        return [f"prompts wait: with one GPU more, {nodes}"]
    tail = evidence.figures.get("itl_p99")
    if tail is not None and tail.finding is Finding.BETTER and tail.gain >= _WORTH_TRADING:
        return ["prompts wait while tokens are steadier than need be: try a larger --prefill-budget"]
    return []
