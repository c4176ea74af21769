"""A value is followed back to what made it."""

from meshwright.description.hlo.dataflow import origin
from meshwright.description.hlo.parser import parse_hlo

FETCHED = """HloModule fetched, is_scheduled=true

ENTRY main {
  p = f32[4,8]{1,0} parameter(0)
  q = f32[4,8]{1,0} parameter(1)
  s1 = ((f32[4,8]{1,0}), f32[2,8]{1,0:S(1)}, s32[]) slice-start(p), slice={[0:2], [0:8]}
  s2 = ((f32[4,8]{1,0}), f32[2,8]{1,0:S(1)}, s32[]) slice-start(OTHER), slice={[2:4], [0:8]}
  d1 = f32[2,8]{1,0:S(1)} slice-done(s1)
  d2 = f32[2,8]{1,0:S(1)} slice-done(s2)
  j = f32[4,8]{1,0:S(1)} custom-call(d1, d2), custom_call_target="TARGET"
  ROOT r = f32[8,4]{1,0} transpose(j), dimensions={1,0}
}
"""


def source(other, target):
    """The name of what made the program's result."""
    module = parse_hlo(FETCHED.replace("OTHER", other).replace("TARGET", target))
    return origin(module, module.root("main")).name


def test_an_array_that_is_fetched_in_slices_and_joined_is_that_array():
    assert source("p", "ConcatBitcast") == "p"


def test_slices_of_two_arrays_are_no_one_array_nor_is_what_another_call_makes():
    assert source("q", "ConcatBitcast") == "j"
    assert source("p", "Sort") == "j"
