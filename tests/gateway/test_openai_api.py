"""Which requests are accepted, and what refuses the others."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

from common.errors import RequestRejected
from common.request import LogitBias
from gateway.echo import Encoded
from gateway.limits import ModelLimits
from gateway.openai_api import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from gateway.prompts import check_prompts
from gateway.structured import NamedSchema
from gateway.unsupported import CHAT, COMPLETION

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion({"model": "m", "prompt": "hi", **fields})


def chat(**fields: Any) -> ChatRequest:
    return parse_chat({"model": "m", "messages": [USER], **fields})


def test_every_field_of_the_official_client_is_supported_or_refused_by_name() -> None:
    completion_fields = get_type_hints(completion_create_params.CompletionCreateParamsStreaming)
    assert completion_fields.keys() <= CompletionRequest.model_fields.keys() | COMPLETION.keys()
    chat_fields = get_type_hints(chat_create_params.CompletionCreateParamsStreaming)
    assert chat_fields.keys() <= ChatRequest.model_fields.keys() | CHAT.keys()


def test_no_field_is_both_supported_and_refused() -> None:
    assert not CompletionRequest.model_fields.keys() & COMPLETION.keys()
    assert not ChatRequest.model_fields.keys() & CHAT.keys()


@pytest.mark.parametrize("name", [*COMPLETION, "temperature", "max_tokens", "stop", "seed", "stream", "user"])
def test_null_is_as_if_absent_in_completions(name: str) -> None:
    assert completion(**{name: None}) == completion()


@pytest.mark.parametrize("name", [*CHAT, "max_completion_tokens", "top_p", "stream_options", "stop"])
def test_null_is_as_if_absent_in_chat(name: str) -> None:
    assert chat(**{name: None}) == chat()


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in COMPLETION.items() for v in values])
def test_default_of_an_unsupported_field_is_as_if_absent_in_completions(name: str, value: Any) -> None:
    assert completion(**{name: value}) == completion()


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in CHAT.items() for v in values])
def test_default_of_an_unsupported_field_is_as_if_absent_in_chat(name: str, value: Any) -> None:
    assert chat(**{name: value}) == chat()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store", True),
        ("store", 0),
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("service_tier", "flex"),
        ("web_search_options", {}),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestRejected, match=f"^{name} is not supported") as caught:
        chat(**{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.0}, "top_k"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 10**4000}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 2.1}, "repetition_penalty"),
        ({"repetition_penalty": True}, "repetition_penalty"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"x\n": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"05": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 10_000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": 100.5}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias"),
        ({"logit_bias": {"5": True}}, "logit_bias"),
        ({"logit_bias": {"5": None}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ["a", 1]}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 2000}, "stop_token_ids"),
        ({"stream": 1}, "stream"),
        ({"ignore_eos": "true"}, "ignore_eos"),
        ({"user": 5}, "user"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"colour": "red"}, "colour"),
        ({"prompt": "hi"}, "prompt"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [USER, {"content": "hi"}]}, "messages[1].role"),
        ({"messages": [USER, {"role": "wizard", "content": "hi"}]}, "messages[1].role"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [USER | {"colour": 1}]}, "messages[0].colour"),
        ({"messages": [USER | {"tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [USER | {"tool_calls": []}]}, "messages[0].tool_calls"),
        ({"messages": [USER | {"tool_call_id": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "content": "4"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "tool_call_id": "a"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
        ({"messages": [{"role": "function", "name": "f", "content": "4"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages[0].content"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        [""],
        ["a", ""],
        [[]],
        [[1], []],
        5,
        {},
        [1, "a"],
        ["a", 1],
        [True],
        [1.0],
        [["a"]],
        [[[1]]],
        [[1], "a"],
    ],
)
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(RequestRejected) as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_four_forms_of_a_prompt(prompt: Any, parsed: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == parsed


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "ab"


def test_a_message_that_the_official_client_returned_can_be_sent_back() -> None:
    returned = {"role": "assistant", "content": "hi", "refusal": None, "audio": None, "tool_calls": None}
    assert chat(messages=[USER, returned, USER]).messages[1].content == "hi"


def test_lengths_that_agree_may_both_be_given() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).length().max_tokens == 5


def test_sampling_parameters() -> None:
    sampling = completion(top_k=-1, seed=-1, stop_token_ids=[7], temperature=0).sampling(9)
    assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (0, 2**64 - 1, 9)
    assert (sampling.stop_token_ids, sampling.temperature, sampling.top_p) == ((7,), 0.0, 1.0)
    assert completion().sampling(9).seed != completion().sampling(9).seed


def test_penalties_and_biases_are_sampling_parameters() -> None:
    sampling = chat(
        presence_penalty=-2, frequency_penalty=0.5, repetition_penalty=1.5, logit_bias={"7": -100, "0": 2}
    ).sampling(9)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-2.0, 0.5)
    assert sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == (LogitBias(7, -100.0), LogitBias(0, 2.0))
    assert not completion().sampling(9).has_penalties


@pytest.mark.parametrize(
    ("request_", "num_logprobs"),
    [
        (completion(), None),
        (completion(logprobs=0), 0),
        (completion(logprobs=20), 20),
        (chat(), None),
        (chat(top_logprobs=0), None),
        (chat(logprobs=False), None),
        (chat(logprobs=True), 0),
        (chat(logprobs=True, top_logprobs=20), 20),
    ],
)
def test_each_endpoint_asks_for_log_probabilities_in_its_way(
    request_: GenerationRequest, num_logprobs: int | None
) -> None:
    assert request_.sampling(9).num_logprobs == num_logprobs


@pytest.mark.parametrize("logprobs", [-1, 21, True, 1.0])
def test_wrong_logprobs_of_completions(logprobs: Any) -> None:
    with pytest.raises(RequestRejected) as caught:
        completion(logprobs=logprobs)
    assert (caught.value.status, caught.value.param) == (400, "logprobs")


def test_a_million_unknown_fields_are_one_error() -> None:
    with pytest.raises(RequestRejected, match="unknown field 'f0'"):
        completion(**{f"f{i}": 1 for i in range(100_000)})


@pytest.mark.parametrize(
    ("where", "fields"),
    [
        ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema", "json_schema": {}}}),
        ("messages[0]", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_of_many_unknown_fields_within_a_field_one_is_looked_at(where: str, fields: dict[str, Any]) -> None:
    inside: Any = fields
    for part in where.replace("[0]", ".0").split("."):
        inside = inside[int(part) if part.isdecimal() else part]
    inside |= {"name": "x"} if where.endswith("schema") else {}
    inside |= {f"f{i}": 1 for i in range(100)}
    with pytest.raises(RequestRejected) as caught:
        parse_chat({"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields)
    assert (caught.value.param, caught.value.code) == (f"{where}.f0", "unknown_parameter")
    with pytest.raises(ValidationError) as whole:
        NamedSchema.model_validate({"name": "x", "schema": {}} | {f"f{i}": 1 for i in range(100)})
    assert [error["loc"] for error in whole.value.errors()] == [("f0",)]


@pytest.mark.parametrize(("n", "tokens"), [(1, 300_000), (64, 4000)])
def test_log_probabilities_of_prompts_are_bounded(n: int, tokens: int) -> None:
    limits = ModelLimits(context_length=1 << 20, vocab_size=100)
    fits = [Encoded([7] * 3000)]
    for fields, param in (
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20}, "logprobs"),
    ):
        request = completion(n=n, **fields)
        with pytest.raises(RequestRejected, match="log probabilities of prompts") as caught:
            check_prompts(request, [Encoded([7] * tokens)], "prompt", limits, None)
        assert (caught.value.status, caught.value.param) == (400, param)
        assert len(check_prompts(request, fits, "prompt", limits, None)) == 1
    request = completion(n=n, logprobs=20)
    assert len(check_prompts(request, [Encoded([7] * tokens)], "prompt", limits, None)) == 1
