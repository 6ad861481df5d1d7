"""The parts about backlogs, nodes and memory, as far as they need no server: what is compared with what."""

from __future__ import annotations

import pytest

from durable.errors import InvalidSetting
from tests.benchmarks import backlogs, memory, nodes
from tests.benchmarks.backlogs import Backlog
from tests.benchmarks.memory import Peaks, peak_bytes


def test_backlog_keeps_the_best_of_its_rounds() -> None:
    backlog = Backlog()

    backlog.measured(rate=900.0, claim=4.0)
    backlog.measured(rate=1_000.0, claim=5.0)

    assert backlog == Backlog(rate=1_000.0, claim=4.0)


def test_large_backlog_is_compared_with_the_small_one() -> None:
    rate, claim = backlogs.relations(Backlog(1_000.0, 4.0), Backlog(900.0, 5.0), 1_000_000, "no keys")

    assert (rate.name, rate.ratio) == ("handle while 1,000,000 rows wait, no keys", 0.9)
    assert (claim.name, claim.ratio) == ("claim a batch of 1,000,000 rows, no keys", 1.25)


def test_backlog_smaller_than_its_rounds_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="--rows 40000: 3 rounds use up 24000"):
        backlogs.run(3, 40_000)


def test_nodes_are_compared_with_one() -> None:
    two, four = nodes.relations({1: 500.0, 2: 900.0, 4: 1_000.0})

    assert (two.name, two.ratio) == ("handle on 2 nodes", 1.8)
    assert (four.name, four.ratio) == ("handle on 4 nodes", 2.0)


def test_peak_is_read_from_the_status_of_a_process() -> None:
    assert peak_bytes("Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t    88 kB\nVmRSS:\t    80 kB\n") == 88 * 1024


def test_status_without_a_peak_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="VmHWM"):
        peak_bytes("Name:\tpython\n")


def test_share_of_messages_keeps_its_first_peak() -> None:
    peaks = Peaks(1_000)
    for passed, peak in ((99, 1), (150, 2), (400, 3), (1_000, 4)):
        peaks.note(passed, peak)

    assert peaks.at == {0.1: 2, 0.5: 4, 1.0: 4}


def test_later_peaks_are_compared_with_the_first() -> None:
    half, whole = memory.relations("send", {0.1: 100 << 20, 0.5: 110 << 20, 1.0: 120 << 20})

    assert (half.name, half.ours, half.ratio) == ("send, peak after 50%", 110.0, 1.1)
    assert (whole.name, whole.ratio) == ("send, peak after 100%", 1.2)
