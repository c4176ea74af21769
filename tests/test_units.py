import pytest

from meshwright.errors import MeshwrightError
from meshwright.units import (
    parse_bytes,
    parse_count,
    show_bytes,
    show_flops,
    show_percent,
    show_range,
    show_rate,
    show_seconds,
)

SHOWN = [
    (show_bytes(0), "0 B"),
    (show_bytes(999), "999 B"),
    (show_bytes(40.06e9), "40.1 GB"),
    (show_bytes(999_960), "1.00 MB"),
    (show_flops(1.834e15), "1.83 Pflop"),
    (show_rate(9_830, "tok/s"), "9.83 ktok/s"),
    (show_seconds(4.13), "4.13 s"),
    (show_seconds(0.00284), "2.84 ms"),
    (show_seconds(17e-6), "17.0 us"),
    (show_seconds(3e-8), "30.0 ns"),
    (show_seconds(0), "0 s"),
    (show_range(1.12e-3, 1.82e-3), "1.12 to 1.82 ms"),
    (show_range(112e-6, 1.82e-3), "112 us to 1.82 ms"),
    (show_range(0.0, 2e-3), "0 s to 2.00 ms"),
    (show_range(2e-3, 2.001e-3), "2.00 ms"),
    (show_percent(0.5817), "58.2%"),
]


@pytest.mark.parametrize(("shown", "wanted"), SHOWN)
def test_quantities_have_three_figures_and_a_unit(shown, wanted):
    assert shown == wanted


@pytest.mark.parametrize(("text", "count"), [("4M", 4_000_000), ("64k", 64_000), ("1.5G", 1_500_000_000), ("17", 17)])
def test_counts_take_decimal_prefixes(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "4X", "M", "-3", "1.5", "1e3"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(MeshwrightError, match="not a whole number"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MB", 64_000_000),
        ("64 MB", 64_000_000),
        ("1.5G", 1_500_000_000),
        ("2MiB", 2 << 20),
        ("2Ki", 2048),
        ("17B", 17),
    ],
)
def test_bytes_are_typed_as_screens_print_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "B", "64XB", "64MBB", "-3B"])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(MeshwrightError, match="not a number of bytes"):
        parse_bytes(text)
