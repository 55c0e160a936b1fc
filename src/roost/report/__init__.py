"""What a step or a search did, for people to look at: one file per kind of output."""
