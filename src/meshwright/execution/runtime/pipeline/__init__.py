"""Pipeline parallelism: stages, and the schedules that run them."""
