"""Tools: how they reach the template, what answers are held to, what the official client makes of a call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from transformers import AutoTokenizer

from common.errors import RequestRejected
from gateway.fake import Script
from gateway.openai_api import parse_chat
from gateway.text import TextPipeline
from tests.gateway.conftest import MODEL, WAIT_S, LiveServer
from tests.gateway.test_structured import AGE, INTEGER, chat_grammar, json_schema, matches
from tests.tiny import IM_END

USER: dict[str, Any] = {"role": "user", "content": "hi"}


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = tool("weather", description="Tell the weather.", parameters=CITY)
CALLED = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
ROUND = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "In "}, {"type": "text", "text": "Rome?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALLED, CALLED | {"id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "warm"}]},
]


# The grammar ------------------------------------------------------------------------------------------------


def test_auto_is_free() -> None:
    assert chat_grammar(tools=[WEATHER]) is None
    assert chat_grammar(tools=[WEATHER], tool_choice="auto", parallel_tool_calls=True) is None
    assert chat_grammar(tools=[WEATHER], tool_choice="none") is None
    assert chat_grammar(tools=[tool(strict=False)]) is None


def test_required_is_calls_and_nothing_else() -> None:
    grammar = chat_grammar(tools=[WEATHER, tool("age", parameters=AGE)], tool_choice="required")
    rome, age = call("weather", '{"city": "Rome"}'), call("age", '{"age": 5}')
    for good in (rome, age, rome + "\n" + age, "\n".join([rome] * 3)):
        assert matches(grammar, good), good
    for bad in (
        "",
        "Sure",
        "Sure " + rome,
        rome + "\ndone",
        call("age", '{"age": "5"}'),
        call("other", "{}"),
    ):
        assert not matches(grammar, bad), bad
    one = chat_grammar(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    assert matches(one, rome)
    assert not matches(one, rome + "\n" + rome)


def test_a_named_function_is_called_once() -> None:
    named = {"type": "function", "function": {"name": "age"}}
    grammar = chat_grammar(tools=[WEATHER, tool("age", parameters=AGE)], tool_choice=named)
    age = call("age", '{"age": 5}')
    assert matches(grammar, age)
    assert not matches(grammar, age + "\n" + age)
    assert not matches(grammar, call("weather", '{"city": "Rome"}'))


def test_a_function_without_parameters_gets_none() -> None:
    grammar = chat_grammar(tools=[tool("now")], tool_choice="required")
    assert matches(grammar, call("now", "{}"))
    assert not matches(grammar, call("now", '{"a": 1}'))


def test_auto_holds_strict_functions_to_their_schemas() -> None:
    grammar = chat_grammar(tools=[tool("age", parameters=AGE, strict=True), WEATHER])
    good = call("age", '{"age": 5}')
    for text in (
        "Hello.",
        good,
        f"Let me see.\n{good}",
        f"{good}\n{good} done",
        call("weather", '{"x": [1]}'),
    ):
        assert matches(grammar, text), text
    for text in (call("age", "{}"), call("other", "{}"), "a <tool_call>b"):
        assert not matches(grammar, text), text


def test_auto_without_parallel_calls_is_one_at_the_most() -> None:
    grammar = chat_grammar(tools=[WEATHER], parallel_tool_calls=False)
    rome = call("weather", '{"city": "Rome"}')
    assert matches(grammar, "Hello.")
    assert matches(grammar, "Well. " + rome)
    assert not matches(grammar, rome + rome)


def test_an_answer_is_a_call_or_has_the_response_format() -> None:
    grammar = chat_grammar(tools=[WEATHER], response_format=json_schema(AGE))
    assert matches(grammar, '{"age": 5}')
    assert matches(grammar, call("weather", '{"city": "Rome"}'))
    assert not matches(grammar, "Hello.")


def test_parameters_that_cannot_be_enforced() -> None:
    schema = AGE | {"not": INTEGER}
    assert matches(
        chat_grammar(tools=[tool(parameters=schema)], tool_choice="required"), call("f", '{"age": 5}')
    )
    with pytest.raises(RequestRejected, match="'not'") as caught:
        chat_grammar(tools=[WEATHER, tool(parameters=schema, strict=True)])
    assert caught.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(colour=1)]}, "tools[0].function.colour"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "f"}, "tool_choice"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "f", "a": 1}}},
            "tool_choice",
        ),
        ({"tools": [tool()], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [tool()], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [tool()], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [CALLED | {"type": "custom"}]}]},
            "messages[0].tool_calls[0].type",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        parse_chat({"model": "m", "messages": [USER], **fields})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_no_tools_is_as_if_absent() -> None:
    plain = parse_chat({"model": "m", "messages": [USER]})
    for fields in (
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"parallel_tool_calls": True},
    ):
        request = parse_chat({"model": "m", "messages": [USER], **fields})
        assert (request.tool_use, request.grammar) == (plain.tool_use, plain.grammar) == (None, None)


# The prompt -------------------------------------------------------------------------------------------------


def rendered(
    text: TextPipeline, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> str:
    request = parse_chat({"model": "m", "messages": messages, "tools": tools})
    use = request.tool_use
    return text.render_chat([m.for_template() for m in request.messages], use and use.for_template())


def test_a_template_that_knows_tools_gets_them(tiny_model: Path) -> None:
    """As OpenAI's messages, but for the arguments: templates write them as JSON themselves."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ [messages, tools] | tojson }}"
    messages, tools = json.loads(rendered(TextPipeline(tokenizer), ROUND, [WEATHER]))
    assert tools == [WEATHER]
    assert messages[1] == {"role": "user", "content": "In Rome?"}
    assert messages[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert messages[2]["content"] == ""
    assert messages[3] == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}
    messages, tools = json.loads(rendered(TextPipeline(tokenizer), [USER]))
    assert (messages, tools) == ([USER], None)


