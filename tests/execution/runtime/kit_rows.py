"""The table of the correctness kit: every way to train that is held to one device, to its plan and to the compiler.

To add a model or a way to train, add a row to `ROWS`: at most 8 devices, a batch of 16 sequences of 32 tokens. `make
test` trains the core rows, the cheapest that have every mesh axis, every remat policy and the fields of a strategy, on
1, 2, 4 and 8 devices; `make matrix` trains as many others as cover every mechanism that some row has
(`covering`), and `make exhaustive` the rest. For every row `test_stored_programs.py`, in `make test`, compares the
plan with the stored record of its compiled program.
`test_runtime_kit.py` says what a row is checked against on simulated devices,
`benchmarks/strategy_matrix.py` on real ones.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshwright.description.families.adapters import ALL_LINEAR, with_adapters
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.attention import FullHeads, KeySharing, LatentAttention, LinearAttention
from meshwright.description.step.blocks import program
from meshwright.description.step.frequencies import Frequencies, LongRopeScaling, QueryScaling, YarnRopeScaling
from meshwright.description.step.layer_inputs import AltUp, LayerInputs
from meshwright.description.step.model import (
    AttentionConfig,
    Biases,
    Experts,
    LearnedPositions,
    ModelConfig,
    Norms,
    RotaryPositions,
    Scales,
    rotary,
)
from meshwright.description.step.stages import staged_stacks
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Remat, Workload
from meshwright.mesh import MeshShape

DENSE = ModelConfig(name="dense", num_layers=4, embed=64, mlp=128, num_heads=16, num_kv_heads=8, head_dim=8, vocab=256)
TIED = replace(DENSE, name="tied", tied_embeddings=True)
WIDE = replace(DENSE, name="wide", embed=128)
"""Adafactor factors its second moments of dims from 128 on."""

UNEVEN = replace(DENSE, name="uneven", num_layers=5)
"""With layers that no stages divide."""

ODD = replace(DENSE, name="odd", num_heads=10, num_kv_heads=5, vocab=257)
"""With a vocabulary and heads that tp=2 does not divide, so that they are padded."""

ODD_TIED = replace(ODD, name="oddtied", tied_embeddings=True)

FEW = replace(DENSE, name="few", num_kv_heads=2, vocab=257)
"""With fewer kv heads than tp=4 has devices, so that each is copied."""

ONE_HEAD = replace(
    TIED, name="onehead", num_kv_heads=1, biases=Biases(qkv=True), attention=AttentionConfig(qk_norm="head")
)
"""As Gemma 2B and PaLM: one kv head for all."""

MOE = replace(DENSE, name="moe", experts=Experts(count=8, num_active=2, mlp=32, balance_weight=0.1))
"""Mixtral's shape, dropless."""


def with_experts(name: str, **more: object) -> ModelConfig:
    """The model of experts with some things otherwise."""
    assert MOE.experts is not None
    return replace(MOE, name=name, experts=replace(MOE.experts, **more))


SHARED = with_experts("shared", shared_mlp=32, num_dense_layers=1)
AFTER_TWO = replace(with_experts("aftertwo", shared_mlp=32, num_dense_layers=2), num_layers=6)
SLOTTED = with_experts("slotted", capacity_factor=4.0)
"""With a capacity of all tokens of a device for each expert, so that none is dropped wherever tokens are."""


SIX = with_experts("six", count=6)
"""With experts that ep=4 does not divide, so that arrays have two more."""

SIX_SLOTTED = with_experts("sixslotted", count=6, capacity_factor=3.0)


@dataclass(frozen=True)
class Row:
    """A way to train a model: on a mesh, by a strategy, keeping something for backward.

    core: whether `make test` trains it; the others `make matrix` does. packed: whether rows hold several documents, and
    padding. z_loss: its coefficient.
    """

    model: ModelConfig
    mesh: MeshShape
    strategy: Strategy = DEFAULT
    remat: Remat = "block"
    core: bool = False
    packed: bool = False
    z_loss: float = 0.0
    frozen: tuple[str, ...] = ()

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self.strategy).items() if value != getattr(DEFAULT, name)}
        changed |= {"remat": self.remat} if self.remat != "block" else {}
        changed |= {"packed": True} if self.packed else {}
        changed |= {"z_loss": self.z_loss} if self.z_loss else {}
        changed |= {"frozen": ",".join(self.frozen)} if self.frozen else {}
        return " ".join((self.model.name, str(self.mesh), *(f"{name}={value}" for name, value in changed.items())))

    @property
    def mechanisms(self) -> frozenset[object]:
        """What the row has of its own: model, adapters, mesh axes, fields of the strategy, policy, and batches."""
        strategy = {name: value for name, value in vars(self.strategy).items() if value != getattr(DEFAULT, name)}
        if "num_microbatches" in strategy:
            strategy["num_microbatches"] = True
        words = self.model.name.split()  # Its adapters' too, as in `with_lora`.
        axes = {("axis", axis, degree == 8) for axis, degree in self.mesh.degrees.items() if degree > 1}
        return frozenset(
            {*words, ("lora" in words, self.model.experts is not None), *axes, *strategy.items(), self.remat}
            | {("packed", self.packed), ("z_loss", self.z_loss)}
            | {("cycles in stages", self.mesh.pp > 1 and len(staged_stacks(program(self.model))) > 1)}
            | {("linear over sp", self.model.attention.linear is not None and self.mesh.sp > 1)}
            | set(self.frozen)
        )

    @property
    def workload(self) -> Workload:
        """The step on simulated devices."""
        return Workload(
            model=self.model,
            batch=16,
            seq_len=32,
            compute_dtype="f32",
            remat=self.remat,
            packed=self.packed,
            z_loss=self.z_loss,
            frozen=self.frozen,
        )

    @property
    def alone(self) -> "Row":
        """The same on one device: the whole batch by scores of the whole sequence, by plain ZeRO-less AdamW.

        What it keeps of the strategy is the optimizer, and the dropout with the attention that says of what. Experts
        have no capacity there, and the model of them as many microbatches as in the row, since their loss of imbalance
        is the mean of that of each microbatch; which sequences are in which one depends on no mesh.
        """
        experts, parts = self.model.experts, 1
        if experts is not None:
            experts, parts = replace(experts, capacity_factor=None), self.strategy.num_microbatches
        dropout = self.strategy.dropout
        attention = self.strategy.attention if dropout else DEFAULT.attention
        strategy = Strategy(
            optimizer=self.strategy.optimizer, num_microbatches=parts, dropout=dropout, attention=attention
        )
        model = replace(self.model, name="alone", experts=experts)
        return Row(model, MeshShape(), strategy, packed=self.packed, z_loss=self.z_loss, frozen=self.frozen)


