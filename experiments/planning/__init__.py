"""What a run will cost, told before it is paid: from its set-up and a few seconds of its work."""
