"""Ask how likely tokens were: the likeliest at each place of an answer, and the prompt's own (`echo`)."""

import math

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Is water wet? Answer yes or no."}],
    max_tokens=3,
    temperature=0,
    logprobs=True,
    top_logprobs=3,
)
for token in answer.choices[0].logprobs.content:
    others = ", ".join(f"{top.token!r} {math.exp(top.logprob):.0%}" for top in token.top_logprobs)
    print(f"{token.token!r}: {others}")

scored = client.completions.create(
    model=model, prompt="The capital of France is Paris", max_tokens=1, temperature=0, echo=True, logprobs=0
)
logprobs = scored.choices[0].logprobs
for token, logprob in zip(logprobs.tokens, logprobs.token_logprobs, strict=True):
    print(f"{token!r}: {'(the first)' if logprob is None else f'{logprob:.2f}'}")
