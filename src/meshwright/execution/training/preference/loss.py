"""Losses of pairs of a chosen and a rejected answer, from their log-probabilities under the policy and the reference.

DPO (arXiv:2305.18290, equation 7), conservative DPO for noisy labels (Mitchell 2023, ericmitchell.ai/cdpo.pdf), and IPO
(arXiv:2310.12036, equation 17).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from meshwright.description.step.model import ModelConfig
from meshwright.description.step.passes.shard_ends import PAIR_MEANS
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.models.decoder import log_probabilities_and_load
from meshwright.execution.runtime.experts.routing import ExpertLoad
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.support.field_types import check_fields


@dataclass(frozen=True, kw_only=True)
class Preference:
    """The loss of a preference pair.

    Args:
        loss: `dpo`, or `ipo`, which pulls the margin to 1 / (2 beta) instead of letting it grow without bound.
        beta: strength with which the policy is kept near the reference model.
        label_smoothing: for `dpo`, the assumed share of pairs whose chosen and rejected answers are swapped.
    """

    loss: Literal["dpo", "ipo"] = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.beta <= 0:
            raise MeshwrightError(f"beta is {self.beta}; it is a number above 0, as 0.1")
        if not 0 <= self.label_smoothing < 0.5:
            raise MeshwrightError(
                f"label_smoothing is {self.label_smoothing}; it is a share from 0 to below 0.5, where pairs say nothing"
            )
        if self.loss == "ipo" and self.label_smoothing:
            raise MeshwrightError(f"label_smoothing={self.label_smoothing} is for dpo; ipo has none, use 0")


SETTINGS = ("beta", "label_smoothing", "preference_loss")
"""Names of the run's settings that set the fields of `Preference`."""


OF_TEXT = {
    "fields": "pairs are records with prompt, chosen and rejected",
    "rows": "each answer of a pair is a padded row",
}
"""{setting that does not apply to preference pairs: the reason}."""


def check_preference_options(options: Collection[str], workload: Workload) -> None:
    """Raise a `MeshwrightError` if options of preference pairs are given for a text workload, or the reverse.

    options: names of the options that the user gave.
    """
    if workload.objective == "dpo" and (idle := [name for name in OF_TEXT if name in options]):
        raise MeshwrightError(f"{idle[0]} is not for objective='dpo': {OF_TEXT[idle[0]]}; leave --{idle[0]} out")
    if workload.objective != "dpo" and (idle := [name for name in SETTINGS if name in options]):
        raise MeshwrightError(f"{idle[0]} is for objective='dpo' (--objective dpo); {workload.objective} has no pairs")


DPO = Preference()
"""DPO with beta 0.1."""


class PairParts(NamedTuple):
    """Measurements of a batch of preference pairs."""

    means: Array  # [7], means over the pairs, in the order of `MEANS`.
    load: ExpertLoad | None = None  # None for a model without experts.

    @property
    def metrics(self) -> dict[str, Array]:
        """The metrics of a step, by name."""
        metrics = {name: self.means[number] for number, name in enumerate(MEANS)}
        return metrics if self.load is None else metrics | self.load.metrics


MEANS = (
    "loss",
    "reward_chosen",
    "reward_rejected",
    "reward_margin",
    "reward_accuracy",
    "log_probability_chosen",
    "log_probability_rejected",
)
"""Names of the means over a step's pairs.

The reward of an answer is beta times the difference of its log-probabilities under the policy and under the reference
(equation 5 without its constant). The margin is the chosen answer's reward minus the rejected one's; the accuracy is
the share of pairs with a margin above 0. Log-probabilities are those under the policy.
"""

assert len(MEANS) == PAIR_MEANS


def pair_loss(
    params: Any,
    batch: Mapping[str, Array],
    model: ModelConfig,
    layout: ShardingContext,
    *,
    preference: Preference,
    **how: Any,
) -> tuple[Array, PairParts]:
    """Return the mean loss of a batch of preference pairs, with the MoE balancing loss, and its measurements.

    Args:
        batch: as for `models.decoder.log_probabilities_and_load`, and `reference` [b], the log-probability of each row
            under the reference.
        how: other arguments of `log_probabilities_and_load`.
    """
    text = {name: array for name, array in batch.items() if name != "reference"}
    policy, load = log_probabilities_and_load(params, text, model, layout, **how)
    with jax.named_scope("loss"):
        means = pair_means(policy, batch["reference"], preference, layout)
        value = means[0]
        if model.experts is not None and load is not None:
            value += model.experts.balance_weight * load.balance_loss
        return value, PairParts(means, load)


def pair_means(policy: Array, reference: Array, preference: Preference, layout: ShardingContext) -> Array:
    """Return the means over pairs that `MEANS` names, [7], from log-probabilities [b] under policy and reference.

    Rows alternate: the chosen answer of a pair, then its rejected one. The first mean is the loss. The reference's
    log-probabilities get no gradient.
    """
    reference = jax.lax.stop_gradient(reference)
    # Stacked, so that all means share one sum over devices.
    values = _pair_values(_in_pairs(policy, layout), _in_pairs(reference, layout), preference)
    return jnp.mean(jnp.stack(values), axis=1)


def _pair_values(policy: Array, reference: Array, preference: Preference) -> list[Array]:
    """Return, for each of `MEANS` in order, its value for each pair [p].

    policy, reference: log-probabilities [p, 2] of the chosen and the rejected answer.
    """
    ratios = policy - reference
    rewards = preference.beta * ratios
    margins = rewards[:, 0] - rewards[:, 1]
    if preference.loss == "ipo":
        losses = (ratios[:, 0] - ratios[:, 1] - 1 / (2 * preference.beta)) ** 2
    else:
        wrong = preference.label_smoothing
        losses = -(1 - wrong) * jax.nn.log_sigmoid(margins) - wrong * jax.nn.log_sigmoid(-margins)
    is_right = (margins > 0).astype(losses.dtype)
    return [losses, rewards[:, 0], rewards[:, 1], margins, is_right, policy[:, 0], policy[:, 1]]


def _in_pairs(rows: Array, layout: ShardingContext) -> Array:
    """Reshape rows [b] to pairs [b / 2, 2], without communication: both rows of a pair are on one device."""
    split = layout.spec("batch")[0]
    return jax.lax.reshape(rows, (rows.shape[0] // 2, 2), out_sharding=P(split, None))
