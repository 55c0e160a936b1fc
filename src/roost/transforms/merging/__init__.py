"""Ops that merge: sets that grow without closing a cycle, and the graph made of them."""
