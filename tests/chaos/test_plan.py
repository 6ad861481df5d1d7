"""The plan of faults: a pure function of the seed, in which two faults never meet at one place."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.plan import SECONDS, TRANSPORTS, plan
from tests.chaos.profiles import BROKER, POSTGRES, PROFILES, WIRES

SEEDS = range(30)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("profile", ["short", "pr"])
def test_plan_is_a_function_of_its_seed(profile: str, transport: str) -> None:
    plans = [plan(seed, PROFILES[profile], transport) for seed in SEEDS]
    assert plans == [plan(seed, PROFILES[profile], transport) for seed in SEEDS]
    assert len({each.lanes for each in plans}) == len(SEEDS)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_faults_of_a_lane_do_not_overlap(transport: str) -> None:
    profile = PROFILES["pr"]
    for seed in SEEDS:
        for lane in plan(seed, profile, transport).lanes:
            assert all(before.at + before.seconds < after.at for before, after in pairwise(lane))
            assert all(fault.at + fault.seconds <= profile.faults_seconds for fault in lane)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lanes_share_no_place_except_a_service(transport: str) -> None:
    """A service names its server, its snapshots and its storm, which do not undo each other."""
    lanes = plan(1, PROFILES["nightly"], transport).lanes
    places = [
        place for lane in lanes for place in {fault.place for fault in lane} if place not in ("orders", "billing")
    ]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_several_faults_are_there_at_once(transport: str) -> None:
    faults = plan(1, PROFILES["pr"], transport).faults
    at_once = [sum(each.at <= one.at <= each.at + each.seconds for each in faults) for one in faults]
    assert max(at_once) >= 4


def test_long_run_has_every_kind_of_fault() -> None:
    plans = [plan(seed, PROFILES["nightly"], "rabbitmq") for seed in range(10)]
    kinds = {fault.kind for each in plans if each.pooled for fault in each.faults}
    assert kinds == set(FAULTS)
    assert {*POSTGRES, *WIRES, *BROKER, *SECONDS} < set(FAULTS)


def test_short_run_over_tcp_has_no_fault_of_a_broker() -> None:
    assert not {fault.kind for fault in plan(1, PROFILES["pr"], "tcp").faults} & set(BROKER)
