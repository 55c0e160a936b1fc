"""What the placers that learn on one problem share."""
