"""An agent that is played through an endpoint of the run: guess a number, of which each answer says if it is higher.

It knows nothing of the project but the address of its model. The same code plays with any model that OpenAI's client
reaches.
"""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI


async def play(task: Any, base_url: str, api_key: str, guesses: int = 3) -> float:
    """Play one game. Returns the reward."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = list(task.fields["messages"])
        for _ in range(guesses):
            completion = await client.chat.completions.create(model="policy", messages=messages)
            answer = completion.choices[0].message
            guess = (answer.content or "").strip()
            if guess == task.answer:
                return 1.0
            hint = "?" if not guess.isdecimal() else "+" if int(guess) < int(task.answer) else "-"
            messages += [answer, {"role": "user", "content": hint}]
    return 0.0
