"""Results that threads make ahead: order, bounds, errors, and an end that leaves nothing behind."""

from __future__ import annotations

import threading
import time

import pytest

from realvr.errors import UserError
from realvr.imaging.ahead import MOST_THREADS, Ahead, threads_for


class Kitchen:
    """Makes n * n, and keeps count of what exists and who is at work."""

    def __init__(self, pause: float = 0.002) -> None:
        self.pause, self.lock = pause, threading.Lock()
        self.made: list[int] = []
        self.at_work = self.most_at_work = 0

    def __call__(self, number: int) -> int:
        with self.lock:
            self.at_work += 1
            self.most_at_work = max(self.most_at_work, self.at_work)
        time.sleep(self.pause)
        with self.lock:
            self.at_work -= 1
            self.made.append(number)
        if number < 0:
            raise UserError(f"{number} cannot be made")
        return number * number


def test_every_key_once_and_never_more_than_there_is_room_for() -> None:
    make = Kitchen()
    with Ahead(make, range(40), room=5, threads=3) as ahead:
        for number in range(40):
            assert ahead.get(number) == ahead.get(number) == number * number
            assert len(make.made) + make.at_work <= number + 5
            ahead.discard([number])
    assert sorted(make.made) == list(range(40)) and make.most_at_work <= 3


def test_work_goes_on_while_nobody_asks() -> None:
    """Deterministic: whoever holds the first result waits until the third was made."""
    third = threading.Event()

    def make(number: int) -> int:
        if number == 2:
            third.set()
        return number

    with Ahead(make, range(3), room=3, threads=1) as ahead:
        assert ahead.get(0) == 0
        assert third.wait(10), "nothing is made while the first result is in use"
        begun = ahead.waited
        assert ahead.get(2) == 2 and ahead.waited - begun < 1


def test_an_error_is_that_of_its_key() -> None:
    make = Kitchen()
    with Ahead(make, [1, -2, 3], room=3, threads=2) as ahead:
        assert ahead.get(1) == 1
        with pytest.raises(UserError, match="-2 cannot"):
            ahead.get(-2)
        assert ahead.get(3) == 9


def test_other_orders_and_keys_are_made_on_the_spot() -> None:
    with Ahead(Kitchen(0), [1, 2, 3], room=1, threads=1) as ahead:
        assert [ahead.get(number) for number in (3, 1, 9, 2)] == [9, 1, 81, 4]


def test_what_is_never_asked_for_does_not_block_the_rest() -> None:
    make = Kitchen(0)
    with Ahead(make, range(6), room=2, threads=1) as ahead:
        ahead.get(0)
        for number in range(4):
            ahead.discard([number])
        assert ahead.get(5) == 25 and make.made.count(5) == 1


def test_nothing_is_made_before_it_is_asked_for_nor_what_is_there() -> None:
    make = Kitchen(0)
    with Ahead(make, range(4), room=4, threads=1, known={2: 4}.get) as ahead:
        time.sleep(0.02)
        assert not make.made
        ahead.get(0)
        assert ahead.get(2) == 4
    assert 2 not in make.made


@pytest.mark.parametrize("room", [1, 2, 3, 5])
def test_what_comes_again_is_never_made_by_who_asks(room: int) -> None:
    """Nor twice, as far as the order could be read while the first result was there."""
    order, made = [1, 2, 1, 1, 2, 3, 1, 4, 3, 3, 4, 5], []

    def make(number: int) -> int:
        made.append((number, threading.current_thread() is threading.main_thread()))
        return number * number

    with Ahead(make, order, room, threads=2) as ahead:
        for key in order:
            assert ahead.get(key) == key * key
            ahead.discard([key])
            assert len(ahead._made) <= room
        assert not ahead._made and not ahead._uses
    assert {number for number, _ in made} == {1, 2, 3, 4, 5} and not any(asker for _, asker in made)
    assert len(made) == 5 or room < 5


def test_an_error_or_ctrl_c_ends_the_threads() -> None:
    make = Kitchen(0.02)
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), Ahead(make, range(100), room=50, threads=2) as ahead:
        ahead.get(0)
        raise KeyboardInterrupt
    assert threading.active_count() == before
    assert len(make.made) < 10, "what was only planned is not made any more"


def test_threads_share_the_cores() -> None:
    assert 1 <= threads_for(1) <= MOST_THREADS
    assert threads_for(1000) == 1
