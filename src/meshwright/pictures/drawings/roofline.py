"""Draw a matmul on the roofline of a chip: flops per second over flops per byte, on logarithmic axes."""

from __future__ import annotations

import math
from typing import NamedTuple

from meshwright.pictures.colours import named
from meshwright.pictures.panels import Sketch
from meshwright.pictures.scene import Box, Label, Line, Scene
from meshwright.planning.cost.rates.product import Intensity, PricedProduct
from meshwright.units import show_rate

_HEIGHT = 13  # lines
_MOST_WIDE = 96  # characters
_LEFT = 12  # Characters for the labels at the left.
_ROOM = 4  # The factor between the outermost ridge or point and the edge of the picture.


class _Roof(NamedTuple):
    """The slope of the roofline for one kind of traffic (`name`), `memory` or `network`.

    intensity: the matmul's flops per byte of the traffic. ridge: the flops per byte from which it is compute bound.
    """

    name: str
    intensity: float
    ridge: float


def roofline_sketch(priced: PricedProduct, *, dtype: str) -> Sketch | None:
    """Draw a matmul on the rooflines of memory and of its longest collective; None for a resharding.

    dtype: the elements' dtype, which determines the peak flops.
    """
    way, system = priced.chosen, priced.layout.system
    found: dict[str, Intensity | None] = {"memory": way.memory, "network": way.network}
    roofs = [_Roof(name, one.value, one.here) for name, one in found.items() if one]
    if not roofs or not way.seconds:
        return None
    peak, rate = system.peak(dtype), way.implementation.flops / way.seconds
    said = [f"peak {show_rate(peak, 'flop/s')} in {dtype}"]
    said += [f"{roof.name} {show_rate(peak / roof.ridge, 'B/s')}" for roof in roofs]
    notes = [f"roofs: {'; '.join(said)}", f"●: the product, {show_rate(rate, 'flop/s')} if everything overlaps"]
    notes += [
        f"{roof.name}: {roof.intensity:,.0f} flops a byte; compute bound from {roof.ridge:,.0f}, where its slope ends"
        for roof in roofs
    ]
    return Sketch(
        title=f"roofline of {system.chip.name}",
        panels=(),
        draw=lambda width: _draw(roofs, peak, rate, min(width, _MOST_WIDE)),
        notes=tuple(notes),
    )


def _draw(roofs: list[_Roof], peak: float, rate: float, width: float) -> Scene:
    """Return the roofline as a scene.

    peak: the chip's flops per second. rate: the matmul's. width: that of the scene, in characters.
    """
    inner = width - _LEFT - 1
    lowest = min(min(roof.intensity, roof.ridge) for roof in roofs) / _ROOM
    highest = max(max(roof.intensity, roof.ridge) for roof in roofs) * _ROOM
    bottom = min(rate / _ROOM, *(peak * lowest / roof.ridge for roof in roofs))

    def x_of(intensity: float) -> float:
        return _LEFT + math.log(intensity / lowest) / math.log(highest / lowest) * inner

    def y_of(flops: float) -> float:
        return 1.5 + math.log(peak / flops) / math.log(peak / bottom) * (_HEIGHT - 2)

    items: list[Box | Line | Label] = [
        Line(_LEFT, 0.5, 0, _HEIGHT),
        Line(_LEFT, _HEIGHT + 0.5, inner, 0),
        Label(0, y_of(peak) - 0.5, show_rate(peak, "flop/s")),
    ]
    if abs(y_of(rate) - y_of(peak)) >= 1:
        items.append(Label(0, y_of(rate) - 0.5, show_rate(rate, "flop/s")))
    ridge = min(roof.ridge for roof in roofs)
    items.append(Line(x_of(ridge), y_of(peak), _LEFT + inner - x_of(ridge), 0))
    for roof in roofs:
        start = max(lowest, roof.ridge * bottom / peak)
        x, y = x_of(start), y_of(peak * start / roof.ridge)
        items.append(Line(x, y, x_of(roof.ridge) - x, y_of(peak) - y, named(_COLOURS[roof.name])))
        items.append(Label(x + 2, min(y, _HEIGHT - 0.5), roof.name))
    for power in range(math.ceil(math.log10(lowest)), math.floor(math.log10(highest)) + 1):
        text = f"{10**power:,}" if power >= 0 else f"{10**power:g}"
        items.append(Label(min(x_of(10**power) - len(text) / 2, width - len(text)), _HEIGHT + 1, text))
    for place, roof in enumerate(sorted(roofs, key=lambda roof: roof.intensity), start=1):
        hint = f"{roof.intensity:,.0f} flops a byte of {roof.name}"
        items.append(Box(x_of(roof.intensity) - 0.5, y_of(rate) - 0.5, 1, 1, "●", hint=hint))
        items.append(Label(x_of(roof.intensity), y_of(rate) + place - 0.5, roof.name))
    items.append(Label(_LEFT + 1, _HEIGHT + 2, "flops a byte"))
    return Scene(width, _HEIGHT + 3, tuple(items))


_COLOURS = {"memory": "parameters", "network": "exposed communication"}
"""The name in `colours.NAMED` of each slope's colour."""
