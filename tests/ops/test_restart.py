"""When a process is started again: the numbers of the README's promise, on a clock that we hold."""

from __future__ import annotations

from common.supervision.restart import Due, Phase, RestartPolicy


def _ready_policy(now: float = 0.0) -> RestartPolicy:
    policy = RestartPolicy(stall_timeout_s=30.0, startup_timeout_s=600.0)
    policy.started(now)
    policy.ready(now)
    return policy


def test_death_before_ever_ready_is_given_up() -> None:
    policy = RestartPolicy(stall_timeout_s=30.0)
    policy.started(0.0)
    assert policy.died(1.0) is None
    assert policy.deadline() is None
    assert policy.due(1e9) is None


def test_deaths_in_a_row_wait_longer_up_to_ten_seconds() -> None:
    policy = _ready_policy()
    now, delays = 1.0, []
    for _ in range(8):
        delay_s = policy.died(now)
        assert delay_s is not None
        delays.append(delay_s)
        assert policy.deadline() == now + delay_s
        now += delay_s
        assert policy.due(now) is Due.START
        policy.started(now)
        now += 1.0
    assert delays == [0, 1, 2, 4, 8, 10, 10, 10]


def test_start_is_not_due_before_its_time_and_due_once() -> None:
    policy = _ready_policy()
    policy.died(1.0)
    policy.due(1.0)
    policy.started(1.0)
    policy.died(2.0)
    assert policy.due(2.9) is None
    assert policy.due(3.0) is Due.START
    assert policy.due(3.1) is None


def test_ten_seconds_of_being_ready_forget_earlier_deaths() -> None:
    policy = _ready_policy()
    for now in (1.0, 2.0, 3.0):
        policy.died(now)
        policy.started(now)
    policy.ready(100.0)
    assert policy.died(109.9) == 4.0
    policy.started(120.0)
    policy.ready(120.0)
    assert policy.died(130.0) == 0.0


def test_time_without_being_ready_forgets_nothing() -> None:
    policy = _ready_policy()
    policy.died(1.0)
    policy.started(1.0)
    assert policy.died(500.0) == 1.0


def test_missing_sign_of_life_is_a_stall_after_the_timeout() -> None:
    policy = _ready_policy(now=10.0)
    policy.alive(20.0)
    assert policy.deadline() == 50.0
    assert policy.due(49.9) is None
    assert policy.due(50.0) is Due.KILL_STALLED
    # A word that was already on its way saves nobody, and the kill is not ordered twice.
    policy.alive(50.1)
    assert policy.due(1e9) is None
    assert policy.died(51.0) == 0.0
    assert policy.phase is Phase.DOWN


def test_start_up_needs_no_sign_of_life_but_has_an_end() -> None:
    policy = RestartPolicy(stall_timeout_s=30.0, startup_timeout_s=600.0)
    policy.started(0.0)
    policy.alive(5.0)
    assert policy.due(599.0) is None
    assert policy.due(600.0) is Due.KILL_SLOW


def test_second_ready_of_one_process_changes_nothing() -> None:
    policy = _ready_policy(now=0.0)
    policy.ready(8.0)
    policy.died(10.0)
    policy.started(10.0)
    policy.died(11.0)
    assert policy.deadline() == 12.0
