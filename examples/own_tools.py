"""Tools of one's own: the price of an article, which a model cannot know without asking."""

import hashlib


def price(article: str) -> str:
    """Look up the price of an article.

    Args:
        article: The article's code, of two letters.
    """
    if len(article) != 2 or not article.isalpha():
        raise ValueError("a code has two letters")
    return str(10 + hashlib.sha256(article.encode()).digest()[0] % 90)
