"""Mutants made by operators: the places without meaning, the sample, the tests of a line, and the trial."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from tests.mutants.mutant import SIMULATION
from tests.mutants.operators.known import KNOWN, Known
from tests.mutants.operators.meaning import meaning
from tests.mutants.operators.places import Mutation, drawn
from tests.mutants.operators.reach import Reach, keep, kept, recorded
from tests.mutants.operators.report import new_survivors, survivors, table
from tests.mutants.operators.rooms import ROOMS, files_of
from tests.mutants.operators.trial import Fate, Tried, tried
from tests.mutants.trees import ROOT, Tree, copied

_LATCH = "durable/agents/latch.py"
_TESTS = "tests/unit/agents/test_latch.py"
_COUNTED = "        self.failures_in_a_row += 1\n"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_rooms_name_files_and_tests_of_the_tree() -> None:
    assert len(files_of()) == sum(len(room.files) for room in ROOMS)
    for room in ROOMS:
        for name in (*room.files, *room.tests):
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("row", KNOWN, ids=lambda row: f"{row.file}: {row.after}")
def test_known_survivor_stands_in_its_file(row: Known) -> None:
    lines = [line.strip() for line in (ROOT / row.file).read_text().splitlines()]
    stripped = "\n".join(line for line in lines if line)
    assert row.before in stripped
    assert row.reason


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f(x: int | None) -> int: ...", "def f(x: int & None) -> int: ..."),
        ("x: list[int | str] = []", "x: list[int - str] = []"),
        ('"""A module of 1."""', '"""A module of 2."""'),
        ("if TYPE_CHECKING:\n    import a", "if not TYPE_CHECKING:\n    import a"),
        ("log.info('%s rows', count + 1)", "log.info('%s rows', count - 1)"),
        ("raise Misuse(f'{count + 1} rows')", "raise Misuse(f'{count - 1} rows')"),
        ("_BYTES = 64 * 1024", "_BYTES = 64 * 1025"),
        ("_PAUSE: Final = timedelta(seconds=5)", "_PAUSE: Final = timedelta(seconds=6)"),
        ("@dataclass(frozen=True, slots=True)\nclass A: ...", "@dataclass(frozen=False, slots=True)\nclass A: ..."),
        ("@override\ndef f(): ...", "def f(): ..."),
        ("def f(a, *, b=1): ...", "def f(a, /, b=1): ..."),
    ],
)
def test_place_without_meaning_makes_no_mutant(before: str, after: str) -> None:
    assert meaning(before) == meaning(after) is not None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = y + 1", "x = y - 1"),
        ("def f(x: int = 1): ...", "def f(x: int = 2): ..."),
        ("@property\ndef f(self): ...", "def f(self): ..."),
        ("raise Misuse from error", "raise Refused from error"),
        ("if log.enabled(1):\n    f()", "if log.enabled(2):\n    f()"),
        ("_NAMES = (1, 'a')", "_NAMES = (2, 'a')"),
    ],
)
def test_change_of_behaviour_has_another_meaning(before: str, after: str) -> None:
    assert meaning(before) != meaning(after)


def test_broken_source_has_no_meaning() -> None:
    assert meaning("x = = 1") is None
    assert meaning("def f(a, a): ...") is None


def test_each_place_makes_one_mutant(tree: Tree) -> None:
    (tree.folder / "some.py").write_text('"""1."""\n\n\ndef f(a: int | str) -> bool:\n    return a + 1 < 2 and not a\n')
    found = list(drawn(tree.folder, ["some.py"], seed=1))
    families = sorted(each.operator.partition("_")[0] for each in found)
    assert families == [
        "NumberReplacer",
        "NumberReplacer",
        "ReplaceAndWithOr",
        "ReplaceBinaryOperator",
        "ReplaceComparisonOperator",
        "ReplaceUnaryOperator",
    ]
    assert {(each.line, each.before) for each in found} == {(5, "return a + 1 < 2 and not a")}
    assert all(each.after != each.before and each.after in each.text for each in found)


def test_sample_depends_on_seed_and_text_alone(tree: Tree) -> None:
    source = (ROOT / _LATCH).read_text()
    (tree.folder / "latch.py").write_text(source)
    drawings = [[each.diff for each in drawn(tree.folder, ["latch.py"], seed)] for seed in (1, 1, 2)]
    (tree.folder / "latch.py").write_text(source.replace("\n\nclass Latch", "\n\nMORE = None\n\n\nclass Latch"))
    moved = [each.diff for each in drawn(tree.folder, ["latch.py"], seed=1)]
    assert drawings[0] == drawings[1] == moved
    assert drawings[0] != drawings[2]


def test_replaced_exception_is_a_class_of_the_module(tree: Tree) -> None:
    (tree.folder / "some.py").write_text("try:\n    x = f()\nexcept OSError:\n    x = y\n")
    (found,) = drawn(tree.folder, ["some.py"], seed=1)
    assert found.diff == "- except OSError:\n+ except CosmicRayTestingException:"
    assert found.text.endswith("class CosmicRayTestingException(Exception): ...\n")


def test_lines_without_test_are_those_of_their_function_or_class(tree: Tree) -> None:
    (tree.folder / "some.py").write_text(
        "LONGEST = 3\n"  # 1
        "class A:\n"  # 2
        "    most = 1\n"  # 3
        "    @property\n"  # 4
        "    def f(self, a=1):\n"  # 5
        "        if (a\n"  # 6
        "            or b):\n"  # 7
        "            return 1\n"  # 8
        "        return 2\n"  # 9
    )
    lines = {2: {"first"}, 3: {"first"}, 6: {"dear", "cheap"}, 9: {"cheap"}}
    reach = Reach({"some.py": {row: frozenset(lines[row]) for row in lines}}, {"dear": 2.0, "cheap": 1.0})
    expected = {1: 2, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 8: 0, 9: 1}
    assert {line: len(reach.of(tree, "some.py", line)) for line in expected} == expected
    assert reach.of(tree, "some.py", 7) == ["cheap", "dear"]


def test_trial_runs_the_tests_of_the_line(tmp_path: Path) -> None:
    source = (ROOT / _LATCH).read_text()
    line = source[: source.index(_COUNTED)].count("\n") + 1
    with copied() as tree:
        reach = recorded(tree, [_TESTS], {}, seeds=0)
        assert len(reach.of(tree, _LATCH, line)) >= 5
        assert SIMULATION not in reach.of(tree, _LATCH, line)
        keep(tmp_path / "reach.json", tree, [_TESTS], reach)
        assert kept(tmp_path / "reach.json", tree, [_TESTS]) == reach
        assert kept(tmp_path / "reach.json", tree, [_LATCH]) is None
        fates = {}
        for name, text in {
            "guard": source.replace(_COUNTED, "        self.failures_in_a_row -= 1\n"),
            "harmless": source.replace(_COUNTED, "        self.failures_in_a_row += 1 + 0\n"),
            "no program": source + "\n1 + Latch\n",
        }.items():
            mutation = Mutation(_LATCH, line, name, _COUNTED.strip(), name, text)
            fates[name] = tried(tree, mutation, reach, {}).fate
        unreached = Mutation(_LATCH, line, "unreached", "", "", source)
        assert tried(tree, unreached, Reach({}, {}), {}).said == "no test executes the line"
    assert fates == {"guard": Fate.KILLED, "harmless": Fate.SURVIVED, "no program": Fate.INCOMPETENT}


def test_report_counts_programs_and_shows_survivors() -> None:
    changes = [Mutation(_LATCH, 49, operator, "a", operator, "") for operator in ("A", "B", "C")]
    results = [
        Tried(changes[0], Fate.KILLED, "tests/unit/test_latch.py::test", "", 3, 1.0),
        Tried(changes[1], Fate.SURVIVED, "", "", 3, 1.0),
        Tried(changes[2], Fate.INCOMPETENT, "", "", 3, 1.0),
    ]
    assert [line.split() for line in table(results).splitlines()] == [
        ["module", "made", "killed", "survived", "incompetent", "killed", "%"],
        [_LATCH, "3", "1", "1", "1", "50"],
        ["all", "3", "1", "1", "1", "50"],
        [],
        ["killed", "by", "1", "tests/unit"],
    ]
    assert survivors(results) == f"{_LATCH}:49 B\n  3 tests execute the line\n- a\n+ B"
    assert new_survivors(results) == [results[1]]


def test_first_mutants_of_a_seed_are_programs() -> None:
    for each in islice(drawn(ROOT, [_LATCH], seed=1), 5):
        assert meaning(each.text) is not None
