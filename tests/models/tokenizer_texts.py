"""Texts that tokenizers split differently."""

import random

PARTS = (
    *("Hello", " world", " HelloWorld", " ABCdef", "CamelCase", " who are you?", " the cat"),
    *("don't", " DON'T", "we'll", "'s", " it's", " I'm", "'Re"),
    *("1", "12", "123", " 1234", "12345", "3,456.78", " 2023", "٣٤٥", "½", "x²y", "Ⅷ"),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "    return", "  \n\n  if (a):"),
    *(".", ",", "!", "?!", "...", " (x)", "{}", "a/b", "/\n", " += ", "$5", "~|^`", "<tag>", " #1"),
    *("été", "e\u0301te\u0301", " Straße", "ΑΒΓ αβγ", " Привет", "Мир", "K", "µm"),
    *(
        "你好",
        "，世界。",
        "こんにちは",
        " カタカナ",
        "한국어",
        " नमस्ते",
        "ไทย",
        "مرحبا",
        "🙂",
        " 👩‍👩‍👧",
    ),
)


def texts(count: int = 100, seed: int = 0) -> list[str]:
    """Returns texts of 1 to 12 parts."""
    draw = random.Random(seed)
    return ["".join(draw.choices(PARTS, k=draw.randint(1, 12))) for _ in range(count)]
