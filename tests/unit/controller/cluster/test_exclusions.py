"""A node that the scheduler refused a job is out of its choice for a while, each time for twice as long."""

from stage2_controller.place.exclusions import EXCLUDED_S, MOST_DOUBLINGS, Exclusions
from stage2_controller.spec.key import Key

ONE, OTHER = Key("team-a", "one"), Key("team-b", "other")


def test_each_refusal_of_one_job_by_one_node_lasts_twice_as_long_up_to_a_bound() -> None:
    now = [0.0]
    made = Exclusions(lambda: now[0])
    for number in range(MOST_DOUBLINGS + 2):
        made.add(ONE, "a")
        length_s = EXCLUDED_S * 2 ** min(number, MOST_DOUBLINGS)
        now[0] += length_s - 1
        assert (made.of(ONE), made.of(OTHER), made.holds(ONE, "b")) == (["a"], [], False)
        now[0] += 1
        assert (made.of(ONE), made.holds(ONE, "a"), made.has_any(ONE)) == ([], False, True)


def test_nothing_is_kept_of_jobs_and_nodes_that_are_gone() -> None:
    made = Exclusions(lambda: 0.0)
    for node in ("a", "b"):
        made.add(ONE, node)
    made.add(OTHER, "a")
    made.forget_node("a")
    assert (made.of(ONE), made.jobs()) == (["b"], {ONE})
    made.forget_job(ONE)
    assert made.jobs() == set()
    made.add(ONE, "a")
    assert made._refusals == {(ONE, "a"): 1}, "another node of the name is another one"
