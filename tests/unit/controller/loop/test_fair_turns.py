"""Whose key is served next: owners take turns, and none of an owner's own keys waits for ever."""

import asyncio

from stage2_controller.spec.names import Key
from stage2_controller.work_queue import NEW_FOR_A_KNOWN, FairTurns, WorkQueue

Named = tuple[str, str]


def served(turns: FairTurns[Named], count: int) -> list[Named]:
    return [turns.pop() for _ in range(count)]


def test_owners_take_turns_in_the_order_in_which_they_came() -> None:
    turns: FairTurns[Named] = FairTurns(lambda item: item[0])
    for item in [("a", "1"), ("a", "2"), ("a", "3"), ("b", "1"), ("c", "1"), ("c", "2")]:
        turns.put(item, new=True)
    assert served(turns, 6) == [("a", "1"), ("b", "1"), ("c", "1"), ("a", "2"), ("c", "2"), ("a", "3")]


def test_what_is_new_comes_first_and_what_is_known_has_its_turn() -> None:
    turns: FairTurns[Named] = FairTurns(lambda item: item[0])
    turns.put(("a", "known"), new=False)
    for number in range(9):
        turns.put(("a", str(number)), new=True)
    assert served(turns, 10).index(("a", "known")) == NEW_FOR_A_KNOWN


def test_an_owner_who_has_waited_for_nothing_is_not_served_twice_in_a_row() -> None:
    turns: FairTurns[Named] = FairTurns(lambda item: item[0])
    turns.put(("a", "1"), new=True)
    assert served(turns, 1) == [("a", "1")]
    for item in [("b", "1"), ("b", "2"), ("a", "2")]:
        turns.put(item, new=True)
    assert served(turns, 3) == [("b", "1"), ("a", "2"), ("b", "2")]


async def test_a_repair_is_the_next_pass_but_one_while_another_namespace_makes_a_thousand_jobs() -> None:
    calls: list[Key] = []
    done = asyncio.Event()

    async def work(key: Key) -> None:
        calls.append(key)
        if len(calls) == 1:
            for number in range(1000):
                queue.add(Key("storm", str(number)))
            queue.add(Key("quiet", "repair"))
        if calls.count(Key("quiet", "repair")) == 2:
            done.set()

    queue = WorkQueue(work, owner_of=lambda key: key.namespace, concurrency=1)
    queue.add(Key("quiet", "repair"))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(queue.run())
        await asyncio.wait_for(done.wait(), timeout=10)
        running.cancel()
    assert calls[:3] == [Key("quiet", "repair"), Key("storm", "0"), Key("quiet", "repair")]
