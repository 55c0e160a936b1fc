"""Where searches begin: placements of other placers, and parameters that live elsewhere."""
