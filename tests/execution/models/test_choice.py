"""How tokens are chosen from logits, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.sampling import Sampling, Written, _apply_limits, choose, samplers_of


@pytest.fixture(autouse=True)
def one_device():
    """Rows lie on a mesh, as in generation."""
    with jax.set_mesh(jax.make_mesh((1,), ("dp",), (jax.sharding.AxisType.Explicit,), devices=jax.devices()[:1])):
        yield


VOCAB = 50
SCORES = np.random.default_rng(0).normal(0, 3, (6, VOCAB)).astype(np.float32)


def softmax(x):
    shares = np.exp(x - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def allowed(row, how):
    """The tokens that can be taken: top-k, of these top-p, of these min-p."""
    order = np.argsort(-row)
    kept = order[: how.top_k or len(row)]
    shares = softmax(row[kept])
    kept = kept[np.cumsum(shares) - shares < how.top_p]
    shares = softmax(row[kept])
    return set(kept[shares >= how.min_p * shares.max()].tolist())


HOWS = [
    Sampling(temperature=1.0),
    Sampling(temperature=1.0, top_k=5),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.2),
    Sampling(temperature=1.0, top_k=7, top_p=0.6, min_p=0.3),
    Sampling(temperature=1.0, top_p=1e-9),
]


def test_what_can_be_taken_is_top_k_then_top_p_then_min_p():
    kept = np.isfinite(np.asarray(_apply_limits(jnp.asarray(SCORES), samplers_of(HOWS))))
    for row, how in enumerate(HOWS):
        assert set(np.flatnonzero(kept[row]).tolist()) == allowed(SCORES[row], how)


def test_tokens_are_drawn_as_often_as_they_are_likely():
    count = 4000
    rows = samplers_of([Sampling(temperature=0.7, seed=seed) for seed in range(count)])
    scores = jnp.broadcast_to(jnp.asarray(SCORES[0]), (count, VOCAB))
    drawn = np.bincount(np.asarray(choose(scores, rows, Written(), jnp.int32(3))), minlength=VOCAB) / count
    wanted = softmax(SCORES[0] / 0.7)
    # Five standard deviations of a share.
    assert (np.abs(drawn - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / count) + 1e-3).all()


def test_repetition_divides_positive_logits_and_multiplies_negative_ones():
    seen = np.zeros((1, VOCAB), bool)
    seen[0, [SCORES[0].argmax(), SCORES[0].argmin()]] = True
    penalised = np.where(seen, np.where(SCORES[:1] > 0, SCORES[:1] / 9, SCORES[:1] * 9), SCORES[:1])
    found = choose(
        jnp.asarray(SCORES[:1]),
        samplers_of([Sampling(repetition_penalty=9.0)]),
        Written(jnp.asarray(seen)),
        jnp.int32(0),
    )
    assert int(found[0]) == penalised[0].argmax() != SCORES[0].argmax()


def test_rows_with_temperature_0_beside_others_are_greedy():
    rows = samplers_of([Sampling(), Sampling(temperature=5.0), Sampling()])
    found = np.asarray(choose(jnp.asarray(SCORES[:3]), rows, Written(), jnp.int32(0)))
    assert found[0] == SCORES[0].argmax()
    assert found[2] == SCORES[2].argmax()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", "1"),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_a_number_that_cannot_be_meant_is_one_line(field, value):
    with pytest.raises(MeshwrightError, match=f"{field} is"):
        Sampling(**{field: value})


def test_tokens_that_were_made_are_penalised_once_and_by_their_count():
    scores, made = jnp.asarray([[3.0, 2.0, 1.5]]), jnp.asarray([[1, 0, 3]])

    def chosen(**how):
        return int(choose(scores, samplers_of([Sampling(**how)]), Written(made=made), jnp.int32(0))[0])

    assert [chosen(presence_penalty=0.9), chosen(presence_penalty=1.1)] == [0, 1]
    assert [chosen(frequency_penalty=0.9), chosen(frequency_penalty=1.1)] == [0, 1]
    assert [chosen(presence_penalty=-1.6), chosen(frequency_penalty=-0.8)] == [0, 2]
