"""Have an answer follow a regular expression, or be one of several (`structured_outputs`, as in vLLM)."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id


def ask(question: str, rule: dict) -> str:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=40,
        temperature=0,
        extra_body={"structured_outputs": rule},
    )
    return answer.choices[0].message.content


print(
    "date:", ask("When did the war end? As YYYY-MM-DD.", {"regex": r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]"})
)
print("mood:", ask("I love this song! What is my mood?", {"choice": ["happy", "sad"]}))
