"""Draw several answers to one prompt (`n`); with a seed they are the same every time."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id


def draw() -> list[str]:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name an animal."}],
        max_tokens=12,
        n=4,
        seed=7,
    )
    return [choice.message.content for choice in answer.choices]


answers = draw()
for number, answer in enumerate(answers):
    print(number, answer)
print("the same again:", draw() == answers)
