"""Worked examples of the scaling book and of MinText, answered through the public API.

The records in tests/data/scaling_book.json carry their source: a chapter of jax-ml.github.io/scaling-book, or a
tutorial of github.com/sshkhr/MinText. A function answers one record, or all records of one form, by name of what is
expected.
"""

import json
import math
from pathlib import Path

import pytest

from meshwright.cost import (
    collective_seconds,
    intensity,
    matmul_bytes,
    network_intensity,
    op_seconds,
    pipeline_transfer_seconds,
    price,
)
from meshwright.errors import MeshwrightError
from meshwright.hardware import dtype_bytes, lay_mesh, parse_system
from meshwright.notation import Sizes, check, infer, parse, parse_array
from meshwright.workload import PRESETS

RECORDS = {
    record["id"]: record
    for record in json.loads((Path(__file__).parents[1] / "data" / "scaling_book.json").read_text(encoding="utf-8"))
}
FUNCTIONS = {
    "all-gather": "AllGather",
    "reduce-scatter": "ReduceScatter",
    "all-reduce": "AllReduce",
    "all-to-all": "AllToAll",
}


def inferred(text, mesh, dims, element_bytes: float = 2):
    """The inference of a text on a mesh."""
    return infer(parse(text, axes=mesh), Sizes(degrees=mesh, dims=dims, element_bytes=element_bytes))


def calls(way):
    """The collectives of a way as the records write them: `AllGather_X(A)`."""
    return [f"{FUNCTIONS[step.kind]}_{''.join(step.axes)}({step.operand.label})" for step in way.communications]


def place(system, axes, **mesh):
    return lay_mesh(parse_system(system), mesh).placement(axes)


def matmul_case(inputs):
    return {"collectives": calls(inferred(inputs["matmul"], inputs["mesh"], dict.fromkeys("IJK", 64)).way)}


def unsharding_case(inputs):
    before, after = ((64, 8, 512), (64, 512, 8))
    ways = [
        inferred(inputs["matmul"], inputs["mesh"], dict(zip("IJK", sizes, strict=True))).way
        for sizes in (before, after)
    ]
    return {"collectives": [" or ".join(call for way in ways for call in calls(way))]}


def resharding_case(inputs):
    (call,) = matmul_case(inputs)["collectives"]
    return {"collectives": [call.removesuffix("(A)")]}


def data_parallel_step(inputs):
    mesh, dims = {"X": 4}, {"B": 64, "D": 32, "F": 128}
    forward = ["In[B_X, D] @ Win[D, F] -> H[B_X, F]", "H[B_X, F] @ Wout[F, D] -> Out[B_X, D]"]
    backward = [
        "H[B_X, F] @ dOut[B_X, D] -> dWout[F, D]",
        "dOut[B_X, D] @ Wout[F, D] -> dH[B_X, F]",
        "In[B_X, D] @ dH[B_X, F] -> dWin[D, F]",
    ]
    ways = [inferred(text, mesh, dims).way for text in backward]
    reduced = [step for way in ways for step in way.communications]
    used = {operand.label for way in ways for product in way.products for operand in product.operands}
    # An all-reduce goes over the links twice.
    assert sum(2 * step.bytes for step in reduced) == 8 * dims["D"] * dims["F"]
    return {
        "forward": [call for text in forward for call in calls(inferred(text, mesh, dims).way)],
        "backward": [f"AllReduce_X({step.result})".replace(", ", ",") for step in reduced],
        "bytes_backward": "8DF",
        "critical_path": any(step.result.label in used for step in reduced),
    }


def fsdp_and_tp_step(inputs):
    mesh, dims = {"X": 4, "Y": 2}, {"B": 256, "D": 32, "F": 128}
    texts = ["In[B_X, D_Y] @ Win[D_X, F_Y] -> H[B_X, F_Y]", "H[B_X, F_Y] @ Wout[F_Y, D_X] -> Out[B_X, D_Y]"]
    steps = [step for text in texts for step in inferred(text, mesh, dims).way.communications]
    expected = 4 * dims["B"] * dims["D"] / mesh["X"] + 4 * dims["D"] * dims["F"] / mesh["Y"]
    assert sum(step.bytes for step in steps) == expected
    forward = [call for text in texts for call in calls(inferred(text, mesh, dims).way)]
    return {"forward": forward, "bytes_forward": "4BD/X + 4DF/Y"}


def gather_of_an_array(inputs):
    dims = dict(zip("BD", inputs["dims"], strict=True))
    gather = inferred(f"AllGather_X({inputs['array']})", inputs["mesh"], dims, dtype_bytes(inputs["dtype"]))
    (collective,) = price(gather, parse_system(f"{inputs['hardware']}:4x4x4")).chosen.collectives
    return {"t": collective.seconds}


