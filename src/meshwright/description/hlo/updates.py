"""Find which argument each result of a program updates, as optimizers do: result = factor * argument + other terms.

The argument's share in a value (`Share`) consists of this factor and of whether the value is the argument itself, or
the argument overwritten in part. The module must be read before XLA optimizes it, because its op names then show what
JAX differentiated. A gradient never counts as an update of its parameter, whatever is added to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.description.hlo.dataflow import INLINE, VIEWS, only_caller
from meshwright.description.hlo.module import Instruction, Module

_FORWARDS = frozenset(VIEWS | {"convert", "reduce-precision", "all-gather", "all-reduce", "dynamic-slice"})
"""Opcodes whose result is their operand in another form: viewed, cast, gathered, summed over devices, or sliced."""

_ANNOTATIONS = frozenset(
    {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "LayoutConstraint"}
    | {"xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape", "xla.sdy.FuncResultSharding"}
)
"""Custom calls that only annotate their operands' sharding, layout or memory, and return them."""

_WRITES = ("dynamic-update-slice", "scatter")

_LEAST_SHARE = 0.5
"""Smallest factor of a model parameter in its update; in a gradient plus weight decay it is far smaller."""

_Place = tuple[int, int | None]
"""A parameter of a computation: its number, and the index of an element if it is a tuple (else None)."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """How much of an argument is in a value that is computed from it: value = factor * argument + other terms."""

    factor: float | None = 1.0  # None if unknown.
    is_changed: bool = False  # False if the value is the argument itself.
    # Whether a part of the argument is overwritten at indices that are not constants, as in a KV cache.
    is_written: bool = False

    def scaled(self, factor: float | None) -> Share:
        """Return the argument's share in the value times `factor`."""
        known = self.factor is not None and factor is not None
        product = self.factor * factor if known else None  # type: ignore[operator]
        return Share(factor=product, is_changed=True, is_written=self.is_written)

    def through(self, outer: Share) -> Share:
        """Return the argument's share in another value, in which this value has the share `outer`."""
        known = self.factor is not None and outer.factor is not None
        factor = self.factor * outer.factor if known else None  # type: ignore[operator]
        is_changed, is_written = self.is_changed or outer.is_changed, self.is_written or outer.is_written
        return Share(factor=factor, is_changed=is_changed, is_written=is_written)


_Shares = dict[_Place, Share]
"""The share of each parameter in a value; parameters without a share are left out."""


