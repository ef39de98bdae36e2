"""maj@3 in closed form: the paper's average over all C(N, 3) subsets of a problem's N responses, without enumerating
them.

A subset votes with its largest class of equal answers. Its accuracy is the mean over the winning class, or over all
three when they are all equal or all different; its longest path is the longest of the three. Summing over subsets,
response i of a class of size n among N counts

    w_i = 1/3 · C(n-1, 2)                 both others in its class
        + 1/2 · (n-1)(N-n)                one other in its class, so the third is outvoted
        + 1/3 · P                         both others in two further classes, P = ((N-n)² - Σ_other n'²) / 2
    accuracy = Σ w_i · correct_i / C(N, 3)

and the k-th shortest response is the longest of C(k-1, 2) subsets. Sums are exact (integers over 6), so nothing depends
on order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True)
class MajorityVote:
    accuracy: float
    longest_path: float


def majority_of_three(classes: Sequence[int], correct: Sequence[bool], longest_paths: Sequence[int]) -> MajorityVote:
    """maj@3 of one problem from each response's equivalence class, correctness and longest path length."""
    count = len(classes)
    if not count == len(correct) == len(longest_paths):
        raise ValueError(
            f"{count} classes, {len(correct)} verdicts, {len(longest_paths)} lengths; give one of each per response"
        )
    if count < 3:
        raise ValueError(f"maj@3 needs at least 3 responses per problem, found {count}; raise --n")
    sizes = Counter(classes)
    squares = sum(n * n for n in sizes.values())
    sixths = {
        name: 2 * comb(n - 1, 2) + 3 * (n - 1) * (count - n) + ((count - n) ** 2 - (squares - n * n))
        for name, n in sizes.items()
    }
    subsets = comb(count, 3)
    right = sum(sixths[name] for name, is_right in zip(classes, correct) if is_right)
    length = sum(comb(rank, 2) * path for rank, path in enumerate(sorted(longest_paths)))
    return MajorityVote(right / (6 * subsets), length / subsets)
