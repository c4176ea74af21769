"""`meshwright launch`: a run as many processes of this machine that are supervised, or as a cluster's job."""

from meshwright.launch.supervise import Job, supervise

__all__ = ["Job", "supervise"]
