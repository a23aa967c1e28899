"""Continue a text, and the same text three times over, with the official client (`pip install openai`)."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

answer = client.completions.create(
    model=model, prompt="The capital of France is", max_tokens=8, temperature=0
)
print(answer.choices[0].text)
print(answer.usage.completion_tokens, "tokens, ended by", answer.choices[0].finish_reason)

texts = ["One, two, three,", "A, B, C,", "Monday, Tuesday,"]
several = client.completions.create(model=model, prompt=texts, max_tokens=6, temperature=0)
for choice in several.choices:
    print(texts[choice.index] + choice.text)
