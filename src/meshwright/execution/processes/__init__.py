"""The processes of one run: rendezvous, comparison of their settings, and detection of lost ones."""
