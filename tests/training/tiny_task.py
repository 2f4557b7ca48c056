"""A task for tiny models: any prompt of three words; the more early words in the response, the better."""


def rows(count=24):
    words = [f"w{3 + i % 50}" for i in range(200)]
    return [{"prompt": " ".join(words[i : i + 3]), "goal": 20 + i % 5} for i in range(count)]


def early_words(completions, goal, **_):
    return [
        sum(int(w[1:]) < g for w in text.split() if w[1:].isdigit()) / max(1, len(text.split()))
        for text, g in zip(completions, goal, strict=True)
    ]
