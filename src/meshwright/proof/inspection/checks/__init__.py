"""The checks of an inspection, one per file: a subclass of `Finding`, and a function that yields such findings.

A new check needs a kind in `finding.FindingKind` and an entry in `run_checks.CHECKS`, or in `CHECKS_OF_DATAFLOW` if it
follows values from op to op; without the entry it never runs.
"""
