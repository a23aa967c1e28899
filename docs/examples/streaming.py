"""Print an answer while it is made, then what it cost and where its time went."""

from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is a relay race?"}],
    max_tokens=48,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"timings": True},  # fields that OpenAI does not have go here
)
timings = None
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
        timings = getattr(chunk, "timings", None) or timings
    if chunk.usage:
        print(f"\n{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")
print(f"prefill {timings['prefill_ms']:.0f} ms, hand-over {timings['transfer_ms']:.0f} ms")