def parts(count: int, **more: object) -> Strategy:
    """A strategy with so many microbatches."""
    return Strategy(num_microbatches=count, **more)


def fused(method: str, **more: object) -> Strategy:
    """A strategy by which queries of a split sequence meet keys in a fused attention."""
    return Strategy(attention="flash", sp_method=method, **more)


WHOLE_STREAM = Strategy(tp_stream="whole")
RING, ULYSSES, GATHER = fused("ring"), fused("ulysses"), fused("gather")
GPIPE, ALTERNATING = parts(4, schedule="gpipe"), parts(4)

DENSE_ALONE = [
    Row(DENSE, MeshShape(), fused("gather"), core=True),
    Row(DENSE, MeshShape(dp=8)),
    Row(DENSE, MeshShape(dp=2), parts(4)),
    Row(DENSE, MeshShape(fsdp=8)),
    Row(DENSE, MeshShape(fsdp=2), parts(4), core=True),
    Row(DENSE, MeshShape(fsdp=4), Strategy(zero_stage=1), core=True),
    Row(DENSE, MeshShape(fsdp=4), Strategy(zero_stage=2), core=True),
    Row(DENSE, MeshShape(tp=8)),
    Row(DENSE, MeshShape(tp=8), WHOLE_STREAM, core=True),
    Row(DENSE, MeshShape(tp=4), Strategy(collective_matmul=True), core=True),
    Row(DENSE, MeshShape(sp=8)),
    Row(DENSE, MeshShape(sp=4), GATHER, core=True),
    Row(DENSE, MeshShape(sp=8), RING),
    Row(DENSE, MeshShape(sp=2), RING, core=True),
    Row(DENSE, MeshShape(sp=8), ULYSSES, core=True),
    Row(DENSE, MeshShape(pp=4), GPIPE, "matmuls", core=True),
    Row(DENSE, MeshShape(pp=4), ALTERNATING),
    Row(TIED, MeshShape(pp=2), ALTERNATING),
]

DENSE_MIXES = [
    Row(DENSE, MeshShape(dp=2, fsdp=4)),
    Row(DENSE, MeshShape(dp=2, fsdp=4), Strategy(zero_stage=0), core=True),
    Row(DENSE, MeshShape(fsdp=2, tp=4), WHOLE_STREAM),
    Row(DENSE, MeshShape(fsdp=2, tp=4), Strategy(collective_matmul=True)),
    Row(TIED, MeshShape(sp=2, tp=4), parts(2, collective_matmul=True)),
    Row(DENSE, MeshShape(dp=2, fsdp=2, tp=2), parts(2), core=True),
    Row(DENSE, MeshShape(dp=2, fsdp=2, tp=2), parts(2, zero_stage=1)),
    Row(DENSE, MeshShape(dp=2, fsdp=2, tp=2), parts(4, zero_stage=2)),
    Row(TIED, MeshShape(dp=2, fsdp=2, sp=2), Strategy(zero_stage=2)),
    Row(TIED, MeshShape(dp=2, sp=2, tp=2), parts(4)),
    Row(DENSE, MeshShape(fsdp=2, sp=2, tp=2), remat="none", core=True),
    Row(DENSE, MeshShape(fsdp=2, sp=2, tp=2), WHOLE_STREAM, "attention"),
    Row(DENSE, MeshShape(fsdp=2, sp=2, tp=2), GATHER, "matmuls"),
    Row(DENSE, MeshShape(dp=2, fsdp=2, sp=2), RING, "none"),
    Row(DENSE, MeshShape(tp=2, sp=4), RING, "attention", core=True),
    Row(DENSE, MeshShape(fsdp=2, sp=2, tp=2), fused("ring", num_microbatches=2), "matmuls"),
    Row(DENSE, MeshShape(sp=4, tp=2), ULYSSES, core=True),
    Row(DENSE, MeshShape(fsdp=2, sp=2, tp=2), fused("ulysses", num_microbatches=2)),
    Row(DENSE, MeshShape(dp=2, pp=4), ALTERNATING),
    Row(DENSE, MeshShape(fsdp=2, pp=4), GPIPE),
    Row(DENSE, MeshShape(tp=4, pp=2), ALTERNATING),
    Row(DENSE, MeshShape(fsdp=2, tp=2, pp=2), ALTERNATING, core=True),
    Row(TIED, MeshShape(fsdp=2, tp=2, pp=2), GPIPE, "none"),
    Row(TIED, MeshShape(sp=2, tp=2, pp=2), parts(16)),
    Row(DENSE, MeshShape(fsdp=2, sp=2, pp=2), fused("ulysses", num_microbatches=4)),
]

MOE_ALONE = [
    Row(MOE, MeshShape(dp=4)),
    Row(MOE, MeshShape(fsdp=8)),
    Row(SLOTTED, MeshShape(fsdp=2)),
    Row(MOE, MeshShape(tp=8)),
    Row(MOE, MeshShape(tp=2), WHOLE_STREAM),
    Row(MOE, MeshShape(sp=8), RING),
    Row(MOE, MeshShape(sp=4), ULYSSES),
    Row(MOE, MeshShape(ep=8)),
    Row(SLOTTED, MeshShape(ep=4)),
    Row(SHARED, MeshShape(ep=4)),
]

