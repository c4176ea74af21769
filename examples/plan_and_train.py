"""Plan a tiny model on 8 simulated devices, prove the plan, train on it.

XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu .venv/bin/python examples/plan_and_train.py
"""

from tempfile import TemporaryDirectory

import meshwright as mw

TINY = {"on": "cpu:8", "batch": 16, "seq_len": 64}


def main() -> None:
    best = mw.plan("tiny", **TINY)
    print(f"best mesh: {best.mesh}")

    plan = mw.plan("tiny", **TINY, mesh="1,2,4,1", remat="block")
    rows = mw.verify(plan).rows
    print(f"{sum(row.is_equal for row in rows)} of {len(rows)} quantities are compiled as predicted")

    with TemporaryDirectory() as directory:
        mw.train(plan, directory, steps=20, on_step=lambda row: print(f"step {row['step']:>2}  loss {row['loss']:.3f}"))


if __name__ == "__main__":
    main()
