"""Penalties against a model in plain Python, over rows that come, decode side by side, and are used again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config import EngineConfig, ModelConfig
from common.device.packed import PackedBlock
from common.engine.batch import SampleRow, prepare_for_prebuilt
from common.engine.loader import load_engine
from common.engine.penalties import PenaltyState
from common.engine.sampler import resolve_sampling, sample
from common.messages import int32s
from common.request import LogitBias, Request, SamplingParams

CPU = torch.device("cpu")
NUM_ROWS = 3
VOCAB = 11  # not a multiple of 8, as the prompt's bitmap would like it
EOS = 3

TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    temperature=st.just(0.0),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.25, 2.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5, 0.5]),
    logit_bias=st.lists(
        st.builds(LogitBias, TOKENS, st.sampled_from([-3.0, 4.0])), max_size=2, unique_by=lambda b: b.token
    ).map(tuple),
)


@dataclass(frozen=True)
class Admit:
    """A request takes a row, whoever had it before; its first token may come from another node."""

    row: int
    prompt: list[int]
    params: SamplingParams
    first: int | None


@dataclass(frozen=True)
class Step:
    """All rows that are taken, or some of them, draw a token."""

    seed: int
    left_out: frozenset[int]
    may_stop: bool


OPERATIONS = st.one_of(
    st.builds(
        Admit,
        st.integers(1, NUM_ROWS),
        st.lists(TOKENS, min_size=1, max_size=6),
        PARAMS,
        st.none() | TOKENS,
    ),
    st.builds(Step, st.integers(0, 1000), st.frozensets(st.integers(1, NUM_ROWS), max_size=1), st.booleans()),
)


@dataclass
class Model:
    """What a row's logits must be: the definitions, a token at a time."""

    prompt: list[int]
    params: SamplingParams
    outputs: list[int] = field(default_factory=list)

    def penalised(self, logits: list[float], *, may_stop: bool) -> list[float]:
        changed = list(logits)
        for bias in self.params.logit_bias:
            changed[bias.token] += bias.bias
        for token in range(VOCAB):
            count = self.outputs.count(token)
            if count or token in self.prompt:
                factor = self.params.repetition_penalty
                changed[token] = changed[token] / factor if changed[token] > 0 else changed[token] * factor
            changed[token] -= self.params.frequency_penalty * count
            changed[token] -= self.params.presence_penalty * (count > 0)
        if not may_stop:
            changed[EOS] = float("-inf")
        return changed


def admit(state: PenaltyState, operation: Admit) -> Model:
    request = Request(int32s(operation.prompt), operation.params, len(operation.prompt), row=operation.row)
    state.prime(request)
    model = Model(operation.prompt, operation.params)
    if operation.first is not None:
        state.count_seeded([operation.row], [operation.first], [operation.params])
        model.outputs.append(operation.first)
    return model


def step(state: PenaltyState, models: dict[int, Model], operation: Step) -> None:
    rows = [row for row in models if row not in operation.left_out]
    if not rows:
        return
    generator = torch.Generator().manual_seed(operation.seed)
    logits = torch.randn((len(rows), VOCAB), generator=generator) * 3
    expected = [
        models[row].penalised(values, may_stop=operation.may_stop)
        for row, values in zip(rows, logits.tolist(), strict=True)
    ]
    samples = [SampleRow(i, models[row].params, 9, operation.may_stop) for i, row in enumerate(rows)]
    drawn = sample(logits, resolve_sampling(samples, rows, (EOS,), PackedBlock(CPU)), state).tokens.tolist()
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-5)
    for row, token, values in zip(rows, drawn, expected, strict=True):
        assert values[token] >= max(values) - 1e-4
        models[row].outputs.append(token)


@given(operations=st.lists(OPERATIONS, max_size=30))
def test_logits_are_those_of_the_model(operations: list[Admit | Step]) -> None:
    state = PenaltyState(NUM_ROWS, VOCAB, CPU)
    models: dict[int, Model] = {}
    with torch.inference_mode():
        for operation in operations:
            match operation:
                case Admit():
                    models[operation.row] = admit(state, operation)
                case Step():
                    step(state, models, operation)


def test_a_first_token_counts_once() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=1.0)
    state = PenaltyState(1, 2, CPU)
    with torch.inference_mode():
        admit(state, Admit(1, [0], params, first=0))
        # One count leaves token 0 ahead, by a little; two would not.
        logits = torch.tensor([[1.5, 0.0]])
        inputs = resolve_sampling([SampleRow(0, params, 2, may_stop=True)], [1], (), PackedBlock(CPU))
        assert sample(logits, inputs, state).tokens.tolist() == [0]
        # Now it was put out twice.
        assert sample(torch.tensor([[1.5, 0.0]]), inputs, state).tokens.tolist() == [1]


def test_rows_without_penalties_are_left_alone() -> None:
    penalised = SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=2.0, repetition_penalty=2.0)
    plain = SamplingParams(max_tokens=9, temperature=0.0)
    state = PenaltyState(2, 4, CPU)
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 2)
    with torch.inference_mode():
        admit(state, Admit(1, [0, 1], penalised, first=0))
        admit(state, Admit(2, [0, 1], plain, first=0))
        samples = [SampleRow(0, plain, 3, may_stop=True), SampleRow(1, penalised, 3, may_stop=True)]
        drawn = sample(logits, resolve_sampling(samples, [2, 1], (), PackedBlock(CPU)), state).tokens.tolist()
    assert logits.tolist() == [[4.0, 3.0, 2.0, 1.0], [0.0, 1.5, 2.0, 1.0]]
    assert drawn == [0, 2]


def test_every_output_counts_once_however_late_its_row_is_mirrored(tiny_model: Path) -> None:
    engine = load_engine(tiny_model, ModelConfig(str(tiny_model)), EngineConfig(device="cpu", kv_pages=9))
    sampling = SamplingParams(max_tokens=9, frequency_penalty=1.0)

    def counted(request: Request) -> list[int]:
        counts = engine.runner._penalties._counts
        assert counts is not None
        return [int(counts[request.row, token]) for token in (7, 8)]

    # Handed over: the first token may be here before the row is mirrored.
    request = Request(int32s([5, 6]), sampling, 2, row=1, page_ids=(1,), outputs=[7], num_sampled=1)
    engine.runner.grant(request)
    engine.runner.seed_first_tokens(prepare_for_prebuilt([request], engine.layout.page_size), [request])
    assert counted(request) == [1, 0]
    # Retracted, and granted again.
    request.outputs += [8, 7]
    request.retract()
    request.row = 2
    engine.runner.grant(request)
    assert counted(request) == [2, 1]
