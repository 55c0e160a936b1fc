"""The learned list scheduler: rules, network, and training over many problems."""
