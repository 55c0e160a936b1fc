"""Problem x Placement -> Timeline: `reference.py` is the truth, `compiled.py` the speed."""