MOE_MIXES = [
    Row(MOE, MeshShape(dp=2, fsdp=4)),
    Row(SHARED, MeshShape(fsdp=2, tp=4), remat="none"),
    Row(MOE, MeshShape(dp=2, fsdp=2, tp=2), parts(4)),
    Row(MOE, MeshShape(ep=4, fsdp=2), parts(2)),
    Row(MOE, MeshShape(ep=2, dp=4), remat="attention"),
    Row(MOE, MeshShape(ep=4, tp=2)),
    Row(SLOTTED, MeshShape(ep=2, fsdp=2, tp=2)),
    Row(SHARED, MeshShape(ep=2, fsdp=2, tp=2)),
    Row(SLOTTED, MeshShape(ep=2, sp=2, tp=2), remat="matmuls"),
    Row(MOE, MeshShape(ep=2, dp=2, sp=2)),
    Row(MOE, MeshShape(ep=2, sp=4), RING, core=True),
    # Without a first dense layer: a stack of one is no loop, and the compiler sends its positions once for both passes.
    Row(with_experts("shared", shared_mlp=32), MeshShape(ep=2, sp=2, tp=2), RING),
    Row(MOE, MeshShape(fsdp=2, sp=2, tp=2), RING),
    Row(MOE, MeshShape(ep=2, fsdp=2, sp=2), ULYSSES),
]

STAGES = [
    Row(DENSE, MeshShape(dp=2, fsdp=2, pp=2), parts(4, zero_stage=1)),
    Row(DENSE, MeshShape(fsdp=2, tp=2, pp=2), parts(4, collective_matmul=True)),
    Row(DENSE, MeshShape(sp=2, tp=2, pp=2), fused("gather", num_microbatches=4)),
    Row(DENSE, MeshShape(dp=2, sp=2, pp=2), fused("ring", num_microbatches=4)),
    Row(DENSE, MeshShape(sp=4, pp=2), fused("ring", num_microbatches=4, schedule="gpipe"), "matmuls"),
    Row(MOE, MeshShape(pp=4), parts(8)),
    Row(SLOTTED, MeshShape(ep=2, tp=2, pp=2), parts(4)),
    Row(SHARED, MeshShape(ep=2, fsdp=2, pp=2), parts(2, schedule="gpipe")),
    Row(SHARED, MeshShape(fsdp=2, sp=2, pp=2), fused("ring", num_microbatches=4)),
    Row(AFTER_TWO, MeshShape(ep=2, tp=2, pp=2), parts(4)),
    Row(AFTER_TWO, MeshShape(fsdp=2, pp=2), parts(4, virtual_stages=2)),
    Row(UNEVEN, MeshShape(dp=2, pp=2), parts(4, virtual_stages=2, dropout=0.2)),
]

OPTIMIZERS = [
    Row(DENSE, MeshShape(fsdp=2, tp=2), Strategy(optimizer="lion"), core=True),
    Row(WIDE, MeshShape(fsdp=2, tp=2), Strategy(optimizer="adafactor")),
    Row(DENSE, MeshShape(fsdp=2, tp=2), Strategy(optimizer="sgd", zero_stage=1), core=True),
    Row(DENSE, MeshShape(dp=2, fsdp=2, tp=2), Strategy(optimizer="muon", on_bad_step="skip"), core=True),
    Row(MOE, MeshShape(ep=2, fsdp=2, tp=2), Strategy(optimizer="muon")),
    Row(UNEVEN, MeshShape(fsdp=2, tp=2, pp=2), Strategy(optimizer="muon", num_microbatches=4)),
    Row(DENSE, MeshShape(fsdp=2, sp=2, tp=2), Strategy(optimizer="muon", zero_stage=1)),
    Row(DENSE, MeshShape(fsdp=4), Strategy(optimizer="muon", zero_stage=0)),
    Row(SHARED, MeshShape(ep=2, fsdp=2, pp=2), Strategy(optimizer="muon", num_microbatches=2)),
    Row(DENSE, MeshShape(tp=4), Strategy(optimizer="muon")),
]

DROPOUT = [
    Row(DENSE, MeshShape(dp=2, fsdp=2, tp=2), parts(2, dropout=0.2)),
    Row(DENSE, MeshShape(tp=2, sp=4), fused("ring", dropout=0.2), "none"),
    Row(MOE, MeshShape(ep=2, dp=2, tp=2), Strategy(dropout=0.2)),
]

PACKED = [
    Row(DENSE, MeshShape(fsdp=2), packed=True, remat="none"),
    Row(DENSE, MeshShape(dp=2, fsdp=2, tp=2), parts(2), packed=True, z_loss=1e-3, core=True),
    Row(DENSE, MeshShape(sp=2, tp=4), packed=True),
    Row(DENSE, MeshShape(sp=2, tp=4), GATHER, packed=True),
    Row(DENSE, MeshShape(sp=2, tp=4), ULYSSES, packed=True),
    Row(DENSE, MeshShape(sp=4, fsdp=2), RING, "matmuls", packed=True),
    Row(DENSE, MeshShape(dp=2, sp=2, pp=2), fused("ring", num_microbatches=4), packed=True, z_loss=1e-3),
    Row(DENSE, MeshShape(sp=2, tp=2, pp=2), fused("gather", num_microbatches=4), packed=True),
    Row(DENSE, MeshShape(sp=2, pp=2), parts(4, schedule="gpipe"), "matmuls", packed=True, z_loss=1e-3),
    Row(DENSE, MeshShape(sp=2, pp=2), fused("ulysses", num_microbatches=4), packed=True),
    Row(SLOTTED, MeshShape(ep=2, sp=2, tp=2), packed=True),
    Row(MOE, MeshShape(ep=2, dp=2, sp=2), RING, packed=True),
    Row(AFTER_TWO, MeshShape(ep=2, tp=2, pp=2), parts(4), packed=True),
    Row(AFTER_TWO, MeshShape(fsdp=2, sp=2, pp=2), parts(4), packed=True),
]

