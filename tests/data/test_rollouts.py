"""What an interrupted file or folder lacks."""

from dccot.data.problems import Problem
from dccot.data.rollouts import missing_pairs

ASKED = [(Problem(name, "?", "1"), [5]) for name in "ba"]


def test_what_is_missing_comes_in_the_order_of_the_problems_and_nothing_twice():
    assert missing_pairs(ASKED, range(2)) == [("b", 0), ("b", 1), ("a", 0), ("a", 1)]
    assert missing_pairs(ASKED, iter(range(2)), {("b", 1), ("a", 0), ("c", 0)}) == [("b", 0), ("a", 1)]
    assert missing_pairs(ASKED, [0], {("a", 0), ("b", 0)}) == []
