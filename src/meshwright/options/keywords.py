"""The keywords of the library, for type checkers: written by `python tests/test_options.py`, not by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from meshwright.description.step.serving import CacheSplit
from meshwright.description.step.strategy import (
    Attention,
    MatmulDtype,
    OnBadStep,
    Optimizer,
    RateSchedule,
    SequenceMethod,
    TpStream,
)
from meshwright.description.step.trained import BaseFormat
from meshwright.description.step.workload import Dtype, Objective, Reference, Remat
from meshwright.options.values import Count, MeshLike, SystemLike


class WorkloadOptions(TypedDict, total=False):
    """The workload, and how its hardware is described."""

    batch: Count | None
    """Sequences of the global batch; with --objective dpo, pairs. Needed, or --batch-tokens."""
    batch_tokens: Count | None
    """The global batch in tokens, as 4M, instead of --batch."""
    seq_len: Count | None
    """Tokens of a sequence. Default: the model's trained length, or 2048."""
    dtype: Dtype | None
    """Dtype of matmuls. Default: bf16, on simulated CPU devices f32."""
    param_dtype: Dtype | None
    """Dtype of parameters and gradients. Default: f32."""
    remat: Remat | Literal["auto"] | None
    """Rematerialization: the activations that a layer saves for backward, from most to least memory: none (recompute
    nothing), attention (all but scores), matmuls (their outputs), block (its input), offload (its input, in
    host memory). Default: plan tries them all (auto); train and verify use block.
    """
    objective: Objective | None
    """next-token: all text. dpo: pairs of a chosen and a rejected answer. Default: next-token."""
    reference: Reference | None
    """The reference model of dpo: run in each step (live), or once before the first (precomputed). Default: live."""
    packed: bool | None
    """Rows have several documents or padding, so that the batch includes positions, segments and weights (off)."""
    z_loss: float | None
    """Add this times the square of the log of the logits' normalizer to the loss, as 1e-4. Default: 0."""
    num_layers: Count | None
    """Use only N layers of the model. Default: all."""
    lora_rank: Count | None
    """Train only LoRA adapters of this rank, as 16; all other parameters are frozen. Default: train all."""
    lora_alpha: float | None
    """Adapters' output is scaled by alpha / rank. Default: 2 * rank."""
    lora_targets: str | Sequence[str] | None
    """Matmuls with adapters, as q_proj,v_proj or query,value, and embed_tokens, lm_head. Default: all-linear."""
    lora_dropout: float | None
    """Dropout of the adapters' input in training, as 0.05. Default: 0."""
    lora_dora: bool | None
    """Train a magnitude for each output of the adapted matmuls too, as DoRA does (arXiv:2402.09353). Default: off."""
    quantize_base: BaseFormat | None
    """With adapters: store the weights of layers in 4 bits (nf4) or in int8, as QLoRA does. Default: in --dtype."""
    adapter: str | Path | None
    """Start from these PEFT adapters, which set rank, alpha and targets. Default: new ones."""
    freeze: str | Sequence[str] | None
    """Do not train these parameters, by path: embedding, layers.query or 'layers.*_norm'. Default: train all."""
    hardware: str | Path | None
    """A TOML file with your own chip, whose name --on then accepts (examples: meshwright/description/hardware/data)."""
    memory_headroom: float | str | None
    """Fraction added to predicted memory before it must fit, as 10%. Default: the error measured on such chips."""


