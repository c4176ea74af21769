"""`meshwright launch`: a run as many processes of this machine that are supervised, or as a cluster's job."""

from meshwright.launch.machines import machines_of
from meshwright.launch.manifests import SAVE_SECONDS, jobset, slurm, tpu_vm
from meshwright.launch.replicas import REPLICA, Replicas
from meshwright.launch.supervisor import Job, supervise

__all__ = ["REPLICA", "SAVE_SECONDS", "Job", "Replicas", "jobset", "machines_of", "slurm", "supervise", "tpu_vm"]
