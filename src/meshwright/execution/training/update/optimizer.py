"""Optimizer settings of a run: learning rates, schedule, weight decay, clipping. `Strategy` names the optimizer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import optax

from meshwright.description.step.model import Model
from meshwright.description.step.parameter_tree import check_patterns, leaves, matches, parameters
from meshwright.description.step.strategy import RateSchedule, Strategy
from meshwright.errors import MeshwrightError
from meshwright.support.field_types import check_fields, from_data
from meshwright.units import parse_number

NO_DECAY = ("*norm*", "*bias*", "sinks", "layer_scale", "embedding", "positions")
"""Path patterns of the parameters without weight decay by default: norms, biases, embedding tables."""

LONGEST_WARMUP = 2000
"""Maximum default warm-up in steps, as in the recipes of GPT-3 and Llama."""

USED: Mapping[str, frozenset[str]] = {
    "weight_decay": frozenset({"adamw", "adamw-8bit", "lion", "muon"}),
    "no_decay": frozenset({"adamw", "adamw-8bit", "lion", "muon"}),
    "b1": frozenset({"adamw", "adamw-8bit", "lion", "muon"}),
    "b2": frozenset({"adamw", "adamw-8bit", "lion", "muon"}),
    "eps": frozenset({"adamw", "adamw-8bit", "muon"}),
    "momentum": frozenset({"muon"}),
    "decay_share": frozenset({"wsd"}),
    "final_rate": frozenset({"cosine", "linear", "wsd"}),
    "max_bad_steps": frozenset({"skip"}),
}
"""{setting: the optimizers, schedules or bad-step rules that use it}; all use a setting that is not listed."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Learning rate of each step and parameter, weight decay, clipping and the handling of bad steps.

    Args:
        learning_rate: the highest rate, reached at the end of the warm-up.
        schedule: the rate after the warm-up. cosine, linear: decays to `final_rate` of the highest at `decay_steps`.
            wsd (arXiv:2404.06395): stays constant, and decays in the last `decay_share` of the steps after the warm-up.
            constant: no decay.
        warmup_steps: steps in which the rate rises linearly from the first to the highest.
        decay_steps: the step at which the schedule reaches its final rate.
        decay_share: for wsd, the share of the steps after the warm-up in which the rate decays.
        final_rate: the rate at the end of the schedule as a share of the highest.
        first_rate: the rate at the first step as a share of the highest; None for 1 / warmup_steps. 0 in configs from
            before this setting.
        weight_decay: share of a weight subtracted per step, times the learning rate.
        no_decay: path patterns of the parameters without weight decay.
        b1, b2, eps: constants of AdamW (arXiv:1711.05101) and Lion (arXiv:2302.06675).
        momentum: Muon's momentum.
        clip_norm: maximum norm of all gradients together; 0 for no clipping.
        rates: `PATTERN=FACTOR` entries. The learning rate of a parameter is multiplied by the factor of the last entry
            whose pattern its path matches.
        spike_factor: a step is bad if its gradient norm exceeds this multiple of the median of earlier norms; None:
            only a loss or gradients that are not finite make a step bad.
        max_bad_steps: if bad steps are skipped (`Strategy.on_bad_step`), the run ends after this number in a row.
    """

    learning_rate: float = 3e-3
    schedule: RateSchedule = "cosine"
    warmup_steps: int = 20
    decay_steps: int = 200
    decay_share: float = 0.2
    final_rate: float = 0.1
    first_rate: float | None = None
    weight_decay: float = 0.1
    no_decay: tuple[str, ...] = NO_DECAY
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    clip_norm: float = 1.0
    rates: tuple[str, ...] = ()
    spike_factor: float | None = None
    max_bad_steps: int = 10

    def __post_init__(self) -> None:
        check_fields(self)
        if self.learning_rate <= 0:
            raise MeshwrightError(f"learning_rate is {self.learning_rate}; it is a number above 0, as 0.003")
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            if getattr(self, name) < 0:
                raise MeshwrightError(f"{name} is {getattr(self, name)}; it is a number from 0")
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise MeshwrightError(f"{name} is {getattr(self, name)}; it is a number from 0 to below 1")
        for name in ("final_rate", "first_rate", "decay_share"):
            if not 0 <= (getattr(self, name) or 0) <= 1:
                raise MeshwrightError(f"{name} is {getattr(self, name)}; it is a share from 0 to 1")
        for name in ("decay_steps", "eps"):
            if getattr(self, name) <= 0:
                raise MeshwrightError(f"{name} is {getattr(self, name)}; it is a number above 0")
        if self.spike_factor is not None and self.spike_factor <= 1:
            raise MeshwrightError(f"spike_factor is {self.spike_factor}; it is a number above 1, as 10")
        if self.max_bad_steps < 1:
            raise MeshwrightError(f"max_bad_steps is {self.max_bad_steps}; it is a whole number from 1")
        self.factors  # noqa: B018  Parsed here, so that an invalid entry of `rates` is an error at once.

    @property
    def factors(self) -> tuple[tuple[str, float], ...]:
        """The entries of `rates` as (pattern, factor)."""
        return tuple(map(_factor, self.rates))

    def factor(self, path: str) -> float:
        """Return the factor by which the learning rate of the parameter at `path` is multiplied."""
        return next((factor for pattern, factor in reversed(self.factors) if matches(pattern, path)), 1.0)

    def decays(self, path: str) -> bool:
        """Whether weight decay applies to the parameter at `path`."""
        return not any(matches(pattern, path) for pattern in self.no_decay)

    def optax_schedule(self) -> optax.Schedule:
        """Return the learning rate as an Optax schedule."""
        warmup = optax.linear_schedule(self._first, self.learning_rate, self.warmup_steps)
        last, ends = self.learning_rate * self.final_rate, self.end - self.warmup_steps
        if self.schedule == "cosine":
            parts, at = [optax.cosine_decay_schedule(self.learning_rate, ends, self.final_rate)], []
        elif self.schedule == "constant":
            parts, at = [optax.constant_schedule(self.learning_rate)], []
        elif self.schedule == "linear":
            parts, at = [optax.linear_schedule(self.learning_rate, last, ends)], []
        else:
            falls = optax.linear_schedule(self.learning_rate, last, self.end - self._falls_from)
            parts, at = [optax.constant_schedule(self.learning_rate), falls], [self._falls_from]
        return optax.join_schedules([warmup, *parts], [self.warmup_steps, *at])

    @property
    def end(self) -> int:
        """The step at which the schedule reaches its final rate."""
        return max(self.decay_steps, self.warmup_steps + 1)

    @property
    def _first(self) -> float:
        """The learning rate at the first step."""
        share = 1 / max(1, self.warmup_steps) if self.first_rate is None else self.first_rate
        return self.learning_rate * share

    @property
    def _falls_from(self) -> int:
        """The step at which the decay of wsd begins."""
        return self.end - max(1, round(self.decay_share * (self.end - self.warmup_steps)))

    def rate(self, step: int) -> float:
        """Return the learning rate at a step, as `optax_schedule` does, without JAX."""
        if step < self.warmup_steps:
            return self._first + (self.learning_rate - self._first) * step / self.warmup_steps
        since = self._falls_from if self.schedule == "wsd" else self.warmup_steps
        share = min(1.0, max(0.0, (step - since) / (self.end - since)))
        if self.schedule == "constant":
            share = 0.0
        kept = 0.5 * (1 + math.cos(math.pi * share)) if self.schedule == "cosine" else 1 - share
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * kept)


def check_optimizer_options(optimizer: Optimizer, options: Collection[str], strategy: Strategy, model: Model) -> None:
    """Raise a `MeshwrightError` if an optimizer option has no effect, or its pattern matches no parameter of a model.

    options: names of the options that the user gave.
    """
    ways = {"optimizer": strategy.optimizer, "lr_schedule": optimizer.schedule, "on_bad_step": strategy.on_bad_step}
    for setting in options:
        if setting in USED and not USED[setting] & {*ways.values()}:
            option = "optimizer" if USED[setting] & USED["b1"] else "lr_schedule"
            option = "on_bad_step" if "skip" in USED[setting] else option
            raise MeshwrightError(
                f"{setting} has no effect with {option} {ways[option]}; it is for {option}"
                f" {' or '.join(sorted(USED[setting]))}: leave it out"
            )
    paths = [path for path, _ in leaves(parameters(model))]
    if "no_decay" in options:
        check_patterns("no_decay", optimizer.no_decay, paths)
    if "rate" in options:
        check_patterns("rate", [pattern for pattern, _ in optimizer.factors], paths)


def default_warmup(steps: int) -> int:
    """Return the default warm-up in steps: a tenth of the run's steps, at most `LONGEST_WARMUP`."""
    return min(LONGEST_WARMUP, -(-steps // 10))


def optimizer_from_data(data: Any, path: str = "") -> Optimizer:
    """Return the optimizer in the data of a `config.json`. path: position of the data in the file, for errors.

    A config without a schedule is from an early version and keeps its behaviour: the cosine schedule, starting at rate
    0, and weight decay of all parameters except norms and expert-choice biases.
    """
    if isinstance(data, Mapping) and "schedule" not in data:
        data = {"first_rate": 0.0, "no_decay": ["*norm*", "choice_bias"], **data}
    return from_data(Optimizer, data, path)


def _factor(text: str) -> tuple[str, float]:
    """Parse `PATTERN=FACTOR`. Return (pattern, factor)."""
    pattern, equals, number = text.rpartition("=")
    try:
        factor = parse_number(number) if equals and pattern else -1.0
    except MeshwrightError:
        factor = -1.0
    if factor == 0:
        raise MeshwrightError(f"rate {text!r} would learn nothing; --freeze {pattern} freezes it")
    if factor < 0:
        raise MeshwrightError(f"rate is {text!r}; it is a pattern of parameters and a factor above 0, as embedding=0.1")
    return pattern, factor