class StrategyOptions(TypedDict, total=False):
    """How a step runs. Default: the planner's choice; where it does not choose, the value in parentheses."""

    num_microbatches: Count | None
    """Microbatches of a device's batch, run one after the other; more need less memory (1)."""
    zero_stage: Literal[0, 1, 2, 3] | None
    """fsdp shards 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters (3)."""
    attention: Attention | None
    """flash: a fused kernel, or blockwise if the chip has none. cudnn: cuDNN's kernel. scores: write the matrix of
    scores to memory (on TPUs flash, elsewhere scores).
    """
    sp_method: SequenceMethod | None
    """How keys reach the queries of a sequence split over sp: gathered, sent round a ring, or (ulysses) exchanged for
    heads (gather). With ring and ulysses, --attention is flash.
    """
    tp_stream: TpStream | None
    """Between blocks, tp splits the residual stream along the sequence, or replicates it (split)."""
    collective_matmul: bool | None
    """Run tp's collectives chunk by chunk, overlapped with their matmuls (off)."""
    schedule: Literal["gpipe", "1f1b"] | None
    """Order of microbatches in pipeline stages (1f1b)."""
    virtual_stages: Count | None
    """Chunks of layers in each stage; several make the schedule interleaved (1)."""
    optimizer: Optimizer | None
    """adamw, lion, adafactor, sgd or muon; adamw-8bit can be planned (adamw)."""
    moment_dtype: Dtype | None
    """Dtype of the optimizer's moments (the parameters')."""
    master_weights: bool | None
    """The optimizer updates float32 copies of narrower parameters (off)."""
    gradient_dtype: Dtype | None
    """Dtype in which gradients are summed over devices (the matmuls')."""
    matmul_dtype: MatmulDtype | None
    """Quantize the operands of layers' matmuls; needs pip install meshwright[quantized] (off)."""
    dropout: float | None
    """Dropout of the outputs of attention and MLP (0)."""
    reference_mesh: MeshLike | None
    """The mesh of dpo's reference model, over the same devices, as fsdp=2,tp=4 (the policy's)."""


class ServingOptions(TypedDict, total=False):
    """The serving workload and its hardware."""

    on: SystemLike
    """The hardware: a chip and a slice shape or a device count, as v5e:4x4 or h100:8. Needed."""
    batch: Count | None
    """Sequences served at once. Default: the most within --latency; without --latency, dp*ep."""
    latency: str | float | None
    """Maximum step time, as 30ms: of one decode step, or of a batch of prompts. Default: no limit; the shortest step
    is best.
    """
    prompt_len: Count | None
    """Tokens of a prompt. Default: 1024."""
    output_len: Count | None
    """Tokens of an answer. Default: 256; prefill has none."""
    chunk: Count | None
    """With --serve prefill: tokens of each prompt in a step (chunked prefill). Default: whole prompts."""
    adapter_slots: Count | None
    """LoRA adapters that the server holds at once, of which each sequence uses one. Default: 0."""
    adapter_rank: Count | None
    """The maximum rank of these adapters. Default: 16."""
    num_layers: Count | None
    """Use only N layers of the model. Default: all."""
    hardware: str | Path | None
    """A TOML file with your own chip, whose name --on then accepts."""
    memory_headroom: float | str | None
    """Fraction added to predicted memory before it must fit, as 10%. Default: the error measured on such chips."""
    dtype: str | None
    """Dtype of matmuls: also int8 or fp8 on chips that support it."""
    weight_dtype: str | None
    """Dtype of weights: bf16, f32; int8, int4 or fp8 for those of layers, with scales."""
    kv_dtype: str | None
    """Dtype of cached keys and values."""


class PlanOptions(WorkloadOptions, StrategyOptions, total=False):
    """A plan: workload, strategy, hardware and mesh."""

    on: SystemLike
    """The hardware, as v5p:4x4x4."""
    mesh: MeshLike | None
    """As fsdp=-1,tp=4. Default: the planner chooses."""


class SearchOptions(WorkloadOptions, StrategyOptions, total=False):
    """The workload of `meshwright.plan`, and choices that the planner must keep."""

    include_planned: bool
    """Include plans that meshwright cannot train yet."""
    framework: str | None
    """Predict steps as another framework runs them: megatron-core, maxtext, torchtitan, …. Default: meshwright."""


