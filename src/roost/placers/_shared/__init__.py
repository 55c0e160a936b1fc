"""What several families of placers share: units, groups, layers, orders, and room in memory."""
