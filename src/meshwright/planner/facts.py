"""What there is to say of a plan to train, as data: numbers and names, which `planner.sentences` turns into text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from meshwright.mesh import MeshShape
from meshwright.record import Bound


@dataclass(frozen=True)
class TokensPerDevice:
    """The tokens of a device beside those that hide gathers of weights and sums of gradients over some axes.

    axes: empty where no axis gathers or sums. wanted: tokens from which all of it is hidden. is_of_microbatch: the
    tokens are those of one microbatch, as each gathers or sums anew.
    """

    tokens: int
    axes: tuple[str, ...]
    wanted: int
    is_of_microbatch: bool = False

    @property
    def is_hidden(self) -> bool:
        """Whether the tokens hide it."""
        return self.tokens >= self.wanted


@dataclass(frozen=True)
class TensorDegree:
    """The degree of tp beside mlp / alpha, up to which its products take longer than its collectives.

    alpha: flops a network byte that the hardware wants. placement: the links that tp runs over.
    """

    degree: int
    mlp: int
    alpha: float
    placement: str

    @property
    def limit(self) -> float:
        """The degree from which collectives take longer."""
        return self.mlp / self.alpha


@dataclass(frozen=True)
class ExposedCommunication:
    """The time of a step that waits for the network, most of it over some axes; no axes where none is exposed."""

    seconds: float
    share: float
    axes: tuple[str, ...]
    placement: str


@dataclass(frozen=True)
class PipelineBubble:
    """The time that stages of a pipeline wait for their first microbatch and the last gradient."""

    seconds: float
    share: float
    stages: int
    virtual_stages: int
    num_microbatches: int


@dataclass(frozen=True)
class MemoryUse:
    """How full the memory of a device is, the headroom that is kept of it, and the largest term."""

    share: float
    headroom: float
    largest: str
    largest_bytes: int


@dataclass(frozen=True)
class CausalFlops:
    """MFU where attention counts only the scores that a causal mask keeps, beside MFU, which counts all of them."""

    mfu: float
    causal_mfu: float


@dataclass(frozen=True)
class TrainingRun:
    """What it takes to train on so many tokens: time, chip hours, and what they cost where an hour's price is known."""

    tokens: int
    seconds: float
    chip_hours: float
    cost: float | None


WhyFact = TokensPerDevice | TensorDegree | ExposedCommunication | PipelineBubble | MemoryUse | CausalFlops


class GapKind(StrEnum):
    """Why a plan is not the best."""

    BEST = "best"
    MEMORY = "does not fit"
    EQUAL = "as fast, with less memory left"
    TIED = "tied"
    FASTER = "faster"
    RECOMPUTE = "recompute"
    COMMUNICATION = "communication"
    TERM = "term"


@dataclass(frozen=True)
class Gap:
    """The largest difference of a plan from the best one.

    seconds: of the term that grows most, and its name; axes: of communication, those that it is over; remat: the policy
    that is needed; peak_bytes: where it does not fit; parts: of a plan that is faster by less than the prediction can
    tell, how many more axes, stages, microbatches and rings it has (`planner.ties`).
    """

    kind: GapKind
    term: str = ""
    seconds: float = 0.0
    axes: tuple[str, ...] = ()
    remat: str = ""
    peak_bytes: int = 0
    parts: int = 0


@dataclass(frozen=True)
class Exposure:
    """Where communication is exposed, for what share of the step; tokens beside wanted ones where too few are why."""

    axes: tuple[str, ...]
    share: float
    tokens: int = 0
    wanted: int = 0


class Turn(StrEnum):
    """What happens to a plan on the way to more chips, another batch or longer sequences."""

    ALREADY = "already communication bound"
    TURNS = "changes"
    STAYS = "stays"
    ENDS = "stays until it is no longer legal"


@dataclass(frozen=True)
class MoreChips:
    """At how many chips, for the same batch, a plan becomes communication bound.

    by_rule: whether by the rule of thumb alone. reason: why more chips are not legal.
    """

    turn: Turn
    bound: Bound | None
    factor: int = 1
    chips: int = 0
    exposure: Exposure | None = None
    by_rule: bool = False
    reason: str = ""


@dataclass(frozen=True)
class OtherBatch:
    """At which batch, on the same chips, a plan turns from compute to communication bound or back.

    batch: the one at which it turns, or the last that was tried. tokens: of a device there.
    """

    turn: Turn
    batch: int
    is_larger: bool
    bound: Bound | None
    tokens: int = 0
    exposure: Exposure | None = None


class SequenceLimit(StrEnum):
    """What ends longer sequences."""

    NONE = "fits still"
    MEMORY = "memory"
    POSITIONS = "positions"
    MESH = "mesh"
    ALREADY = "does not fit as it is"


@dataclass(frozen=True)
class LongerSequences:
    """Up to which sequence length a plan fits, and what ends it.

    seq_len: the first that does not fit where memory ends it, else the last that does. positions: learned ones.
    """

    limit: SequenceLimit
    seq_len: int = 0
    peak_bytes: int = 0
    usable_bytes: float = 0.0
    model: str = ""
    positions: int = 0
    reason: str = ""


NearbyFact = MoreChips | OtherBatch | LongerSequences


@dataclass(frozen=True)
class StateSize:
    """Parameters, gradients and moments of the whole model beside the memory of a device, and the model axes in use.

    wanted_axes: how many model axes the rule of thumb wants; 3 with a pipeline among them.
    """

    state_bytes: int
    usable_bytes: float
    wanted_axes: Literal[0, 1, 2, 3]
    axes: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """The states in memories of a device."""
        return self.state_bytes / self.usable_bytes


@dataclass(frozen=True)
class FsdpFirst:
    """The share of the devices that fsdp has, and the other axes of the mesh."""

    fsdp: int
    num_devices: int
    others: MeshShape


@dataclass(frozen=True)
class SequencesPerDevice:
    """The sequences of the batch beside the devices that share them out over some axes."""

    batch: int
    axes: tuple[str, ...]
    shards: int

    @property
    def each(self) -> int:
        """Sequences of a device."""
        return self.batch // self.shards


RuleFact = StateSize | FsdpFirst | SequencesPerDevice


@dataclass(frozen=True)
class ImageStates:
    """What parameters, gradients and momentum take of a device's memory, and whether the plan fits."""

    parameters: int
    state_bytes: int
    share: float
    fits: bool


@dataclass(frozen=True)
class ImageActivations:
    """What a device keeps of its images for the backward pass."""

    bytes: int
    images: int


@dataclass(frozen=True)
class ReplicaInstead:
    """The mesh with a whole copy on every device, and what it would lose."""

    mesh: MeshShape
    gap: Gap


@dataclass(frozen=True)
class ImageCommunication:
    """What collectives take, in images of the backward pass, and what of it is exposed."""

    seconds: float
    equal_images: float
    images: int
    exposed_seconds: float
    share: float


@dataclass(frozen=True)
class DataParallelLimit:
    """From how many devices on data parallelism alone exposes more than a share of the step; None where up to `tried`
    devices it does not. images: of a device there.
    """

    devices: int | None
    tried: int
    images: int
    share: float


ImageFact = ImageStates | ImageActivations | ReplicaInstead | ImageCommunication | DataParallelLimit

Fact = WhyFact | TrainingRun | Gap | NearbyFact | RuleFact | ImageFact