PADDED = [
    Row(ODD, MeshShape(tp=4), core=True),
    Row(ODD_TIED, MeshShape(tp=2), Strategy(collective_matmul=True)),
    Row(ODD, MeshShape(dp=2, fsdp=2, tp=2), parts(2)),
    Row(ODD_TIED, MeshShape(fsdp=2, tp=2), Strategy(zero_stage=1)),
    Row(ODD, MeshShape(sp=2, tp=2), RING),
    Row(ODD_TIED, MeshShape(fsdp=2, tp=2, pp=2), parts(4), core=True),
    Row(FEW, MeshShape(fsdp=2, tp=4), core=True),
    Row(FEW, MeshShape(tp=4), parts(2, collective_matmul=True)),
    Row(SIX, MeshShape(ep=4)),
    Row(SIX, MeshShape(ep=4, tp=2)),
    Row(SIX_SLOTTED, MeshShape(ep=4, fsdp=2)),
    Row(ONE_HEAD, MeshShape(dp=2, tp=2), WHOLE_STREAM),
    Row(ONE_HEAD, MeshShape(sp=2, tp=2), RING),
    Row(ONE_HEAD, MeshShape(fsdp=2, tp=2, pp=2), parts(4), core=True),
]

WITHOUT_DROPOUT = [
    Row(MOE, MeshShape(ep=2, dp=2, tp=2)),
    Row(UNEVEN, MeshShape(dp=2, pp=2), parts(4, virtual_stages=2)),
]
"""Rows of `ROWS` that have dropout too, without it: quicker. Not among them, whose order the golden records have."""

REPEATED = [Row(SHARED, MeshShape(ep=2, fsdp=2, pp=2), parts(4, schedule="gpipe"))]
"""Where a device has one sequence of a microbatch, so that all stages run its plain layers: `inspect` finds it."""

ROWS = [*DENSE_ALONE, *DENSE_MIXES, *MOE_ALONE, *MOE_MIXES, *STAGES, *OPTIMIZERS, *DROPOUT, *PACKED, *PADDED]


def narrow(preset: str, **more: object) -> ModelConfig:
    """A preset of a family at the width of the rows above."""
    return replace(PRESETS[preset], embed=64, mlp=128, **more)


NEOX = narrow(
    "gpt-neox-20b",
    num_layers=4,
    num_heads=8,
    num_kv_heads=8,
    head_dim=8,
    vocab=256,
    positions=RotaryPositions(dims=2),
    biases=Biases(mlp=True),
)
QWEN3 = narrow("tiny-qwen3")
GEMMA2 = narrow(
    "tiny-gemma2",
    scales=replace(PRESETS["tiny-gemma2"].scales, embedding=8.0),
    attention=AttentionConfig(windows=(12, None)),
)
GEMMA3 = narrow(
    "tiny-gemma3", scales=Scales(embedding=8.0), attention=AttentionConfig(windows=(12,) * 5 + (None,), qk_norm="head")
)
WITH_LATENT = LatentAttention(query_rank=24, kv_rank=16, nope_head_dim=8, rope_head_dim=4, value_head_dim=6)
LATENT = replace(
    DENSE,
    name="latent",
    num_kv_heads=16,
    attention=AttentionConfig(latent=WITH_LATENT),
    positions=RotaryPositions(is_interleaved=True),
)
SCALED_LATENT = replace(
    LATENT,
    name="scaledlatent",
    positions=replace(
        rotary(10_000.0, YarnRopeScaling(factor=4.0, original_max_seq_len=8, query_beta=0.6)), is_interleaved=True
    ),
)
"""As Mistral 4: whole queries are scaled by their position, though a part of them is rotated."""

DIRECT = replace(LATENT, name="direct", attention=AttentionConfig(latent=replace(WITH_LATENT, query_rank=None)))
"""Latent attention whose queries come from the stream itself."""

DEEPSEEK = narrow("tiny-deepseek")
QWEN2_MOE = narrow(
    "tiny-qwen2-moe", num_layers=3, experts=replace(PRESETS["tiny-qwen2-moe"].experts, mlp=32, shared_mlp=64)
)
OLMO2 = narrow("tiny-olmo2")
GPT_OSS = narrow(
    "tiny-gpt-oss",
    attention=AttentionConfig(windows=(12, None), has_sinks=True),
    experts=replace(PRESETS["tiny-gpt-oss"].experts, mlp=32),
)
GPT2 = narrow("tiny-gpt2", positions=LearnedPositions(rows=64))

SMALL = {"num_layers": 4, "num_heads": 16, "num_kv_heads": 8, "head_dim": 8, "vocab": 256}
"""Sizes of released models at the width of the rows above."""

MISTRAL = narrow("mistral-7b", **SMALL, attention=AttentionConfig(windows=(12,)))
MINISTRAL3 = narrow(
    "mistral-7b",
    **SMALL,
    name="ministral3",
    attention=AttentionConfig(),
    # The rows' sequences are several times the original length.
    positions=rotary(10_000.0, YarnRopeScaling(factor=4.0, original_max_seq_len=8, query_beta=0.6)),
)
QWEN2 = narrow("qwen2-7b", **SMALL)
QWEN3_MOE = narrow("qwen3-30b-a3b", **SMALL, experts=Experts(count=8, num_active=2, mlp=32, balance_weight=0.1))
GEMMA = narrow("gemma-7b", **SMALL, scales=Scales(embedding=8.0))
LONG = LongRopeScaling(short_factor=(1.0, 1.5), long_factor=(2.0, 4.0), factor=4.0, original_max_seq_len=16)
PHI3 = narrow(
    "phi3-mini",
    **SMALL,
    attention=AttentionConfig(windows=(12,)),
    # The rows' sequences are longer than the original length.
    positions=replace(rotary(10_000.0, LONG), dims=4),
)