class Updates:
    """Finds the arguments of a module that its results are new versions of, as a step's new parameters are."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._found: dict[tuple[str, str, int | None], _Shares] = {}

    def of(self, result: Instruction) -> Mapping[int, Share]:
        """Return, by argument number, the `Share` of each argument that the result updates or returns unchanged."""
        found = self._shares(result, None)
        return {number: share for (number, _), share in found.items() if self._is_update(number, share)}

    @cached_property
    def differentiated(self) -> frozenset[int]:
        """Numbers of the arguments that are read, directly or in another form, by functions that JAX differentiates."""
        parameters = self.module.computations[self.module.entry].parameters
        return frozenset(number for number, one in parameters.items() if self._is_in_forward(one))

    def _is_update(self, number: int, share: Share) -> bool:
        """Whether a result with this share of argument `number` is an update of the argument.

        If JAX differentiates the argument, as a model parameter, its factor must be at least `_LEAST_SHARE`. Other
        arguments, such as moments, may have any positive or unknown factor.
        """
        if number in self.differentiated:
            return share.factor is not None and share.factor >= _LEAST_SHARE
        return share.factor is None or share.factor > 0

    def _is_in_forward(self, parameter: Instruction) -> bool:
        """Whether an argument, directly or in another form, is used by a function that JAX differentiates."""
        waiting, seen = [parameter], set()
        while waiting:
            held = waiting.pop()
            for user in self.module.users(held):
                if _is_differentiated(user):
                    return True
                forms = [user] if user.opcode in _FORWARDS else self._inside(held, user)
                waiting += [form for form in forms if (form.computation, form.name) not in seen]
                seen |= {(form.computation, form.name) for form in forms}
        return False

    def _inside(self, held: Instruction, user: Instruction) -> list[Instruction]:
        """Return the instructions that have the value of `held` inside the computations to which `user` passes it.

        If `user` is a fusion or call, they are in its computation. If it is a tuple, they are in the loop bodies and
        branches that take the tuple.
        """
        module, places = self.module, [i for i, name in enumerate(user.operands) if name == held.name]
        if user.opcode in INLINE:
            parameters = module.computations[user.called("calls", "to_apply")[0]].parameters
            return [parameters[i] for i in places if i in parameters]
        if user.opcode != "tuple":
            return []
        bodies = [name for caller in module.users(user) for name in (*caller.called("body"), *caller.branches)]
        parameters = [one for name in bodies for one in module.computations[name].parameters.values()]
        taken = [take for one in parameters for take in module.users(one) if take.opcode == "get-tuple-element"]
        return [take for take in taken if take.index in places]

    def _shares(self, value: Instruction, index: int | None) -> _Shares:
        """Return the share of each parameter of the enclosing computation in a value.

        index: the element of the value that counts, if the value is a tuple; else None.
        """
        key = value.computation, value.name, index
        if key not in self._found:
            self._found[key] = {}  # Ends the recursion if a value depends on itself.
            self._found[key] = self._computed(value, index)
        return self._found[key]

    def _computed(self, value: Instruction, index: int | None) -> _Shares:
        """Compute what `_shares` returns, from the shares in the operands."""
        module, opcode = self.module, value.opcode
        if opcode == "parameter":
            return {(value.index, index): Share()}
        if opcode == "get-tuple-element":
            return self._shares(module.operand(value), value.index)
        if opcode == "tuple":
            is_there = index is not None and index < len(value.operands)
            return self._shares(module.operand(value, index or 0), None) if is_there else {}
        if opcode == "opt-barrier":
            return self._shares(module.operand(value), index)
        if opcode in INLINE:
            root = module.root(value.called("calls", "to_apply")[0])
            return self._outside(self._shares(root, index), list(value.operands), value)
        if opcode == "while":
            return self._after_loop(value, index)
        if opcode == "conditional":
            operands = value.operands[1:]
            return _best(
                *(
                    self._outside(self._shares(self.module.root(name), index), [operand], value)
                    for name, operand in zip(value.branches, operands, strict=False)
                )
            )
        if value.custom_call_target in _ANNOTATIONS and (index or 0) < len(value.operands):
            return self._shares(module.operand(value, index or 0), None)
        return {} if index is not None else self._arithmetic(value)

    def _arithmetic(self, value: Instruction) -> _Shares:
        """Return the shares of parameters in the result of an op that is neither a call nor a tuple."""
        module, opcode = self.module, value.opcode
        if opcode in _FORWARDS:
            return self._shares(module.operand(value), None)
        if not value.op_name or _is_differentiated(value):
            return {}
        if opcode in ("select", "clamp"):
            kept = module.operands(value)[1:] if opcode == "select" else module.operands(value)[1:2]
            return _best(*(self._shares(one, None) for one in kept))
        if opcode in _WRITES:
            return self._written(value)
        if opcode in ("add", "maximum", "minimum"):
            return _best(*(_scaled(self._shares(one, None), 1.0) for one in module.operands(value)[:2]))
        if opcode not in ("subtract", "multiply", "divide"):
            return {}
        left, right = module.operands(value)
        if opcode == "subtract":
            return _best(_scaled(self._shares(left, None), 1.0), _scaled(self._shares(right, None), -1.0))
        if opcode == "divide":
            by = self._factor(right)
            return self._times(left, 1 / by if by else None, right)
        return _best(self._times(left, self._factor(right), right), self._times(right, self._factor(left), left))

    def _written(self, value: Instruction) -> _Shares:
        """Return the shares in the result of `value`, which overwrites a part of an array.

        For each parameter, it is the larger one of its shares in the array and in the new part.
        """
        array, *rest = self.module.operands(value)
        part, places = (rest[1], rest[:1]) if value.opcode == "scatter" else (rest[0], rest[1:])
        shares = _scaled(self._shares(array, None), 1.0)
        if not all(self._is_fixed(place) for place in places):
            shares = {place: replace(share, is_written=True) for place, share in shares.items()}
        return _best(shares, _scaled(self._shares(part, None), 1.0))

    def _is_fixed(self, value: Instruction) -> bool:
        """Whether a value is computed from constants alone."""
        waiting, seen = [value], set()
        while waiting:
            held = waiting.pop()
            if (held.computation, held.name) in seen:
                continue
            seen.add((held.computation, held.name))
            if held.opcode == "parameter":
                caller = only_caller(self.module, held)
                if caller is None or caller.opcode not in INLINE:
                    return False
                waiting.append(self.module.operand(caller, held.index))
            waiting += self.module.operands(held)
        return True

    def _times(self, value: Instruction, factor: float | None, scale: Instruction) -> _Shares:
        """Return the shares of parameters in the product or the quotient of `value` and `scale`.

        Empty unless `scale` is a scalar or a broadcast scalar: Adam's divisor, for example, differs between elements.
        factor: the number by which `value` is multiplied, None if unknown.
        """
        while _is_form(scale):
            scale = self.module.operand(scale)
        return _scaled(self._shares(value, None), factor) if scale.shape.size == 1 else {}

    def _factor(self, value: Instruction) -> float | None:
        """Return the number that a value equals; 1 if it is 1 plus or minus an unknown (weight decay); else None."""
        module, opcode = self.module, value.opcode
        if opcode == "constant":
            try:
                return float(value.text)
            except ValueError:
                return None
        if _is_form(value):
            return self._factor(module.operand(value))
        if opcode not in ("add", "subtract", "multiply"):
            return None
        left, right = (self._factor(one) for one in module.operands(value))
        if left is not None and right is not None:
            return {"add": left + right, "subtract": left - right, "multiply": left * right}[opcode]
        return 1.0 if left == 1.0 and opcode != "multiply" else None

    def _outside(self, inside: _Shares, operands: list[str], caller: Instruction) -> _Shares:
        """Convert shares of a computation's parameters to shares of the parameters of its caller's computation.

        Args:
            inside: the shares of the computation's parameters.
            operands: the caller's operand for each parameter.
            caller: the instruction that calls the computation.
        """
        given = self.module.computations[caller.computation].instructions
        return _best(
            *(
                _through(self._shares(given[operands[number]], index), share)
                for (number, index), share in inside.items()
                if number < len(operands)
            )
        )

    def _after_loop(self, loop: Instruction, index: int | None) -> _Shares:
        """Return the shares of parameters in element `index` of a loop's final state.

        They are the shares in the loop's initial state, times the factors that an iteration applies.
        """
        root, before = self.module.root(loop.called("body")[0]), self.module.operand(loop)
        kept: dict[int | None, Share] = {index: Share()}
        waiting = [index]
        while waiting:
            element = waiting.pop()
            for (_, other), share in self._shares(root, element).items():
                if other not in kept:
                    kept[other] = share.through(kept[element])
                    waiting.append(other)
                elif share.is_changed:
                    kept[other] = share.through(kept[other])
        return _best(*(_through(self._shares(before, element), share) for element, share in kept.items()))


def _is_form(value: Instruction) -> bool:
    """Whether a value is its operand viewed, cast, broadcast or annotated with a sharding (as on explicit meshes)."""
    return value.opcode in VIEWS or value.opcode in ("convert", "broadcast") or value.custom_call_target in _ANNOTATIONS


def _is_differentiated(instruction: Instruction) -> bool:
    """Whether an op is in a function that JAX differentiates, forward or backward, by its op_name."""
    return "jvp(" in instruction.op_name or "transpose(" in instruction.op_name


def _scaled(shares: _Shares, factor: float | None) -> _Shares:
    return {place: share.scaled(factor) for place, share in shares.items()}


def _through(shares: _Shares, outer: Share) -> _Shares:
    return {place: share.through(outer) for place, share in shares.items()}


def _best(*several: _Shares) -> _Shares:
    """Return, for each parameter, the share with the largest factor among the shares in several values."""
    found: _Shares = {}
    for shares in several:
        for place, share in shares.items():
            other = found.get(place, share)
            larger = max(share, other, key=lambda one: (one.factor is not None, one.factor or 0.0))
            is_changed, is_written = share.is_changed or other.is_changed, share.is_written or other.is_written
            found[place] = replace(larger, is_changed=is_changed, is_written=is_written)
    return found
