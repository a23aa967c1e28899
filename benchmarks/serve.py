"""Load on any server of the OpenAI API, over HTTP, as its clients see it: `baton bench serve`.

A rate of requests that arrive whatever the server does (open loop), or so many at any time (closed loop); or
streams that are held, first alone and then beside long prompts. Knows nothing of Baton: others are measured
by the same client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.answers import Answer, read_answer
from benchmarks.load import Effort, Hold, run_load
from benchmarks.options import NewFile
from benchmarks.report import Report
from benchmarks.requests import RequestMaker, arrivals
from benchmarks.serve_figures import GoodLimits, add_effort, add_load, add_long, add_phase, add_row
from benchmarks.serve_plot import Groups, plot_load
from benchmarks.server import first_model
from benchmarks.targets import Targets, takes_targets
from benchmarks.token_streams import StreamClient
from common.api_key import read_api_key
from terminal.progress import Progress, progress


@dataclass(frozen=True, slots=True)
class _Server:
    """The server under load, and how it is asked."""

    client: StreamClient
    maker: RequestMaker
    options: dict[str, Any]

    def requests(self, prompt_tokens: int, output_tokens: int, num: int, first: int = 0) -> list[bytes]:
        """Write `num` requests that are all different."""
        bodies = (self.maker.body(prompt_tokens, output_tokens, first + i) for i in range(num))
        return [self.client.encode(body) for body in bodies]

    def due(self, num: int, rate: float) -> Sequence[float]:
        is_even = self.options["arrivals"] == "even"
        return arrivals(num, rate, self.options["seed"], is_even=is_even)

    def load(self, prompt_tokens: int, effort: Effort, shown: Progress) -> list[Answer]:
        """Send the warm-up and then the load of one prompt length."""
        options = self.options
        output, patience_s = options["output_tokens"], options["patience_s"]
        num, warm_up, rate = options["num_requests"], options["warm_up"], options["rate"]
        most_open = options["concurrency"] or (None if rate else 1)
        warm = self.requests(prompt_tokens, output, warm_up, first=num)
        shown.say(f"{prompt_tokens} tokens, warm-up")
        run_load(self.client, warm, None, most_open, patience_s, Effort())
        shown.say(f"{prompt_tokens} tokens")
        due_s = self.due(num, rate) if rate else None
        requests = self.requests(prompt_tokens, output, num)
        streams = run_load(self.client, requests, due_s, most_open, patience_s, effort, shown.advance)
        return [read_answer(stream) for stream in streams]

    def hold(self, prompt_tokens: int, targets: Targets, shown: Progress) -> Groups:
        """Hold streams without and with long prompts, and add their figures; returns the answers."""
        options = self.options
        rate, busy_s, num = options["long_rate"], options["busy_s"], options["hold"]
        due_s = self.due(round(rate * busy_s), rate)
        long_sizes = options["long_prompt_tokens"], options["long_output_tokens"]
        held = self.requests(prompt_tokens, options["hold_tokens"], num)
        long = self.requests(*long_sizes, len(due_s), first=num)
        warm = self.requests(*long_sizes, options["warm_up"] if long else 0, first=num + len(long))
        shown.say("warm-up")
        run_load(self.client, warm, None, 1, options["patience_s"], Effort())
        hold = Hold(self.client, held, options["patience_s"])
        with hold.effort.measured():
            shown.say("starting the streams")
            hold.begin()
            shown.say("holding the streams, alone")
            quiet_window_s = hold.watch(options["quiet_s"])
            shown.say("holding the streams, beside long prompts")
            busy_window_s = hold.watch(busy_s, long, due_s)
            hold.drain()
            shown.say("holding the streams, alone again")
            again_window_s = hold.watch(options["quiet_s"]) if long else quiet_window_s
            hold.end()
        answers = [read_answer(stream) for stream in hold.streams]
        quiet_ms = add_phase(targets, "quiet", answers, quiet_window_s, prompt_tokens)
        long_answers = [read_answer(stream) for stream in hold.long]
        if long:
            # The streams' context has grown by then, and with it every step: what long prompts cost is what
            # is between quiet times before and after.
            again_ms = add_phase(targets, "quiet again", answers, again_window_s, prompt_tokens)
            busy_ms = add_phase(targets, "busy", answers, busy_window_s, prompt_tokens, quiet_ms)
            around_ms = (quiet_ms["p50"] + again_ms["p50"]) / 2
            if around_ms > 0:
                targets.add("ITL p99 busy over p50 quiet before and after", busy_ms["p99"] / around_ms, "x")
            add_long(targets, long_answers)
        targets.add("held streams that began again", hold.again, "streams")
        failed = sum(bool(read_answer(stream).error) for stream in hold.ended)
        targets.add("held streams that failed", failed, "streams")
        add_effort(targets, hold.effort)
        return {
            "held streams": [read_answer(stream) for stream in hold.streams],
            "long prompts": long_answers,
        }


def _lengths(context: click.Context, param: click.Parameter, value: str) -> list[int]:
    try:
        return [int(length) for length in value.split(",")]
    except ValueError:
        raise click.BadParameter("not whole numbers, separated by commas") from None


_POSITIVE = click.FloatRange(0, min_open=True)


@click.command()
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server, without /v1.")
@click.option("--model", help="Name of the model  [default: the server's first]")
@click.option(
    "--api-key", envvar="BATON_API_KEY", help="Key that the server asks for; @FILE reads it from a file."
)
@click.option("--rate", type=_POSITIVE, help="Open loop: requests a second, whatever the server does.")
@click.option(
    "--concurrency",
    type=click.IntRange(1),
    help="Requests at any time; with --rate, at most.  [default: 1, with --rate no limit]",
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "even"]),
    default="poisson",
    show_default=True,
    help="When requests of a rate come.",
)
@click.option(
    "--num-requests", type=click.IntRange(1), default=100, show_default=True, help="For each length."
)
@click.option(
    "--warm-up", type=click.IntRange(0), default=4, show_default=True, help="Requests before, not counted."
)
@click.option(
    "--prompt-tokens",
    default="512",
    show_default=True,
    callback=_lengths,
    help="Length of prompts; several, with commas, are run in turn.",
)
@click.option(
    "--output-tokens", type=click.IntRange(1), default=128, show_default=True, help="Length of answers."
)
@click.option(
    "--prompt-kind",
    type=click.Choice(["ids", "text"]),
    default="ids",
    show_default=True,
    help="Random token ids, or random words for servers that take no ids.",
)
@click.option(
    "--vocab-size", type=click.IntRange(4), default=32_000, show_default=True, help="Ids are below."
)
@click.option(
    "--token-ids", is_flag=True, help="Count by token ids: the server echoes those of the prompt too."
)
@click.option("--seed", default=0, show_default=True, help="Of prompts and arrivals.")
@click.option("--ttft-limit-ms", type=float, help="Goodput: the first token within this.")
@click.option("--itl-limit-ms", type=float, help="Goodput: 99 of 100 gaps of a request within this.")
@click.option("--hold", type=click.IntRange(1), help="Hold so many streams instead, and add long prompts.")
@click.option(
    "--hold-tokens", type=click.IntRange(2), default=8192, show_default=True, help="Tokens of a held stream."
)
@click.option(
    "--quiet-s", type=_POSITIVE, default=10.0, show_default=True, help="Seconds without long prompts."
)
@click.option(
    "--busy-s", type=click.FloatRange(0), default=20.0, show_default=True, help="Seconds with them."
)
@click.option(
    "--long-prompt-tokens", type=click.IntRange(1), default=8192, show_default=True, help="Of each."
)
@click.option("--long-output-tokens", type=click.IntRange(1), default=16, show_default=True, help="Of each.")
@click.option("--long-rate", type=_POSITIVE, default=4.0, show_default=True, help="Long prompts a second.")
@click.option(
    "--patience-s", type=_POSITIVE, default=120.0, show_default=True, help="Of silence, then it has failed."
)
@click.option(
    "--plot",
    type=NewFile(),
    help="Draw latencies and tokens into this SVG file.",
)
@click.option("--label", default="", help="Stands in the name of the saved file.")
@click.option("--save", is_flag=True, help="Keep the result in benchmarks/results.")
@takes_targets
def main(*, plot: Path | None, save: bool, **options: Any) -> None:
    """Put load on a server of the OpenAI API, and time its tokens."""
    report = Report.of_command("serve")
    targets = Targets.of(report, options["aim"], options["limit"])
    url = options["url"].rstrip("/")
    api_key = read_api_key(options["api_key"])
    client = StreamClient(url, api_key)
    maker = RequestMaker(
        options["model"] or first_model(url, api_key),
        options["vocab_size"],
        options["prompt_kind"] == "text",
        options["token_ids"],
        options["seed"],
    )
    server = _Server(client, maker, options)
    lengths = options["prompt_tokens"]
    groups: Groups
    if options["hold"]:
        with progress("holding streams") as shown:
            groups = server.hold(lengths[0], targets, shown)
    else:
        effort = Effort()
        with progress("requests", options["num_requests"] * len(lengths)) as shown:
            loads = [(length, server.load(length, effort, shown)) for length in lengths]
        groups = {f"prompts of {length} tokens": answers for length, answers in loads}
        for length, answers in loads:
            if len(lengths) > 1:
                add_row(targets, answers, length)
            else:
                add_load(targets, answers, GoodLimits(options["ttft_limit_ms"], options["itl_limit_ms"]))
        add_effort(targets, effort)
    report.publish(save=save, label=options["label"])
    if plot is not None:
        said = ", ".join(f"{each.name} {each.value:.4g} {each.unit}" for each in report.figures)
        plot.write_text(plot_load(f"{maker.model} at {url}", groups, [said]))
    targets.check()


if __name__ == "__main__":
    main()
