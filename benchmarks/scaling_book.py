"""How many of the worked examples of the scaling book and MinText meshwright answers, within each one's tolerance.

    .venv/bin/python benchmarks/scaling_book.py FILE [--json]

FILE is a list of records {id, kind, inputs, expected: {name: {value, unit}}, tolerance, check}; check: approx (relative
tolerance), exact, set (order free), lower_bound (what is expected was measured: the answer is at most that, and within
the tolerance). Every answer is computed from the inputs, by `scaling_book_answers.py`.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scaling_book_answers import Record, form_of

from meshwright.errors import MeshwrightError


def misses(record: Record) -> Iterator[dict[str, Any]]:
    """What of a record is not answered within its tolerance, each with the answer, None where there is none."""
    answer = form_of(record)
    try:
        answers = answer(record) if answer else {}
    except MeshwrightError as error:
        answers, why = {}, str(error)
    else:
        why = "no answer to this" if answer else "no answer to questions of this form"
    for quantity, expected in record["expected"].items():
        found = answers.get(quantity)
        if found is None:
            yield {"id": record["id"], "quantity": quantity, "expected": expected["value"], "answer": None, "why": why}
        elif not is_within(found, expected["value"], check=record["check"], tolerance=record["tolerance"]):
            yield {"id": record["id"], "quantity": quantity, "expected": expected["value"], "answer": found, "why": ""}


def is_within(answer: Any, expected: Any, *, check: str, tolerance: float) -> bool:
    """Whether an answer is the expected one as far as the check asks; of lists each item in its place."""
    if isinstance(expected, list) and check == "set":
        return sorted(answer) == sorted(expected)
    if isinstance(expected, list):
        same = isinstance(answer, list) and len(answer) == len(expected)
        return same and all(
            is_within(a, e, check=check, tolerance=tolerance) for a, e in zip(answer, expected, strict=True)
        )
    if isinstance(expected, (str, bool)) or check in ("exact", "set"):
        return answer == expected
    if check == "lower_bound":
        return expected * (1 - tolerance) <= answer <= expected
    if check == "approx":
        return math.isclose(answer, expected, rel_tol=0, abs_tol=tolerance * abs(expected))
    raise ValueError(f"check {check!r} is not approx, exact, set or lower_bound")


def score(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The counts over all records and by kind, and every miss."""
    missed: list[dict[str, Any]] = []
    by_kind: dict[str, dict[str, int]] = {}
    for record in records:
        found = list(misses(record))
        missed += found
        counts = by_kind.setdefault(record["kind"], {"records": 0, "within": 0})
        counts["records"] += 1
        counts["within"] += not found
    within = sum(counts["within"] for counts in by_kind.values())
    return {"records": len(records), "within": within, "by_kind": by_kind, "missed": missed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = score(json.loads(args.file.read_text(encoding="utf-8")))
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for kind, counts in result["by_kind"].items():
        print(f"{kind:<22}{counts['within']:>3} of {counts['records']:>3} within tolerance")
    print(f"{'all':<22}{result['within']:>3} of {result['records']:>3}")
    for miss in result["missed"]:
        said = miss["why"] if miss["answer"] is None else f"answered {miss['answer']}"
        print(f"  {miss['id']}: {miss['quantity']} is {miss['expected']}, {said}")


if __name__ == "__main__":
    main()
