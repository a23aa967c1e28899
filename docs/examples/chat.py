"""Hold a chat: the second question needs the first answer."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

messages = [{"role": "system", "content": "Answer in one short sentence."}]
for question in ("What is the capital of Italy?", "And of France?"):
    messages.append({"role": "user", "content": question})
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=40, temperature=0)
    message = answer.choices[0].message
    messages.append({"role": message.role, "content": message.content})
    print(message.role, "says:", message.content)
