"""Let the model call a function, give it the result, and stream its answer."""

import json

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id


def get_weather(city: str) -> str:
    return json.dumps({"city": city, "sky": "sunny", "celsius": 21})


tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
messages = [{"role": "user", "content": "How is the weather in Paris?"}]
asked = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[tool],
    tool_choice={"type": "function", "function": {"name": "get_weather"}},
    max_tokens=100,
    temperature=0,
)
message = asked.choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls:
    arguments = json.loads(call.function.arguments)
    print("calls", call.function.name, arguments)
    result = get_weather(**arguments)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

stream = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[tool],
    tool_choice="none",
    max_tokens=40,
    temperature=0,
    stream=True,
)
print("".join(chunk.choices[0].delta.content or "" for chunk in stream))
