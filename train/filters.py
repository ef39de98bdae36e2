"""Which prompts are trained on. A filter sees all responses to one prompt.

include_easy   at least one response is both correct and well-formed
remove_easy    neither all correct nor all wrong; format does not matter
none           every prompt

Another filter is one entry of FILTERS, or your own function: filter=my_package.my_module:my_filter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dccot.rollout.response import Rollout

Group = Sequence[Rollout]


def include_easy(group: Group) -> bool:
    return any(rollout.correct and rollout.well_formed for rollout in group)


def remove_easy(group: Group) -> bool:
    return 0 < sum(rollout.correct for rollout in group) < sum(rollout.judged for rollout in group)


def keep_all(group: Group) -> bool:
    return len(group) > 0


FILTERS: dict[str, Callable[[Group], bool]] = {
    "include_easy": include_easy,
    "remove_easy": remove_easy,
    "none": keep_all,
}