def test_a_template_that_knows_no_tools_finds_them_in_plain_messages(text: TextPipeline) -> None:
    prompt = rendered(text, ROUND, [WEATHER])
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n")
    (listed,) = [line for line in prompt.splitlines() if line.startswith('{"type": "function"')]
    assert json.loads(listed) == WEATHER
    said = call("weather", '{"city": "Rome"}')
    answers = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response>"
    assert prompt.endswith(
        f"<|im_start|>assistant\n{said}\n{said}<|im_end|>\n"
        f"<|im_start|>user\n{answers}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered(text, [USER]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert "weather" in rendered(text, [USER], [WEATHER])


def test_arguments_that_are_no_json_reach_the_model_as_it_wrote_them(text: TextPipeline) -> None:
    broken = CALLED | {"function": {"name": "weather", "arguments": "{oops"}}
    assert "{oops" in rendered(text, [USER, {"role": "assistant", "tool_calls": [broken]}])


# The answer -------------------------------------------------------------------------------------------------


@pytest.fixture
def api(server: LiveServer) -> Any:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as api:
        yield api


def says(
    server: LiveServer, text: TextPipeline, answer: str, *, tokens_per_event: int = 1, end: bool = True
) -> None:
    ids = text.encode([answer], special_tokens=False)[0] + [IM_END] * end
    server.nodes.script = Script(lambda _: ids, eos_token_ids=(IM_END,), tokens_per_event=tokens_per_event)


def ask(api: openai.OpenAI, *, stream: bool, **fields: Any) -> Any:
    """Return the choice; a stream is put together by the client's own means."""
    arguments: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": [WEATHER], **fields}
    if not stream:
        return api.chat.completions.create(**arguments).choices[0]
    state: Any = ChatCompletionStreamState()
    for chunk in api.chat.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or ():
                assert (delta.id is None) == (delta.type is None) == (delta.function.name is None)
        state.handle_chunk(chunk)
    return state.get_final_completion().choices[0]


ROME = call("weather", '{"city": "Rome"}')


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_per_event", [1, 3, 500])
@pytest.mark.parametrize(
    ("answer", "content", "num_calls", "reason"),
    [
        (ROME, None, 1, "tool_calls"),
        ("Let me look. 你好\n" + ROME + "\n" + ROME, "Let me look. 你好", 2, "tool_calls"),
        ("No tool, 5 < 6 <tool.", "No tool, 5 < 6 <tool.", 0, "stop"),
        ("<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", 0, "stop"),
    ],
)
def test_calls_as_the_official_client_sees_them(
    api: openai.OpenAI,
    server: LiveServer,
    text: TextPipeline,
    stream: bool,
    tokens_per_event: int,
    answer: str,
    content: str | None,
    num_calls: int,
    reason: str,
) -> None:
    says(server, text, answer, tokens_per_event=tokens_per_event)
    choice = ask(api, stream=stream)
    assert (choice.message.content, choice.finish_reason) == (content, reason)
    calls = choice.message.tool_calls or []
    assert [(c.type, c.function.name, c.function.arguments) for c in calls] == [
        ("function", "weather", '{"city": "Rome"}')
    ] * num_calls
    assert len({c.id for c in calls}) == num_calls
    assert all(c.id.startswith("call_") for c in calls)


def test_a_call_that_was_cut(api: openai.OpenAI, server: LiveServer, text: TextPipeline) -> None:
    cut = ROME.partition("ome")[0]
    says(server, text, cut, end=False)
    fields: Any = {"model": MODEL, "messages": [USER], "tools": [WEATHER]}
    fields["max_tokens"] = len(text.encode([cut], special_tokens=False)[0])
    choice = api.chat.completions.create(**fields).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments == '{"city": "R'
    chunks = list(api.chat.completions.create(**fields, stream=True))
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(piece.function.arguments for piece in pieces) == '{"city": "R'
    assert chunks[-1].choices[0].finish_reason == "length"


def test_arguments_are_streamed_as_they_come(
    api: openai.OpenAI, server: LiveServer, text: TextPipeline
) -> None:
    says(server, text, ROME)
    chunks = list(api.chat.completions.create(model=MODEL, messages=[USER], tools=[WEATHER], stream=True))  # type: ignore[list-item, call-overload]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", None)
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert pieces[0].function.name == "weather"
    assert len(pieces) > 8
    assert "".join(piece.function.arguments for piece in pieces) == '{"city": "Rome"}'
    assert {piece.index for piece in pieces} == {0}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_of_all_tokens(
    api: openai.OpenAI, server: LiveServer, text: TextPipeline, stream: bool
) -> None:
    says(server, text, ROME)
    choice = ask(api, stream=stream, logprobs=True)
    assert len(choice.logprobs.content) == len(text.encode([ROME], special_tokens=False)[0]) + 1


def test_each_choice_calls_for_itself(api: openai.OpenAI, server: LiveServer, text: TextPipeline) -> None:
    says(server, text, ROME)
    body = api.chat.completions.create(model=MODEL, messages=[USER], tools=[WEATHER], n=2)  # type: ignore[list-item]
    ids = [choice.message.tool_calls[0].id for choice in body.choices if choice.message.tool_calls]
    assert len(set(ids)) == 2


def test_without_tools_the_tags_are_text(api: openai.OpenAI, server: LiveServer, text: TextPipeline) -> None:
    says(server, text, ROME)
    for fields in ({"tools": openai.omit}, {"tool_choice": "none"}):
        choice = ask(api, stream=False, **fields)
        assert (choice.message.content, choice.message.tool_calls) == (ROME, None)
        assert choice.finish_reason == "stop"
    assert "weather" not in text._backend.decode(server.nodes.streams[-1].prompt_ids.tolist())


def test_a_round_trip(api: openai.OpenAI, server: LiveServer, text: TextPipeline) -> None:
    """What the client got is sent back as it is, with the tool's answer."""
    says(server, text, ROME)
    first = api.chat.completions.create(model=MODEL, messages=[USER], tools=[WEATHER], tool_choice="required")  # type: ignore[list-item]
    message = first.choices[0].message
    assert message.tool_calls is not None
    answer = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    says(server, text, "It is sunny.")
    history: Any = [USER, message, answer]
    second = api.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER])  # type: ignore[list-item]
    assert second.choices[0].message.content == "It is sunny."
    prompt = text._backend.decode(server.nodes.streams[-1].prompt_ids.tolist(), skip_special_tokens=False)
    assert ROME in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt
