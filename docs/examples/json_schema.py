"""Have an answer follow a JSON schema; it parses, whatever the model would rather say."""

import json

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Describe Anna, who is 32 and likes blue, as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    max_tokens=200,
    temperature=0,
)
person = json.loads(answer.choices[0].message.content)
print(person["name"], person["age"], person["colour"])