EVERY_SECOND_ROTATED = RotaryPositions(
    frequencies=(Frequencies(theta=10_000.0), Frequencies(theta=10_000.0, is_identity=True))
)
COHERE2 = replace(
    DENSE,
    name="cohere2",
    tied_embeddings=True,
    norms=Norms(kind="layer"),
    parallel_blocks="shared norm",
    attention=AttentionConfig(windows=(12, None)),
    positions=replace(EVERY_SECOND_ROTATED, is_interleaved=True),
    scales=Scales(logits=0.25),
)
SMOLLM3 = replace(DENSE, name="smollm3", positions=EVERY_SECOND_ROTATED)
SCALED = replace(
    DENSE,
    name="scaled",
    attention=AttentionConfig(qk_norm="rotated head"),
    activation="relu2",
    scales=Scales(embedding=12.0, attention=0.2, residual=0.22, logits=0.5),
)
"""With Granite's factors, Hunyuan's norms and Nemotron's activation."""

DELTA = replace(
    DENSE,
    name="delta",
    attention=AttentionConfig(
        qk_norm="head",
        has_output_gate=True,
        # Wide keys are nearly orthogonal: triangular systems of others amplify the rounding that rows compare.
        linear=LinearAttention(num_heads=8, num_value_heads=16, key_dim=32, value_dim=8, layers=(True, False)),
    ),
)
"""With the gated delta rule in every second layer, and attention whose output has a gate in the others."""

EIGHT_DELTA = replace(DELTA, num_layers=8)

QWEN3_NEXT = narrow(
    "tiny-qwen3-next",
    attention=replace(
        PRESETS["tiny-qwen3-next"].attention,
        linear=LinearAttention(num_heads=8, num_value_heads=16, key_dim=32, value_dim=8),
    ),
    experts=replace(PRESETS["tiny-qwen3-next"].experts, mlp=32, shared_mlp=32),
)
SPARSE = with_experts("sparse", shared_mlp=32, layers=(False, True))
"""With experts in every second layer, as decoder_sparse_step=2 has it."""

SIX_SPARSE = replace(SPARSE, num_layers=6)
"""With three cycles of layers, which two stages do not divide."""

AFTER_ONE = replace(SPARSE, name="sparseafterone", num_layers=5, experts=replace(SPARSE.experts, num_dense_layers=1))
"""With a dense layer before the cycles."""

ONE_DENSE = with_experts("onedense", layers=(True, False, True, True))
"""With layers in no cycle: experts in all but the second, as mlp_only_layers=[1] has it."""

CHUNKED = replace(
    DENSE,
    name="chunked",
    attention=AttentionConfig(windows=(12, None), is_chunked=True, qk_norm="rotated head, unscaled"),
    positions=RotaryPositions(
        frequencies=(
            Frequencies(theta=1000.0),
            Frequencies(theta=1000.0, is_identity=True, of_queries=QueryScaling(beta=0.5, length=6, offset=1)),
        ),
        is_interleaved=True,
    ),
)
"""With Llama 4's attention in layers of one kind: chunks, and layers without positions whose queries are scaled."""

IN_CHUNKS = replace(CHUNKED, name="inchunks", attention=replace(CHUNKED.attention, windows=(12,)))
"""With chunks in all layers: of layers with other windows a fused kernel is a branch, and a program's text has all."""

LLAMA4 = narrow(
    "tiny-llama4",
    attention=replace(PRESETS["tiny-llama4"].attention, windows=(12, 12, 12, None)),
    experts=replace(PRESETS["tiny-llama4"].experts, mlp=32, shared_mlp=32),
)

GEMMA4 = narrow(
    "tiny-gemma4",
    **SMALL,
    # Fewer kv heads in layers without a window: over tp=4 each of these is copied, and none of the others.
    attention=replace(
        PRESETS["tiny-gemma4"].attention,
        windows=(12, None),
        full_heads=FullHeads(num_kv_heads=2, head_dim=16, are_values_keys=True),
    ),
    positions=RotaryPositions(frequencies=PRESETS["tiny-gemma4"].positions.frequencies[-2:]),
)
GEMMA4_MOE = replace(
    GEMMA4,
    name="tiny-gemma4-moe",
    experts=replace(PRESETS["tiny-gemma4-moe"].experts, mlp=32, balance_weight=0.1),
)

GEMMA4_SMALL = narrow(
    "tiny-gemma4-e2b",
    **SMALL | {"num_layers": 6, "num_kv_heads": 2},
    # Over tp=4 kv heads are copied: those that the last four layers have no keys and values of, too.
    attention=replace(
        PRESETS["tiny-gemma4-e2b"].attention,
        windows=(12, None),
        full_heads=FullHeads(num_kv_heads=2, head_dim=16),
        sharing=KeySharing(num_layers=4, mlp=256),
    ),
    # Scores that are not scaled down make rounding larger.
    scales=replace(PRESETS["tiny-gemma4-e2b"].scales, embedding=8.0, attention=0.25),
)
"""Each layer has an input of its own, and the last ones attend to keys and values of the first two."""

GEMMA4_SHORT = replace(
    GEMMA4_SMALL,
    name="short-gemma4-e2b",
    num_layers=3,
    vocab=257,
    attention=replace(GEMMA4_SMALL.attention, sharing=KeySharing(num_layers=1, mlp=128)),
    layer_inputs=LayerInputs(vocab=257, width=16),
)
"""With tables of tokens that tp does not divide."""

GEMMA3N = narrow(
    "tiny-gemma3n",
    **SMALL | {"num_layers": 6, "num_kv_heads": 2},
    attention=replace(PRESETS["tiny-gemma3n"].attention, windows=(12, None), sharing=KeySharing(num_layers=2, mlp=128)),
    # Scores that are not scaled down make rounding larger, and so do few gates that are not zero.
    scales=replace(PRESETS["tiny-gemma3n"].scales, embedding=8.0, attention=0.25),
    altup=AltUp(num_streams=4, laurel_rank=16, num_sparse_layers=2, sparsity=0.5),
)
"""Its layers pass on four streams; the MLPs of the first two are sparse, and the last two have no keys and values."""

