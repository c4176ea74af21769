"""`meshwright launch`: a run as supervised processes on this machine, or as a cluster job."""

from meshwright.launch.machines import machines_of
from meshwright.launch.manifests import SAVE_SECONDS, jobset, slurm, tpu_vm
from meshwright.launch.replicas import REPLICA, Replicas
from meshwright.launch.supervisor import Job, supervise

__all__ = ["REPLICA", "SAVE_SECONDS", "Job", "Replicas", "jobset", "machines_of", "slurm", "supervise", "tpu_vm"]
