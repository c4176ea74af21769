"""What the rebuilt derivation predicts otherwise than the golden records, with the cause of each."""

from __future__ import annotations

from collections.abc import Mapping

RERUN = "Recomputing a whole block sums the MLP's output again: the old list called it attention's output."
BIASES = (
    "Gradients of biases and of learned positions are planned as programs sum them: those of norms in float32, one "
    "all-reduce for each dim of the tokens that is split. The old plan had one in the compute dtype."
)
LATENTS = (
    "A latent's gradient is all-reduced over tp, after which attention's input gradient needs no reduce- "
    "scatter. Latents are recomputed, rotary embedding is counted on whole keys, heads of two sizes "
    "product by product; a stage's dense and sparse layers are counted together, and each kind reads its "
    "own weights alone."
)
POST_NORMS = "Norms after blocks cost a pass, and their backward makes the MLP's last product and its sum again."
SLOTS = (
    "The activation goes through all slots of experts, filled or not; the router multiplies the stream as tp splits it."
)
ROUTER = "The router multiplies the stream as tp splits it; the old time had it whole on every device."
TWO_KINDS = (
    "Experts and the MLP beside them have an activation each, a launch on GPUs; layers of two kinds read "
    "their own weights alone; the router multiplies the stream as tp splits it."
)
PARALLEL = (
    "Parallel blocks have two norms and gather the input of each; nothing needs attention's output product again."
)
QK_NORM = "Norms of query and key heads cost a pass over each; the router multiplies the stream as tp splits it."
NORM_SUMS = (
    "A server sums the squares of its last norm, and of each norm after a block, as of those before blocks; of a "
    "LayerNorm the mean before them; and of a prompt each device those of its own tokens alone."
)
PROMPTS = (
    "Of prompts the last tokens' stream is summed over the devices that split tokens, each router multiplies tokens as "
    "they are split, and tokens on their way to experts of other devices are not gathered before."
)
SHARED_EXPERT = "Experts and the MLP beside them are each summed over tp, as the program does it."
NEWEST = "Every device of a server has the newest token of every text, where the text's next step looks for it."
STRADDLED = "A window and the tokens of a step may lie across one page more than they would fill."
FEATURES = "The mean of the last image, which the product to the classes reads, is kept for its gradient."

PLACES = "Positions of gathered keys follow from how a sequence is cut: nothing sends them, in no layer."
REPORTED = (
    "The loss that is reported is cross-entropy alone, so that stages do not add up the experts' loss of imbalance."
)

CHOICE_BIAS = "The bias by which DeepSeek-V3's router chooses is a parameter of 256 elements in each layer of experts."

TIMES = ("breakdown seconds/*", "mfu", "step seconds", "tokens per second")

REFERENCE = "A frozen reference is a phase of its own, of no flops where a step runs none."

UPDATE = "Muon's update has products: a phase of flops of its own, of none with any other optimizer."

CASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "decode 70b int8 on v5e": (
        f"{NORM_SUMS} {NEWEST}",
        (
            *TIMES,
            "predicted collectives/*",
            "useful collectives/*",
            "search/best/*",
            "search/frontier/*",
            "search in 20 ms/*",
        ),
    ),
    "decode mixtral on h100": (NEWEST, (*TIMES, "predicted collectives/*", "useful collectives/*")),
    "decode qwen on tpu7x": (NEWEST, (*TIMES, "predicted collectives/*", "useful collectives/*")),
    "decode tiny on cpu": (NEWEST, (*TIMES, "predicted collectives/*", "useful collectives/*")),
    "decode window on a100": (STRADDLED, ("memory/*",)),
    "decode 7b cache by batch on v5e": (NORM_SUMS, (*TIMES, "predicted collectives/*", "useful collectives/*")),
    "decode deepseek-v3 fp8 on h100": (
        f"{SHARED_EXPERT} {NEWEST}",
        (
            *TIMES,
            "predicted collectives/*",
            "useful collectives/*",
            "search in 50 ms/frontier",
            "search in 50 ms/best/*",
        ),
    ),
    "prefill 70b on v5p": (
        f"{NORM_SUMS} {PROMPTS}",
        (*TIMES, "predicted collectives/*", "useful collectives/*", "search/best/*", "search/frontier/*"),
    ),
    "prefill mixtral on h100": (PROMPTS, (*TIMES, "predicted collectives/*", "useful collectives/*")),
    "prefill latent on h100": (NORM_SUMS, (*TIMES, "predicted collectives/*", "useful collectives/*")),
    "70b torchtitan with tp on h100": (RERUN, ("executed collectives/*", "useful collectives/*")),
    "bloom alibi on a100": (
        BIASES,
        (*TIMES, "executed collectives/*", "predicted collectives/*", "useful collectives/*"),
    ),
    "gpt2 learned positions on v5e": (
        BIASES,
        ("executed collectives/*", "predicted collectives/*", "useful collectives/*"),
    ),
    "gpt2-xl ZeRO-1 on v5e": (BIASES, ("executed collectives/*", "predicted collectives/*", "useful collectives/*")),
    "gpt3 DeepSpeed ZeRO-3 on a100": (
        BIASES,
        (*TIMES, "executed collectives/*", "predicted collectives/*", "useful collectives/*"),
    ),
    "gpt3 megatron on a100": (
        BIASES,
        (*TIMES, "executed collectives/*", "predicted collectives/*", "search/*", "useful collectives/*"),
    ),
    "qwen2 biases on v6e": (BIASES, ("search/*",)),
    "deepseek-v2 lockstep on v5p": (
        LATENTS,
        (
            *TIMES,
            "attention flops by phase/*",
            "executed collectives/*",
            "flops",
            "flops by phase/*",
            "hbm bytes by phase/*",
            "predicted collectives/*",
            "useful collectives/*",
        ),
    ),
    "deepseek-v2 on h100": (
        LATENTS,
        (
            *TIMES,
            "attention flops by phase/*",
            "flops",
            "flops by phase/*",
            "hbm bytes by phase/*",
            "predicted collectives/*",
        ),
    ),
    "deepseek-v3 on h100": (
        LATENTS,
        (
            *TIMES,
            "attention flops by phase/*",
            "executed collectives/*",
            "flops",
            "flops by phase/*",
            "hbm bytes by phase/*",
            "predicted collectives/*",
            "useful collectives/*",
        ),
    ),
    "deepseek-v3 plain layers repeated by stages on v5p": (
        LATENTS,
        (
            *TIMES,
            "attention flops by phase/*",
            "executed collectives/*",
            "flops",
            "flops by phase/*",
            "hbm bytes by phase/*",
            "predicted collectives/*",
            "useful collectives/*",
        ),
    ),
    "deepseek-v3 plain layers shared by stages on v5p": (
        LATENTS,
        (
            *TIMES,
            "attention flops by phase/*",
            "executed collectives/*",
            "flops",
            "flops by phase/*",
            "hbm bytes by phase/*",
            "predicted collectives/*",
            "useful collectives/*",
        ),
    ),
    "deepseek-v3 search of h100": (
        LATENTS,
        (
            *TIMES,
            "attention flops by phase/*",
            "flops",
            "flops by phase/*",
            "hbm bytes by phase/*",
            "predicted collectives/*",
            "search/*",
        ),
    ),
    "gemma2 post norms on v6e": (
        POST_NORMS,
        (
            *TIMES,
            "executed collectives/*",
            "flops",
            "flops by phase/*",
            "predicted collectives/*",
            "useful collectives/*",
        ),
    ),
    "kit 045 slotted fsdp=2 on cpu": (SLOTS, (*TIMES,)),
    "kit 045 slotted fsdp=2 on h100": (SLOTS, (*TIMES,)),
    "kit 051 slotted ep=4 on cpu": (SLOTS, (*TIMES,)),
    "kit 051 slotted ep=4 on h100": (SLOTS, (*TIMES,)),
    "kit 051 slotted ep=4 on v5e": (SLOTS, (*TIMES,)),
    "kit 059 slotted fsdp=2,tp=2,ep=2 on cpu": (SLOTS, (*TIMES,)),
    "kit 059 slotted fsdp=2,tp=2,ep=2 on h100": (SLOTS, (*TIMES,)),
    "kit 059 slotted fsdp=2,tp=2,ep=2 on v5e": (SLOTS, (*TIMES,)),
    "kit 061 slotted tp=2,sp=2,ep=2 remat=matmuls on cpu": (SLOTS, (*TIMES, "bound")),
    "kit 061 slotted tp=2,sp=2,ep=2 remat=matmuls on h100": (SLOTS, (*TIMES,)),
    "kit 061 slotted tp=2,sp=2,ep=2 remat=matmuls on v5e": (SLOTS, (*TIMES,)),
    "kit 073 slotted tp=2,ep=2,pp=2 num_microbatches=4 on cpu": (SLOTS, (*TIMES,)),
    "kit 073 slotted tp=2,ep=2,pp=2 num_microbatches=4 on h100": (SLOTS, (*TIMES,)),
    "kit 073 slotted tp=2,ep=2,pp=2 num_microbatches=4 on v5e": (SLOTS, (*TIMES,)),
    "mixtral capacity on v5e": (SLOTS, (*TIMES,)),
    "tiny experts with slots on cpu": (SLOTS, (*TIMES, "search of what runs/*")),
    "kit 046 moe tp=8 on cpu": (ROUTER, (*TIMES,)),
    "kit 046 moe tp=8 on h100": (ROUTER, (*TIMES,)),
    "kit 046 moe tp=8 on v5e": (ROUTER, (*TIMES,)),
    "kit 055 moe dp=2,fsdp=2,tp=2 num_microbatches=4 on cpu": (ROUTER, (*TIMES, "predicted collectives/*")),
    "kit 055 moe dp=2,fsdp=2,tp=2 num_microbatches=4 on h100": (ROUTER, (*TIMES, "predicted collectives/*")),
    "kit 055 moe dp=2,fsdp=2,tp=2 num_microbatches=4 on v5e": (
        ROUTER,
        ("predicted collectives/*", "breakdown seconds/*"),
    ),
    "kit 058 moe tp=2,ep=4 on cpu": (ROUTER, (*TIMES,)),
    "kit 058 moe tp=2,ep=4 on h100": (ROUTER, (*TIMES,)),
    "kit 058 moe tp=2,ep=4 on v5e": (ROUTER, (*TIMES,)),
    "kit 065 moe fsdp=2,tp=2,sp=2 attention=flash sp_method=ring on cpu": (ROUTER, (*TIMES,)),
    "kit 065 moe fsdp=2,tp=2,sp=2 attention=flash sp_method=ring on h100": (ROUTER, (*TIMES,)),
    "kit 065 moe fsdp=2,tp=2,sp=2 attention=flash sp_method=ring on v5e": (ROUTER, (*TIMES,)),
    "kit 084 moe dp=2,tp=2,ep=2 dropout=0.2 on cpu": (ROUTER, (*TIMES,)),
    "kit 084 moe dp=2,tp=2,ep=2 dropout=0.2 on h100": (ROUTER, (*TIMES,)),
    "kit 084 moe dp=2,tp=2,ep=2 dropout=0.2 on v5e": (ROUTER, (*TIMES,)),
    "mixtral 1f1b lockstep on v6e": (ROUTER, (*TIMES,)),
    "mixtral ep on h100": (ROUTER, (*TIMES,)),
    "mixtral ep on v5p": (ROUTER, (*TIMES,)),
    "mixtral without ep on h100": (ROUTER, (*TIMES,)),
    "kit 052 shared ep=4 on cpu": (TWO_KINDS, ("bound", "hbm bytes by phase/*")),
    "kit 052 shared ep=4 on h100": (TWO_KINDS, (*TIMES, "hbm bytes by phase/*")),
    "kit 052 shared ep=4 on v5e": (TWO_KINDS, ("hbm bytes by phase/*",)),
    "kit 054 shared fsdp=2,tp=4 remat=none on cpu": (TWO_KINDS, (*TIMES, "hbm bytes by phase/*")),
    "kit 054 shared fsdp=2,tp=4 remat=none on h100": (TWO_KINDS, (*TIMES, "hbm bytes by phase/*")),
    "kit 054 shared fsdp=2,tp=4 remat=none on v5e": (TWO_KINDS, (*TIMES, "hbm bytes by phase/*")),
    "kit 060 shared fsdp=2,tp=2,ep=2 on cpu": (TWO_KINDS, (*TIMES, "hbm bytes by phase/*")),
    "kit 060 shared fsdp=2,tp=2,ep=2 on h100": (TWO_KINDS, (*TIMES, "hbm bytes by phase/*")),
    "kit 060 shared fsdp=2,tp=2,ep=2 on v5e": (TWO_KINDS, (*TIMES, "hbm bytes by phase/*")),
    "kit 064 shared tp=2,sp=2,ep=2 attention=flash sp_method=ring on cpu": (TWO_KINDS, (*TIMES,)),
    "kit 064 shared tp=2,sp=2,ep=2 attention=flash sp_method=ring on h100": (TWO_KINDS, (*TIMES,)),
    "kit 064 shared tp=2,sp=2,ep=2 attention=flash sp_method=ring on v5e": (TWO_KINDS, (*TIMES,)),
    "kit 074 shared fsdp=2,ep=2,pp=2 num_microbatches=2 schedule=gpipe on cpu": (TWO_KINDS, ("hbm bytes by phase/*",)),
    "kit 074 shared fsdp=2,ep=2,pp=2 num_microbatches=2 schedule=gpipe on h100": (
        TWO_KINDS,
        (*TIMES, "hbm bytes by phase/*", "predicted collectives/*"),
    ),
    "kit 074 shared fsdp=2,ep=2,pp=2 num_microbatches=2 schedule=gpipe on v5e": (TWO_KINDS, ("hbm bytes by phase/*",)),
    "kit 075 shared fsdp=2,sp=2,pp=2 num_microbatches=4 attention=flash sp_method=ring on cpu": (
        TWO_KINDS,
        ("hbm bytes by phase/*",),
    ),
    "kit 075 shared fsdp=2,sp=2,pp=2 num_microbatches=4 attention=flash sp_method=ring on h100": (
        TWO_KINDS,
        (*TIMES, "hbm bytes by phase/*", "predicted collectives/*"),
    ),
    "kit 075 shared fsdp=2,sp=2,pp=2 num_microbatches=4 attention=flash sp_method=ring on v5e": (
        TWO_KINDS,
        ("hbm bytes by phase/*",),
    ),
    "kit 076 aftertwo tp=2,ep=2,pp=2 num_microbatches=4 on cpu": (
        TWO_KINDS,
        (*TIMES, "executed collectives/*", "hbm bytes by phase/*", "useful collectives/*"),
    ),
    "kit 076 aftertwo tp=2,ep=2,pp=2 num_microbatches=4 on h100": (
        TWO_KINDS,
        (*TIMES, "executed collectives/*", "hbm bytes by phase/*", "useful collectives/*"),
    ),
    "kit 076 aftertwo tp=2,ep=2,pp=2 num_microbatches=4 on v5e": (
        TWO_KINDS,
        (*TIMES, "executed collectives/*", "hbm bytes by phase/*", "useful collectives/*"),
    ),
    "kit 077 aftertwo fsdp=2,pp=2 num_microbatches=4 virtual_stages=2 on cpu": (TWO_KINDS, ("hbm bytes by phase/*",)),
    "kit 077 aftertwo fsdp=2,pp=2 num_microbatches=4 virtual_stages=2 on h100": (
        TWO_KINDS,
        (*TIMES, "hbm bytes by phase/*"),
    ),
    "kit 077 aftertwo fsdp=2,pp=2 num_microbatches=4 virtual_stages=2 on v5e": (TWO_KINDS, ("hbm bytes by phase/*",)),
    "kit 085 shared fsdp=2,ep=2,pp=2 num_microbatches=4 schedule=gpipe on cpu": (TWO_KINDS, ("hbm bytes by phase/*",)),
    "kit 085 shared fsdp=2,ep=2,pp=2 num_microbatches=4 schedule=gpipe on h100": (
        TWO_KINDS,
        (*TIMES, "hbm bytes by phase/*", "predicted collectives/*"),
    ),
    "kit 085 shared fsdp=2,ep=2,pp=2 num_microbatches=4 schedule=gpipe on v5e": (TWO_KINDS, ("hbm bytes by phase/*",)),
    "tiny shared experts over stages on cpu": (TWO_KINDS, ("hbm bytes by phase/*",)),
    "neox parallel blocks on a100": (
        PARALLEL,
        (*TIMES, "executed collectives/*", "predicted collectives/*", "useful collectives/*"),
    ),
    "palm slices of v4": (PARALLEL, (*TIMES, "flops", "flops by phase/*")),
    "qwen3 experts on h100": (QK_NORM, (*TIMES, "search/*")),
    "qwen3 experts on v6e": (QK_NORM, (*TIMES,)),
    "qwen3 norms of heads on v6e": (
        QK_NORM,
        (*TIMES, "executed collectives/*", "predicted collectives/*", "useful collectives/*"),
    ),
    "qwen3 uneven stages on a100": (QK_NORM, (*TIMES,)),
    "resnet*": (FEATURES, ("memory/activations", "memory/peak")),
}
"""By case: why it differs, and in which quantities (`fnmatch`)."""

