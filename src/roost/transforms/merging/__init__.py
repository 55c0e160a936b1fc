"""Merging of ops: sets that grow without closing a cycle, and the graph made of them."""
