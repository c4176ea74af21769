"""The processes of one run: where they meet, what they compare before they start, and how each notices a lost one."""

from meshwright.processes.host import REFUSED
from meshwright.processes.member import Member, join, leave_at_once
from meshwright.processes.options import ALONE, Processes, split_address
from meshwright.processes.relay import Relay

__all__ = ["ALONE", "REFUSED", "Member", "Processes", "Relay", "join", "leave_at_once", "split_address"]
