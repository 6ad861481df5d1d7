"""`python -m tests.mutants.operators`: change the modules of the guarantees by operators, and see tests fail.

Exits with 1 when a mutant survives that is not known. The checkout is only read.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from tests.mutants.operators.places import Mutation, drawn
from tests.mutants.operators.reach import keep, kept, recorded
from tests.mutants.operators.report import as_json, known_reason, new_survivors, survivors, table
from tests.mutants.operators.rooms import files_of
from tests.mutants.operators.trial import Fate, Tried, tried
from tests.mutants.trees import ROOT, Tree, copied
from tests.support.servers import bare_postgres

_REACH: Final = ROOT / "build" / "mutate-reach.json"


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    rooms = files_of()
    files = [file for file, room in rooms.items() if any(word in (file, room.name) for word in options.only or [file])]
    if not files:
        print(f"no module or room is called {' '.join(options.only)!r}; rooms and modules are:")
        print(*(f"  {room.name:9} {file}" for file, room in rooms.items()), sep="\n")
        return 2
    drawing = drawn(ROOT, files, options.seed)
    mutations = list(islice(drawing, options.sample) if options.sample else drawing)
    if options.list:
        print(*(f"{each.name}\n{each.diff}\n" for each in mutations), sep="\n")
        return 0
    with copied() as tree:
        results = _tried(tree, mutations, options.json)
    print("\n" + table(results))
    if lived := survivors(results):
        print("\n" + lived)
    new = new_survivors(results)
    print(f"\nseed {options.seed}: {len(mutations)} mutants, {len(new)} survivors that are not known")
    return int(bool(new))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.operators", description=__doc__)
    parser.add_argument("only", nargs="*", help="rooms or files (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (default: 1)")
    parser.add_argument("--sample", type=int, default=250, help="number of mutants; 0 for all (default: 250)")
    parser.add_argument("--json", type=Path, help="write the results to this file, after each trial")
    parser.add_argument("--list", action="store_true", help="print the mutants, and end")
    return parser


def _tried(tree: Tree, mutations: Sequence[Mutation], path: Path | None) -> list[Tried]:
    """Try all mutants, one after the other."""
    rooms = {files_of()[each.file] for each in mutations}
    tests = sorted({test for room in rooms for test in room.tests})
    results: list[Tried] = []
    with bare_postgres() as server:
        servers = {"DURABLE_TEST_DATABASE_URL": server.uri()}
        began = time.monotonic()
        print("running the tests without a mutant:", *tests, flush=True)
        reach = kept(_REACH, tree, tests) or recorded(tree, tests, servers)
        keep(_REACH, tree, tests, reach)
        print(f"{len(reach.seconds)} tests in {time.monotonic() - began:.0f} s", flush=True)
        for mutation in mutations:
            results.append(each := tried(tree, mutation, reach, servers))
            known = "known " if each.fate is Fate.SURVIVED and known_reason(each) else ""
            what = f"{len(results)} of {len(mutations)}  {known}{each.fate}  {mutation.name}"
            print(f"{what}  {each.seconds:.1f} s  {each.by or each.said}", flush=True)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(as_json(results), indent=2) + "\n")
    return results


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
