"""The paper's own results, shown next to ours: its tables 1 and 2 with the appendix's ±, and total tokens.

The paper's ± takes every response (for majority voting every subset of three) as independent. Ours take problems as the
unit, so ours are larger for the same data; `results.pooled_errors` computes the paper's version for our responses.
"""

from __future__ import annotations

from dccot.core.statistics import Estimate

COLUMNS = ("aime24", "amc23", "hmmt25", "math500", "minerva", "olympiadbench")
# per benchmark: accuracy, its ±, longest path, its ±
_ROWS = """
DSR-32K     40.20 .63 9540 83 81.35 .44 5151 51 18.28 .50 10685 89 89.04 .35 3146 39 36.65 .73 4879 71 60.94 .47 5875 49
DSR-12K     39.43 .63 8047 43 80.66 .44 4792 38 18.28 .50  8666 41 88.81 .35 2963 29 36.63 .73 4496 47 60.53 .47 5327 33
Maj-DSR-3   44.19 .01 9690 0  84.55 .00 5803 1  19.39 .01  9970 0  91.02 .05 3638 6  38.69 .12 5716 9  63.29 .08 6462 6
DSR-HLP-24K 40.08 .63 7903 54 81.90 .43 4535 40 18.32 .50  8375 55 89.29 .35 2790 30 37.50 .73 4124 49 61.72 .47 4909 34
DSR-HLP-12K 39.03 .63 6023 38 80.83 .44 3574 29 16.78 .48  6391 38 88.08 .36 2215 22 37.36 .73 3122 33 60.34 .47 3880 25
DC-CoT      41.87 .64 5974 38 80.38 .44 3368 29 18.07 .50  6803 38 88.74 .35 1979 22 35.16 .72 2865 32 60.19 .47 3742 26
DC-CoT-HLP  40.85 .63 4740 27 80.55 .44 2786 21 16.48 .48  5175 28 88.44 .36 1734 16 35.02 .72 2454 25 60.07 .47 3040 19
DC-CoT-Maj  46.02 .01 7412 0  83.70 .00 4239 .43 19.54 .01 8109 0  90.66 .05 2443 5  37.05 .12 3668 6  62.45 .08 4603 5
"""

Point = tuple[Estimate, Estimate]  # accuracy in %, longest path in tokens


def _read(line: str) -> tuple[str, dict[str, Point]]:
    method, *cells = line.split()
    pairs = [Estimate(float(value), float(error)) for value, error in zip(cells[::2], cells[1::2])]
    return method, dict(zip(COLUMNS, zip(pairs[::2], pairs[1::2])))


RESULTS: dict[str, dict[str, Point]] = dict(map(_read, _ROWS.strip().splitlines()))
COMPARED_WITH = {"DC-CoT": "DSR-32K", "DC-CoT-HLP": "DSR-HLP-12K", "DC-CoT-Maj": "Maj-DSR-3"}  # table 2
VOTES = {"DSR-12K": "Maj-DSR-3", "DC-CoT": "DC-CoT-Maj"}  # whose responses vote → the row of the votes
_SEQUENTIAL = ("DSR-32K", "DSR-12K", "Maj-DSR-3", "DSR-HLP-24K", "DSR-HLP-12K")
LAYOUT = (*_SEQUENTIAL, "SFT", "DC-CoT", "DC-CoT-HLP", "DC-CoT-Maj")
TOTAL_TOKENS = {
    "DC-CoT": dict(zip(COLUMNS, (6831, 4185, 7603, 2554, 3526, 4489))),
    "DC-CoT-HLP": dict(zip(COLUMNS, (6185, 4022, 6411, 2537, 3401, 4154))),
    "DC-CoT-Maj": dict(zip(COLUMNS, (20493, 12554, 22809, 7662, 10579, 13468))),
}
