"""The options of `baton bench compare`, and how much it measures where the user says nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from benchmarks.options import NewFile, choices_of
from benchmarks.verdict import MOST_OTHERS
from common.config import DEFAULT_MODEL, EngineConfig, ModelConfig

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured, where the user says nothing else."""

    rounds: int
    seconds: float
    loads: tuple[float, ...]
    short_prompt_tokens: int
    long_prompt_tokens: int
    output_tokens: int
    concurrency: int

    @classmethod
    def of(cls, options: dict[str, Any], *, on_gpu: bool) -> Sizes:
        """Return what the user said, the rest as it fits the device; writes it into the options, too."""
        default = _SIZES[on_gpu, options["quick"]]
        said = {name: options[name] for name in cls.__slots__}
        options |= {name: getattr(default, name) if value is None else value for name, value in said.items()}
        return cls(**{name: options[name] for name in cls.__slots__})


_SIZES = {  # by whether it is a GPU, and whether it is to be quick
    (False, False): Sizes(4, 8.0, (0.3, 0.6, 0.9), 64, 1024, 32, 8),
    (False, True): Sizes(3, 2.5, (0.4, 0.8), 64, 512, 16, 8),
    (True, False): Sizes(4, 10.0, (0.3, 0.6, 0.9), 256, 8192, 128, 64),
    (True, True): Sizes(3, 4.0, (0.4, 0.8), 256, 4096, 64, 64),
}


def _numbers(context: click.Context, param: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    try:
        numbers = None if value is None else tuple(sorted({float(part) for part in value.split(",")}))
    except ValueError:
        raise click.BadParameter("not numbers, separated by commas") from None
    if numbers is not None and numbers[0] <= 0:
        raise click.BadParameter("numbers above 0 are wanted")
    return numbers


_POSITIVE = click.FloatRange(0, min_open=True)
_OPTIONS = (
    click.argument("model", default=DEFAULT_MODEL),
    click.option("--quick", is_flag=True, help="Less of everything: a first look, with more noise."),
    click.option("--rounds", type=click.IntRange(2), help="Of each server, in turn  [default: 4; quick, 3]"),
    click.option(
        "--seconds",
        type=_POSITIVE,
        help="Of each rate in a round  [default: 8, on GPUs 10; quick, 2.5 and 4]",
    ),
    click.option(
        "--loads",
        callback=_numbers,
        help="Rates, as parts of what the better server takes  [default: 0.3,0.6,0.9; quick, 0.4,0.8]",
    ),
    click.option("--rates", callback=_numbers, help="Requests a second, instead of --loads."),
    click.option(
        "--short-prompt-tokens", type=click.IntRange(1), help="Of most prompts  [default: 64, on GPUs 256]"
    ),
    click.option(
        "--long-prompt-tokens",
        type=click.IntRange(1),
        help="Of the others  [default: 1024, on GPUs 8192; quick, half]",
    ),
    click.option(
        "--long-share", type=click.FloatRange(0, 1), default=0.2, show_default=True, help="How many are long."
    ),
    click.option(
        "--output-tokens",
        type=click.IntRange(2),
        help="Of each answer  [default: 32, on GPUs 128; quick, half]",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(1),
        help="Requests at any time, to find what a server takes  [default: 8, on GPUs 64]",
    ),
    click.option(
        "--ttft-limit-ms",
        type=_POSITIVE,
        help="Goodput: the first token within this  [default: 3 times that of a long prompt alone]",
    ),
    click.option(
        "--itl-limit-ms",
        type=_POSITIVE,
        help="Goodput: 99 of 100 gaps of a request within this  [default: 3 times the median of one alone]",
    ),
    click.option(
        "--prefill",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Prefill nodes, disaggregated.",
    ),
    click.option(
        "--decode", type=click.IntRange(1), default=1, show_default=True, help="Decode nodes, disaggregated."
    ),
    click.option(
        "--colocated-nodes",
        type=click.IntRange(1),
        help="Nodes of the colocated server  [default: as many as the other one has GPUs; 1 on a CPU]",
    ),
    click.option("--device", type=choices_of(EngineConfig, "device"), default="auto", show_default=True),
    click.option(
        "--load-format", type=choices_of(ModelConfig, "load_format"), default="auto", show_default=True
    ),
    click.option("--serve", default="", help="More options of `baton serve`, for all servers, in quotes."),
    click.option(
        "--servers",
        type=click.Choice(["auto", "together", "apart"]),
        default="auto",
        show_default=True,
        help="Whether all run at the same time, one under load. auto: on a CPU with room for them; else one "
        "ends before the next starts, and each has all of the memory.",
    ),
    click.option("--disaggregated-url", help="A server that runs already, instead of one that is started."),
    click.option("--colocated-url", help="The other one."),
    click.option(
        "--api-key", envvar="BATON_API_KEY", help="Key that both ask for; @FILE reads it from a file."
    ),
    click.option("--vocab-size", type=click.IntRange(4), help="Token ids are below  [default: the model's]"),
    click.option(
        "--most-others",
        type=click.FloatRange(0, 100),
        default=100 * MOST_OTHERS,
        show_default=True,
        help="Percent of the cores that other programs may take; beyond, it cannot tell.",
    ),
    click.option("--seed", default=0, show_default=True, help="Of prompts and arrivals."),
    click.option(
        "--patience-s",
        type=_POSITIVE,
        default=120.0,
        show_default=True,
        help="Of silence, then it has failed.",
    ),
    click.option("--plot", type=NewFile(), help="Draw it into this SVG file."),
    click.option("--label", default="", help="Stands in the name of the saved files."),
    click.option("--save", is_flag=True, help="Keep result and plot in benchmarks/results."),
)


def takes_options(command: F) -> F:
    """Give the command its argument and its options."""
    for add in reversed(_OPTIONS):
        command = add(command)
    return command
