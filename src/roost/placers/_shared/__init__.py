"""Helpers of several families of placers: units, groups, layers, orders, room in memory."""
