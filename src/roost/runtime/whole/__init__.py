"""The module runtime: an unchanged nn.Module, with its weights where a plan has them."""
