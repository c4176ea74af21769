"""The processes of one run: rendezvous, comparison of their settings, and detection of lost ones."""

from meshwright.processes.host import FAILED, REFUSED, End, Host, listen
from meshwright.processes.member import Member, join, leave_at_once
from meshwright.processes.options import ALONE, HOSTED, Processes, split_address
from meshwright.processes.relay import Relay

__all__ = [
    "ALONE",
    "FAILED",
    "HOSTED",
    "REFUSED",
    "End",
    "Host",
    "Member",
    "Processes",
    "Relay",
    "join",
    "leave_at_once",
    "listen",
    "split_address",
]
