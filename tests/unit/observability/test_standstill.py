"""The rule that names what has kept an event loop."""

from __future__ import annotations

from durable.observability.standstill import Standstill, Unseen


def test_task_seen_for_the_limit_is_named_with_its_seconds() -> None:
    standstill = Standstill[str](due=10.0)
    for tenth in range(1, 9):
        standstill.look(10.0 + tenth / 10, "handler", late_by=0.0)
    (found,) = standstill.found(10.85, 0.0).items()
    assert found[0] == "handler"
    assert 0.79 < found[1] < 0.81


def test_shorter_steps_of_several_tasks_name_none() -> None:
    standstill = Standstill[str](due=10.0)
    for tenth in range(1, 9):
        standstill.look(10.0 + tenth / 10, f"task {tenth % 2}", late_by=0.0)
    assert standstill.found(10.85, 0.8) == {}


def test_suspended_process_names_none() -> None:
    standstill = Standstill[str](due=10.0)
    standstill.look(10.1, "handler", late_by=0.0)
    standstill.look(70.2, "handler", late_by=60.0)
    standstill.look(70.3, "handler", late_by=0.0)
    assert standstill.found(70.35, 0.3) == {}


def test_time_of_a_suspension_is_not_added_to_a_blocking_task() -> None:
    standstill = Standstill[str](due=10.0)
    standstill.look(10.6, "handler", late_by=0.0)
    standstill.look(70.7, "handler", late_by=60.0)
    assert 0.59 < standstill.found(70.75, 0.0)["handler"] < 0.61


def test_computation_without_a_look_is_found_without_its_task() -> None:
    assert Standstill[str](due=10.0).found(15.0, 4.8) == {Unseen.COMPUTATION: 4.8}


def test_computation_with_a_late_look_is_found_without_its_task() -> None:
    standstill = Standstill[str](due=10.0)
    standstill.look(15.0, "handler", late_by=4.9)
    assert standstill.found(15.0, 4.8) == {Unseen.COMPUTATION: 4.8}


def test_computation_before_a_suspension_is_found_once() -> None:
    standstill = Standstill[str](due=10.0)
    for tenth in range(1, 20):
        standstill.look(10.0 + tenth / 10, "handler", late_by=0.0)
    standstill.look(70.0, "handler", late_by=58.0)
    assert standstill.found(70.0, 2.1).keys() == {"handler"}
