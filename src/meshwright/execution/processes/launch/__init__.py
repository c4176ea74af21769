"""`meshwright launch`: a run as supervised processes on this machine, or as a cluster job; replicas of a server."""
