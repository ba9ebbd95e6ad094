"""`python -m tests.chaos`: kills, full disks, second writers, false clocks, flipped bits, signals.

Every trial disturbs a real process and looks at what is left: the same bytes as those of an
undisturbed reference, or a refusal in one sentence; anything else is a finding.
"""