class TrainOptions(PlanOptions, total=False):
    """A run: its plan, and the settings that are not in it."""

    weights: str | Path | None
    """Start from the weights and tokenizer of this Hugging Face directory. Default: MODEL, if it is one."""
    seed: int | None
    """Seed of the initial parameters and the order of the data. Default: 0."""
    data: str | Sequence[str] | None
    """Files (text, .jsonl, .parquet, .arrow), folders, patterns, or token stores of `tokenize`. Give each a weight, as
    a.jsonl=0.7, or none of them. Default: the .py files of Python's standard library.
    """
    fields: str | Sequence[str] | Mapping[str, str] | None
    """Template of a record's text, as [question+prompt],answer: + joins fields, commas separate parts, and a part in
    [] has no loss. FILE=TEMPLATE is for one source. Default: messages, input_ids or text, whichever the first
    record has.
    """
    rows: Literal["windows", "packed", "padded"] | None
    """What a row holds: a window of a long text, several documents (packed), or one with padding (padded). Default:
    windows for text, else packed.
    """
    held_out: float | None
    """Fraction of documents or windows kept for evaluation and not trained on. Default: 0."""
    bad_data: Literal["error", "skip"] | None
    """For a record that cannot be used: stop and show it, or skip and count it. Default: error."""
    beta: float | None
    """The weight of the KL constraint: a higher beta keeps the policy nearer to the reference. Default: 0.1."""
    label_smoothing: float | None
    """Conservative DPO: the assumed share of pairs whose labels are swapped. Default: 0."""
    preference_loss: Literal["dpo", "ipo"] | None
    """ipo regresses the margin of a pair to 1 / (2 beta); dpo lets it grow. Default: dpo."""
    learning_rate: float | None
    """The peak learning rate. Default: 0.003; from trained weights 0.00002, LoRA 0.0002, dpo 0.000001."""
    lr_schedule: RateSchedule | None
    """The schedule after the warm-up: cosine, linear, wsd (constant, then a decay), constant. Default: cosine."""
    warmup_steps: int | None
    """Steps until the rate reaches its peak. Default: a tenth of all steps, at most 2000."""
    first_rate: float | None
    """Rate of the first step, as a fraction of the peak. Default: 1 / the warm-up's steps."""
    decay_steps: int | None
    """The step at which the schedule ends. Default: --steps."""
    decay_share: float | None
    """Fraction of the steps after the warm-up in which wsd decays. Default: 0.2."""
    final_rate: float | None
    """Rate at the end of the schedule, as a fraction of the peak. Default: 0.1."""
    rate: str | Sequence[str] | None
    """Multiply the rate of some parameters, as embedding=0.1 or layers.*=0.5. The last match counts."""
    weight_decay: float | None
    """Decoupled weight decay, times the learning rate. Default: 0.1."""
    no_decay: str | Sequence[str] | None
    """Parameters without weight decay. Default: norms, biases and embedding tables."""
    b1: float | None
    """The decay of the first moment (AdamW, Lion). Default: 0.9."""
    b2: float | None
    """The decay of the second moment (AdamW); Lion's second beta. Default: 0.95."""
    eps: float | None
    """AdamW's epsilon. Default: 1e-8."""
    momentum: float | None
    """Muon's momentum. Default: 0.95."""
    clip_norm: float | None
    """Clip gradients to this global norm; 0 clips none. Default: 1."""
    on_bad_step: OnBadStep | None
    """Stop at a bad step (NaN, infinity or a spike), or skip its update. Default: stop."""
    spike_factor: float | None
    """A spike is a gradient norm above this multiple of the median of recent steps. Default: no spikes."""
    max_bad_steps: int | None
    """With --on-bad-step skip: stop after this many bad steps in a row. Default: 10."""
    save_every: Count | None
    """Steps or time between checkpoints, as 500, 30m, 1h; 0: only after the last step. Default: 30m; a resumed run
    keeps its own.
    """
    keep: int | None
    """Number of recent checkpoints to keep. Default: 2."""
    keep_every: int | None
    """Also keep the first checkpoint of every N steps, permanently. Default: none."""
    grace_seconds: float | None
    """Time after SIGTERM to finish the step and save; after it, the command ends without saving. Default: 30."""
    eval_every: int | None
    """Steps between evaluations on --held-out, --eval-data, --eval-tasks; also after the last. Default: 0, none."""
    eval_batches: int | None
    """Maximum number of batches of an evaluation. Default: all held-out batches."""
    eval_data: str | Sequence[str] | None
    """Evaluate on these files; kinds as for --data. Default: the documents of --held-out."""
    eval_tasks: str | Sequence[str] | None
    """Multiple-choice tasks of each evaluation, files as for `eval --task`. Default: none."""
    profile: str | None
    """Trace these steps, as 10:15, for Perfetto and xprof, and print their collectives. Default: none."""
    wandb: str | None
    """Also send the metrics to this project of Weights & Biases (pip install wandb). Default: no."""