FAMILIES = [
    Row(MISTRAL, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(MINISTRAL3, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(MINISTRAL3, MeshShape(sp=4), Strategy(sp_method="ring", attention="flash")),
    Row(MINISTRAL3, MeshShape(fsdp=2, pp=2), parts(4)),
    Row(QWEN2, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(QWEN3_MOE, MeshShape(ep=2, fsdp=2, tp=2)),
    Row(GEMMA, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(PHI3, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(NEOX, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(QWEN3, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(GEMMA2, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(GEMMA3, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(GEMMA3, MeshShape(fsdp=2, pp=2), ALTERNATING),
    Row(QWEN2_MOE, MeshShape(ep=2, fsdp=2, tp=2)),
    Row(QWEN2_MOE, MeshShape(ep=2, sp=2, tp=2)),
    Row(OLMO2, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(OLMO2, MeshShape(tp=4), Strategy(collective_matmul=True), "none"),
    Row(OLMO2, MeshShape(fsdp=2, tp=2, pp=2), ALTERNATING),
    Row(GPT_OSS, MeshShape(ep=2, fsdp=2, tp=2)),
    Row(GPT_OSS, MeshShape(fsdp=2, sp=2, tp=2), remat="none"),
    Row(GPT_OSS, MeshShape(tp=4), WHOLE_STREAM),
    Row(GPT_OSS, MeshShape(dp=2, sp=4), parts(2)),
    Row(GPT_OSS, MeshShape(ep=2, tp=2, pp=2), parts(4)),
    Row(GPT2, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(GPT2, MeshShape(dp=2, fsdp=2, tp=2), parts(2)),
    Row(GPT2, MeshShape(fsdp=2, tp=2), Strategy(zero_stage=1)),
    Row(LATENT, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(SCALED_LATENT, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(DIRECT, MeshShape(fsdp=2, tp=4)),
    Row(LATENT, MeshShape(tp=8), WHOLE_STREAM),
    Row(DIRECT, MeshShape(fsdp=2, tp=2), WHOLE_STREAM, "attention"),
    Row(LATENT, MeshShape(fsdp=2, tp=4), parts(2), "matmuls"),
    Row(LATENT, MeshShape(dp=2, fsdp=2, sp=2), remat="none"),
    Row(LATENT, MeshShape(dp=2, fsdp=2, tp=2), parts(2, zero_stage=1)),
    Row(DIRECT, MeshShape(fsdp=2, tp=2, pp=2), ALTERNATING),
    Row(DEEPSEEK, MeshShape(ep=2, fsdp=2, tp=2)),
    Row(DEEPSEEK, MeshShape(ep=2, sp=2, tp=2), parts(2), "attention"),
    Row(DEEPSEEK, MeshShape(ep=2, fsdp=2, pp=2), parts(4)),
    Row(LATENT, MeshShape(fsdp=2, sp=2, tp=2), RING),
    Row(DIRECT, MeshShape(sp=4, tp=2), ULYSSES),
    Row(LATENT, MeshShape(fsdp=2, sp=2, pp=2), fused("gather", num_microbatches=4)),
    Row(GEMMA2, MeshShape(fsdp=2, sp=2, tp=2), packed=True),
    Row(GPT2, MeshShape(fsdp=2, sp=2, tp=2), packed=True),
    Row(DEEPSEEK, MeshShape(ep=2, sp=2, tp=2), packed=True),
    Row(LATENT, MeshShape(fsdp=2, sp=2, tp=2), RING, packed=True),
    Row(COHERE2, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(COHERE2, MeshShape(fsdp=2, tp=2), WHOLE_STREAM, "matmuls"),
    Row(COHERE2, MeshShape(tp=2, pp=2), ALTERNATING),
    Row(SCALED, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(SMOLLM3, MeshShape(fsdp=2, pp=2), fused("gather", num_microbatches=4)),
    Row(DELTA, MeshShape(fsdp=2, tp=2)),
    Row(DELTA, MeshShape(dp=2, fsdp=2, tp=2), parts(2), "none"),
    Row(DELTA, MeshShape(dp=2, tp=4), WHOLE_STREAM, "attention"),
    Row(DELTA, MeshShape(fsdp=2, tp=2), fused("gather", dropout=0.2), "matmuls"),
    Row(DELTA, MeshShape(dp=2, fsdp=2, tp=2), packed=True),
    Row(DELTA, MeshShape(fsdp=2, sp=4), RING, packed=True),
    Row(DELTA, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(DELTA, MeshShape(sp=8), remat="matmuls"),
    Row(DELTA, MeshShape(dp=2, sp=4), ULYSSES, "none", packed=True),
    Row(DELTA, MeshShape(sp=2, tp=2), fused("gather", num_microbatches=2), "attention"),
    Row(QWEN3_NEXT, MeshShape(ep=2, fsdp=2, tp=2)),
    Row(QWEN3_NEXT, MeshShape(ep=2, sp=2, tp=2), parts(2), "none"),
    Row(SPARSE, MeshShape(ep=2, tp=2)),
    Row(SPARSE, MeshShape(dp=2, fsdp=2, sp=2), parts(2), "none"),
    Row(SPARSE, MeshShape(fsdp=2, sp=2, tp=2), remat="matmuls"),
    # Layers of several kinds, of which a stage has whole cycles.
    Row(DELTA, MeshShape(fsdp=2, tp=2, pp=2), ALTERNATING),
    Row(DELTA, MeshShape(fsdp=2, pp=2), ALTERNATING, packed=True),
    Row(EIGHT_DELTA, MeshShape(fsdp=2, pp=2), parts(4, virtual_stages=2)),
    Row(EIGHT_DELTA, MeshShape(dp=2, sp=2, pp=2), ALTERNATING, packed=True),
    Row(EIGHT_DELTA, MeshShape(sp=4, pp=2), fused("ring", num_microbatches=2)),
    Row(SPARSE, MeshShape(ep=2, fsdp=2, pp=2), GPIPE),
    Row(SIX_SPARSE, MeshShape(dp=2, pp=2), parts(4, dropout=0.2)),
    Row(SIX_SPARSE, MeshShape(ep=2, fsdp=2, pp=2), Strategy(optimizer="muon", num_microbatches=4)),
    # With AdamW, signs in its first update move the third step's gradient norm by more than 1e-5.
    Row(replace(QWEN3_NEXT, num_layers=8), MeshShape(ep=2, tp=2, pp=2), Strategy(optimizer="sgd", num_microbatches=4)),
    Row(LLAMA4, MeshShape(ep=2, tp=2, pp=2), ALTERNATING),
    Row(LLAMA4, MeshShape(fsdp=2, sp=2, pp=2), GPIPE, "matmuls"),
    Row(GEMMA4, MeshShape(fsdp=2, tp=2, pp=2), ALTERNATING),
    Row(GEMMA4_MOE, MeshShape(ep=2, fsdp=2, pp=2), ALTERNATING),
    Row(ONE_DENSE, MeshShape(ep=2, fsdp=2, tp=2)),
    Row(LLAMA4, MeshShape(ep=2, fsdp=2, tp=2)),
    Row(LLAMA4, MeshShape(ep=2, sp=2, tp=2), parts(2), "none"),
    Row(CHUNKED, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(GEMMA4, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(GEMMA4, MeshShape(dp=2, tp=4), parts(2), "matmuls"),
    Row(GEMMA4, MeshShape(fsdp=2, sp=2), ULYSSES, packed=True),
    Row(GEMMA4, MeshShape(fsdp=2, tp=2), WHOLE_STREAM, "none"),
    Row(GEMMA4_SMALL, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(GEMMA4_SHORT, MeshShape(dp=2, tp=4), parts(2), "matmuls"),
    Row(GEMMA4_SMALL, MeshShape(fsdp=2, sp=2), ULYSSES, packed=True),
    Row(GEMMA4_SHORT, MeshShape(fsdp=2, tp=2), WHOLE_STREAM, "none"),
    Row(GEMMA4_SHORT, MeshShape(dp=2, fsdp=2), parts(2, zero_stage=2)),
    Row(GEMMA3N, MeshShape(dp=2, fsdp=2, tp=2)),
    Row(GEMMA3N, MeshShape(fsdp=2, tp=4), parts(2), "matmuls"),
    Row(GEMMA3N, MeshShape(fsdp=2, tp=2), WHOLE_STREAM, "none"),
    Row(GEMMA3N, MeshShape(fsdp=2, sp=2), packed=True),
    # With AdamW, signs in its first update move the third step's gradient norm by up to 1.5e-5.
    Row(GEMMA4_MOE, MeshShape(ep=2, fsdp=2, tp=2), Strategy(optimizer="sgd")),
    Row(GEMMA4_MOE, MeshShape(ep=2, sp=2, tp=2), parts(2), "none"),
    Row(GEMMA4_MOE, MeshShape(fsdp=2, tp=2), Strategy(optimizer="sgd"), "matmuls"),
    Row(IN_CHUNKS, MeshShape(sp=4), RING),
    Row(IN_CHUNKS, MeshShape(sp=2), ULYSSES),
    Row(IN_CHUNKS, MeshShape(sp=2, tp=2), fused("gather")),
    Row(CHUNKED, MeshShape(fsdp=2, pp=2), parts(4)),
    Row(CHUNKED, MeshShape(fsdp=2, sp=2), packed=True),
    Row(IN_CHUNKS, MeshShape(fsdp=2, sp=2), RING, packed=True),
    Row(IN_CHUNKS, MeshShape(sp=2), ULYSSES, packed=True),
    Row(IN_CHUNKS, MeshShape(sp=2, tp=2), fused("gather"), packed=True),
    Row(AFTER_ONE, MeshShape(ep=2, fsdp=2, tp=2), Strategy(dropout=0.2, attention="flash")),
    Row(AFTER_ONE, MeshShape(ep=2, fsdp=2, pp=2), ALTERNATING),
]
"""Families with other ops than Llama's."""


def with_lora(model: ModelConfig, *targets: str, dropout: float = 0.0, dora: bool = False) -> ModelConfig:
    """The model with adapters beside some of its products; beside all that can have one where none are named."""
    found = with_adapters(model, rank=4, alpha=8.0, targets=targets or (ALL_LINEAR,), dropout=dropout, dora=dora)
    ends = "".join(f" {name}" for name in ENDS if name in targets)
    return replace(found, name=f"{model.name} {'dora' if dora else 'lora'}{ends}{' dropout' * (dropout > 0)}")


ENDS = ("embed_tokens", "lm_head")
LORA = with_lora(DENSE)
ONE = replace(DENSE, name="one", num_layers=1)
"""One layer is no loop, so that a compiler leaves out each gradient that leads to nothing that is trained."""

FINE_TUNING = [
    Row(LORA, MeshShape(fsdp=2, sp=2, tp=2)),
    Row(LORA, MeshShape(fsdp=2, sp=2, tp=2), remat="none"),
    Row(LORA, MeshShape(fsdp=2, sp=2, tp=2), WHOLE_STREAM, "attention"),
    Row(LORA, MeshShape(fsdp=2, sp=2, tp=2), GATHER, "matmuls"),
    Row(LORA, MeshShape(tp=4), Strategy(collective_matmul=True)),
    Row(LORA, MeshShape(sp=2), RING),
    Row(LORA, MeshShape(dp=2, fsdp=2, tp=2), parts(2)),
    Row(LORA, MeshShape(fsdp=4), Strategy(zero_stage=1)),
    Row(LORA, MeshShape(dp=2, fsdp=2, tp=2), parts(4, zero_stage=2)),
    Row(LORA, MeshShape(pp=4), GPIPE, "matmuls"),
    Row(LORA, MeshShape(fsdp=2, tp=2, pp=2), ALTERNATING),
    Row(with_lora(DENSE, "q_proj", "v_proj"), MeshShape(fsdp=2, tp=2)),
    Row(with_lora(ONE, "q_proj", "v_proj"), MeshShape(fsdp=2, tp=2), core=True),
    Row(with_lora(ONE, "k_proj"), MeshShape(fsdp=2, sp=2, tp=2), ULYSSES),
    Row(with_lora(ONE, "v_proj"), MeshShape(fsdp=2, sp=2, tp=2), WHOLE_STREAM, "matmuls"),
    Row(with_lora(ONE, "o_proj"), MeshShape(fsdp=2, tp=2), remat="attention"),
    Row(with_lora(ONE, "gate_proj", "down_proj"), MeshShape(fsdp=2, tp=2), remat="matmuls"),
    Row(with_lora(SHARED, "q_proj", "v_proj"), MeshShape(ep=2, fsdp=2, tp=2)),
    Row(with_lora(DENSE, dropout=0.2), MeshShape(fsdp=2, sp=2, tp=2)),
    Row(with_lora(DENSE, dropout=0.2), MeshShape(dp=2, fsdp=2, tp=2), parts(2)),
    Row(with_lora(DENSE, dropout=0.2), MeshShape(fsdp=2, tp=2, pp=2), ALTERNATING),
    Row(with_lora(SHARED, dropout=0.2), MeshShape(ep=2, fsdp=2, tp=2), remat="none"),
    Row(with_lora(NEOX), MeshShape(fsdp=2, sp=2, tp=2)),
    Row(with_lora(GEMMA2), MeshShape(fsdp=2, sp=2, tp=2)),
    Row(with_lora(DELTA, "q_proj"), MeshShape(fsdp=2, tp=2)),
    Row(with_lora(EIGHT_DELTA, "q_proj"), MeshShape(fsdp=2, tp=2, pp=2), ALTERNATING),
    Row(with_lora(replace(SPARSE, num_layers=8)), MeshShape(fsdp=2, pp=2), GPIPE),
    Row(with_lora(GEMMA4_SMALL), MeshShape(fsdp=2, sp=2, tp=2)),
    Row(with_lora(GPT2), MeshShape(fsdp=2, sp=2, tp=2)),
    Row(with_lora(QWEN3), MeshShape(fsdp=2, sp=2, tp=2)),
    Row(with_lora(MOE), MeshShape(ep=2, fsdp=2, tp=2)),
    Row(with_lora(SHARED), MeshShape(ep=2, fsdp=2, tp=2)),
    Row(with_lora(SHARED), MeshShape(ep=2, fsdp=2, tp=2), remat="none"),
    Row(with_lora(DENSE, dora=True), MeshShape(fsdp=2, sp=2, tp=2)),
    Row(with_lora(DENSE, dora=True), MeshShape(dp=2, fsdp=2, tp=2), parts(2), "none"),
    Row(with_lora(DENSE, dora=True), MeshShape(fsdp=2, tp=2), WHOLE_STREAM, "matmuls"),
    Row(with_lora(DENSE, dora=True), MeshShape(tp=4), Strategy(collective_matmul=True)),
    Row(with_lora(DENSE, dora=True), MeshShape(fsdp=4), Strategy(zero_stage=1)),
    Row(with_lora(DENSE, dora=True), MeshShape(fsdp=2, tp=2, pp=2), ALTERNATING),
    Row(with_lora(ONE, "q_proj", "o_proj", dora=True), MeshShape(fsdp=2, tp=2), core=True),
    Row(with_lora(replace(ONE, tied_embeddings=True), *ENDS), MeshShape(fsdp=2, tp=2), core=True),
    Row(with_lora(NEOX, dora=True), MeshShape(fsdp=2, tp=2)),
    Row(with_lora(GPT2, dora=True), MeshShape(fsdp=2, sp=2, tp=2)),
    Row(with_lora(DENSE, *ENDS, "q_proj"), MeshShape(fsdp=2, sp=2, tp=2)),
    Row(with_lora(DENSE, *ENDS, dropout=0.2), MeshShape(dp=2, fsdp=2, tp=2), parts(2)),
    Row(with_lora(DENSE, *ENDS), MeshShape(fsdp=2, tp=2, pp=2), ALTERNATING),
    Row(with_lora(DENSE, *ENDS), MeshShape(fsdp=2, pp=2), GPIPE),
    Row(with_lora(DENSE, "lm_head"), MeshShape(dp=2, tp=2), WHOLE_STREAM, "none"),
    Row(with_lora(DENSE, "embed_tokens"), MeshShape(fsdp=4), Strategy(zero_stage=1)),
    Row(with_lora(TIED, *ENDS), MeshShape(fsdp=2, tp=2)),
    Row(DENSE, MeshShape(fsdp=2, tp=2), frozen=("embedding", "layers")),
    Row(DENSE, MeshShape(fsdp=2, tp=2), parts(2), frozen=("*norm*", "down", "unembedding")),
    Row(DENSE, MeshShape(fsdp=2, tp=2), parts(2, zero_stage=1), frozen=("embedding", "query")),
    Row(TIED, MeshShape(fsdp=2, tp=2), frozen=("embedding",)),
    Row(SHARED, MeshShape(ep=2, fsdp=2, tp=2), frozen=("expert_*", "router")),
    Row(DENSE, MeshShape(fsdp=2, tp=2, pp=2), ALTERNATING, frozen=("embedding",)),
]
"""Adapters of low rank, which are all that trains, and parameters that are frozen."""


def covering(rows: Iterable[Row]) -> Sequence[Row]:
    """The core rows, and of the others as many as it takes for every mechanism that some row has, cheap ones first.

    Experts and stages each about double the time to compile a row.
    """
    every = list(rows)
    found = [row for row in every if row.core]
    seen = set[object]().union(*(row.mechanisms for row in found))

    def gain(row: Row) -> float:
        cost = (2 if row.model.experts else 1) * (2 if row.mesh.pp > 1 else 1)
        return len(row.mechanisms - seen) / cost

    while gain(best := max(every, key=gain)):
        found.append(best)
        seen |= best.mechanisms
    return found