def gather_of_few_bytes(inputs):
    time = collective_seconds("all-gather", inputs["bytes"], place("v4:4x4x4", "X", **inputs["mesh"]))
    return {"t": time.seconds, "regime": time.regime}


def measured_gather(inputs):
    placement = place("v5e:8x4", inputs["axis"], **inputs["mesh"])
    return {"t": collective_seconds("all-gather", inputs["bytes"], placement).seconds}


def gather_in_a_node(inputs):
    time = collective_seconds("all-gather", inputs["bytes"], place("h100:8", "X", X=8))
    return {"exact": time.seconds, "approx": time.asymptotic_seconds}


def reduce_in_a_node(inputs):
    placement = place("h100:8", "X", X=8)
    time = collective_seconds("all-reduce", inputs["bytes"], placement)
    # The switches add up: the bytes go over the link once.
    sharp = collective_seconds("all-gather", inputs["bytes"], placement).asymptotic_seconds
    return {"ring_exact": time.seconds, "ring_approx": time.asymptotic_seconds, "sharp": sharp}


def gather_beside_an_inner_axis(inputs):
    nbytes = 2 * inputs["D"] * inputs["F"]
    eight, many = (
        collective_seconds("all-gather", nbytes / y, place("h100:256", "X", X=256 // y, Y=y)) for y in inputs["Y"]
    )
    # For Y = 64 the book takes (n - 1) / n as 1.
    return {"Y8": eight.seconds, "Y64": many.asymptotic_seconds}


def gather_over_two_nodes(inputs):
    time = collective_seconds("all-gather", inputs["bytes"], place("h100:16", "X", X=16))
    terms = {term.link: term.seconds for term in time.terms}
    bound = time.binds.partition(":")[0]
    return {"node_term": terms["node"], "scaleout_term": terms["leaf"], "t": time.seconds, "bound": bound}


def exchange_over_two_nodes(inputs):
    one = collective_seconds("all-to-all", 1e9 / 8, place("h100:8", "X", X=8))
    two = collective_seconds("all-to-all", 1e9 / 16, place("h100:16", "X", X=16))
    return {"ratio": two.asymptotic_seconds / one.asymptotic_seconds}


def pipeline(inputs):
    microbatch = 2 * inputs["B"] * inputs["D"] / inputs["microbatches"]
    # tp fills the nodes, so that a whole node sends at inputs["W"].
    hop = collective_seconds("collective-permute", microbatch / 8, place("h100:32", "pp", pp=4, tp=8))
    arguments = {"num_microbatches": inputs["microbatches"], "num_stages": inputs["stages"]}
    return {"t": pipeline_transfer_seconds(hop.bandwidth_seconds, **arguments)}


def vector_sum(inputs):
    times = [op_seconds(size, 12 * size, parse_system("h100:1"), dtype="f32").seconds for size in inputs["N"]]
    return {"t_65536": times[0], "t_2^30": times[1], "intensity": intensity(1, 12)}


def matrix_for_each_row(inputs):
    nbytes = matmul_bytes(1, 65536, 65536, weight_dtype=inputs["dtype"], activation_dtype=inputs["dtype"])
    return {"intensity": intensity(2 * 65536 * 65536, nbytes)}


def split_over_two_chips(inputs):
    system = parse_system("v5e:1x1")
    assert system.chip.torus
    assert system.peak() == inputs["flops"]
    # Each chip does B D F flops and sends 2 B F bytes: D / 2 flops a byte.
    return {"D_crit": 2 * network_intensity(system, inputs["link_bw"])}


def flops_of_a_product(inputs):
    dims = {dim: inputs[dim] for dim in "BDF"}
    way = inferred(inputs["matmul"], inputs["mesh"], dims).way
    assert way.repeated_axes == ("Z",)
    return {"per_device": way.flops, "total_executed": way.flops * math.prod(inputs["mesh"].values())}


def flops_with_remat(inputs):
    dims = {"B": 64, "D": 32, "F": 128}
    texts = ["X[B, D] @ W[D, F] -> Y[B, F]", "dY[B, F] @ W[D, F] -> dX[B, D]", "X[B, D] @ dY[B, F] -> dW[D, F]"]
    forward, *backward = (inferred(text, {}, dims).way.flops / math.prod(dims.values()) for text in texts)
    none, block = forward + sum(backward), forward + forward + sum(backward)
    return {"no_remat": none, "block_remat": block, "ratio": block / none}


def memory_of_a_matrix(inputs):
    array = parse_array(inputs["sharding"], axes=inputs["mesh"])
    dims = dict(zip("IJ", inputs["dims"], strict=True))
    sizes = Sizes(degrees=inputs["mesh"], dims=dims, element_bytes=dtype_bytes(inputs["dtype"]))
    check(array, sizes)
    return {
        "bytes_per_device": sizes.local_bytes(array),
        "local_shape": list(sizes.local_shape(array)),
        "total_bytes": sizes.total_bytes(array),
        "load_time": op_seconds(0, sizes.local_bytes(array), parse_system("h100:1")).seconds,
    }


def memory_of_mintext(inputs):
    sizes = Sizes(degrees=inputs["mesh"], dims={"B": 8192, "D": 128, "F": 2048})
    arrays = {"x": "x[B_data, D]", "w1": "w1[D, F_model]", "w2": "w2[F_model, D]"}
    return {name: list(sizes.local_shape(parse_array(text, axes=inputs["mesh"]))) for name, text in arrays.items()}


def memory_to_serve(inputs):
    model = PRESETS["llama3-70b"]
    cache = parse_array("KV[T, L, K, H]")
    dims = {"T": 2, "L": model.num_layers, "K": model.num_kv_heads, "H": model.head_dim}
    answers = {name: [] for name in RECORDS["mem-serve-70b-dtypes"]["expected"]}
    for dtype in inputs["dtypes"]:
        weights = inputs["params"] * dtype_bytes(dtype)
        chips = weights / parse_system("v5e:1").hbm_bytes
        system = smallest_slice("v5e", chips)
        left = system.num_chips * system.hbm_bytes - weights
        token = Sizes(degrees={}, dims=dims, element_bytes=dtype_bytes(dtype)).local_bytes(cache)
        row = (weights, chips, system.num_chips, left, token, int(left / (token * inputs["S"])))
        for values, value in zip(answers.values(), row, strict=True):
            values.append(value)
    return answers


def smallest_slice(chip, chips):
    """The smallest slice with so many chips or more."""
    for count in range(math.ceil(chips), 257):
        try:
            return parse_system(f"{chip}:{count}")
        except MeshwrightError:
            continue
    raise AssertionError(chips)


def memory_to_train(inputs):
    saved = parse_array("A[L, C, T, D]")
    dims = {"L": inputs["L"], "C": inputs["checkpoints_per_layer"], "T": int(inputs["tokens"]), "D": inputs["D"]}
    checkpoints = Sizes(degrees={}, dims=dims).local_bytes(saved)
    # bf16 weights and AdamW's two moments in float32; the book leaves out gradients and master weights.
    total = checkpoints + inputs["params"] * (dtype_bytes("bf16") + 2 * dtype_bytes("f32"))
    return {"checkpoints": checkpoints, "total": total, "min_chips": total / parse_system("v5p:1x1x1").hbm_bytes}


ANSWERS = {
    "case1": matmul_case,
    "case2": matmul_case,
    "case3": matmul_case,
    "case4-b": matmul_case,
    "case-replicate-out": unsharding_case,
    "case-resharding": resharding_case,
    "case-dp-step": data_parallel_step,
    "case-fsdp-tp-step": fsdp_and_tp_step,
    "coll-ag-v4p-x": gather_of_an_array,
    "coll-ag-v4p-small": gather_of_few_bytes,
    "meas-ag-v5e-8x4": measured_gather,
    "gpu-ag-popquiz": gather_in_a_node,
    "gpu-ar-sharp": reduce_in_a_node,
    "gpu-ag-inner-sharded": gather_beside_an_inner_axis,
    "gpu-ag-2node": gather_over_two_nodes,
    "gpu-a2a-cross": exchange_over_two_nodes,
    "gpu-pp-comms": pipeline,
    "roof-h100-vadd": vector_sum,
    "roof-batched-matvec": matrix_for_each_row,
    "roof-2chip-split": split_over_two_chips,
    "flops-q2": flops_of_a_product,
    "flops-block-remat": flops_with_remat,
    "mem-mintext-tp": memory_of_mintext,
    "mem-fp32-IXY": memory_of_a_matrix,
    "mem-int8-IXY-Z": memory_of_a_matrix,
    "mem-serve-70b-dtypes": memory_to_serve,
    "mem-llama3-70b-min-4ckpt": memory_to_train,
}


def test_every_record_has_an_answer():
    assert ANSWERS.keys() == RECORDS.keys()


@pytest.mark.parametrize("name", RECORDS)
def test_a_worked_example_comes_out(name):
    record = RECORDS[name]
    answers = ANSWERS[name](record["inputs"])
    for quantity, expected in record["expected"].items():
        answer, value = answers[quantity], expected["value"]
        if record["check"] == "lower_bound":
            assert value * (1 - record["tolerance"]) <= answer <= value, quantity
        elif record["check"] == "set" and isinstance(value, list):
            assert sorted(answer) == sorted(value), quantity
        elif record["check"] == "approx" and not isinstance(value, str):
            assert answer == pytest.approx(value, rel=record["tolerance"]), quantity
        else:
            assert answer == value, quantity
