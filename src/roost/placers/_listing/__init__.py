"""List scheduling: ops in dispatch order, each unit placed by a rule."""
