"""Ask several questions at once with the asynchronous client; they share the decode steps."""

import asyncio

from openai import AsyncOpenAI

QUESTIONS = ("What is a river?", "What is a mountain?", "What is an island?")


async def main() -> None:
    async with AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none") as client:
        model = (await client.models.list()).data[0].id

        async def ask(question: str) -> str:
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                max_tokens=24,
                temperature=0,
            )
            return answer.choices[0].message.content

        for question, answer in zip(QUESTIONS, await asyncio.gather(*map(ask, QUESTIONS)), strict=True):
            print(f"{question} {answer}")


asyncio.run(main())