class ServeOptions(TypedDict, total=False):
    """A server: the model's devices, the engine, HTTP, and its processes."""

    on: SystemLike | None
    """The hardware, as cpu:8 or h100:8. Default: a run's own; needed for a Hugging Face directory."""
    mesh: MeshLike | None
    """The mesh, as 1,2,1,1 or fsdp=2. Default: a run's own; for a directory, fsdp over all devices."""
    dtype: Dtype | None
    """Dtype of parameters and matmuls. Default: the weights' dtype."""
    compile_cache: str | Path | None
    """Directory in which compiled programs are cached, at most 4 GiB, or off. Default: the user's cache."""
    adapter: str | Path | Sequence[str] | Mapping[str, str | Path] | None
    """Adapters, as PEFT writes them. NAME=DIRECTORY: requests choose it by this name. DIRECTORY alone: add it to the
    weights. Default: none.
    """
    adapter_slots: int | None
    """The maximum number of named adapters at once. Default: those of --adapter."""
    adapter_rank: int | None
    """The maximum rank of named adapters. Default: the largest of --adapter, or 16 without any."""
    adapter_folder: str | Path | None
    """Let requests load and unload named adapters (/v1/load_lora_adapter), from inside this directory only. Default:
    they cannot.
    """
    host: str
    """The address to listen on; 0.0.0.0 for all interfaces. Default: 127.0.0.1."""
    port: int
    """The port; 0 picks a free one. Default: 8000."""
    name: str | None
    """The model's name in the API. Default: the name of its directory."""
    plan: str | Path | None
    """A serving plan (plan --serve decode -o FILE); it sets --on, --mesh, --batch, --context, --cache and dtypes."""
    batch: int | None
    """The maximum number of sequences in the batch, over all devices. Default: 64."""
    context: int | None
    """The maximum tokens of a prompt and its completion. Default: the model's context, at most 4096."""
    cache_tokens: int | None
    """The capacity of the KV cache in tokens. Default: the most that memory allows, up to batch times context."""
    page_size: int | None
    """The tokens of a page of the KV cache. Default: 16."""
    cache: CacheSplit | None
    """How fsdp and sp split the KV cache, in addition to tp over its heads: batch, by sequences; sequence, by tokens;
    heads, not at all. Default: batch.
    """
    kv_dtype: str | None
    """Store keys and values in int8, with a scale per token and head, or in fp8 (e4m3), without scales. Default: the
    compute dtype.
    """
    weight_dtype: str | None
    """Store the weights of layers in int8 or fp8, with a scale per column, or in int4, with a scale per 128 inputs.
    Those that a checkpoint has in int4 (GPTQ, AWQ) or fp8 stay as they are. Default: the compute dtype.
    """
    chunk: int
    """The maximum prompt tokens between two decode steps (chunked prefill). Default: 1024."""
    no_prefix_cache: bool | None
    """Do not keep pages of prompts for later prompts with the same prefix."""
    drafts: int | None
    """Speculative decoding with N draft tokens a step, by n-gram lookup. Default: 0; 4 with a draft model."""
    draft_model: str | Path | None
    """A smaller model with the same vocabulary that proposes the draft tokens. Default: none."""
    max_queue: int
    """The maximum number of queued requests; others get 429. Default: 1024."""
    timeout: float | None
    """The time limit of a request. Default: 600."""
    grace: float
    """The time that open requests have to finish after SIGTERM. Default: 30."""
    api_keys: str | Path | None
    """A file with one API key a line, each optionally with its own limits (KEY requests=4 max_tokens=256).
    MESHWRIGHT_API_KEYS adds keys, separated by commas. Default: no key is needed.
    """
    limit: str | Sequence[str] | Mapping[str, float] | None
    """Limits of a request, as max_tokens=512 prompt_tokens=2048; docs/serving.md lists them and their defaults."""
    cors: str | Sequence[str] | None
    """Origins whose pages may call the server (CORS); * for all. Default: none."""
    allowed_host: str | Sequence[str] | None
    """Names by which clients may call the server, in addition to localhost and --host; * for all. Default: none."""
    replicas: int
    """Servers of the model behind one port, which share the devices; --mesh is each one's mesh. Default: 1."""
    coordinator: str | None
    """Coordinator: HOST:PORT of the first process; auto on Cloud TPU and Slurm."""
    num_processes: int | None
    """Number of processes, among which the devices are divided equally."""
    process_id: int | None
    """Number of this process, from 0; only process 0 prints, writes files and listens."""
    start_seconds: float | None
    """How long the processes wait for each other before they start. Default: 300."""