NAMED_DIFFERENCES: Mapping[tuple[str, str], str] = (
    {(case, quantity): why for case, (why, quantities) in CASES.items() for quantity in quantities}
    | dict.fromkeys((("*", "flops by phase/reference"), ("*", "attention flops by phase/reference")), REFERENCE)
    | dict.fromkeys((("*", "flops by phase/update"), ("*", "attention flops by phase/update")), UPDATE)
    | dict.fromkeys(
        (("deepseek-v3 *", "argument bytes"), ("deepseek-v3 *", "memory/*"), ("decode deepseek-v3 *", "memory/*")),
        CHOICE_BIAS,
    )
    | {
        ("kit 076 *", f"{counted} collectives/reduce-scatter tp recompute *"): RERUN
        for counted in ("useful", "executed")
    }
    | {
        (case, quantity): PLACES
        for case in ("13b gather over sp *", "kit 011 *", "kit 030 *", "kit 069 *")
        for quantity in (*TIMES, "* collectives/all-gather sp *")
    }
    | {
        ("deepseek-v3 search of h100", "* collectives/all-gather sp *"): PLACES,
        ("published runs", "torchtitan-*"): PLACES,
    }
    | {("*", "* collectives/all-reduce pp forward*"): REPORTED}
    | {
        (case, quantity): REPORTED
        for case in ("kit 07[2-7] *", "kit 085 *", "tiny shared experts over stages *")
        for quantity in TIMES
    }
)
