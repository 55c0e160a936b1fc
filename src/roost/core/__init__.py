"""The nouns, frozen: what the other folders hand to each other."""
