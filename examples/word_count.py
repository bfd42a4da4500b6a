"""Count the words of many texts at once and add them up: a map-reduce from an asyncio program.

$ penstock worker word_count:app
$ python word_count.py
"""

import asyncio
from collections import Counter
from pathlib import Path

from penstock import App

app = App("word-count")


@app.task
def count(text: str) -> dict[str, int]:
    return dict(Counter(text.lower().split()))


@app.task
def merge(counts: list[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


async def main() -> None:
    texts = Path(__file__).read_text().split("\n\n")
    jobs = await count.amap(texts)
    total = await (await merge.adelay(await asyncio.gather(*jobs)))
    for word, times in Counter(total).most_common(3):
        print(f"{times:3} {word}")


if __name__ == "__main__":
    asyncio.run(main())
