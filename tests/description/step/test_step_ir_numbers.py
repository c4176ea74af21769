"""The numbers of kinds of work, by which the times of ops are known."""

from meshwright.description.step import ir


def test_numbers_of_work_are_bounded_and_never_given_twice():
    most = ir._number.cache_info().maxsize
    first = ir._number(("a test's work", 0))
    assert ir._number(("a test's work", 0)) == first
    numbers = [ir._number(("a test's work", each)) for each in range(1, most + 1)]
    assert ir._number.cache_info().currsize == most
    assert len({first, *numbers, ir._number(("a test's work", 0))}) == most + 2
