"""Problem x Placer x Budget -> Result."""
