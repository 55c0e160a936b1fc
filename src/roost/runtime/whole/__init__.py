"""The module runtime: runs an unchanged `nn.Module` with its weights where a plan has them."""
