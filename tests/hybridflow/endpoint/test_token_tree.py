"""Trees of tokens: continued and branched contexts, of which nothing is lost."""

from __future__ import annotations

import random

from hybridflow.endpoint.token_tree import Branch, TokenTree


def test_a_context_continues_the_longest_sequence_that_it_begins_with() -> None:
    tree = TokenTree()
    first = tree.branch([1, 2])
    assert first == Branch(0, [1, 2])
    tree.grow(first, [3, 4], "a")
    assert tree.upto("a") == [1, 2, 3, 4]
    assert tree.branch([1, 2, 3, 4, 5]) == Branch(0, [5])
    tree.grow(tree.branch([1, 2, 3, 4, 5]), [6], "b")
    assert tree.upto("a") == [1, 2, 3, 4] and tree.upto("b") == [1, 2, 3, 4, 5, 6]
    assert (len(tree), tree.tokens) == (1, 6)


def test_a_context_that_leaves_a_sequence_is_another_and_both_may_grow() -> None:
    tree = TokenTree()
    tree.grow(tree.branch([1]), [2], "a")
    tree.grow(tree.branch([1, 2, 3]), [4], "b")
    other = tree.branch([1, 2, 9])
    assert other == Branch(1, [1, 2, 9])
    tree.grow(other, [8], "c")
    assert tree.branch([1, 2, 3, 4, 5]) == Branch(0, [5])
    assert tree.branch([1, 2, 9, 8, 7]) == Branch(1, [7])
    assert tree.branch([1]) == Branch(2, [1])  # drawn again from the same context
    assert tree.upto("a") == [1, 2] and tree.upto("unknown") is None


def test_every_drawn_token_is_in_one_place_behind_its_context() -> None:
    generator = random.Random(1)
    tree, contexts = TokenTree(), [[0]]
    drawn: list[tuple[list[int], list[int]]] = []
    placed: dict[int, list[int]] = {}
    for number in range(300):
        context = [*generator.choice(contexts), generator.randrange(3)]
        branch = tree.branch(context)
        answer = [generator.randrange(3) for _ in range(generator.randrange(1, 4))]
        assert [*placed.get(branch.sequence, []), *branch.tokens] == context
        tree.grow(branch, answer, number)
        placed[branch.sequence] = [*context, *answer]
        assert tree.upto(number) == [*context, *answer]
        contexts.append([*context, *answer])
        drawn.append((context, answer))
    assert tree.tokens == sum(map(len, placed.values())) and len(tree) == len(placed)
    for number, (context, answer) in enumerate(drawn):
        assert tree.upto(number) == [*context, *answer]  # nothing is lost
