"""From a workload and a system to a mesh: every legal one priced and ranked, and the choice as a plan to keep."""
