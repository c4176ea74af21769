"""Answers to worked examples on chips, collectives, products and thresholds, for `scaling_book_answers.py`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from scaling_book_formulas import (
    critical_tokens_data,
    critical_tokens_fsdp_tp,
    critical_tokens_moe,
    feedforward_texts,
    pipeline_transfer_seconds,
)

from meshwright.description.hardware.dtypes import dtype_bytes
from meshwright.description.hardware.fabric import Crossing, Placement, lay_mesh
from meshwright.description.hardware.load import load_chip
from meshwright.description.hardware.system import System, parse_system
from meshwright.description.notation.inference import Inference, infer
from meshwright.description.notation.legality import Sizes
from meshwright.description.notation.parser import parse
from meshwright.description.notation.steps import Implementation
from meshwright.planning.cost.rates.collective import collective_seconds
from meshwright.planning.cost.rates.links import collective_efficiency
from meshwright.planning.cost.rates.product import price
from meshwright.planning.cost.roofline import (
    critical_batch,
    hardware_intensity,
    intensity,
    matmul_bytes,
    network_intensity,
    op_seconds,
)

Record = Mapping[str, Any]
Answers = dict[str, Any]
Form = tuple[str, str, str, Callable[[Record], Answers]]
"""A kind, names of inputs, names among the expected that tell it from others, and the function that answers."""

FUNCTIONS = {
    "all-gather": "AllGather",
    "reduce-scatter": "ReduceScatter",
    "all-reduce": "AllReduce",
    "all-to-all": "AllToAll",
}

# --- Reading a record


def inferred(text: str, mesh: Mapping[str, int], dims: Mapping[str, int], element_bytes: float = 2) -> Inference:
    """The inference of a text on a mesh."""
    return infer(parse(text, axes=mesh), Sizes(degrees=mesh, dims=dims, element_bytes=element_bytes))


def calls(way: Implementation) -> list[str]:
    """The collectives of a way as the records write them: `AllGather_X(A)`."""
    return [f"{FUNCTIONS[step.kind]}_{''.join(step.axes)}({step.operand.label})" for step in way.communications]


def place(system: System | str, axes: str | tuple[str, ...], mesh: Mapping[str, int]) -> Placement:
    """Where axes of a mesh lie on a system."""
    return lay_mesh(parse_system(system) if isinstance(system, str) else system, mesh).placement(axes)


def slice_of(hardware: str, shape: Mapping[str, int] | list[int]) -> System:
    """The slice whose physical axes have the sizes of a mesh."""
    sizes = shape.values() if isinstance(shape, Mapping) else shape
    return parse_system(f"{hardware}:{'x'.join(map(str, sizes))}")


def one(hardware: str) -> System:
    """One chip of a kind."""
    return parse_system(f"{hardware}:1")


def axis_alpha(hardware: str) -> float:
    """Flops per byte on one physical axis of a torus that wraps, both directions."""
    torus = load_chip(hardware).torus
    assert torus
    return network_intensity(one(hardware), torus.axis_bytes_per_second)


def nodes_alpha(hardware: str) -> float:
    """Flops per byte out of a node, for data parallelism across nodes."""
    chip = load_chip(hardware)
    return network_intensity(one(hardware), chip.levels[1].link_bytes_per_second)


# --- hardware_constant


def chip_figures(record: Record) -> Answers:
    """The figures of one chip."""
    chip = load_chip(record["inputs"]["hardware"])
    int8 = chip.peak_flops.get("int8")
    found: Answers = {
        "hbm_bytes": chip.hbm_bytes,
        "hbm_bw": chip.hbm_bytes_per_second,
        "flops_bf16": chip.peak(),
        "ops_int8": int8,
        "ops_fp8_int8": int8,
    }
    if chip.torus:
        found |= {
            "ici_bw_per_link_oneway": chip.torus.link_bytes_per_second,
            "ici_bw_per_axis_bidirectional": chip.torus.axis_bytes_per_second,
            "max_slice": list(chip.torus.max_slice),
            "host_topology": list(chip.torus.host),
        }
    return found


def networks_of_hosts(record: Record) -> Answers:
    """Egress to the data-centre network, and to the host."""
    chips = {name.removeprefix("tpu_"): load_chip(name) for name in record["inputs"]["hardware"]}
    found: Answers = {f"dcn_{name}": chip.dcn.bytes_per_second for name, chip in chips.items() if chip.dcn}
    found |= {f"pcie_{name}": chip.host_bytes_per_second for name, chip in chips.items()}
    host = {f"{name}_host_nic": found[f"dcn_{name}"] * chip.chips_per_host for name, chip in chips.items()}
    return found | host | {"pcie_default": min(chip.host_bytes_per_second for chip in chips.values())}


def wrapped_axes(record: Record) -> Answers:
    """Which axes of slices are rings."""
    return {"wrap": [list(slice_of(name, shape).wraps) for name, shape in record["inputs"]["slices"]]}


def gpu_networks(record: Record) -> Answers:
    """Nodes of GPUs and what leaves them."""
    levels = [load_chip(name).levels for name in record["inputs"]["node_types"]]
    return {
        "gpus_per_node": [node.degree for node, *_ in levels],
        "gpu_egress": [node.link_bytes_per_second for node, *_ in levels],
        "node_egress": [leaf.link_bytes_per_second for _, leaf, *_ in levels],
    }


def pod(record: Record) -> Answers:
    """A whole slice."""
    system = slice_of(record["inputs"]["hardware"], record["inputs"]["mesh"])
    return {
        "chips": system.num_chips,
        "hosts": system.num_hosts,
        "flops_bf16": system.num_devices * system.peak(),
        "hbm": system.num_devices * system.hbm_bytes,
    }


def fat_tree(record: Record) -> Answers:
    """The levels of the H100 tree."""
    node, leaf, spine = load_chip("h100").levels
    del node
    units = record["inputs"]["sus"]
    return {
        "node_egress": leaf.link_bytes_per_second,
        "su_egress": spine.link_bytes_per_second,
        "spine_total": units * spine.link_bytes_per_second,
        "per_node_at_spine": spine.link_bytes_per_second / leaf.degree,
    }


def rack_egress(record: Record) -> Answers:
    """What leaves a rack of 72 GPUs."""
    rack, node = (load_chip(name).levels[1].link_bytes_per_second for name in ("gb200-nvl72", "h100"))
    return {"node_egress": rack, "ratio_to_h100": rack / node}


def gather_bandwidth(record: Record) -> Answers:
    """The bandwidth of an all-gather at each level of a tree, and over all of them."""
    levels = [Crossing(name, degree, 1, 1, link, 0.0) for name, degree, link in record["inputs"]["levels"]]

    def rate(crossings: list[Crossing]) -> float:
        degree = math.prod(crossing.degree for crossing in crossings)
        placement = Placement(("X",), degree, (), tuple(crossings), 1, 0.0, False)
        return 1e12 / collective_seconds("all-gather", 1e12, placement).seconds

    return {level.level: rate([level]) for level in levels} | {"overall": rate(levels)}


def achieved_bandwidth(record: Record) -> Answers:
    """What all-reduces reach in a node."""
    inputs = record["inputs"]
    system = parse_system(f"{inputs['hardware']}:{inputs['n']}")
    placement = place(system, "X", {"X": inputs["n"]})

    def rate(nbytes: float) -> float:
        time = collective_seconds("all-reduce", nbytes, placement)
        return inputs["theoretical"] * collective_efficiency(system, time)

    ring, once = (collective_seconds(kind, 1.0, placement) for kind in ("all-reduce", "all-gather"))
    gain = ring.bandwidth_seconds / once.asymptotic_seconds
    return {"bus_bw_large_message": rate(16e9), "bus_bw_58MB": rate(58e6), "sharp_gain_theory": gain}


def host_memory(record: Record) -> Answers:
    """The memory of the chips of a host."""
    return {"hbm": record["inputs"]["chips"] * load_chip(record["inputs"]["hardware"]).physical_bytes}


# --- comm_case


def product_case(record: Record) -> Answers:
    """The collectives of a product, or of a resharding without its operand's name.

    Where only the result must be made whole, either an operand or the result is gathered: whichever is smaller.
    """
    text, mesh = record["inputs"]["matmul"], record["inputs"]["mesh"]
    inference = inferred(text, mesh, dict.fromkeys("IJK", 64))
    if inference.case is None:
        return {"collectives": [call.partition("(")[0] for call in calls(inference.implementation)]}
    if inference.case > 1 or not inference.implementation.communications:
        return {"collectives": calls(inference.implementation)}
    sizes = [dict(zip("IJK", dims, strict=True)) for dims in ((64, 8, 512), (64, 512, 8))]
    choices = [call for dims in sizes for call in calls(inferred(text, mesh, dims).implementation)]
    return {"collectives": [" or ".join(choices)]}


def data_parallel_step(record: Record) -> Answers:
    """A feedforward block under data parallelism."""
    mesh, dims = {"X": 4}, {"B": 64, "D": 32, "F": 128}
    forward = feedforward_texts(batch=("X",), fsdp=(), tp=())
    backward = [
        "H[B_X, F] @ dOut[B_X, D] -> dWout[F, D]",
        "dOut[B_X, D] @ Wout[F, D] -> dH[B_X, F]",
        "In[B_X, D] @ dH[B_X, F] -> dWin[D, F]",
    ]
    ways = [inferred(text, mesh, dims).implementation for text in backward]
    reduced = [step for way in ways for step in way.communications]
    used = {operand.label for way in ways for product in way.products for operand in product.operands}
    # An all-reduce goes over the links twice.
    over_links = sum(2 * step.bytes for step in reduced) / (dims["D"] * dims["F"])
    return {
        "forward": [call for text in forward for call in calls(inferred(text, mesh, dims).implementation)],
        "backward": [f"AllReduce_X({step.result})".replace(", ", ",") for step in reduced],
        "bytes_backward": f"{over_links:g}DF",
        "critical_path": any(step.result.label in used for step in reduced),
    }


def mixed_step(record: Record) -> Answers:
    """A feedforward block under FSDP over X and tensor parallelism over Y."""
    mesh, dims = {"X": 4, "Y": 2}, {"B": 256, "D": 32, "F": 128}
    ways = [
        inferred(text, mesh, dims).implementation for text in feedforward_texts(batch=("X",), fsdp=("X",), tp=("Y",))
    ]
    steps = [step for way in ways for step in way.communications]
    stream, weights = (sum(step.bytes for step in steps if step.axes == (axis,)) for axis in "YX")
    stream *= mesh["X"] / (dims["B"] * dims["D"])
    weights *= mesh["Y"] / (dims["D"] * dims["F"])
    forward = [call for way in ways for call in calls(way)]
    return {"forward": forward, "bytes_forward": f"{stream:g}BD/X + {weights:g}DF/Y"}


def strategy_step(record: Record) -> Answers:
    """A feedforward block under a strategy."""
    return {"dp": data_parallel_step, "fsdp+tp": mixed_step}[record["inputs"]["strategy"]](record)


# --- collective_time


def gather_of_an_array(record: Record) -> Answers:
    """An all-gather of an array in the notation, over the axes that are named."""
    inputs = record["inputs"]
    array = inputs["array"]
    dims = dict(zip(re.findall(r"(\w)(?:_\w+)?(?=[,\]])", array), inputs["dims"], strict=True))
    text = f"AllGather_{''.join(inputs['axes'])}({array})"
    gather = inferred(text, inputs["mesh"], dims, dtype_bytes(inputs["dtype"]))
    (collective,) = price(
        gather, slice_of(inputs["hardware"], inputs["mesh"]), dtype=inputs["dtype"]
    ).chosen.collectives
    return {"t": collective.seconds}


def collective_on_an_axis(record: Record) -> Answers:
    """A collective of some bytes over one axis of a slice; the first where none is named."""
    inputs = record["inputs"]
    axis = inputs.get("axis", next(iter(inputs["mesh"])))
    placement = place(slice_of(inputs["hardware"], inputs["mesh"]), axis, inputs["mesh"])
    if "hop_latency" in inputs:
        placement = replace(placement, hop_seconds=inputs["hop_latency"])
    time = collective_seconds(inputs["op"].replace("_", "-"), inputs["bytes"], placement)
    return {"t": time.seconds, "regime": time.regime}


def collectives_in_a_node(record: Record) -> Answers:
    """An all-gather and an all-reduce over GPUs of a node; where the switches add up, the bytes go over a link once."""
    inputs = record["inputs"]
    placement = place(f"{inputs['hardware']}:{inputs['n']}", "X", {"X": inputs["n"]})
    gather, reduce = (collective_seconds(kind, inputs["bytes"], placement) for kind in ("all-gather", "all-reduce"))
    return {
        "exact": gather.seconds,
        "approx": gather.asymptotic_seconds,
        "ring_exact": reduce.seconds,
        "ring_approx": reduce.asymptotic_seconds,
        "sharp": gather.asymptotic_seconds,
    }


def gather_beside_an_inner_axis(record: Record) -> Answers:
    """An all-gather of weights over a scalable unit of GPUs, beside an inner axis that splits them too."""
    inputs = record["inputs"]
    node, leaf, *_ = load_chip(inputs["hardware"]).levels
    total = node.degree * leaf.degree
    answers = {}
    for inner in inputs["Y"]:
        placement = place(f"{inputs['hardware']}:{total}", "X", {"X": total // inner, "Y": inner})
        time = collective_seconds("all-gather", 2 * inputs["D"] * inputs["F"] / inner, placement)
        # Where the inner axis spans nodes the book takes (n - 1) / n as 1.
        answers[f"Y{inner}"] = time.asymptotic_seconds if inner > node.degree else time.seconds
    return answers


def gather_over_nodes(record: Record) -> Answers:
    """An all-gather over whole nodes, level by level."""
    inputs = record["inputs"]
    total = inputs["nodes"] * load_chip(inputs["hardware"]).levels[0].degree
    time = collective_seconds("all-gather", inputs["bytes"], place(f"{inputs['hardware']}:{total}", "X", {"X": total}))
    terms = {term.link: term.seconds for term in time.terms}
    bound = time.binds.partition(":")[0]
    return {"node_term": terms["node"], "scaleout_term": terms["leaf"], "t": time.seconds, "bound": bound}


def exchange_over_two_nodes(record: Record) -> Answers:
    """An all-to-all of one array over two nodes beside one."""
    hardware = record["inputs"]["hardware"]
    node = load_chip(hardware).levels[0].degree
    one_node, two = (
        collective_seconds("all-to-all", 1e9 / n, place(f"{hardware}:{n}", "X", {"X": n})) for n in (node, 2 * node)
    )
    return {"ratio": two.asymptotic_seconds / one_node.asymptotic_seconds}


def pipeline(record: Record) -> Answers:
    """The transfers of a pipeline."""
    inputs = record["inputs"]
    hop = 2 * inputs["B"] * inputs["D"] / inputs["microbatches"] / inputs["W"]
    arguments = {"num_microbatches": inputs["microbatches"], "num_stages": inputs["stages"]}
    return {"t": pipeline_transfer_seconds(hop, **arguments)}


# --- matmul_roofline, critical_batch


def vector_sum(record: Record) -> Answers:
    """c = a + b in float32: 12 bytes for a flop."""
    inputs = record["inputs"]
    times = [op_seconds(size, 12 * size, one(inputs["hardware"]), dtype="f32").seconds for size in inputs["N"]]
    names = [f"t_{name}" for size in inputs["N"] for name in (_power(size),)]
    return dict(zip(names, times, strict=True)) | {"intensity": intensity(1, 12)}


def _power(size: int) -> str:
    """A size as the records name it: powers of two from 2^30 on as such."""
    exponent = size.bit_length() - 1
    return f"2^{exponent}" if exponent >= 30 and size == 1 << exponent else str(size)


def matrix_for_each_row(record: Record) -> Answers:
    """A product with one row, its dims large."""
    dtype, dim = record["inputs"]["dtype"], 1 << 16
    return {
        "intensity": intensity(2 * dim * dim, matmul_bytes(1, dim, dim, weight_dtype=dtype, activation_dtype=dtype))
    }


def split_over_two_chips(record: Record) -> Answers:
    """Each chip does B D F flops and sends partial sums of B F elements: D over their bytes, flops a byte."""
    inputs = record["inputs"]
    return {"D_crit": dtype_bytes(inputs["dtype"]) * intensity(inputs["flops"], inputs["link_bw"])}


def critical_rows(record: Record) -> Answers:
    """The batch from which a product with a weight is compute bound."""
    inputs = record["inputs"]
    system, dtypes = one(inputs["hardware"]), {"weight_dtype": inputs["w_dtype"], "activation_dtype": inputs["a_dtype"]}
    return {
        "B_crit": critical_batch(system, **dtypes, compute_dtype=inputs["compute"]),
        "hw_intensity": hardware_intensity(system, dtype=inputs["compute"]),
    }


def critical_rows_exactly(record: Record) -> Answers:
    """The same of weights with finite dims; `bytes` says how many each array has an element: 2BD + DF + 2BF."""
    inputs = record["inputs"]
    sizes = {term[-2:]: float(term[:-2] or 1) for term in inputs["bytes"].split(" + ")}
    dtypes = {1.0: "int8", 2.0: "bf16", 4.0: "f32"}
    weight, activation = dtypes[sizes["DF"]], dtypes[sizes["BD"]]
    system = one(inputs["hardware"])
    return {
        f"B_{dim}": critical_batch(system, weight_dtype=weight, activation_dtype=activation, dims=(dim, dim))
        for dim in inputs["DF"]
    }


def critical_tokens(record: Record) -> Answers:
    """The tokens a chip for data parallelism over one axis of the torus, two, three, and of a whole pod."""
    inputs = record["inputs"]
    alpha = axis_alpha(inputs["hardware"])
    rank = len(load_chip(inputs["hardware"]).torus.max_slice)  # type: ignore[union-attr]
    answers = {f"axes{links}": critical_tokens_data(alpha, links=links) for links in range(1, rank + 1)}
    return answers | {"pod": inputs["pod_chips"] * answers[f"axes{rank}"]}


def critical_tokens_mixed(record: Record) -> Answers:
    """The batch for FSDP with tensor parallelism."""
    inputs = record["inputs"]
    alpha = axis_alpha(inputs["hardware"])
    return {"B": critical_tokens_fsdp_tp(alpha, num_devices=inputs["N"], ffw_dim=inputs["F"])}


def critical_tokens_between_slices(record: Record) -> Answers:
    """The tokens a slice for data parallelism over the data-centre network."""
    bandwidths = record["inputs"]["dcn"]
    return {name: critical_tokens_data(network_intensity(one(name), rate)) for name, rate in bandwidths.items()}


def critical_tokens_of_experts(record: Record) -> Answers:
    """The tokens a GPU for data parallelism of a mixture of experts across nodes."""
    inputs = record["inputs"]
    dense = critical_tokens_data(nodes_alpha(inputs["hardware"]))
    return {"B_crit": critical_tokens_moe(dense, num_experts=inputs["E"], num_active=inputs["k"])}


def critical_tokens_of_nodes(record: Record) -> Answers:
    """The intensities within and across nodes of given figures."""
    inputs = record["inputs"]
    names = {"within_node": "gpu_egress", "cross_node": "node_egress", "nvl72_cross_node": "nvl72_node_egress"}
    return {
        answer: critical_tokens_data(intensity(inputs["flops"], inputs[name]))
        for answer, name in names.items()
        if name in inputs
    }


BASIC_FORMS: tuple[Form, ...] = (
    ("hardware_constant", "hardware n theoretical", "", achieved_bandwidth),
    ("hardware_constant", "hardware mesh", "", pod),
    ("hardware_constant", "hardware chips", "", host_memory),
    ("hardware_constant", "hardware", "dcn_v5e", networks_of_hosts),
    ("hardware_constant", "hardware", "", chip_figures),
    ("hardware_constant", "slices", "", wrapped_axes),
    ("hardware_constant", "node_types", "", gpu_networks),
    ("hardware_constant", "nodes_per_su sus", "", fat_tree),
    ("hardware_constant", "links gbps", "", rack_egress),
    ("hardware_constant", "levels", "", gather_bandwidth),
    ("comm_case", "matmul mesh", "", product_case),
    ("comm_case", "strategy", "", strategy_step),
    ("collective_time", "hardware mesh op array dims dtype axes", "", gather_of_an_array),
    ("collective_time", "hardware mesh op bytes", "", collective_on_an_axis),
    ("collective_time", "hardware n bytes", "", collectives_in_a_node),
    ("collective_time", "hardware D F Y", "", gather_beside_an_inner_axis),
    ("collective_time", "hardware nodes bytes", "", gather_over_nodes),
    ("collective_time", "B D W microbatches stages", "", pipeline),
    ("collective_time", "hardware", "ratio", exchange_over_two_nodes),
    ("matmul_roofline", "hardware N", "", vector_sum),
    ("matmul_roofline", "flops link_bw dtype", "", split_over_two_chips),
    ("matmul_roofline", "dtype", "intensity", matrix_for_each_row),
    ("critical_batch", "hardware w_dtype a_dtype compute", "", critical_rows),
    ("critical_batch", "hardware bytes DF", "", critical_rows_exactly),
    ("critical_batch", "hardware E k", "", critical_tokens_of_experts),
    ("critical_batch", "hardware N F", "", critical_tokens_mixed),
    ("critical_batch", "hardware strategy pod_chips", "", critical_tokens),
    ("critical_batch", "dcn", "", critical_tokens_between_slices),
    ("critical_batch", "flops gpu_egress node_egress", "", critical_tokens_of_nodes),
)
