"""Programs that are inspected are other people's, which mix dtypes and ranks as JAX allows."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def allow_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
